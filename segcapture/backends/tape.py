"""A graph segment without CUDA: operators recorded one by one, and run again on the same memory."""

import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import attrs
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from segcapture.backends.refusals import check_function, check_operator, is_stricter_on_cpu
from segcapture.backends.works import LOOK_EVERY, Started
from segcapture.errors import CaptureFailedError
from segcapture.operators.collectives import handle, has_work, is_collective, is_mark, run_to_end
from segcapture.operators.compiled import kernels_refused
from segcapture.operators.composites import is_composite, names_of, tensor_leaves
from segcapture.operators.watching import watching
from segcapture.source import location
from segcapture.writeback.memory import copy_into
from segcapture.writeback.ownership import own_alias, storage_id

# They promise no values, so there is nothing to run again.
_EMPTY = ("aten::empty", "aten::new_empty")


class Tape:
    """The operators of one graph segment."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._started: list[Started] = []
        self._closed = False
        self.operations = 0

    def __del__(self) -> None:
        # What may be the last reference to a process group dies with the entries. torch then joins the
        # threads of gloo while it holds the GIL, for which one may be waiting, to drop a tensor.
        if self._started:
            time.sleep(2 * LOOK_EVERY)

    def add(self, entry: "_Entry") -> None:
        """Append one recorded operator."""
        self._entries.append(entry)
        self.operations += 1

    def start(self, func: Any) -> Started:
        """A collective that the code, or else the end of the tape, waits for."""
        self._started.append(Started(func))
        return self._started[-1]

    def wait(self, started: Started) -> None:
        """Wait for a collective, now and whenever the tape runs."""
        if self._closed:
            raise CaptureFailedError(
                f"The Work of `{names_of(started.func)[0]}`, waited for at {location()}, was made in a graph "
                f"segment that has ended: CUDA waits for an event of the same capture alone. The segment's "
                f"end has waited for the collective already: call `wait()` before the break, or make the "
                f"collective an eager segment (`break_on=['c10d::*']`)."
            )
        if started.works:
            started.wait()
            self.add(_Entry("c10d::wait", started.wait))

    def close(self) -> None:
        """Wait for what is under way, as the end of a CUDA graph joins all streams."""
        for started in self._started:
            self.wait(started)
        self._closed = True

    def results(self) -> Iterator[torch.Tensor]:
        """The tensors that the operators made."""
        return (tensor for entry in self._entries for tensor in entry.results())

    def launch(self, stream: Any) -> tuple[int]:
        """Run all operators again; the status is always 0."""
        with _below_autograd():
            for entry in self._entries:
                entry.run()
        return (0,)

    def launch_stepwise(self) -> Iterator["_Entry"]:
        """The same, stopping after each operator, under the caller's own modes."""
        for entry in self._entries:
            with _below_autograd():
                entry.run()
            yield entry

    def nodes(self) -> list[tuple[str, str]]:
        """`operator` and its name, for each."""
        return [("operator", entry.name) for entry in self._entries]

    def storages_kept(self) -> list[int]:
        """Identity of the storage of each tensor that it keeps, once for each tensor."""
        kept = {id(t): t for entry in self._entries for t in (*entry.arguments(), *entry.results())}
        return [storage_id(tensor) for tensor in kept.values() if _has_storage(tensor)]


@contextlib.contextmanager
def _below_autograd() -> Iterator[None]:
    """As operators were recorded. Inference mode may write to its own tensors and to others."""
    with torch.inference_mode(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


@attrs.frozen(eq=False)
class _Entry:
    """One operator with its arguments and the results that later operators read."""

    name: str
    _call: Callable[..., Any]
    _args: tuple[Any, ...] = ()
    _kwargs: dict[str, Any] = attrs.Factory(dict)
    _fresh: dict[int, torch.Tensor] = attrs.Factory(dict)
    """By their position among the leaves of the output."""
    place: str = attrs.Factory(location)

    def arguments(self) -> list[torch.Tensor]:
        return tensor_leaves(self._args, self._kwargs)

    def results(self) -> Iterable[torch.Tensor]:
        return self._fresh.values()

    def run(self) -> None:
        leaves = tree_leaves(self._call(*self._args, **self._kwargs))
        for position, recorded in self._fresh.items():
            new = leaves[position]
            if _described(new) != _described(recorded):
                raise CaptureFailedError(
                    f"`{self.name}` returned {_described(new)} on replay and {_described(recorded)} at "
                    f"capture: its result depends on more than shapes (on what autograd needs, say), so it "
                    f"belongs into an eager segment."
                )
            if new.data_ptr() != recorded.data_ptr():
                copy_into(recorded, new)


def _described(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else "no tensor"


class Recorder:
    """Watches the calling thread and writes its operators on the current tape."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tape: Tape | None = None
        """None: operators just run."""
        self.borrowed: list[weakref.ref[torch.Tensor]] = []
        """What was given to collectives while they just ran."""
        self.made: set[int] = set()
        """Identities of the storages that came up in graph segments, or as bridges: they all live on."""
        self._trusted = False
        """Whether CUDA captures the function that runs now, though the CPU reads values in it."""
        self._running = False
        """Whether an operator that goes on the tape runs right now."""

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Watch for the block."""
        with kernels_refused(self.is_blind), watching(self._operator, self._function):
            yield

    def is_blind(self) -> bool:
        """Whether a kernel that is launched now would be missing on the tape."""
        return self.tape is not None and not self._running

    def _function(self, func: Any, args: Any, kwargs: Any, call: Callable[[], Any]) -> Any:
        if self.tape is None:
            return call()
        check_function(func, args, kwargs, self.device)
        self._trusted = is_stricter_on_cpu(func, args, kwargs)
        try:
            return call()
        finally:
            self._trusted = False

    def _operator(self, func: Any, args: Any, kwargs: Any, call: Callable[[], Any]) -> Any:
        if is_composite(func):
            return call()
        if self.tape is not None:
            return self._record(self.tape, func, args, kwargs)
        out = call()
        if is_collective(func):
            self.borrowed += map(weakref.ref, tensor_leaves(args, kwargs, out))
        return out

    def _record(self, tape: Tape, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator and write it on the tape."""
        # On other devices CUDA would not mind.
        if not self._trusted and any(t.device == self.device for t in tensor_leaves(args, kwargs)):
            check_operator(func, args, kwargs)
        # Aliases, since code may change the shape of a tensor object in place later.
        kept = tree_map_only(torch.Tensor, _alias, (args, kwargs))
        started = tape.start(func) if has_work(func) else None
        call = started or (functools.partial(run_to_end, func) if is_collective(func) else func)
        self._running = True
        try:
            out = call(*args, **kwargs)
        finally:
            self._running = False
        if _needs_nothing(func):
            return out
        given = {storage_id(t) for t in tensor_leaves(args, kwargs) if _has_storage(t)}
        results = {i: leaf for i, leaf in enumerate(tree_leaves(out)) if isinstance(leaf, torch.Tensor)}
        fresh = {i: t for i, t in results.items() if not (_has_storage(t) and storage_id(t) in given)}
        if not all(map(_has_storage, fresh.values())):
            raise CaptureFailedError(
                f"`{names_of(func)[0]}` made a sparse tensor at {location()}: the tape writes new values to "
                f"the memory of the captured ones, which dense tensors alone have. Make it in a function "
                f"marked `@eager_break_during_capture`, or before the capture."
            )
        self.made.update(map(storage_id, fresh.values()))
        if fresh or not results or _may_write(func):
            # Results are kept with their metadata of now, as arguments are.
            fresh = {i: _alias(t) for i, t in fresh.items()}
            tape.add(_Entry(names_of(func)[0], call, kept[0], kept[1], fresh))
        return out if started is None else handle(out, functools.partial(tape.wait, started))


def _needs_nothing(func: Any) -> bool:
    name, tags = names_of(func)[0], getattr(func, "tags", ())
    # Each run of a functional collective itself is waited for, so marks need nothing.
    return (
        name.startswith(_EMPTY)
        or torch.Tag.inplace_view in tags
        or func.namespace == "profiler"
        or is_mark(func)
    )


def _may_write(func: Any) -> bool:
    schema = getattr(func, "_schema", None)
    return schema is None or bool(schema.is_mutable) or is_collective(func)


def _has_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return own_alias(tensor)
