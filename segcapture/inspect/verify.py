"""Comparison of a capture with the function that it captured: the first segment that differs."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import attrs
import torch

from segcapture.ambient import Ambient
from segcapture.arguments import Call, resolve
from segcapture.backends.base import Backend
from segcapture.inspect.snapshot import Kept, Mismatch, Search, Snapshot, brief, compare, keep
from segcapture.inspect.table import frozen, named
from segcapture.listener import Listener
from segcapture.recorder import Options, Run
from segcapture.segments import EagerSegment, GraphSegment, Segment
from segcapture.thread import short
from segcapture.trees import PLAIN, Place, flatten, tensors_in

_AGREED = "Its inputs still agreed: everything compared before it is equal."
_LEFT_BEHIND = (
    "a tensor that was re-bound since (a new weight, an input not copied into its static tensor), one that a "
    "break left somewhere instead of returning it"
)
_ADVICE = {
    "argument": "A graph segment repeats the kernels of the capture on the memory of the capture: look for "
    f"{_LEFT_BEHIND}, a Python value that it read, and a kernel that its break hides. check=True at capture "
    "names most of these.",
    "output": "The function depends on something besides its arguments: an object or global that has changed "
    "since the capture, or state that is not a tensor.",
    "rebound": "The eager function reads a tensor at another address than the capture: it was re-bound after "
    "the capture. Copy new values into the captured tensor.",
    "value": "A plain Python value is frozen at capture. Pass it as `Live(...)`, as a tensor, or in an "
    "object that the function reads.",
    "field": "An eager call keeps a mutable object by identity. If the code has replaced it since the "
    "capture, change the captured object in place, or pass `Live(...)`; if the runs themselves change it, "
    "put it back in before=.",
    "passed": "The Python code passed other arguments than at capture, or took another branch: it ran then "
    "alone. Put the decision into a break, or capture once for each.",
    "returned": "A plain Python value that a break returns is frozen for the graph segments after it: return "
    "a tensor, or put what uses the value into the break.",
    "anew": "A replay writes to the memory of the capture, and never changes which tensor stands there: "
    "write in place (`tensor.copy_(new)`; for gradients `zero_grad(set_to_none=False)`), or pass the tensor "
    "in and return it.",
    "structure": "Which breaks a run passes is fixed at capture.",
    "final": f"Look for {_LEFT_BEHIND}, and a Python value that the code after the last break read, or took "
    "out of what a break returned. check=True at capture names most of these.",
    "state": "All that was compared at breaks is equal, but what the run leaves in this tensor is not.",
}
_WHATEVER_THE_INPUTS = ("field", "passed", "rebound", "structure", "value")
"""Kinds of which it says nothing that all before them is equal."""


@attrs.frozen(eq=False)
class Difference:
    """One value that is not the same in two runs."""

    kind: str
    """`anew`, `argument`, `field`, `final`, `output`, `passed`, `rebound`, `returned`, `state`, `structure`
    or `value`."""
    where: str
    """The segment in words."""
    path: str
    """Which leaf of which argument or output."""
    detail: str
    """Expected and found."""
    segment: Segment | None = attrs.field(default=None, repr=False)
    """The segment that is wrong; None for state after the run."""
    largest: float | None = None
    """Largest difference of elements; None where there is none to speak of."""
    inputs_agreed: bool = False
    """Whether something was compared before it, and all of that was equal."""

    @property
    def location(self) -> str:
        """`file:line` of the segment."""
        return self.segment.location if self.segment is not None else "?"

    def __str__(self) -> str:
        return f"{self.where}\n  {self.path}: {self.detail}"


@attrs.frozen(eq=False, kw_only=True)
class VerifyReport:
    """What `verify` found. True if nothing; its text says the first difference and what it means."""

    segments: tuple[Segment, ...] = attrs.field(repr=False)
    compared: int
    """Number of values compared with the capture."""
    differences: tuple[Difference, ...]
    """The first difference at each place that differs, in order."""
    nondeterminism: Difference | None
    """The first difference between two eager runs on the same inputs."""
    with_outputs: bool
    """Whether the final output was compared."""

    @property
    def ok(self) -> bool:
        """Whether the capture and the eager function agree, and the function agrees with itself."""
        return not self.differences and self.nondeterminism is None

    @property
    def difference(self) -> Difference | None:
        """The first difference between the capture and the eager function."""
        return self.differences[0] if self.differences else None

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        lines, first = [], self.difference
        if self.nondeterminism is not None:
            lines += [
                f"The eager function is not deterministic: two runs on the same inputs and state differ, "
                f"first in {self.nondeterminism}",
                "  What comes after cannot be compared. Look for draws from a generator that is not in "
                "`state=`, for atomics in kernels, and for Python state (put it back in `before=`).",
            ]
        if first is not None:
            agreed = f"{_AGREED} " if first.inputs_agreed and first.kind != "state" else ""
            lines += [
                f"The capture differs from the eager function, first in {first}",
                f"  {agreed}{_ADVICE[first.kind]}",
            ]
            if later := len(self.differences) - 1:
                lines.append(f"  {later} later place{'s differ' if later > 1 else ' differs'} too.")
        elif self.nondeterminism is None:
            lines.append(
                f"The capture agrees with the eager function: {len(self.segments)} segments, {self.compared} "
                f"values compared."
            )
        if not self.with_outputs:
            lines.append("The final output was not compared: pass what the capture returned as outputs=.")
        return "\n".join(lines)


def verify(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    owner: Any,
    options: Options,
    ambient: Ambient,
    backend: Backend,
    segments: tuple[Segment, ...],
    outputs: Any,
    state: Any,
    before: Callable[[], object] | None,
    rtol: float | None,
    atol: float | None,
) -> VerifyReport:
    """Compare; see `BreakableCUDAGraphCapture.verify`."""
    # Not those in the pool: replays write them, and their memory may be another tensor's by the end.
    passed = (
        tensor
        for segment in segments
        if isinstance(segment, EagerSegment)
        for tensor in tensors_in(*segment.call.args, *segment.call.kwargs.values())
        if not backend.is_alias(tensor)
    )
    saved = Snapshot(lambda: Search(fn, args, kwargs, state), passed, backend.device)

    def begin(*, places: bool = True) -> None:
        saved.restore(places=places)
        if before is not None:
            before()

    def eager(*, places: bool = True) -> list[_Point]:
        begin(places=places)
        seen = _EagerRun()
        run = Run(owner, options, [seen])
        with ambient.entered():
            run.enter()
            try:
                out = fn(*args, **kwargs)
            finally:
                run.leave()
        return [
            *seen.points,
            _Point("final", "", "the final output", keep(_leaves("out", out))),
            _Point("state", "", "state after", keep(saved.now().items())),
        ]

    tolerance = rtol, atol
    try:
        first = eager()
        replaced = saved.replaced()
        # Does the function read what it has put there? Then it goes on from that, unless it is put back.
        read = replaced and _first_difference(first, eager(places=False), tolerance, arguments=False)[1]
        limit, nondeterminism = _first_difference(first, eager(), tolerance)
        saved.restore()
        anew = None
        if saved.replaced() if nondeterminism else read:
            nondeterminism, anew = None, _put_anew(replaced)
        begin()
        comparison = _Comparison(first[:limit], segments, saved, tolerance)
        with ambient.entered():
            comparison.replay(backend, outputs)
    finally:
        saved.restore()
    return VerifyReport(
        segments=segments,
        compared=comparison.compared,
        differences=(*([anew] if anew else ()), *comparison.found()),
        nondeterminism=nondeterminism,
        with_outputs=outputs is not None,
    )


def _put_anew(paths: Sequence[str]) -> Difference:
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    named = ", ".join(f"`{path}`" for path in paths[:3]) + more
    return Difference("anew", "what each run puts anew", named, "another tensor after a run than before it")


@attrs.frozen(eq=False)
class _Point:
    """Values that passed one point of an eager run."""

    kind: str
    name: str
    """Of the break."""
    where: str
    values: dict[str, Kept]


class _EagerRun(Listener):
    """Keeps what passes each break."""

    def __init__(self) -> None:
        self.points: list[_Point] = []

    def break_begins(self, index: int, name: str, place: str, call: Call) -> None:
        """Keep the arguments, before the function may change them."""
        where = f"break `{name}`, {short(place)}"
        self.points.append(_Point("argument", name, where, keep(_arguments(call))))

    def break_ends(self, index: int, places: list[Place]) -> None:
        """Keep the output."""
        _, name, where = attrs.astuple(self.points[-1], recurse=False)[:3]
        self.points.append(_Point("output", name, where, keep(_comparable(places))))


def _arguments(call: Call) -> list[tuple[str, Any]]:
    """The leaves of all arguments, by the function's own names."""
    return [leaf for name, value in named(call) for leaf in _leaves(name, value)]


def _leaves(name: str, value: Any) -> list[tuple[str, Any]]:
    return _comparable(flatten(value, name))


def _comparable(places: Sequence[Place]) -> list[tuple[str, Any]]:
    """Path and value of each tensor and plain Python value."""
    return [(place.path, place.value) for place in places if isinstance(place.value, (torch.Tensor, *PLAIN))]


Tolerance = tuple[float | None, float | None]
"""Relative and absolute; None: as usual for the dtype."""


def _first_mismatch(
    expected: dict[str, Kept], found: dict[str, Kept], tolerance: Tolerance
) -> tuple[str, Mismatch] | None:
    for path in expected:  # Replay checks structures itself.
        if path in found:
            mismatch = compare(expected[path].value, found[path].value, *tolerance)
            if mismatch is not None:
                return path, mismatch
    return None


def _first_difference(
    first: list[_Point], second: list[_Point], tolerance: Tolerance, *, arguments: bool = True
) -> tuple[int | None, Difference | None]:
    """Where two eager runs differ, in arguments of breaks or not: number of the point, and what differs."""
    # The last points are those of any run, so that one which passes fewer breaks differs before its end.
    for i, (a, b) in enumerate(zip(first, second, strict=False)):
        if (a.kind, a.name) != (b.kind, b.name):
            return i, Difference("structure", a.where, "breaks", f"the second run came to {b.where}")
        if a.kind == "argument" and not arguments:
            continue
        if mismatch := _first_mismatch(a.values, b.values, tolerance):
            path, how = mismatch
            return i, Difference(a.kind, a.where, f"`{path}`", how.text, None, how.largest)
    return None, None


class _Comparison:
    """Of a capture, which runs segment by segment, with the points of an eager run."""

    def __init__(
        self, points: list[_Point], segments: Sequence[Segment], saved: Snapshot, tolerance: Tolerance
    ):
        self.compared = 0
        self._points, self._segments = iter(points), segments
        self._saved, self._tolerance = saved, tolerance
        self._differences: list[Difference] = []
        self._suspects: list[Difference] = []
        """Values that breaks returned and that are frozen: no matter if all else agrees."""
        found = [tensor for tensor in saved.now().values() if tensor is not None]
        self._stable = {tensor.untyped_storage().data_ptr() for tensor in found}
        """Addresses of storages that belong to the user, which must not move."""

    def found(self) -> list[Difference]:
        """The first difference at each place that differs."""
        return [*self._suspects, *self._differences] if self._differences else []

    def replay(self, backend: Backend, outputs: Any) -> None:
        """Run all segments, as long as there are points to compare with."""
        gap: list[GraphSegment] = []
        for segment in self._segments:
            if isinstance(segment, GraphSegment):
                backend.run(segment)
                gap.append(segment)
                continue
            if (seen := self._next("argument", segment.name, segment)) is None:
                return
            self._compare_arguments(segment, gap, seen.values)
            backend.run(segment)
            if (seen := self._next("output", segment.name, segment)) is None:
                return
            self._compare_output(segment, seen.values)
            gap = []
        last = self._segments[-1] if self._segments else None
        if (seen := self._next("final", "", last)) is not None and outputs is not None:
            about = Difference(
                "final", _where(gap, last), " of the final output", "", gap[0] if gap else last
            )
            self._compare(about, seen.values, keep(_leaves("out", outputs)))
        if seen is not None and (seen := self._next("state", "", None)) is not None:
            about = Difference("state", "what the run left behind", "", "")
            self._compare(about, seen.values, keep(self._saved.now().items()))

    def _next(self, kind: str, name: str, segment: Segment | None) -> _Point | None:
        """The next point, if it is this one; else a difference, if there is one."""
        point = next(self._points, None)
        if point is None or (point.kind, point.name) == (kind, name):
            return point
        came = "its end" if point.kind == "final" else point.where
        here = "and the capture has no break there" if kind == "final" else f"where the capture has {segment}"
        text = f"the eager run came to {came} {here}"
        self._add(Difference("structure", str(segment), "breaks", text, segment))
        return None

    def _compare_arguments(
        self, segment: EagerSegment, gap: list[GraphSegment], seen: dict[str, Kept]
    ) -> None:
        call = segment.call
        found = keep(_arguments(Call(call.fn, *resolve(call.args, call.kwargs))))
        kind, blamed = ("argument", gap[0]) if gap else ("rebound", segment)
        about = Difference(kind, _where(gap, segment), f" of {segment}", "", blamed)
        if self._compare(about, seen, found, segment):
            return
        for path in (*seen, *found):
            if path not in found:
                text = f"expected {brief(seen[path].value)}, not passed at capture"
            elif path not in seen:
                text = f"passed at capture ({brief(found[path].value)}), and not in the eager run"
            else:
                continue
            self._add(Difference("passed", str(segment), f"`{path}` of {segment}", text, segment))
            return

    def _compare_output(self, segment: EagerSegment, seen: dict[str, Kept]) -> None:
        """And suspect a plain value before the graph segments that read it, or a copy of it."""
        for path, value, _ in segment.writeback.plain():
            mismatch = compare(seen[path].value, value, *self._tolerance) if path in seen else None
            if mismatch is not None and not self._differences:
                text, at = f"{mismatch.text} at capture", f"`{path}` of its output"
                self._suspects.append(Difference("returned", str(segment), at, text, segment, None, True))
        found = keep((leaf.path, leaf.target) for leaf in segment.writeback.leaves)
        self._compare(Difference("output", str(segment), "", "", segment), seen, found)

    def _compare(
        self,
        about: Difference,
        expected: dict[str, Kept],
        found: dict[str, Kept],
        reader: EagerSegment | None = None,
    ) -> bool:
        """Compare leaf by leaf; whether one differs. `reader` is the segment that these are arguments of."""
        agreed = self.compared > 0
        self.compared += len(expected.keys() & found.keys())
        mismatch = _first_mismatch(expected, found, self._tolerance)
        if mismatch is None:
            return False
        path, how = mismatch
        if reader and (kind := _kind_of_argument(path, expected[path], found[path], reader, self._stable)):
            about = attrs.evolve(about, kind=kind, where=str(reader), segment=reader)
        at = f"`{path}`{about.path}"
        self._add(attrs.evolve(about, path=at, detail=how.text, largest=how.largest, inputs_agreed=agreed))
        return True

    def _add(self, found: Difference) -> None:
        agreed = found.inputs_agreed and not self._differences and found.kind not in _WHATEVER_THE_INPUTS
        self._differences.append(attrs.evolve(found, inputs_agreed=agreed))


def _kind_of_argument(
    path: str, expected: Kept, found: Kept, reader: EagerSegment, stable: Collection[int]
) -> str:
    """Why an argument differs, where that shows; else empty: the graph segment before made it."""
    tensors = isinstance(expected.value, torch.Tensor) + isinstance(found.value, torch.Tensor)
    if tensors == 1:
        return "passed"
    if tensors == 0:
        return "value" if path in dict(frozen(reader.call)) else "field"
    return "rebound" if expected.storage in stable and expected.address != found.address else ""


def _where(gap: list[GraphSegment], segment: Segment | None) -> str:
    if len(gap) > 1:
        return f"graph segments {gap[0].index} to {gap[-1].index} ({gap[0]})"
    return str(gap[0] if gap else segment)
