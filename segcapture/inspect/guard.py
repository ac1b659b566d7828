"""`check=True` at replay: whether what segments read is still there."""

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import attrs
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from segcapture.errors import CaptureStateError, FrozenValueWarning
from segcapture.inspect.arguments import named
from segcapture.segments import EagerSegment, Segment
from segcapture.thread import warn
from segcapture.trees import flatten, references, tensors_in


@attrs.frozen
class Use:
    """One call of an operator."""

    operator: str
    place: str

    def __str__(self) -> str:
        return f"`{self.operator}` at {self.place}"


@attrs.frozen(eq=False)
class Read:
    """A tensor from outside that a graph segment reads."""

    use: Use
    segment: int
    weak: StorageWeakRef
    tensor: "weakref.ref[torch.Tensor]"
    pointer: int
    layout: str

    def trouble(self, kept: int) -> str:
        """What has happened to it, or an empty string. `kept` tensors on its storage are the capture's."""
        # With our own temporary handle the count is one more than there are tensors.
        if self.weak.expired() or torch._C._storage_Use_Count(self.weak.cdata) - 1 <= kept:
            return "was dropped or re-bound after the capture"
        tensor = self.tensor()
        if tensor is not None and tensor.data_ptr() != self.pointer:
            return "has moved to another address since the capture"
        return ""


class Guard:
    """Checks before each segment of a replay that what it reads is still there."""

    def __init__(self, reads: list[Read], segments: Sequence[Segment], kept: Counter[int]) -> None:
        self.reads = reads
        self._kept = kept
        self._by_segment: dict[int, list[Read]] = {}
        for read in reads:
            self._by_segment.setdefault(read.segment, []).append(read)
        self._objects = _shared_objects(segments)

    def trouble(self, read: Read) -> str:
        """What has happened to a tensor, or an empty string."""
        return read.trouble(self._kept[read.weak.cdata])

    def segment(self, segment: Segment) -> AbstractContextManager[Any]:
        """Raise CaptureStateError if the graph segment reads memory that is gone.

        Warns (FrozenValueWarning) once for an object that only the capture holds any more.
        """
        for read in self._by_segment.get(segment.index, ()):
            trouble = self.trouble(read)
            if trouble:
                raise CaptureStateError(
                    f"{segment} cannot be replayed: {read.use} reads {read.layout}, which {trouble}. Keep "
                    f"the captured tensor and copy new values into it (`tensor.copy_(new)`), or capture "
                    f"again."
                )
        for held in self._objects.get(segment.index, ()):
            held.warn_if_dropped(segment)
        return nullcontext()


class _Held:
    """A mutable object with tensors in it that an eager call keeps by identity."""

    def __init__(self, path: str, value: Any, ours: int) -> None:
        self._path = path
        self._boxed = [value]
        self._ours = ours
        """References of the recorded calls."""

    def held_by_others(self) -> bool:
        """Whether anybody but the capture refers to it."""
        return references(self._boxed)[0] > self._ours

    def warn_if_dropped(self, segment: Segment) -> None:
        """Warn once if nobody else does any more."""
        if self._ours >= 0 and not self.held_by_others():
            self._ours = -1  # Not again.
            warn(
                f"{segment} reads `{self._path}` (a {type(self._boxed[0]).__qualname__} that holds tensors), "
                f"which only the capture refers to any more. An eager call keeps a mutable object by "
                f"identity: if the code has made a new one since, this replay still reads the old. Change "
                f"the captured object in place, or pass `Live(lambda: ...)`.",
                FrozenValueWarning,
            )


def _shared_objects(segments: Sequence[Segment]) -> dict[int, list[_Held]]:
    """The mutable objects with tensors among the arguments, by segment, that others hold now."""
    objects = _objects(segments)
    # What nobody else holds now was made for the call.
    return {index: [h for h in held if h.held_by_others()] for index, held in objects.items()}


# A function of its own: its variables refer to the objects too.
def _objects(segments: Sequence[Segment]) -> dict[int, list[_Held]]:
    found: dict[int, list[tuple[str, Any]]] = {}
    ours: Counter[int] = Counter()
    for segment in segments:
        if isinstance(segment, EagerSegment):
            for name, argument in named(segment.call):
                for path, value in _outer_objects(name, argument):
                    ours[id(value)] += 1
                    found.setdefault(segment.index, []).append((path, value))
    # One reference of each call, and one of each `_Held` but that which asks.
    return {
        index: [_Held(path, value, 2 * ours[id(value)] - 1) for path, value in pairs]
        for index, pairs in found.items()
    }


def _outer_objects(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, tuple):
        for i, item in enumerate(value):
            yield from _outer_objects(f"{path}[{i}]", item)
    elif not isinstance(value, torch.Tensor) and flatten(value)[0].is_container and _has_tensors(value):
        yield path, value


def _has_tensors(value: Any) -> bool:
    return next(tensors_in(value), None) is not None
