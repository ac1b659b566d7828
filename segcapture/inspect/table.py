"""The segment table: as text, for rich, as HTML and as a Graphviz graph."""

import html as escape
import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from segcapture.inspect.arguments import frozen as frozen_arguments
from segcapture.segments import EagerSegment, GraphSegment, Segment
from segcapture.thread import short

if TYPE_CHECKING:
    from segcapture.capture import BreakableCUDAGraphCapture

_COLUMNS = ("#", "kind", "name", "where", "ops", "runs", "bridges", "frozen")
_LONGEST = {"name": 40, "runs": 60, "frozen": 60}  # characters


def text(capture: "BreakableCUDAGraphCapture") -> str:
    """One line per segment, under a title and above the totals."""
    rows = [_COLUMNS, *[_row(segment) for segment in capture.segments]]
    return "\n".join([title(capture), *aligned(rows), _totals(capture)])


def rich_table(capture: "BreakableCUDAGraphCapture") -> Any:
    """A `rich.table.Table`, for `rich.print(g)`."""
    from rich.markup import escape as plain
    from rich.table import Table

    table = Table(title=plain(title(capture)), caption=plain(_totals(capture)), title_justify="left")
    for column in _COLUMNS:
        numeric = column in ("#", "ops", "bridges")
        table.add_column(column, justify="right" if numeric else "left", no_wrap=numeric)
    for segment in capture.segments:
        style = "bold" if isinstance(segment, EagerSegment) else ""
        table.add_row(*map(plain, _row(segment)), style=style)
    return table


def html(capture: "BreakableCUDAGraphCapture") -> str:
    """A `<table>` for notebooks; whole names of kernels show on hovering."""
    head = "".join(f"<th>{column}</th>" for column in _COLUMNS)
    body = []
    for segment in capture.segments:
        cells = "".join(f"<td>{escape.escape(cell)}</td>" for cell in _row(segment))
        hover = escape.escape("\n".join(_names(segment)), quote=True)
        body.append(f'<tr title="{hover}">{cells}</tr>')
    return (
        f"<table><caption>{escape.escape(title(capture))}<br>{escape.escape(_totals(capture))}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    )


def dot(capture: "BreakableCUDAGraphCapture") -> str:
    """A `digraph` in the order of replay; edges behind eager segments carry their bridges' bytes."""
    lines = [
        f"digraph {_quoted(capture.name or 'capture')} {{",
        "  rankdir=LR; node [fontname=monospace, style=filled];",
    ]
    for segment in capture.segments:
        eager = isinstance(segment, EagerSegment)
        look = "shape=ellipse, fillcolor=lightsalmon" if eager else "shape=box, fillcolor=lightsteelblue"
        ops = "" if isinstance(segment, EagerSegment) else f"\n{segment.operations} operations"
        label = f"{segment.index}: {segment.name}\n{short(segment.location)}{ops}"
        lines.append(f"  s{segment.index} [label={_quoted(label)}, {look}];")
    for segment in capture.segments[:-1]:
        carried = f' [label="{size(segment.bridge_bytes)}"]' if isinstance(segment, EagerSegment) else ""
        lines.append(f"  s{segment.index} -> s{segment.index + 1}{carried};")
    return "\n".join([*lines, "}", ""])


def title(capture: "BreakableCUDAGraphCapture") -> str:
    """Name, device, mode and the number of segments."""
    name = f"capture {capture.name!r}" if capture.name else "capture"
    return (
        f"{name} on {capture.device}, mode {capture.mode}: {_count(capture.num_graphs, 'graph segment')}, "
        f"{_count(capture.num_eager_breaks, 'eager segment')}"
    )


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines, with columns below each other."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def size(nbytes: int) -> str:
    """Bytes for people: `512 B`, `3.2 MiB`."""
    amount, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.0f} {unit}" if unit == "B" or amount >= 100 else f"{amount:.1f} {unit}"


def _row(segment: Segment) -> tuple[str, ...]:
    cells = {
        "#": str(segment.index),
        "kind": segment.kind,
        "name": segment.name,
        "where": short(segment.location),
        "ops": str(segment.operations) if isinstance(segment, GraphSegment) else "",
        "runs": _summary(_names(segment)),
        "bridges": size(segment.bridge_bytes) if isinstance(segment, EagerSegment) else "",
        "frozen": ", ".join(frozen(segment)) if isinstance(segment, EagerSegment) else "",
    }
    return tuple(_cut(cells[column], _LONGEST.get(column, 1000)) for column in _COLUMNS)


def _totals(capture: "BreakableCUDAGraphCapture") -> str:
    graphs = [s for s in capture.segments if isinstance(s, GraphSegment)]
    eager = [s for s in capture.segments if isinstance(s, EagerSegment)]
    kinds = Counter(kind for segment in graphs for kind, _ in segment.nodes)
    known = ", ".join(_count(number, kind) for kind, number in kinds.most_common())
    operations = known or _count(max(0, sum(segment.operations for segment in graphs)), "operation")
    return f"total: {operations}; bridges of {size(sum(segment.bridge_bytes for segment in eager))}"


def _names(segment: Segment) -> list[str]:
    """Names of kernels or operators; of other nodes their kind."""
    return [name or kind for kind, name in segment.nodes] if isinstance(segment, GraphSegment) else []


def _summary(names: list[str]) -> str:
    """Short names, the frequent ones first, with their numbers."""
    counted = Counter(map(_brief_name, names))
    return ", ".join(f"{name} x{n}" if n > 1 else name for name, n in counted.most_common())


def _brief_name(name: str) -> str:
    """`some_kernel` for `void at::native::some_kernel<4, ...>(int, ...)`."""
    bare = name.replace("(anonymous namespace)", "")
    while "<" in bare and ">" in bare[bare.index("<") :]:
        shorter = re.sub(r"<[^<>]*>", "", bare)
        if shorter == bare:
            break
        bare = shorter
    bare = bare.split("(")[0].split()[-1] if bare.split("(")[0].split() else name
    return bare if bare.startswith("aten::") else bare.split("::")[-1] or bare


def frozen(segment: EagerSegment) -> list[str]:
    """The plain values that an eager segment froze at capture, as `name=value`."""
    return [f"{name}={_value(value)}" for name, value in frozen_arguments(segment.call)]


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return _cut(repr(value), 24)


def _cut(cell: str, longest: int) -> str:
    cell = cell.replace("\n", " ")
    return cell if len(cell) <= longest else cell[: longest - 1] + "…"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _quoted(label: str) -> str:
    plain = label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{plain}"'
