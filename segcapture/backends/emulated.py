"""The emulated backend: the same program on tapes, without CUDA graphs.

It is for tests, CI and debugging, on the CPU, and on CUDA tensors in `mode="debug"`. It does not model
streams and the reuse of pool memory, and it cannot see kernels that bypass the dispatcher.
"""

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from segcapture.advice import BREAK
from segcapture.backends.base import Backend
from segcapture.backends.refusals import check_function, check_operator, is_stricter_on_cpu
from segcapture.backends.tape import Draws, Entry, Tape
from segcapture.errors import CaptureFailedError
from segcapture.exclusive import Exclusive
from segcapture.operators.collectives import Collective, is_collective, wait_until_returned
from segcapture.operators.compiled import kernels_refused
from segcapture.operators.composites import is_composite, map_tensors, names_of, tensor_leaves
from segcapture.operators.intercept import Invoke, aside, capture_reported, watching
from segcapture.replay import Watch, base_ambient, replay_loop, under
from segcapture.segments import GraphSegment, Segment
from segcapture.tensors import own_alias, shows_memory_alone, storage_id
from segcapture.thread import location


class EmulatedBackend(Backend):
    """One capture as tapes."""

    def __init__(self, device: torch.device, *, pool: Any, stream: Any, execute: bool) -> None:
        if not execute:
            raise ValueError(
                "execute=False is for CUDA graphs: where there is no GPU, and in mode='debug', operators are "
                "recorded by running them. Leave it out."
            )
        if device.type == "cpu" and (stream is not None or pool is not None):
            raise ValueError(f"stream={stream!r}, pool={pool!r}: {device} has neither streams nor pools")
        self.device = device
        self._tape: Tape | None = None
        """None: operators just run."""
        self._draws = Draws(device)
        self._exclusive = Exclusive()
        self._made: dict[int, StorageWeakRef] = {}
        """By identity, the storages of graph segments and bridges. While it is held, no other has it."""
        self._in_collectives: list[weakref.ref[torch.Tensor]] = []
        """What was given to collectives while they just ran."""
        self._trusted = False
        """Whether CUDA captures the function that runs now, though the CPU reads values in it."""
        self._running = False
        """Whether an operator that goes on the tape runs right now."""
        self._refused = ""
        """What was refused in this segment."""

    def exclusive(self) -> AbstractContextManager[None]:
        """For the block, no other thread replays this capture."""
        return self._exclusive

    def storages(self, segments: Sequence[Segment]) -> list[torch.UntypedStorage]:
        """What the operators on the tapes made, and the bridges, as far as it lives."""
        weak = [made.cdata for made in self._made.values()] if segments else []
        return [s for s in map(torch.UntypedStorage._new_with_weak_ptr, weak) if s is not None]

    @contextmanager
    def open(self) -> Iterator[None]:
        """Watch the operators of this thread."""
        self._made.clear()
        self._in_collectives.clear()
        try:
            with (
                capture_reported(self.is_recording),
                kernels_refused(self._is_blind, triton=self.device.type != "cpu"),
                watching(self._operator, self._function, bodies=True),
            ):
                yield
        finally:
            self._draws.clear()

    def begin(self) -> None:
        """Begin a tape."""
        self._tape, self._refused = Tape(), ""
        self._draws.begin()

    def end(self) -> Tape | None:
        """End it. The operators have run already."""
        if self._refused:
            raise CaptureFailedError(
                f"`{self._refused}` was refused in this segment, and its exception was caught in the `with` "
                f"block. {BREAK}",
                operator=self._refused,
            )
        tape = self._tape
        if tape is None:
            return None
        with aside():
            self._draws.follow(tape)
            tape.close()
        self._tape = None
        return tape if tape.operations else None

    def returned(self) -> None:
        """Outputs of collectives have their owners alone once their Work has let go of them."""
        wait_until_returned(self._in_collectives)
        self._in_collectives.clear()

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
        try:
            ours = shows_memory_alone(tensor) and self._is_ours(tensor)
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
        """A loop over tapes and calls, for one thread at a time."""
        base, exclusive = base_ambient(segments), self._exclusive
        run = under(base, functools.partial(replay_loop(segments, base, watch), None))

        def replay() -> None:
            with exclusive:
                run()

        return replay

    def _is_ours(self, tensor: torch.Tensor) -> bool:
        """Whether the capture made its memory."""
        return tensor.layout is torch.strided and storage_id(tensor) in self._made

    def _is_blind(self) -> bool:
        """Whether a kernel that is launched now would be missing on the tape."""
        return self._tape is not None and not self._running

    def _function(self, func: Any, args: Any, kwargs: Any, call: Invoke) -> Any:
        if self._tape is None:
            return call()
        self._check(check_function, func, args, kwargs, self.device)
        if not is_stricter_on_cpu(func, args, kwargs):
            return call()
        self._trusted = True
        try:
            return call()
        finally:
            self._trusted = False

    def _check(self, check: Callable[..., None], *given: Any) -> None:
        try:
            check(*given)
        except CaptureFailedError as error:
            self._refused = error.operator  # a CUDA capture would be invalid from here on
            raise

    def _operator(self, func: Any, args: Any, kwargs: Any, call: Invoke) -> Any:
        if is_composite(func):
            return call()
        if self._tape is not None:
            # On other devices CUDA would not mind.
            if not self._trusted and any(t.device == self.device for t in tensor_leaves(args, kwargs)):
                self._check(check_operator, func, args, kwargs, self._is_ours)
            if not self._running:  # else it is a part of an operator that goes on the tape whole
                return self._record(self._tape, func, args, kwargs, call)
        out = call()
        if is_collective(func):
            self._in_collectives += map(weakref.ref, tensor_leaves(args, kwargs, out))
        return out

    def _record(self, tape: Tape, func: Any, args: Any, kwargs: Any, call: Invoke) -> Any:
        """Run an operator and write it on the tape."""
        name, given = names_of(func)[0], tensor_leaves(args, kwargs)
        # Made of Python values, that is. The tape keeps the values: code may write to the tensor.
        constant = name == "aten::lift_fresh" and given[0].untyped_storage().resizable()
        again = func
        with aside():
            # Aliases, since code may change the shape of a tensor object in place later.
            kept = map_tensors(torch.clone if constant else own_alias, (args, kwargs))
            if is_collective(func):
                again = Collective(func)
            elif torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
                again = self._draws.add(tape, func)
        self._running = True
        try:
            out = call() if again is func else again(*args, **kwargs)
        finally:
            self._running = False
        if self._tape is not tape:
            raise CaptureFailedError(
                f"An eager break was called inside of the operator `{name}`, called at {location()}. The "
                f"tape records operators whole: put the break around the operator, or name it in `break_on`.",
                operator=name,
            )
        with aside():
            theirs = set() if constant else {storage_id(t) for t in given if _has_storage(t)}
            results = [None if _has_storage(t) and storage_id(t) in theirs else t for t in tensor_leaves(out)]
            made = tensor_leaves(results)
            for storage in (tensor.untyped_storage() for tensor in made if _has_storage(tensor)):
                self._made[storage._cdata] = StorageWeakRef(storage)
            if _effect(func, bool(made) or not results):
                if not all(map(_has_storage, made)):
                    raise CaptureFailedError(
                        f"`{name}` made a sparse or nested tensor at {location()}: the tape writes new "
                        f"values to the memory of old ones, which dense tensors alone have. Make it in a "
                        f"function marked `@eager_break_during_capture`, or before the capture.",
                        operator=name,
                    )
                # Results are kept with their metadata of now, as arguments are.
                results = map_tensors(own_alias, results) if made else []
                tape.entries.append(Entry(name, again, kept[0], kept[1], results))
        return tape.started(again, out) if isinstance(again, Collective) and again.has_work else out


def _tapes(segments: Sequence[Segment]) -> list[Tape]:
    graphs = [segment.graph for segment in segments if isinstance(segment, GraphSegment)]
    return [graph for graph in graphs if isinstance(graph, Tape)]


# They promise no values, so there is nothing to run again.
_EMPTY = ("aten::empty", "aten::new_empty")


@functools.lru_cache(maxsize=4096)
def _effect(func: Any, has_results: bool) -> bool:
    """Whether a replay needs an operator, which has results of its own, or none at all, or not."""
    changes_shape_alone = torch.Tag.inplace_view in getattr(func, "tags", ())
    if names_of(func)[0].startswith(_EMPTY) or changes_shape_alone or func.namespace == "profiler":
        return False
    # The schemas of others than torch do not always say what they write.
    return has_results or func.namespace != "aten" or bool(func._schema.is_mutable)


def _has_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested
