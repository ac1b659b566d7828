"""`check=True`: what a capture cannot see by itself, watched operator by operator, and again at replay.

Tensors that leave an eager function by a side door, work on the wrong device or stream, memory that is gone
when the capture ends. What is left to check at replay becomes `Checks.guard`.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import attrs
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from segcapture.arguments import Call
from segcapture.backends.base import Backend
from segcapture.errors import CaptureFailedError, CaptureStateError, FrozenValueWarning
from segcapture.inspect.table import named
from segcapture.listener import Listener
from segcapture.operators.composites import names_of, tensor_leaves
from segcapture.operators.intercept import Use, watching
from segcapture.replay import Watch
from segcapture.segments import EagerSegment, Segment
from segcapture.tensors import View, storage_id
from segcapture.thread import warn
from segcapture.trees import Place, flatten, references, tensors_in

_COPIES = {"aten::copy_", "aten::_to_copy"}
_NUMBERS = (int, float, complex)
_NO_WORK = {"aten::empty", "aten::empty_like", "aten::empty_permuted", "aten::empty_strided", "aten::resize_"}


@attrs.define(eq=False)
class _Made:
    """A storage that came up during the capture, and who made it."""

    use: Use
    by: str
    """`eager`, `graph` or `capture`."""
    segment: int
    name: str
    weak: StorageWeakRef
    """As long as it is held, no other storage can have the same identity."""


@attrs.frozen(eq=False)
class Read:
    """A tensor from outside that a graph segment reads."""

    use: Use
    segment: int
    weak: StorageWeakRef
    tensor: "weakref.ref[torch.Tensor]"
    address: int
    what: str
    kept: int = 0
    """How many tensors on its storage are the capture's."""

    @classmethod
    def of(cls, tensor: torch.Tensor, use: Use, segment: int) -> "Read":
        """That of a tensor by an operator, now."""
        weak, kind = StorageWeakRef(tensor.untyped_storage()), "tensor"
        if isinstance(tensor, torch.nn.Parameter):
            kind = "parameter"
        if torch.nn.parameter.is_lazy(tensor):
            what = f"a {kind} that is not initialised: warm up before the capture"
        else:
            what = f"a {kind} ({View.of(tensor)})"
        return cls(use, segment, weak, weakref.ref(tensor), tensor.data_ptr(), what)

    def trouble(self) -> str:
        """What has happened to it, or an empty string."""
        # With our own temporary handle the count is one more than there are tensors.
        if self.weak.expired() or torch._C._storage_Use_Count(self.weak.cdata) - 1 <= self.kept:
            return "was dropped or re-bound after the capture"
        tensor = self.tensor()
        if tensor is not None and tensor.data_ptr() != self.address:
            return "has moved to another address since the capture"
        return ""

    def check(self, segment: Segment) -> None:
        """Raise CaptureStateError if it is not there any more."""
        if trouble := self.trouble():
            raise CaptureStateError(
                f"{segment} cannot be replayed: {self.use} reads {self.what}, which {trouble}. Keep the "
                f"captured tensor and copy new values into it (`tensor.copy_(new)`), or capture again.",
                segment=segment.index,
            )


@attrs.define(eq=False)
class Number:
    """A number that a break returned, and that a graph segment seems to compute with."""

    use: Use
    segment: int
    path: str
    value: Any
    source: Any = None
    """The eager segment; None once it has been warned of."""

    def check(self, segment: Segment) -> None:
        """Warn once if another one stands there now."""
        plain = self.source.writeback.plain() if self.source is not None else ()
        for now in (now for path, _, now in plain if path == self.path and now != self.value):
            source, self.source = self.source, None
            warn(
                f"{self.use} in {segment} was captured with {self.value!r}, as `{self.path}` of {source} "
                f"was. It is {now!r} now, and the graph goes on with the old one. Return a tensor, or put "
                f"what computes with it into a break.",
                FrozenValueWarning,
            )


@attrs.define(eq=False)
class KeptObject:
    """A mutable object with tensors in it that eager calls keep by identity."""

    boxed: list[Any]
    """It alone: one reference, which does not count."""
    path: str
    ours: int = 0
    """How often recorded calls refer to it."""
    warned: bool = False

    def is_held_by_others(self) -> bool:
        """Whether anybody but the capture refers to it."""
        return references(self.boxed)[0] > self.ours

    def check(self, segment: Segment) -> None:
        """Warn once if nobody else does any more."""
        if not self.warned and not self.is_held_by_others():
            self.warned = True
            warn(
                f"{segment} reads `{self.path}` (a {type(self.boxed[0]).__qualname__} that holds tensors), "
                f"which only the capture refers to any more. An eager call keeps a mutable object by "
                f"identity: if the code has made a new one since, this replay still reads the old. Change "
                f"the captured object in place, or pass `Live(lambda: ...)`.",
                FrozenValueWarning,
            )


class Checks(Listener):
    """The checks of one running capture."""

    guard: Watch | None = None
    """To be called before each segment of a replay, once the capture is complete.

    It raises CaptureStateError if the segment reads memory that is gone, and warns (FrozenValueWarning) once
    for an object that only the capture holds any more, and for a number that captured code computed with.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._made: dict[int, _Made] = {}
        self._reads: dict[tuple[int, int, int], Read] = {}
        self._now = ("capture", 0, "")
        """Who runs: `graph`, `eager` or the capture itself; the index of the segment, and its name."""
        self._launched: list[Use] = []
        self._numbers: list[tuple[int, str, Any]] = []
        """What breaks have returned: index of the segment, path and value."""
        self._computed: dict[tuple[int, str], Number] = {}
        """Those that a graph segment takes, by the first three."""

    def intercepting(self) -> AbstractContextManager[None]:
        """Watch the operators of this thread, composite ones whole."""
        return watching(self._operator, in_parts=False)

    def graph_begins(self, index: int) -> None:
        """Operators are part of a graph segment from now on."""
        self._launched = []
        self._now = ("graph", index, "")

    def graph_ending(self, index: int) -> None:
        """Operators are ours from now on."""
        self._now = ("capture", 0, "")

    def graph_ends(self, index: int, empty: bool) -> None:
        """Raise CaptureFailedError if operators ran and nothing was recorded."""
        if self._launched and empty:
            raise _failed(
                f"Graph segment {index} is empty though {len(self._launched)} operators ran in it, the "
                f"first {self._launched[0]}: they were launched on another stream or device and would not "
                f"be replayed. Let the stream wait for the capture's first (`side.wait_stream(...)`).",
                index,
                self._launched[0],
            )

    def break_begins(self, index: int, name: str, place: str, call: Call) -> None:
        """Raise CaptureFailedError if another break let an argument escape."""
        for tensor in _strided([*tensors_in(*call.args, *call.kwargs.values())]):
            if (made := self._made.get(storage_id(tensor))) is not None and made.by == "eager":
                raise _escaped(f"Eager segment {index} (`{name}`, {place}) is given", made, index)
        self._now = ("eager", index, name)

    def break_ends(self, index: int, places: list[Place]) -> None:
        """What it returned does not escape."""
        for tensor in _strided([place.value for place in places]):
            if storage_id(tensor) in self._made:
                self._made[storage_id(tensor)].by = "capture"
        self._numbers += [(index, p.path, p.value) for p in places if type(p.value) in _NUMBERS]
        self._now = ("capture", 0, "")

    def finished(self, segments: Sequence[Segment]) -> None:
        """Raise CaptureFailedError if a replay would find something now."""
        self._made.clear()
        checks: dict[int, list[Read | Number | KeptObject]] = defaultdict(list)
        kept = self._backend.tensors_kept(segments)
        bridges = [b for s in segments if isinstance(s, EagerSegment) for b in s.writeback.bridges]
        for found in self._reads.values():
            if any(bridge.address <= found.address < bridge.address + bridge.nbytes for bridge in bridges):
                continue  # memory of ours, which the model may have dropped
            read = attrs.evolve(found, kept=kept[found.weak.cdata])
            checks[read.segment].append(read)
            if trouble := read.trouble():
                raise _failed(
                    f"{read.use} in graph segment {read.segment} reads {read.what}, which {trouble} "
                    f"began: each replay would read freed memory. Keep the tensor as long as the capture.",
                    read.segment,
                    read.use,
                )
        for (index, _), number in self._computed.items():
            number.source = segments[index]
            checks[number.segment].append(number)
        for index, thing in _objects(segments):
            if thing.is_held_by_others():  # else it was made for the call
                checks[index].append(thing)

        def guard(segment: Segment) -> AbstractContextManager[None]:
            for check in checks.get(segment.index, ()):
                check.check(segment)
            return nullcontext()

        self.guard = guard

    def _operator(self, func: Any, args: Any, kwargs: Any, call: Callable[[], Any]) -> Any:
        name, in_graph = names_of(func)[0], self._now[0] == "graph"
        # A number or a list that becomes a tensor comes with its memory: to us there was none before.
        given = [] if name == "aten::lift_fresh" else _strided(args, kwargs)
        for tensor in given if in_graph else ():
            self._check_read(tensor, name, given)
        before = {storage_id(tensor) for tensor in given}
        out = call()
        returned = _strided(out)
        fresh = [tensor for tensor in returned if storage_id(tensor) not in before]
        if fresh or in_graph:
            use = Use(name)
            for tensor in fresh:
                weak = StorageWeakRef(tensor.untyped_storage())
                self._made[storage_id(tensor)] = _Made(use, *self._now, weak)
            if in_graph:
                self._check_launch(func, use, fresh, [*returned, *given])
                self._check_numbers(use, args, kwargs)
        return out

    def _check_numbers(self, use: Use, args: Any, kwargs: Any) -> None:
        """Note an operator that takes a number that a break has returned, or an equal one."""
        taken = [value for value in tree_leaves((args, kwargs)) if type(value) in _NUMBERS]
        for index, path, number in self._numbers if taken else ():
            if any(type(value) is type(number) and value == number for value in taken):
                self._computed.setdefault((index, path), Number(use, self._now[1], path, number))

    def _check_read(self, tensor: torch.Tensor, operator: str, given: list[torch.Tensor]) -> None:
        """Note a tensor from outside that a graph segment reads."""
        device, segment = self._backend.device, self._now[1]
        made = self._made.get(storage_id(tensor))
        if made is not None and made.by == "eager":
            raise _escaped(f"{Use(operator)} in graph segment {segment} reads", made, segment)
        if tensor.device.type == "cpu" and device.type != "cpu":
            # A kernel takes a single number from the host by value, and keeps it.
            by_value = tensor.dim() == 0 and operator not in _COPIES
            internal = made is not None and made.by == "capture"
            if by_value or internal or not any(t.device == device for t in given):
                return
        elif made is not None or tensor.device != device:
            return
        key = (storage_id(tensor), id(tensor), segment)
        if key not in self._reads:
            self._reads[key] = Read.of(tensor, Use(operator), segment)

    def _check_launch(
        self, func: Any, use: Use, fresh: list[torch.Tensor], touched: list[torch.Tensor]
    ) -> None:
        """Raise CaptureFailedError for an operator that works elsewhere than is captured."""
        device, segment = self._backend.device, self._now[1]
        elsewhere = [t.device for t in touched if t.device.type == device.type and t.device != device]
        mine = [t for t in touched if t.device == device]
        if elsewhere and not mine:
            raise _failed(
                f"{use} runs on {elsewhere[0]}, and graph segment {segment} is captured on {device}: it "
                f"would not be replayed. Move the tensors, or put it into a function marked "
                f"`@eager_break_during_capture`.",
                segment,
                use,
            )
        schema = getattr(func, "_schema", None)
        works = any(t.numel() for t in fresh) or (schema is not None and schema.is_mutable)
        quiet = use.operator in _NO_WORK or torch.Tag.inplace_view in getattr(func, "tags", ())
        if not works or quiet or not any(t.numel() for t in mine):
            return
        if not self._backend.is_recording():
            raise _failed(
                f"{use} runs on a stream that is not part of the capture, so graph segment {segment} "
                f"does not contain it: it would not be replayed. Let the stream wait for the capture's first "
                f"(`side.wait_stream(torch.cuda.current_stream())`).",
                segment,
                use,
            )
        self._launched.append(use)


def _escaped(reader: str, made: _Made, segment: int) -> CaptureFailedError:
    return _failed(
        f"{reader} a tensor that eager segment {made.segment} (`{made.name}`) made ({made.use}) and did not "
        f"return: a replay would read the one that the capture made, not a new one. Return it from the "
        f"function, or make it before the capture and write to it in place.",
        segment,
        made.use,
    )


def _failed(message: str, segment: int, use: Use) -> CaptureFailedError:
    return CaptureFailedError(message, segment=segment, operator=use.operator)


def _strided(*trees: Any) -> list[torch.Tensor]:
    return [tensor for tensor in tensor_leaves(trees) if tensor.layout is torch.strided]


def _objects(segments: Sequence[Segment]) -> list[tuple[int, KeptObject]]:
    """The mutable objects with tensors among the arguments, with the index of the segment."""
    found: dict[int, KeptObject] = {}
    by_segment = []
    for segment in segments:
        if isinstance(segment, EagerSegment):
            for name, argument in named(segment.call):
                for path, value in _outer_objects(name, argument):
                    kept = found.setdefault(id(value), KeptObject([value], path))
                    kept.ours += 1
                    by_segment.append((segment.index, kept))
    return by_segment


def _outer_objects(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, tuple):
        for i, item in enumerate(value):
            yield from _outer_objects(f"{path}[{i}]", item)
    elif flatten(value)[0].is_container and any(True for _ in tensors_in(value)):
        yield path, value
