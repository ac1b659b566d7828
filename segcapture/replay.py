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


def replay_loop(
    segments: Sequence[Segment],
    base: Ambient | None,
    watch: Watch | None = None,
    across: Callable[[EagerSegment], Around | None] = lambda segment: None,
    bind_thread: Callable[[], object] = lambda: None,
) -> Callable[[Any], None]:
    """Segments as one function, with everything looked up that is known before a replay.

    Args:
        segments: To run in this order.
        base: The ambient state under which the replay runs.
        watch: What to enter around each segment.
        across: What to put around the call of an eager segment and its write-back, if anything.
        bind_thread: Called where a launch fails, which is then tried once more: what a thread needs that has
            not used the device before.

    Returns:
        A function of what the launches take. It raises a SegcaptureError where a graph cannot be launched,
        and what eager functions and their write-back raise.
    """
    program: list[Step] = [
        _eager_step(segment, base, across(segment))
        if isinstance(segment, EagerSegment)
        else (segment.graph.launch, None, None)
        for segment in segments
    ]

    def run_steps(steps: list[Step], of: Sequence[Segment], stream: Any) -> None:
        remaining = iter(steps)
        try:
            for fn, args, store in remaining:
                if args is None:
                    if fn(stream)[0]:
                        bind_thread()
                        (status,) = fn(stream)
                        if status:
                            raise _launch_failed(status)
                elif store is None:
                    out = fn(*args)
                    if out is not None:
                        _now(of, remaining).writeback.store(out)  # says what it expected
                else:
                    store(fn(*args))
        except BaseException as error:
            error.add_note(
                f"segcapture: raised in {_now(of, remaining)} during replay. The segments after it did not "
                f"run; the capture can be replayed again."
            )
            raise

    def run(stream: Any) -> None:
        if watch is None and not profiler._is_profiler_enabled:
            run_steps(program, segments, stream)
            return
        for segment, step in zip(segments, program, strict=True):
            with torch.profiler.record_function(str(segment)) if watch is None else watch(segment):
                run_steps([step], [segment], stream)

    return run


def _now(segments: Sequence[Segment], remaining: Any) -> Any:
    """The segment that runs now: the iterator over the steps knows, so that counting costs nothing."""
    return segments[len(segments) - remaining.__length_hint__() - 1]


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
