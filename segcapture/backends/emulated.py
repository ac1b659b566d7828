"""The emulated backend: the same program on tapes, without CUDA graphs.

It is for tests, CI and debugging, on the CPU, and on CUDA tensors in `mode="debug"`. It does not model
streams and the reuse of pool memory, and it cannot see kernels that bypass the dispatcher.
"""

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map_only

from segcapture.backends.base import Backend
from segcapture.backends.refusals import check_function, check_operator, is_stricter_on_cpu
from segcapture.backends.tape import Entry, Tape
from segcapture.backends.triton_launches import launches_refused
from segcapture.backends.works import wait_until_returned
from segcapture.errors import CaptureFailedError
from segcapture.operators.collectives import handle, has_work, is_collective, is_mark, run_to_end
from segcapture.operators.compiled import kernels_refused
from segcapture.operators.composites import is_composite, names_of, tensor_leaves
from segcapture.operators.intercept import Call, watching
from segcapture.replay import Program, Watch, base_ambient, under
from segcapture.segments import EagerSegment, GraphSegment, Segment
from segcapture.tensors import own_alias, shows_memory_alone, storage_id
from segcapture.thread import location


class EmulatedBackend(Backend):
    """One capture as tapes."""

    def __init__(self, device: torch.device, *, pool: Any, stream: Any, execute: bool) -> None:
        if not execute:
            raise ValueError(
                "execute=False is for CUDA graphs: the emulated backend records operators by running them. "
                "Leave it out where there is no GPU and in mode='debug'."
            )
        if device.type == "cpu" and (stream is not None or pool is not None):
            raise ValueError(
                f"stream={stream!r}, pool={pool!r}: one is of another device than {device}, where there are "
                f"neither streams nor pools"
            )
        self.device = device
        self._tape: Tape | None = None
        """None: operators just run."""
        self._made: dict[int, StorageWeakRef] = {}
        """By identity, the storages of graph segments and bridges. While it is held, no other has it."""
        self._borrowed: list[weakref.ref[torch.Tensor]] = []
        """What was given to collectives while they just ran."""
        self._trusted = False
        """Whether CUDA captures the function that runs now, though the CPU reads values in it."""
        self._running = False
        """Whether an operator that goes on the tape runs right now."""
        self._refused = ""
        """What was refused in this segment."""

    def storages(self, segments: Sequence[Segment]) -> list[torch.UntypedStorage]:
        """What the operators on the tapes made, and the bridges."""
        results = [t for tape in _tapes(segments) for t in tape.kept() if storage_id(t) in self._made]
        eager = [segment for segment in segments if isinstance(segment, EagerSegment)]
        bridges = [
            tensor
            for segment in eager
            for tensor in [
                leaf.target
                for leaf in segment.writeback.leaves
                if leaf.block is not None and leaf.block.fresh
            ]
        ]
        return list({storage_id(t): t.untyped_storage() for t in (*results, *bridges)}.values())

    @contextmanager
    def open(self) -> Iterator[None]:
        """Watch the operators of this thread."""
        self._made.clear()
        self._borrowed.clear()
        launches = nullcontext() if self.device.type == "cpu" else launches_refused(self._is_blind)
        with launches, kernels_refused(self._is_blind), watching(self._operator, self._function):
            yield

    def begin(self) -> None:
        """Begin a tape."""
        self._tape, self._refused = Tape(), ""

    def end(self) -> Tape | None:
        """End it. The operators have run already."""
        if self._refused:
            raise CaptureFailedError(
                f"`{self._refused}` was refused in this segment, and its exception was caught in the `with` "
                f"block. Move it, with what uses its value, into a function marked "
                f"`@eager_break_during_capture` that returns tensors of fixed shapes."
            )
        tape, self._tape = self._tape, None
        if tape is None:
            return None
        tape.close()
        return tape if tape.operations else None

    def returned(self) -> None:
        """Outputs of collectives have their owners alone once their Work has let go of them."""
        wait_until_returned(self._borrowed)
        self._borrowed.clear()

    def abort(self) -> list[str]:
        """Drop the open tape."""
        self._tape = None
        return []

    def allocate(self, nbytes: int, device: torch.device) -> torch.UntypedStorage:
        """Plain memory."""
        storage = torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()
        self._made[storage._cdata] = StorageWeakRef(storage)
        return storage

    def argument(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Another object, since the captured code may change the shape of its own in place."""
        if not shows_memory_alone(tensor) or tensor.layout is not torch.strided:
            return None
        try:
            ours = storage_id(tensor) in self._made
        except NotImplementedError:  # of vmap
            return None
        return own_alias(tensor) if ours else None

    def is_recording(self) -> bool:
        """Whether there is a tape: all operators of this thread go on it."""
        return self._tape is not None

    def tensors_kept(self, segments: Sequence[Segment]) -> Counter[int]:
        """What the tapes keep; a CUDA graph would keep addresses."""
        return Counter(storage_id(tensor) for tape in _tapes(segments) for tensor in tape.kept())

    def wait_for_host_copies(self) -> None:
        """Wait for the GPU, in debug mode."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def replayer(self, segments: Sequence[Segment], watch: Watch | None = None) -> Callable[[], None]:
        """A loop over tapes and calls."""
        base = base_ambient(segments)
        return under(base, functools.partial(Program(segments, base, watch).run, None))

    def _is_blind(self) -> bool:
        """Whether a kernel that is launched now would be missing on the tape."""
        return self._tape is not None and not self._running

    def _function(self, func: Any, args: Any, kwargs: Any, call: Call) -> Any:
        if self._tape is None:
            return call()
        with self._refusals_noted():
            check_function(func, args, kwargs, self.device)
        self._trusted = is_stricter_on_cpu(func, args, kwargs)
        try:
            return call()
        finally:
            self._trusted = False

    @contextmanager
    def _refusals_noted(self) -> Iterator[None]:
        """A CUDA capture would be invalid from here on."""
        try:
            yield
        except CaptureFailedError as error:
            self._refused = error.operator
            raise

    def _operator(self, func: Any, args: Any, kwargs: Any, call: Call) -> Any:
        if is_composite(func):
            return call()
        if self._tape is not None:
            return self._record(self._tape, func, args, kwargs)
        out = call()
        if is_collective(func):
            self._borrowed += map(weakref.ref, tensor_leaves(args, kwargs, out))
        return out

    def _record(self, tape: Tape, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator and write it on the tape."""
        # On other devices CUDA would not mind.
        if not self._trusted and any(t.device == self.device for t in tensor_leaves(args, kwargs)):
            with self._refusals_noted():
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
        if self._tape is not tape:
            raise CaptureFailedError(
                f"An eager break was called inside of the operator `{names_of(func)[0]}`, called at "
                f"{location()}. The tape records operators whole: put the break around the operator, or "
                f"name it in `break_on`."
            )
        if is_mark(func):
            return out  # Each run of the collective itself is waited for.
        given = {storage_id(t) for t in tensor_leaves(args, kwargs) if _has_storage(t)}
        results = {i: leaf for i, leaf in enumerate(tree_leaves(out)) if isinstance(leaf, torch.Tensor)}
        fresh = {i: t for i, t in results.items() if not (_has_storage(t) and storage_id(t) in given)}
        made = [tensor.untyped_storage() for tensor in fresh.values() if _has_storage(tensor)]
        self._made.update((storage._cdata, StorageWeakRef(storage)) for storage in made)
        if not _has_effect(func):
            return out
        if not all(map(_has_storage, fresh.values())):
            raise CaptureFailedError(
                f"`{names_of(func)[0]}` made a sparse tensor at {location()}: the tape writes new values to "
                f"the memory of the captured ones, which dense tensors alone have. Make it in a function "
                f"marked `@eager_break_during_capture`, or before the capture."
            )
        if fresh or not results or _may_write(func):
            # Results are kept with their metadata of now, as arguments are.
            fresh = {i: _alias(t) for i, t in fresh.items()}
            tape.add(Entry(names_of(func)[0], call, kept[0], kept[1], fresh))
        return out if started is None else handle(out, functools.partial(tape.wait, started))


def _tapes(segments: Sequence[Segment]) -> list[Tape]:
    graphs = [segment.graph for segment in segments if isinstance(segment, GraphSegment)]
    return [graph for graph in graphs if isinstance(graph, Tape)]


# They promise no values, so there is nothing to run again.
_EMPTY = ("aten::empty", "aten::new_empty")


def _has_effect(func: Any) -> bool:
    changes_shape_alone = torch.Tag.inplace_view in getattr(func, "tags", ())
    return not (names_of(func)[0].startswith(_EMPTY) or changes_shape_alone or func.namespace == "profiler")


def _may_write(func: Any) -> bool:
    schema = getattr(func, "_schema", None)
    return schema is None or bool(schema.is_mutable) or is_collective(func)


def _has_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return own_alias(tensor)
