"""The replay loop: the only place that walks the segments, and that knows what their failures mean."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import attrs
import torch
from torch.autograd import profiler

from segcapture.ambient import Ambient
from segcapture.errors import SegcaptureError
from segcapture.segments import EagerSegment, Segment
from segcapture.thread import short

Around = Callable[[Callable[[], Any], Callable[[Any], None]], Callable[[], None]]
"""From a function and where its output goes to a call of both, with something around it."""
Step = tuple[Callable[..., Any], tuple[Any, ...] | None, Callable[[Any], None] | None]
"""Eager: a function, its arguments, and where its output goes (None: it returns None). Graph: a launch,
None, None."""


Watch = Callable[[Segment], AbstractContextManager[Any]]
"""What is entered around each segment of a replay."""


def profiler_range(segment: Segment) -> AbstractContextManager[Any]:
    """Shows a segment in torch.profiler, and as an NVTX range under `emit_nvtx`, by its name."""
    return torch.profiler.record_function(str(segment))


@attrs.frozen(eq=False)
class OperatorStep:
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


class Program:
    """Segments with everything looked up that is known before a replay.

    Args:
        segments: To run in this order.
        base: The ambient state under which the replay runs.
        watch: What to enter around each segment.
        across: What to put around the call of an eager segment and its write-back, if anything.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        base: Ambient | None,
        watch: Watch | None = None,
        across: Callable[[EagerSegment], Around | None] = lambda segment: None,
    ) -> None:
        self._segments = tuple(segments)
        self._watch = watch
        self._steps: list[Step] = [
            _eager_step(segment, base, across(segment))
            if isinstance(segment, EagerSegment)
            else (segment.graph.launch, None, None)
            for segment in segments
        ]

    def run(self, stream: Any) -> None:
        """Run all segments in order. `stream` is what the launches take.

        Raises:
            SegcaptureError: a graph could not be launched.
            OutputMismatchError: an eager function returned something else than at capture.
        """
        if self._watch is not None or profiler._is_profiler_enabled:
            watch = self._watch or profiler_range
            for segment, step in zip(self._segments, self._steps, strict=True):
                with watch(segment):
                    self._run([step], segment, stream)
        else:
            self._run(self._steps, None, stream)

    def _run(self, steps: list[Step], alone: Segment | None, stream: Any) -> None:
        remaining: Any = iter(steps)
        try:
            for fn, args, store in remaining:
                if args is None:
                    status = fn(stream)
                    if status[0]:
                        raise _launch_failed(status[0])
                elif store is None:
                    out = fn(*args)
                    if out is not None:
                        self._reached(remaining, alone).writeback.store(out)  # says what it expected
                else:
                    store(fn(*args))
        except BaseException as error:
            error.add_note(
                f"segcapture: raised in {self._reached(remaining, alone)} during replay. The segments after "
                f"it did not run; the capture can be replayed again."
            )
            raise

    def _reached(self, remaining: Any, alone: Segment | None) -> Any:
        """The segment that runs now: the iterator knows, so that counting costs nothing on the way."""
        return alone or self._segments[len(self._steps) - remaining.__length_hint__() - 1]


def _eager_step(segment: EagerSegment, base: Ambient | None, around: Around | None) -> Step:
    call, store = segment.call, segment.writeback.store
    run = None if around is None else around(call.invoke, store)
    if segment.ambient != base:

        def run_in_own_ambient() -> None:
            with segment.ambient.entered():
                store(call.invoke()) if run is None else run()

        return run_in_own_ambient, (), None
    if run is not None:
        return run, (), None
    target = None if segment.writeback.expects_none else store
    if call.live or call.kwargs:
        return call.invoke, (), target
    return call.fn, call.args, target


def base_ambient(segments: Sequence[Segment]) -> Ambient | None:
    """The ambient state under which a replay runs: that of the first eager segment."""
    return next((s.ambient for s in segments if isinstance(s, EagerSegment)), None)


def under(base: Ambient | None, run: Callable[[], None]) -> Callable[[], None]:
    """`run` in an ambient state; as it is where `base` is None, as it makes no difference."""
    if base is None:
        return run

    def replay() -> None:
        if base.is_current():
            run()
        else:
            with base.entered():
                run()

    return replay


def _launch_failed(status: Any) -> SegcaptureError:
    return SegcaptureError(
        f"The graph could not be launched: CUDA error {int(status)} ({getattr(status, 'name', '?')}). 900 is "
        f"that the stream is being captured. An error of an earlier kernel shows here too: run with "
        f"CUDA_LAUNCH_BLOCKING=1, or go through `capture.steps()`."
    )
