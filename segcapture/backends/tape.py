"""A graph segment without CUDA: operators recorded one by one, and run again on the same memory."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from segcapture.backends.refusals import check_function, check_operator
from segcapture.backends.works import Borrowed, Pending, Wait, let_threads_finish
from segcapture.errors import CaptureFailedError
from segcapture.operators.collectives import has_work, is_collective, is_mark, wait_for
from segcapture.operators.compiled import kernels_refused, uncompiled
from segcapture.operators.composites import has_own_dispatch, is_composite, names_of, run_in_parts
from segcapture.source import location
from segcapture.writeback.memory import copy_into
from segcapture.writeback.ownership import own_alias, storage_id

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
        self._entries: list[_Entry | Wait] = []
        self._pending: list[Pending] = []
        self._has_collectives = False
        self.operations = 0

    def __del__(self) -> None:
        if self._has_collectives:
            let_threads_finish()

    def add(self, entry: "_Entry | Wait") -> None:
        """Append one recorded operator."""
        self._entries.append(entry)
        self.operations += 1

    def begin_work(self) -> Pending:
        """A collective that the code, or else the end of the tape, waits for."""
        self._has_collectives = True
        self._pending.append(Pending())
        return self._pending[-1]

    def wait(self, pending: Pending) -> None:
        """Wait for a collective, now and whenever the tape runs."""
        if pending in self._pending:
            self._pending.remove(pending)
            pending.wait()
            self.add(Wait(pending))

    def close(self) -> None:
        """Wait for what is under way, as the end of a CUDA graph joins all streams."""
        for pending in list(self._pending):
            self.wait(pending)

    def results(self) -> Iterator[torch.Tensor]:
        """The tensors that the operators made."""
        return (tensor for entry in self._entries for tensor in entry.results())

    def launch(self, stream: Any) -> tuple[int]:
        """Run all operators again; the status is always 0."""
        with _below_autograd():
            for entry in self._entries:
                entry.run()
        return (0,)

    def launch_stepwise(self) -> Iterator["_Entry | Wait"]:
        """The same, stopping after each operator, under the caller's own modes."""
        for entry in self._entries:
            with _below_autograd():
                entry.run()
            yield entry

    def nodes(self) -> list[tuple[str, str]]:
        """`operator` and its name, for each."""
        return [("operator", entry.name) for entry in self._entries]

    def nbytes(self) -> int:
        """Bytes of the results that it keeps, each storage once."""
        results = {storage_id(tensor): tensor for tensor in self.results()}
        return sum(tensor.untyped_storage().nbytes() for tensor in results.values())

    def storages_kept(self) -> Iterator[int]:
        """Identity of the storage of each tensor that it keeps, once for each tensor."""
        operators = (entry for entry in self._entries if isinstance(entry, _Entry))
        kept = {id(t): t for entry in operators for t in entry.tensors() if _has_storage(t)}
        return (storage_id(tensor) for tensor in kept.values())


@contextlib.contextmanager
def _below_autograd() -> Iterator[None]:
    """As operators were recorded. Inference mode may write to its own tensors and to others."""
    with torch.inference_mode(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


class _Entry:
    """One operator with its arguments and the results that later operators read."""

    __slots__ = ("_args", "_fresh", "_func", "_kwargs", "_pending", "name", "place")

    def __init__(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        fresh: list[tuple[int, torch.Tensor]],
        pending: Pending | None,
    ) -> None:
        self._func, self._args, self._kwargs, self._fresh = func, args, kwargs, fresh
        self._pending = pending
        self.name = names_of(func)[0]
        self.place = location()

    def tensors(self) -> list[torch.Tensor]:
        """All that it keeps."""
        given = tree_leaves((self._args, self._kwargs))
        return [*(t for t in given if isinstance(t, torch.Tensor)), *self.results()]

    def results(self) -> list[torch.Tensor]:
        return [tensor for _, tensor in self._fresh]

    def run(self) -> None:
        out = self._func(*self._args, **self._kwargs)
        leaves = (out,) if isinstance(out, torch.Tensor) else tree_leaves(out)
        if self._pending is not None:
            self._pending.start(leaves)
        elif is_collective(self._func):
            wait_for(self._func, leaves)
        for position, recorded in self._fresh:
            new = leaves[position]
            if not isinstance(new, torch.Tensor):
                raise CaptureFailedError(
                    f"`{self.name}` returned no tensor on replay, and one at capture: its results depend on "
                    f"what autograd needs, so it belongs into an eager segment."
                )
            if new.shape != recorded.shape or new.dtype != recorded.dtype:
                raise CaptureFailedError(
                    f"`{self.name}` returned {new.dtype} {list(new.shape)} on replay and "
                    f"{recorded.dtype} {list(recorded.shape)} at capture: its result depends on more than "
                    f"shapes, so it belongs into an eager segment."
                )
            if new.data_ptr() != recorded.data_ptr():
                copy_into(recorded, new)


class Recorder:
    """Watches the calling thread and writes its operators on the current tape."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tape: Tape | None = None
        """None: operators just run."""
        self.trusted = 0
        """Positive inside of an operator that CUDA captures, though the CPU reads values in it."""
        self.running = False
        """Whether an operator that goes on the tape runs right now."""
        self.borrowed = Borrowed()
        self.made: set[int] = set()
        """Identities of the storages that came up in graph segments, or as bridges: they all live on."""

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Watch for the block."""
        with (
            uncompiled(),
            kernels_refused(self.is_blind),
            _RecordFunctions(self),
            _RecordOperators(self),
        ):
            yield

    def is_blind(self) -> bool:
        """Whether a kernel that is launched now would be missing on the tape."""
        return self.tape is not None and not self.running

    def record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator and write it on the tape."""
        tape = self.tape
        assert tape is not None
        if not self.trusted and self._on_device(args, kwargs):
            check_operator(func, args, kwargs)
        # Aliases, since code may change the shape of a tensor object in place later.
        kept_args, kept_kwargs = tree_map_only(torch.Tensor, _alias, (args, kwargs))
        self.running = True
        try:
            out = func(*args, **kwargs)
        finally:
            self.running = False
        pending = None
        if has_work(func):
            pending = tape.begin_work()
            pending.start(out)
            out = pending.handle(out, functools.partial(self._wait, tape, pending, names_of(func)[0]))
        elif is_collective(func):
            wait_for(func, out)
        leaves = (out,) if isinstance(out, torch.Tensor) else tree_leaves(out)
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
        self.made.update(storage_id(t) for _, t in fresh)
        if fresh or not tensors or _may_write(func):
            # Results are kept with their metadata of now, as arguments are.
            tape.add(_Entry(func, kept_args, kept_kwargs, [(i, _alias(t)) for i, t in fresh], pending))
        return out

    def _wait(self, tape: Tape, pending: Pending, name: str) -> None:
        if self.tape is not tape:
            raise CaptureFailedError(
                f"The Work of `{name}`, waited for at {location()}, was made in a graph segment that has "
                f"ended: CUDA waits for an event of the same capture alone. The segment's end has waited for "
                f"the collective already: call `wait()` before the break, or make the collective an eager "
                f"segment (`break_on=['c10d::*']`)."
            )
        tape.wait(pending)

    def _on_device(self, args: Any, kwargs: Any) -> bool:
        """Whether an operator touches the captured device: on others CUDA would not mind."""
        return any(
            leaf.device == self.device
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        )


def _needs_nothing(func: Any) -> bool:
    if is_mark(func):
        return True  # Each run of the collective itself is waited for.
    tags = getattr(func, "tags", ())
    return names_of(func)[0] in _EMPTY or torch.Tag.inplace_view in tags or func.namespace == "profiler"


def _may_write(func: Any) -> bool:
    schema = getattr(func, "_schema", None)
    return schema is None or bool(schema.is_mutable) or is_collective(func)


def _has_storage(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return own_alias(tensor)


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
            out = func(*args, **kwargs)
            if is_collective(func):
                self._recorder.borrowed.note(tree_leaves((args, kwargs, out)))
            return out
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
