"""The replay loop: the only place that walks the segments, and that knows what their failures mean."""

from collections.abc import Callable, Sequence
from typing import Any

from segcapture.ambient import Ambient
from segcapture.errors import SegcaptureError
from segcapture.segments import EagerSegment, GraphSegment, Segment

Around = Callable[[Callable[[], Any]], Callable[[], Any]]
Step = tuple[Callable[..., Any], tuple[Any, ...] | None, Callable[[Any], None] | None]
"""Eager: a function, its arguments, and where its output goes. Graph: a launch, None, None."""


def graph_step(segment: GraphSegment) -> Step:
    """The step of a graph segment."""
    return segment.graph.launch, None, None


def eager_step(segment: EagerSegment, base: Ambient, around: Around | None = None) -> Step:
    """The step of an eager segment, in a replay that runs under the ambient state `base`.

    `around` wraps the function's call (not the write-back of its output).
    """
    call, store = segment.call, segment.writeback.store
    invoke = call.invoke if around is None else around(call.invoke)
    if segment.ambient != base:

        def run_in_own_ambient() -> None:
            with segment.ambient.entered():
                store(invoke())

        return run_in_own_ambient, (), _ignore
    if around is not None or call.live or call.kwargs:
        return invoke, (), store
    return call.fn, call.args, store


def _ignore(out: None) -> None:
    """What the function returned has been stored already."""


class Program:
    """Segments with everything looked up that is known before a replay."""

    def __init__(self, segments: Sequence[Segment], steps: Sequence[Step]) -> None:
        self._segments = tuple(segments)
        self._steps = list(steps)

    def run(self, stream: Any) -> None:
        """Run all segments in order. `stream` is what the launches take.

        Raises:
            SegcaptureError: a graph could not be launched.
            OutputMismatchError: an eager function returned something else than at capture.
        """
        remaining: Any = iter(self._steps)
        try:
            for fn, args, store in remaining:
                if args is None:
                    status = fn(stream)[0]
                    if status:
                        raise _launch_failed(status)
                else:
                    store(fn(*args))  # type: ignore[misc]
        except BaseException as error:
            # Asked from the iterator, so that counting costs nothing while all goes well.
            index = len(self._steps) - remaining.__length_hint__() - 1
            error.add_note(
                f"segcapture: raised in {self._segments[index]} during replay. The segments after it did "
                f"not run; the capture can be replayed again."
            )
            raise


def _launch_failed(status: Any) -> SegcaptureError:
    return SegcaptureError(
        f"The graph could not be launched: CUDA error {int(status)} ({getattr(status, 'name', '?')}). An "
        f"error of an earlier kernel shows here too: run with CUDA_LAUNCH_BLOCKING=1, or go through "
        f"`capture.steps()`."
    )
