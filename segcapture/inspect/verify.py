"""Comparison of a capture with the function that it captured: the first segment that differs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from segcapture.arguments import Call
from segcapture.inspect.comparison import Break, Comparison, arguments_of, kept, leaves_of
from segcapture.inspect.observer import Observer
from segcapture.inspect.report import VerifyReport
from segcapture.inspect.snapshot import State
from segcapture.segments import EagerSegment, Segment
from segcapture.trees import tensors_in

if TYPE_CHECKING:
    from segcapture.capture import BreakableCUDAGraphCapture


class _Listener:
    """Keeps what passes each break of an eager run."""

    def __init__(self) -> None:
        self.breaks: list[Break] = []

    def called(self, name: str, place: str, call: Call) -> None:
        """Keep the arguments, before the function may change them."""
        self.breaks.append(Break(name, place, kept(arguments_of(call))))

    def returned(self, output: Any) -> None:
        """Keep the output."""
        self.breaks[-1].output = kept(leaves_of("out", output))


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
    passed = [
        tensor
        for segment in _eager(capture.segments)
        for tensor in tensors_in(*segment.call.args, *segment.call.kwargs.values())
        if not capture._backend.is_alias(tensor)
    ]
    saved = State((state, passed), fn, args, kwargs, capture.device)
    watched = [(name, t) for name, t in saved.named if not name.startswith("state[1]")]

    def run(listener: _Listener) -> Any:
        saved.restore()
        if before is not None:
            before()
        with _observed(capture, listener):
            return fn(*args, **kwargs)

    try:
        first, second = _Listener(), _Listener()
        expected = kept(leaves_of("out", run(first)))
        after = kept(watched)
        again = kept(leaves_of("out", run(second)))
        again_after = kept(watched)
        eager = Comparison(rtol, atol)
        limit = eager.runs(first.breaks, second.breaks, (expected, again), (after, again_after))
        del second, again, again_after

        saved.restore()
        if before is not None:
            before()
        replay = Comparison(rtol, atol, {t.untyped_storage().data_ptr() for _, t in watched})
        with capture._ambient.entered():
            replay.segments(capture, first.breaks, limit)
        if limit is None:
            if outputs is not None and not any(d.kind == "structure" for d in replay.differences):
                replay.final(capture.segments, expected, leaves_of("out", outputs))
            replay.state(after, watched)
    finally:
        saved.restore()
    return VerifyReport(
        segments=capture.segments,
        compared=replay.compared,
        differences=(*(replay.suspects if replay.differences else ()), *replay.differences),
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


def _eager(segments: tuple[Segment, ...]) -> list[EagerSegment]:
    return [segment for segment in segments if isinstance(segment, EagerSegment)]
