"""Where a replay's time goes, segment by segment, on the host and on the GPU."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import attrs
import torch

from segcapture.backends.base import Backend
from segcapture.inspect.table import WHICH, aligned, which
from segcapture.segments import EagerSegment, Segment

_COLUMNS = {"host us": "host", "function us": "function", "ours us": "ours", "GPU us": "gpu", "gap us": "gap"}
_COLOURS = {"graph segment": "#4878a8", "eager function": "#e8863c", "segcapture": "#a04000"}
_NARROW = 0.04  # of the width: no name fits in


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
        columns = [*_COLUMNS][: 5 if on_gpu else 3]
        numbers = [[getattr(row, _COLUMNS[column]) for column in columns] for row in self.segments]
        rows = [
            [*which(row.segment), *(f"{value:.1f}" if value else "" for value in values)]
            for row, values in zip(self.segments, numbers, strict=True)
        ]
        totals = [f"{sum(row[i] or 0 for row in numbers):.1f}" for i in range(len(columns))]
        table = aligned([[*WHICH, *columns], *rows, ["", "", "total", "", *totals]])
        until_done = f", {self.done:.1f} us until the GPU is done" if on_gpu else ""
        usual = f"A replay as usual: {self.host:.1f} us on the host{until_done}"
        head, foot = f"medians of {self.replays} replays", f"measured: {self.watched:.1f} us on the host."
        return "\n".join([f"{self.title}; {head}", *table, f"{usual}; {foot}"])

    def plot(self, path: str | Path) -> None:
        """Draw the timeline of one replay: segments as bars on a row for the host and one for the GPU.

        The format is what the file's suffix says: `.png`, `.svg`, `.pdf`.

        Raises:
            ImportError: matplotlib is missing.
        """
        try:
            from matplotlib.figure import Figure
            from matplotlib.patches import Patch
        except ImportError as error:
            raise ImportError("plot() needs matplotlib: pip install 'segcapture[plot]'") from error
        rows = ["host", "GPU"] if any(span.gpu for span in self.timeline) else ["host"]
        end = max([1e-3, *(at for span in self.timeline for _, (_, at), _, _ in _bars(span))])
        # No pyplot: it would choose a backend for the whole process.
        figure = Figure(figsize=(12, 1.4 + 0.9 * len(rows)), layout="constrained")
        axes = figure.add_subplot()
        for span in self.timeline:
            for row, (start, stop), colour, label in _bars(span):
                width, middle = stop - start, (start + stop) / 2
                bar = axes.broken_barh([(start, width)], (row - 0.3, 0.6), facecolor=colour)
                bar.set(edgecolor="white", linewidth=0.4)
                if width > _NARROW * end:
                    shown = label[: max(1, int(width / end * 150))]
                    axes.text(middle, row, shown, ha="center", va="center", fontsize=7, color="white")
        axes.set_yticks(range(len(rows)), rows)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlim(0, end * 1.01)
        axes.set_xlabel("us after the start of the replay")
        axes.set_title(self.title, fontsize=10)
        handles = [Patch(color=colour, label=label) for label, colour in _COLOURS.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
        figure.savefig(path, dpi=150)


def _bars(span: Span) -> list[tuple[int, tuple[float, float], str, str]]:
    """Row, start and end, colour and label of a segment's bars; what is ours lies over the whole."""
    graph, eager, ours = _COLOURS.values()
    segment = span.segment
    colour, label = graph, str(segment.index)
    if segment.kind == "eager":
        colour, label = eager, f"{label} {segment.name}"
    bars = [(0, span.host, colour, label)]
    if span.function is not None:
        bars.append((0, (span.host[0], span.function[0]), ours, ""))
        bars.append((0, (span.function[1], span.host[1]), ours, ""))
    if span.gpu is not None:
        bars.append((1, span.gpu, colour, label))
    return bars


def profile(
    title: str, segments: Sequence[Segment], backend: Backend, replay: Callable[[], None], n: int
) -> ProfileReport:
    """Measure; see `BreakableCUDAGraphCapture.profile`."""
    if n < 1:
        raise ValueError(f"n must be 1 or more, got {n}")
    clock = _Clock(backend.device, segments)
    # The first of each kind warms up.
    usual = [_timed(replay, backend.device) for _ in range(n + 1)][1:]
    watched = backend.replayer(clock.timed, clock.around)
    runs = []
    for _ in range(n + 1):
        clock.start()
        host, _ = _timed(watched, backend.device)
        runs.append((host, clock.spans()))
    runs = sorted(runs[1:], key=lambda run: run[0])
    return ProfileReport(
        title=title,
        replays=n,
        segments=tuple(_medians([spans for _, spans in runs], i) for i in range(len(segments))),
        host=median(host for host, _ in usual),
        done=median(done for _, done in usual),
        watched=median(host for host, _ in runs),
        timeline=tuple(runs[(n - 1) // 2][1]),
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


def _medians(runs: Sequence[Sequence[Span]], i: int) -> SegmentTime:
    """Of the segment with the number `i`."""

    def middle(lengths: list[float]) -> float | None:
        return median(lengths) if lengths else None

    spans = [run[i] for run in runs]
    pairs = [(run[i - 1].gpu, run[i].gpu) for run in runs if i]
    return SegmentTime(
        segment=spans[0].segment,
        host=median(span.host[1] - span.host[0] for span in spans),
        function=middle([s.function[1] - s.function[0] for s in spans if s.function]) or 0.0,
        gpu=middle([span.gpu[1] - span.gpu[0] for span in spans if span.gpu]),
        gap=middle([now[0] - before[1] for before, now in pairs if before and now]),
    )


class _Clock:
    """Reads the time around each segment, and marks it on the GPU."""

    def __init__(self, device: torch.device, segments: Sequence[Segment]) -> None:
        self._segments = segments
        self._functions: dict[int, tuple[int, int]] = {}
        self.timed = [self._timed(s) if isinstance(s, EagerSegment) else s for s in segments]
        """The segments, with functions that are timed."""
        count = 0 if device.type == "cpu" else 2 * len(segments) + 1
        self._events: list[Any] = [torch.Event(device, enable_timing=True) for _ in range(count)]

    def _timed(self, segment: EagerSegment) -> EagerSegment:
        fn, times = segment.call.fn, self._functions  # not `self`, which holds it: no cycle

        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter_ns()
            try:
                return fn(*args, **kwargs)
            finally:
                times[segment.index] = (start, time.perf_counter_ns())

        return attrs.evolve(segment, call=attrs.evolve(segment.call, fn=call))

    def start(self) -> None:
        """Begin a new replay. The GPU is idle, so that both clocks begin together."""
        self._at: list[int] = []
        self._functions.clear()
        self._unused = iter(self._events)
        self._mark()
        self._zero = time.perf_counter_ns()

    def _mark(self) -> None:
        if self._events:
            next(self._unused).record()

    def around(self, segment: Segment) -> "_Clock":
        """Itself, as the context around a segment."""
        return self

    def __enter__(self) -> None:
        self._mark()
        self._at.append(time.perf_counter_ns())

    def __exit__(self, *error: object) -> None:
        self._at.append(time.perf_counter_ns())
        self._mark()

    def spans(self) -> list[Span]:
        """What was read, after the GPU is done."""
        host = _pairs([self._us(at) for at in self._at])
        gpu = _pairs([float(self._events[0].elapsed_time(event)) * 1e3 for event in self._events[1:]])
        functions = {i: (self._us(start), self._us(end)) for i, (start, end) in self._functions.items()}
        return [
            Span(segment, host[i], functions.get(segment.index), gpu[i] if gpu else None)
            for i, segment in enumerate(self._segments)
        ]

    def _us(self, at: int) -> float:
        return (at - self._zero) / 1e3


def _pairs(times: list[float]) -> list[tuple[float, float]]:
    return [*zip(times[::2], times[1::2], strict=True)]
