"""What `verify` compares, and which difference is the first: values at each break, and at the end."""

from typing import TYPE_CHECKING, Any

import attrs
import torch

from segcapture.arguments import Call, resolve
from segcapture.inspect.arguments import frozen, named
from segcapture.inspect.report import Difference
from segcapture.inspect.snapshot import Mismatch, compare, keep
from segcapture.segments import EagerSegment, GraphSegment, Segment
from segcapture.thread import short
from segcapture.trees import flatten

if TYPE_CHECKING:
    from segcapture.capture import BreakableCUDAGraphCapture

_PLAIN = (bool, int, float, complex, str, bytes)


@attrs.frozen(eq=False)
class Leaf:
    """A value of the first run: a tensor's is copied."""

    path: str
    value: Any
    pointer: int = 0
    storage: int = 0


@attrs.define(eq=False)
class Break:
    """One break of an eager run."""

    name: str
    place: str
    args: list[Leaf]
    output: list[Leaf] = attrs.field(factory=list)

    def __str__(self) -> str:
        return f"break `{self.name}`, {short(self.place)}"


class Comparison:
    """Collects the first difference at each place."""

    def __init__(self, rtol: float | None, atol: float | None, stable: set[int] | None = None) -> None:
        self.differences: list[Difference] = []
        self.suspects: list[Difference] = []
        """Values that breaks returned and that are frozen: no matter if all else agrees."""
        self.compared = 0
        self._tolerance = (rtol, atol)
        self._stable = stable or set()
        """Addresses of storages that belong to the user, which must not move."""

    def runs(
        self,
        first: list[Break],
        second: list[Break],
        outputs: tuple[list[Leaf], list[Leaf]],
        after: tuple[list[Leaf], list[Leaf]],
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

    def segments(self, capture: "BreakableCUDAGraphCapture", breaks: list[Break], limit: int | None) -> None:
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
            capture._backend.run(segment)
            self._frozen(segment, breaks[passed])
            self._leaves("output", str(segment), breaks[passed].output, _captured(segment), segment)
            passed += 1
            gap = []
        if passed < len(breaks) and limit is None:
            text = f"the eager run came to {breaks[passed]}, and the capture has no break there"
            self._add("structure", str(capture.segments[-1]) if capture.segments else "?", "breaks", text)

    def _arguments(self, segment: EagerSegment, gap: list[GraphSegment], seen: Break) -> None:
        args, kwargs = resolve(segment.call.args, segment.call.kwargs)
        call = Call(segment.call.fn, args, kwargs, live=False)
        of = f" of {segment}"
        blamed: Segment = gap[0] if gap else segment
        kind = "argument" if gap else "rebound"
        found = kept(arguments_of(call))
        if self._leaves(kind, _where(gap, segment), seen.args, found, blamed, of, segment):
            return
        now, before = ({leaf.path: leaf.value for leaf in leaves} for leaves in (seen.args, found))
        for path in [*now, *before]:
            if path not in before:
                text = f"expected {_brief(now[path])}, not passed at capture"
            elif path not in now:
                text = f"passed at capture ({_brief(before[path])}), and not in the eager run"
            else:
                continue
            self._add("passed", str(segment), f"`{path}`{of}", text, segment)
            return

    def _frozen(self, segment: EagerSegment, seen: Break) -> None:
        """Suspect what the break returned before the graph segments that read it, or a copy of it."""
        captured = dict(segment.writeback.frozen())
        for leaf in seen.output:
            if leaf.path not in captured or isinstance(leaf.value, torch.Tensor):
                continue
            if (mismatch := self._values(leaf.value, captured[leaf.path])) is not None:
                where, path = str(segment), f"`{leaf.path}` of its output"
                text = f"{mismatch.text} at capture"
                self.suspects.append(Difference("returned", where, path, text, segment, None, True))

    def final(self, segments: tuple[Segment, ...], expected: list[Leaf], found: Any) -> None:
        """Compare the final output."""
        after = 1 + max((s.index for s in segments if isinstance(s, EagerSegment)), default=-1)
        gap = [s for s in segments[after:] if isinstance(s, GraphSegment)]
        blamed: Segment | None = gap[0] if gap else (segments[-1] if segments else None)
        self._leaves("final", _where(gap, blamed), expected, kept(found), blamed, " of the final output")

    def state(self, expected: list[Leaf], found: Any) -> None:
        """Compare what the run left in the tensors of the user."""
        self._leaves("state", "what the run left behind", expected, kept(found))

    def _leaves(
        self,
        kind: str,
        where: str,
        expected: list[Leaf],
        found: list[Leaf],
        segment: Segment | None = None,
        of: str = "",
        reader: Segment | None = None,
    ) -> bool:
        """Compare leaf by leaf; whether one differs."""
        by_path = {leaf.path: leaf for leaf in found}
        before = self.compared
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
            self._add(
                kind, where, f"`{leaf.path}`{of}", mismatch.text, segment, mismatch.largest, agreed=before > 0
            )
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
        *,
        agreed: bool = True,
    ) -> None:
        agreed &= not self.differences and kind not in ("value", "field", "rebound", "structure", "passed")
        self.differences.append(Difference(kind, where, path, detail, segment, largest, agreed))


def _kind_of_value(path: str, reader: Segment | None) -> str:
    """Of a Python value in an argument: frozen, or in an object that is kept by identity."""
    if not isinstance(reader, EagerSegment):
        return ""
    return "value" if path in {name for name, _ in frozen(reader.call)} else "field"


def _where(gap: list[GraphSegment], segment: Segment | None) -> str:
    if not gap:
        return str(segment)
    return str(gap[0]) if len(gap) == 1 else f"graph segments {gap[0].index} to {gap[-1].index} ({gap[0]})"


def _captured(segment: EagerSegment) -> list[Leaf]:
    """What later segments read of an eager segment's output, after it has run."""
    return kept(segment.writeback.leaves())


def arguments_of(call: Call) -> list[tuple[str, Any]]:
    """The leaves of all arguments, by the function's own names."""
    return [leaf for name, value in named(call) for leaf in leaves_of(name, value)]


def leaves_of(name: str, value: Any) -> list[tuple[str, Any]]:
    """Path and value of each tensor and plain Python value in known containers."""
    return [
        (name + node.path.removeprefix("out"), node.value)
        for node in flatten(value)
        if isinstance(node.value, (torch.Tensor, *_PLAIN))
    ]


def kept(leaves: list[tuple[str, Any]]) -> list[Leaf]:
    """The values as they are now: of tensors copies."""
    copies = []
    with torch.inference_mode():
        for path, value in leaves:
            if not isinstance(value, torch.Tensor):
                copies.append(Leaf(path, value))
            elif value.layout is torch.strided and type(value) in (torch.Tensor, torch.nn.Parameter):
                storage = value.untyped_storage().data_ptr()
                copies.append(Leaf(path, keep(value), value.data_ptr(), storage))
    return copies


def _brief(value: Any) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
