"""What `verify` reports."""

import attrs

from segcapture.segments import Segment

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
    "returned": "A plain Python value that a break returns is frozen for what comes after it: return a "
    "tensor, or put what uses the value into the break.",
    "structure": "Which breaks a run passes is fixed at capture.",
    "final": f"Look for {_LEFT_BEHIND}, and a Python value that the code after the last break read, or took "
    "out of what a break returned. check=True at capture names most of these.",
    "state": "All that was compared at breaks is equal, but what the run leaves in this tensor is not.",
}


@attrs.frozen(eq=False)
class Difference:
    """One value that is not the same in two runs."""

    kind: str
    """`argument`, `output`, `value`, `field`, `rebound`, `structure`, `final` or `state`."""
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
    inputs_agreed: bool = True
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
        lines = []
        if self.nondeterminism is not None:
            lines += [
                f"The eager function is not deterministic: two runs on the same inputs and state differ, "
                f"first in {self.nondeterminism}",
                "  What comes after cannot be compared. Look for draws from a generator that is not in "
                "`state=`, for atomics in kernels, and for Python state (put it back in `before=`).",
            ]
        if self.difference is not None:
            kind = self.difference.kind
            advice = _ADVICE[kind]
            lines += [
                f"The capture differs from the eager function, first in {self.difference}",
                f"  {_AGREED} {advice}"
                if self.difference.inputs_agreed and kind != "state"
                else f"  {advice}",
            ]
            if len(self.differences) > 1:
                later = len(self.differences) - 1
                lines.append(f"  {later} later place{'s differ' if later > 1 else ' differs'} too.")
        elif self.nondeterminism is None:
            lines.append(
                f"The capture agrees with the eager function: {len(self.segments)} segments, {self.compared} "
                f"values compared."
            )
        if not self.with_outputs:
            lines.append("The final output was not compared: pass what the capture returned as outputs=.")
        return "\n".join(lines)
