"""Replay in steps, for people who look at memory between them."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import attrs
import torch

from segcapture.segments import GraphSegment, Segment
from segcapture.thread import short

if TYPE_CHECKING:
    from segcapture.capture import BreakableCUDAGraphCapture


@attrs.frozen(eq=False)
class Operator:
    """One operator of a graph segment that has just run, in `mode="debug"`."""

    name: str
    """`aten::mm`."""
    location: str
    """`file:line` of the user's code that called it."""
    segment: Segment
    results: tuple[torch.Tensor, ...] = attrs.field(repr=False)
    """The new tensors that it made, holding their values; empty if it wrote in place."""

    kind = "operator"

    def __str__(self) -> str:
        return f"operator {self.name} ({short(self.location)}) in {self.segment}"


def steps(capture: "BreakableCUDAGraphCapture") -> Iterator[Segment | Operator]:
    """Run segment by segment; see `BreakableCUDAGraphCapture.steps`."""
    backend = capture._backend
    for segment in capture.segments:
        if capture._guard is not None:
            capture._guard.segment(segment)
        if isinstance(segment, GraphSegment) and capture.mode == "debug":
            tape: Any = segment.graph
            for entry in tape.launch_stepwise():
                backend.wait_for_host_copies()
                yield Operator(entry.name, entry.place, segment, tuple(entry.results()))
        else:
            backend.run(segment)
        yield segment
