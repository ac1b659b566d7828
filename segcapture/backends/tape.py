"""A graph segment without CUDA: operators recorded one by one, and run again on the same memory."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from segcapture.backends.refusals import check_function, check_operator
from segcapture.compiled import uncompiled
from segcapture.composites import has_own_dispatch, is_composite, names_of, run_in_parts
from segcapture.errors import CaptureFailedError
from segcapture.memory import copy_into
from segcapture.ownership import storage_id
from segcapture.source import location

# They promise no values, so there is nothing to run again.
_EMPTY = {
    "aten::empty",
    "aten::empty_like",
    "aten::empty_permuted",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
}


class Tape:
    """The operators of one graph segment."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self.operations = 0

    def add(self, entry: "_Entry") -> None:
        """Append one recorded operator."""
        self._entries.append(entry)
        self.operations += 1

    def launch(self, stream: Any) -> tuple[int]:
        """Run all operators again; the status is always 0."""
        for _ in self.launch_stepwise():
            pass
        return (0,)

    def launch_stepwise(self) -> Iterator[str]:
        """The same, stopping after each operator with its name."""
        # Recorded below autograd and autocast. Inference mode may write to its own tensors and to others.
        with torch.inference_mode(), _no_autocast():
            for entry in self._entries:
                entry.run()
                yield entry.name


@contextlib.contextmanager
def _no_autocast() -> Iterator[None]:
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


class _Entry:
    """One operator with its arguments and the results that later operators read."""

    __slots__ = ("_args", "_fresh", "_func", "_kwargs", "name")

    def __init__(self, func: Any, args: Any, kwargs: Any, fresh: list[tuple[int, torch.Tensor]]) -> None:
        self._func, self._args, self._kwargs, self._fresh = func, args, kwargs, fresh
        self.name = names_of(func)[0]

    def run(self) -> None:
        out = self._func(*self._args, **self._kwargs)
        leaves = (out,) if isinstance(out, torch.Tensor) else tree_leaves(out)
        _wait_for_work(self._func, leaves)
        for position, recorded in self._fresh:
            new = leaves[position]
            if new.shape != recorded.shape or new.dtype != recorded.dtype:
                raise CaptureFailedError(
                    f"`{self.name}` returned {new.dtype} {list(new.shape)} on replay and "
                    f"{recorded.dtype} {list(recorded.shape)} at capture: its result depends on more than "
                    f"shapes, so it belongs into an eager segment."
                )
            if new.data_ptr() != recorded.data_ptr():
                copy_into(recorded, new)


def _wait_for_work(func: Any, leaves: Any) -> None:
    """Collectives return a Work, and what they wrote is there when it is done."""
    if func.namespace != "c10d":
        return
    for leaf in leaves:
        if isinstance(leaf, torch.ScriptObject):
            from torch._C._distributed_c10d import Work

            Work.unbox(leaf).wait()


class Recorder:
    """Watches the calling thread and writes its operators on the current tape."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tape: Tape | None = None
        """None: operators just run."""
        self.trusted = 0
        """Positive inside of an operator that CUDA captures, though the CPU reads values in it."""

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Watch for the block."""
        with uncompiled(), _RecordFunctions(self), _RecordOperators(self):
            yield

    def record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator and write it on the tape."""
        tape = self.tape
        assert tape is not None
        if not self.trusted and self._on_device(args, kwargs):
            check_operator(func, args, kwargs)
        # Aliases, since code may change the shape of a tensor object in place later.
        kept_args, kept_kwargs = tree_map_only(torch.Tensor, _alias, (args, kwargs))
        out = func(*args, **kwargs)
        leaves = (out,) if isinstance(out, torch.Tensor) else tree_leaves(out)
        _wait_for_work(func, leaves)
        if _needs_nothing(func):
            return out
        given = {storage_id(t) for t in tree_leaves((args, kwargs)) if _has_storage(t)}
        tensors = [(i, leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        fresh = [(i, t) for i, t in tensors if not (_has_storage(t) and storage_id(t) in given)]
        if not all(_has_storage(t) for _, t in fresh):
            raise CaptureFailedError(
                f"`{names_of(func)[0]}` made a sparse tensor at {location()}: the tape writes new values to "
                f"the memory of the captured ones, which dense tensors alone have. Make it in a function "
                f"marked `@eager_break_during_capture`, or before the capture."
            )
        if fresh or not tensors or _may_write(func):
            # Results are kept with their metadata of now, as arguments are.
            tape.add(_Entry(func, kept_args, kept_kwargs, [(i, _alias(t)) for i, t in fresh]))
        return out

    def _on_device(self, args: Any, kwargs: Any) -> bool:
        """Whether an operator touches the captured device: on others CUDA would not mind."""
        return any(
            leaf.device == self.device
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        )


def _needs_nothing(func: Any) -> bool:
    tags = getattr(func, "tags", ())
    return names_of(func)[0] in _EMPTY or torch.Tag.inplace_view in tags or func.namespace == "profiler"


def _may_write(func: Any) -> bool:
    schema = getattr(func, "_schema", None)
    return schema is None or bool(schema.is_mutable)


def _has_storage(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.detach()


class _RecordOperators(TorchDispatchMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    supports_higher_order_operators = True  # they are recorded whole

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if has_own_dispatch(types):
            return NotImplemented  # The operators that the subclass makes of this one come here.
        kwargs = kwargs or {}
        if is_composite(func):
            return run_in_parts(self, func, args, kwargs)
        if self._recorder.tape is None:
            return func(*args, **kwargs)
        return self._recorder.record(func, args, kwargs)


class _RecordFunctions(TorchFunctionMode):
    """Sees the conversions to Python, which no operator shows."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        recorder = self._recorder
        if recorder.tape is None or recorder.trusted:
            return func(*args, **kwargs)
        check_function(func, args, kwargs, recorder.device)
        if getattr(func, "__name__", "") == "one_hot" and _classes(args, kwargs) != -1:
            # The CPU kernel checks the range of the classes on the host, the CUDA kernel does not.
            recorder.trusted += 1
            try:
                return func(*args, **kwargs)
            finally:
                recorder.trusted -= 1
        return func(*args, **kwargs)


def _classes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
