"""The picture of one replay. Needs matplotlib."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

if TYPE_CHECKING:
    from segcapture.inspect.profile import ProfileReport

_COLOURS = {"graph": "#4878a8", "eager": "#e8863c"}
_OURS = "#a04000"
_NARROW = 0.04  # of the width: no name fits in


def draw(report: "ProfileReport", path: str | Path) -> None:
    """Write the timeline of the median replay to a file."""
    spans = report.timeline
    on_gpu = any(span.gpu is not None for span in spans)
    lanes = ["host", "GPU"] if on_gpu else ["host"]
    end = max([span.host[1] for span in spans] + [span.gpu[1] for span in spans if span.gpu] + [1e-3])
    # No pyplot: it would choose a backend for the whole process.
    figure = Figure(figsize=(12, 1.4 + 0.9 * len(lanes)), layout="constrained")
    axes = figure.add_subplot()
    for span in spans:
        name, kind = span.segment.name, span.segment.kind
        label = f"{span.segment.index} {name}" if kind == "eager" else str(span.segment.index)
        _bar(axes, 0, span.host, _COLOURS[kind], label, end)
        if span.function is not None:  # what is left of the bar is ours
            for part in ((span.host[0], span.function[0]), (span.function[1], span.host[1])):
                _bar(axes, 0, part, _OURS, "", end)
        if span.gpu is not None:
            _bar(axes, 1, span.gpu, _COLOURS[kind], label, end)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_xlim(0, end * 1.01)
    axes.set_xlabel("us after the start of the replay")
    axes.set_title(report.title, fontsize=10)
    legend = {"graph segment": _COLOURS["graph"], "eager function": _COLOURS["eager"], "segcapture": _OURS}
    handles = [Patch(color=colour, label=label) for label, colour in legend.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)


def _bar(axes: Any, lane: int, span: tuple[float, float], colour: str, label: str, end: float) -> None:
    start, width = span[0], span[1] - span[0]
    axes.broken_barh([(start, width)], (lane - 0.3, 0.6), facecolor=colour, edgecolor="white", linewidth=0.4)
    if label and width > _NARROW * end:
        fits = max(1, int(width / end * 150))
        axes.text(start + width / 2, lane, label[:fits], ha="center", va="center", fontsize=7, color="white")
