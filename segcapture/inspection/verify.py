"""Comparison of a capture with the function that it captured: the first segment that differs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs
import torch

from segcapture.arguments import Call, resolve
from segcapture.inspection.observer import Observer
from segcapture.inspection.report import Difference, VerifyReport
from segcapture.inspection.snapshot import Mismatch, State, compare, keep
from segcapture.segments import EagerSegment, GraphSegment, Segment
from segcapture.source import short
from segcapture.structure import tensors_in, walk

if TYPE_CHECKING:
    from segcapture.capture import BreakableCUDAGraphCapture

_PLAIN = (bool, int, float, complex, str, bytes)


@attrs.frozen(eq=False)
class _Leaf:
    """A value of the first run: a tensor's is copied."""

    path: str
    value: Any
    pointer: int = 0
    storage: int = 0


@attrs.define(eq=False)
class _Break:
    """One break of an eager run."""

    name: str
    place: str
    args: list[_Leaf]
    output: list[_Leaf] = attrs.field(factory=list)

    def __str__(self) -> str:
        return f"break `{self.name}`, {short(self.place)}"


class _Listener:
    """Keeps what passes each break of an eager run."""

    def __init__(self) -> None:
        self.breaks: list[_Break] = []

    def called(self, name: str, place: str, call: Call) -> None:
        """Keep the arguments, before the function may change them."""
        self.breaks.append(_Break(name, place, _keep(_arguments(call))))

    def returned(self, output: Any) -> None:
        """Keep the output."""
        self.breaks[-1].output = _keep(_leaves("out", output))


def verify(
    capture: "BreakableCUDAGraphCapture",
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    outputs: Any,
    state: Any,
    before: Callable[[], object] | None,
    rtol: float | None,
    atol: float | None,
) -> VerifyReport:
    """Compare; see `BreakableCUDAGraphCapture.verify`."""
    # Not those in the pool: replays write them, and their memory may be another tensor's by the end.
    kept = [
        tensor
        for segment in _eager(capture.segments)
        for tensor in tensors_in(*segment.call.args, *segment.call.kwargs.values())
        if not capture._backend.is_alias(tensor)
    ]
    saved = State((state, kept), fn, args, kwargs, capture.device)
    watched = [(name, t) for name, t in saved.named if not name.startswith("state[1]")]

    def run(listener: _Listener) -> Any:
        saved.restore()
        if before is not None:
            before()
        with _observed(capture, listener):
            return fn(*args, **kwargs)

    try:
        first, second = _Listener(), _Listener()
        expected = _keep(_leaves("out", run(first)))
        after = _keep(watched)
        again = _keep(_leaves("out", run(second)))
        again_after = _keep(watched)
        eager = _Comparison(rtol, atol)
        limit = eager.runs(first.breaks, second.breaks, (expected, again), (after, again_after))
        del second, again, again_after

        saved.restore()
        if before is not None:
            before()
        replay = _Comparison(rtol, atol, {t.untyped_storage().data_ptr() for _, t in watched})
        with capture._ambient.entered():
            replay.segments(capture, first.breaks, limit)
        if limit is None:
            if outputs is not None and not any(d.kind == "structure" for d in replay.differences):
                replay.final(capture.segments, expected, _leaves("out", outputs))
            replay.state(after, watched)
    finally:
        saved.restore()
    return VerifyReport(
        segments=capture.segments,
        compared=replay.compared,
        differences=tuple(replay.differences),
        nondeterminism=eager.differences[0] if eager.differences else None,
        with_outputs=outputs is not None,
    )


@contextmanager
def _observed(capture: "BreakableCUDAGraphCapture", listener: _Listener) -> Iterator[None]:
    """An eager run under what was set at the capture, with the breaks that the capture has."""
    options = capture._options
    observer: Any = Observer(capture, options.breaks_at, listener, full=options.full)
    with capture._ambient.entered(), observer.active(), options.operator_breaks.active(observer):
        yield


class _Comparison:
    """Collects the first difference at each place."""

    def __init__(self, rtol: float | None, atol: float | None, stable: set[int] | None = None) -> None:
        self.differences: list[Difference] = []
        self.compared = 0
        self._tolerance = (rtol, atol)
        self._stable = stable or set()
        """Addresses of storages that belong to the user, which must not move."""

    def runs(
        self,
        first: list[_Break],
        second: list[_Break],
        outputs: tuple[list[_Leaf], list[_Leaf]],
        after: tuple[list[_Leaf], list[_Leaf]],
    ) -> int | None:
        """Compare two eager runs. Returns the number of the first break that differs, or None."""
        for i, (a, b) in enumerate(zip(first, second, strict=False)):
            if a.name != b.name:
                self._add("structure", str(a), "breaks", f"the second run came to {b}")
            elif not self._leaves("argument", str(a), a.args, b.args):
                self._leaves("output", str(a), a.output, b.output)
            if self.differences:
                return i
        if len(first) != len(second):
            self._add("structure", "the run", "breaks", f"{len(first)} in one run, {len(second)} in another")
            return min(len(first), len(second))
        if self._leaves("final", "the final output", *outputs) or self._leaves(
            "state", "state after", *after
        ):
            return len(first)
        return None

    def segments(self, capture: "BreakableCUDAGraphCapture", breaks: list[_Break], limit: int | None) -> None:
        """Replay segment by segment and compare at each break, until the one with the number `limit`."""
        gap: list[GraphSegment] = []
        passed = 0
        for segment in capture.segments:
            if isinstance(segment, GraphSegment):
                capture._backend.run(segment)
                gap.append(segment)
                continue
            if passed == limit:
                return
            if passed == len(breaks) or breaks[passed].name != segment.name:
                came = str(breaks[passed]) if passed < len(breaks) else "its end"
                text = f"the eager run came to {came} where the capture has {segment}"
                self._add("structure", str(segment), "breaks", text, segment)
                return
            self._arguments(segment, gap, breaks[passed])
            with segment.ambient.entered():
                capture._backend.run(segment)
            self._leaves("output", str(segment), breaks[passed].output, _captured(segment), segment)
            passed += 1
            gap = []
        if passed < len(breaks) and limit is None:
            text = f"the eager run came to {breaks[passed]}, and the capture has no break there"
            self._add("structure", str(capture.segments[-1]) if capture.segments else "?", "breaks", text)

    def _arguments(self, segment: EagerSegment, gap: list[GraphSegment], seen: _Break) -> None:
        args, kwargs = resolve(segment.call.args, segment.call.kwargs)
        call = Call(segment.call.fn, args, kwargs, live=False)
        of = f" of {segment}"
        blamed: Segment = gap[0] if gap else segment
        kind = "argument" if gap else "rebound"
        self._leaves(kind, _where(gap, segment), seen.args, _keep(_arguments(call)), blamed, of, segment)

    def final(self, segments: tuple[Segment, ...], expected: list[_Leaf], found: Any) -> None:
        """Compare the final output."""
        graphs = [s for s in segments if isinstance(s, GraphSegment)][-1:]
        blamed: Segment | None = graphs[0] if graphs else (segments[-1] if segments else None)
        self._leaves("final", str(blamed), expected, _keep(found), blamed, " of the final output")

    def state(self, expected: list[_Leaf], found: Any) -> None:
        """Compare what the run left in the tensors of the user."""
        self._leaves("state", "what the run left behind", expected, _keep(found))

    def _leaves(
        self,
        kind: str,
        where: str,
        expected: list[_Leaf],
        found: list[_Leaf],
        segment: Segment | None = None,
        of: str = "",
        reader: Segment | None = None,
    ) -> bool:
        """Compare leaf by leaf; whether one differs."""
        by_path = {leaf.path: leaf for leaf in found}
        for leaf in expected:
            other = by_path.get(leaf.path)
            if other is None:
                continue  # Replay checks structures itself.
            mismatch = self._values(leaf.value, other.value)
            self.compared += 1
            if mismatch is None:
                continue
            if not isinstance(leaf.value, torch.Tensor):
                kind = _kind_of_value(leaf.path, reader) or kind
                where, segment = str(reader or segment or where), reader or segment
            elif leaf.storage in self._stable and leaf.pointer != other.pointer and reader is not None:
                kind, where, segment = "rebound", str(reader), reader
            self._add(kind, where, f"`{leaf.path}`{of}", mismatch.text, segment, mismatch.largest)
            return True
        return False

    def _values(self, expected: Any, found: Any) -> Mismatch | None:
        if isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor):
            return compare(expected, found, *self._tolerance)
        if type(expected) is type(found) and (expected == found or expected != expected):
            return None
        return Mismatch(f"expected {_brief(expected)}, found {_brief(found)}")

    def _add(
        self,
        kind: str,
        where: str,
        path: str,
        detail: str,
        segment: Segment | None = None,
        largest: float | None = None,
    ) -> None:
        agreed = kind not in ("value", "field", "rebound", "structure")
        self.differences.append(Difference(kind, where, path, detail, segment, largest, agreed))


def _kind_of_value(path: str, reader: Segment | None) -> str:
    """Of a Python value in an argument: frozen, or in an object that is kept by identity."""
    if not isinstance(reader, EagerSegment):
        return ""
    return "value" if path in {name for name, _ in reader.call.frozen()} else "field"


def _where(gap: list[GraphSegment], segment: EagerSegment) -> str:
    if not gap:
        return str(segment)
    return str(gap[0]) if len(gap) == 1 else f"graph segments {gap[0].index} to {gap[-1].index} ({gap[0]})"


def _eager(segments: tuple[Segment, ...]) -> list[EagerSegment]:
    return [segment for segment in segments if isinstance(segment, EagerSegment)]


def _captured(segment: EagerSegment) -> list[_Leaf]:
    """What later segments read of an eager segment's output, after it has run."""
    return _keep(segment.writeback.leaves())


def _arguments(call: Call) -> list[tuple[str, Any]]:
    return [leaf for name, value in call.named() for leaf in _leaves(name, value)]


def _leaves(name: str, value: Any) -> list[tuple[str, Any]]:
    """Path and value of each tensor and plain Python value in known containers."""
    return [
        (name + node.path.removeprefix("out"), node.value)
        for node in walk(value)
        if isinstance(node.value, (torch.Tensor, *_PLAIN))
    ]


def _keep(leaves: list[tuple[str, Any]]) -> list[_Leaf]:
    kept = []
    with torch.inference_mode():
        for path, value in leaves:
            if not isinstance(value, torch.Tensor):
                kept.append(_Leaf(path, value))
            elif value.layout is torch.strided and type(value) in (torch.Tensor, torch.nn.Parameter):
                storage = value.untyped_storage().data_ptr()
                kept.append(_Leaf(path, keep(value), value.data_ptr(), storage))
    return kept


def _brief(value: Any) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
