"""Where a replay's time goes, segment by segment, on the host and on the GPU."""

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import attrs
import torch

from segcapture.inspect.table import aligned, title
from segcapture.segments import EagerSegment, Segment
from segcapture.thread import short

if TYPE_CHECKING:
    from segcapture.capture import BreakableCUDAGraphCapture


@attrs.frozen(eq=False, kw_only=True)
class SegmentTime:
    """Medians of one segment, in us."""

    segment: Segment = attrs.field(repr=False)
    host: float
    """From its start to its end on the host."""
    function: float
    """The part of it that an eager segment's own function takes; 0 for graph segments."""
    gpu: float | None
    """From its first to its last work on the GPU, waits for the host included; None on the CPU."""
    gap: float | None
    """GPU time between the end of the segment before and its start."""

    @property
    def ours(self) -> float:
        """The part that segcapture takes: the launch, or arguments and write-back."""
        return self.host - self.function


@attrs.frozen(eq=False)
class Span:
    """One segment in one replay: start and end in us after the start of the replay."""

    segment: Segment = attrs.field(repr=False)
    host: tuple[float, float]
    function: tuple[float, float] | None
    gpu: tuple[float, float] | None


@attrs.frozen(eq=False, kw_only=True)
class ProfileReport:
    """What `profile` measured. Its text is a table."""

    title: str
    replays: int
    """How many replays of each kind were made."""
    segments: tuple[SegmentTime, ...]
    host: float
    """Median host us of a replay as usual, until it returns."""
    done: float
    """Median us of a replay as usual, until the GPU has done it."""
    watched: float
    """Median host us of a replay with a clock around each segment: what measuring costs is the difference."""
    timeline: tuple[Span, ...] = attrs.field(repr=False)
    """The replay of median length."""

    def __str__(self) -> str:
        on_gpu = any(row.gpu is not None for row in self.segments)
        columns = ["#", "kind", "name", "where", "host us", "function us", "ours us"]
        rows = [columns + (["GPU us", "gap us"] if on_gpu else [])]
        for row in self.segments:
            cells = [str(row.segment.index), row.segment.kind, row.segment.name, short(row.segment.location)]
            cells += [f"{row.host:.1f}", f"{row.function:.1f}" if row.function else "", f"{row.ours:.1f}"]
            if on_gpu:
                cells += [_number(row.gpu), _number(row.gap)]
            rows.append(cells)
        total = ["", "", "total", "", *(f"{sum(values):.1f}" for values in self._host_columns())]
        if on_gpu:
            total += [f"{sum(row.gpu or 0 for row in self.segments):.1f}"]
            total += [f"{sum(row.gap or 0 for row in self.segments):.1f}"]
        rows.append(total)
        head = f"{self.title}; medians of {self.replays} replays"
        foot = (
            f"A replay as usual: {self.host:.1f} us on the host"
            + (f", {self.done:.1f} us until the GPU is done" if on_gpu else "")
            + f"; measured: {self.watched:.1f} us on the host."
        )
        return "\n".join([head, *aligned(rows), foot])

    def _host_columns(self) -> list[list[float]]:
        rows = self.segments
        return [[r.host for r in rows], [r.function for r in rows], [r.ours for r in rows]]

    def plot(self, path: str | Path) -> None:
        """Draw the timeline of one replay: segments as bars on a host lane and a GPU lane.

        The format is what the file's suffix says: `.png`, `.svg`, `.pdf`.

        Raises:
            ImportError: matplotlib is missing.
        """
        try:
            from segcapture.inspect.timeline import draw
        except ImportError as error:
            raise ImportError("plot() needs matplotlib: pip install 'segcapture[plot]'") from error
        draw(self, path)


def profile(capture: "BreakableCUDAGraphCapture", n: int) -> ProfileReport:
    """Measure; see `BreakableCUDAGraphCapture.profile`."""
    if n < 1:
        raise ValueError(f"n must be 1 or more, got {n}")
    device = capture.device
    clock = _Clock(device, len(capture.segments))
    segments = [clock.timed(s) if isinstance(s, EagerSegment) else s for s in capture.segments]
    watched = capture._backend.replayer(segments, clock.around)
    usual = [_timed(capture.replay, device) for _ in range(n + 1)][1:]
    runs = []
    for _ in range(n + 1):
        clock.start()
        host, _ = _timed(watched, device)
        runs.append((host, clock.spans(capture.segments)))
    runs = runs[1:]  # the first warms up
    runs_by_length = sorted(runs, key=lambda run: run[0])
    return ProfileReport(
        title=title(capture),
        replays=n,
        segments=tuple(
            _medians(segment, [spans for _, spans in runs], i) for i, segment in enumerate(capture.segments)
        ),
        host=median(host for host, _ in usual),
        done=median(done for _, done in usual),
        watched=median(host for host, _ in runs),
        timeline=tuple(runs_by_length[(len(runs) - 1) // 2][1]),
    )


def _timed(replay: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """us until a replay returns, and until it is done."""
    _synchronize(device)
    start = time.perf_counter_ns()
    replay()
    returned = time.perf_counter_ns()
    _synchronize(device)
    return (returned - start) / 1e3, (time.perf_counter_ns() - start) / 1e3


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _medians(segment: Segment, runs: list[list[Span]], i: int) -> SegmentTime:
    spans = [run[i] for run in runs]
    before = [run[i - 1] for run in runs] if i else []
    gpu = [span.gpu[1] - span.gpu[0] for span in spans if span.gpu is not None]
    gaps = [
        span.gpu[0] - last.gpu[1]
        for span, last in zip(spans, before, strict=False)
        if span.gpu is not None and last.gpu is not None
    ]
    return SegmentTime(
        segment=segment,
        host=median(span.host[1] - span.host[0] for span in spans),
        function=median(s.function[1] - s.function[0] if s.function is not None else 0.0 for s in spans),
        gpu=median(gpu) if gpu else None,
        gap=median(gaps) if gaps else None,
    )


class _Clock:
    """Reads the time around each segment, and marks it on the GPU."""

    def __init__(self, device: torch.device, count: int) -> None:
        self._on_gpu = device.type != "cpu"
        self._events: list[Any] = []
        if self._on_gpu:
            self._events = [torch.Event(device, enable_timing=True) for _ in range(2 * count + 1)]
        self.start()

    def start(self) -> None:
        """Begin a new replay. The GPU is idle, so that both clocks begin together."""
        self._at: list[list[int]] = []
        self._function: dict[int, tuple[int, int]] = {}
        self._used = 0
        self._mark()
        self._zero = time.perf_counter_ns()

    def _mark(self) -> None:
        if self._on_gpu:
            self._events[self._used].record()
            self._used += 1

    def around(self, segment: Segment) -> "_Clock":
        """Itself, as the context around a segment."""
        return self

    def __enter__(self) -> None:
        self._mark()
        self._at.append([time.perf_counter_ns()])

    def __exit__(self, *error: object) -> None:
        self._at[-1].append(time.perf_counter_ns())
        self._mark()

    def timed(self, segment: EagerSegment) -> EagerSegment:
        """The segment, with a function that is timed."""
        fn = segment.call.fn

        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter_ns()
            try:
                return fn(*args, **kwargs)
            finally:
                self._function[len(self._at) - 1] = (start, time.perf_counter_ns())

        return attrs.evolve(segment, call=attrs.evolve(segment.call, fn=call))

    def spans(self, segments: tuple[Segment, ...]) -> list[Span]:
        """What was read, after the GPU is done."""
        return [
            Span(
                segment,
                self._host(self._at[i][0], self._at[i][1]),
                self._host(*self._function[i]) if i in self._function else None,
                (self._gpu(2 * i + 1), self._gpu(2 * i + 2)) if self._on_gpu else None,
            )
            for i, segment in enumerate(segments)
        ]

    def _host(self, start: int, end: int) -> tuple[float, float]:
        return (start - self._zero) / 1e3, (end - self._zero) / 1e3

    def _gpu(self, event: int) -> float:
        return float(self._events[0].elapsed_time(self._events[event])) * 1e3


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"
