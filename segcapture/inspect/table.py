"""The segment table: as text, for rich, as HTML and as a Graphviz graph."""

import html as escape
import inspect
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from segcapture.arguments import Call
from segcapture.segments import EagerSegment, GraphSegment, Segment
from segcapture.thread import short
from segcapture.trees import PLAIN, flatten

WHICH = ("#", "kind", "name", "where")
"""The columns that say which segment a row is of."""
_COLUMNS = (*WHICH, "ops", "runs", "bridges", "frozen")
_LONGEST = {"name": 40, "runs": 60, "frozen": 60}  # characters


def text(title: str, segments: Sequence[Segment]) -> str:
    """One line per segment, under a title and above the totals."""
    return "\n".join([title, *aligned([_COLUMNS, *map(_row, segments)]), _totals(segments)])


def rich_table(title: str, segments: Sequence[Segment]) -> Any:
    """A `rich.table.Table`, for `rich.print(g)`."""
    from rich.markup import escape as plain
    from rich.table import Table

    table = Table(title=plain(title), caption=plain(_totals(segments)), title_justify="left")
    for column in _COLUMNS:
        numeric = column in ("#", "ops", "bridges")
        table.add_column(column, justify="right" if numeric else "left", no_wrap=numeric)
    for segment in segments:
        style = "bold" if isinstance(segment, EagerSegment) else ""
        table.add_row(*map(plain, _row(segment)), style=style)
    return table


def html(title: str, segments: Sequence[Segment]) -> str:
    """A `<table>` for notebooks; whole names of kernels show on hovering."""
    head = "".join(f"<th>{column}</th>" for column in _COLUMNS)
    body = []
    for segment in segments:
        cells = "".join(f"<td>{escape.escape(cell)}</td>" for cell in _row(segment))
        body.append(f'<tr title="{escape.escape(chr(10).join(_names(segment)))}">{cells}</tr>')
    return (
        f"<table><caption>{escape.escape(title)}<br>{escape.escape(_totals(segments))}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    )


def dot(name: str, segments: Sequence[Segment]) -> str:
    """A `digraph` in the order of replay; edges behind eager segments carry their bridges' bytes."""
    nodes, edges = [], []
    for segment in segments:
        label, carried = f"{segment.index}: {segment.name}\n{short(segment.location)}", ""
        if isinstance(segment, EagerSegment):
            look, carried = "shape=ellipse, fillcolor=lightsalmon", f' [label="{size(segment.bridge_bytes)}"]'
        else:
            look, label = "shape=box, fillcolor=lightsteelblue", f"{label}\n{segment.operations} operations"
        nodes.append(f"  s{segment.index} [label={_quoted(label)}, {look}];")
        edges.append(f"  s{segment.index} -> s{segment.index + 1}{carried};")
    head = f"digraph {_quoted(name or 'capture')} {{\n  rankdir=LR; node [fontname=monospace, style=filled];"
    return "\n".join([head, *nodes, *edges[:-1], "}", ""])


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines, with columns below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def which(segment: Segment) -> list[str]:
    """The cells that say which segment a row is of."""
    return [str(segment.index), segment.kind, _cut(segment.name, _LONGEST["name"]), short(segment.location)]


def size(nbytes: int) -> str:
    """Bytes for people: `512 B`, `3.2 MiB`."""
    amount, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.0f} {unit}" if unit == "B" or amount >= 100 else f"{amount:.1f} {unit}"


def _count(number: int, noun: str) -> str:
    """`1 segment`, `2 segments`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _row(segment: Segment) -> list[str]:
    if isinstance(segment, GraphSegment):
        names = Counter(map(_brief_name, _names(segment)))  # the frequent ones first
        runs = ", ".join(f"{name} x{n}" if n > 1 else name for name, n in names.most_common())
        return [*which(segment), str(segment.operations), _cut(runs, _LONGEST["runs"]), "", ""]
    values = ", ".join(f"{name}={_value(value)}" for name, value in frozen(segment.call))
    return [*which(segment), "", "", size(segment.bridge_bytes), _cut(values, _LONGEST["frozen"])]


def _totals(segments: Iterable[Segment]) -> str:
    kinds: Counter[str] = Counter()
    operations = nbytes = 0
    for segment in segments:
        if isinstance(segment, GraphSegment):
            kinds.update(kind for kind, _ in segment.nodes)
            operations += max(0, segment.operations)
        else:
            nbytes += segment.bridge_bytes
    known = ", ".join(_count(number, kind) for kind, number in kinds.most_common())
    return f"total: {known or _count(operations, 'operation')}; bridges of {size(nbytes)}"


def _names(segment: Segment) -> list[str]:
    """Names of kernels or operators; of other nodes their kind."""
    return [name or kind for kind, name in segment.nodes] if isinstance(segment, GraphSegment) else []


def _brief_name(name: str) -> str:
    """`some_kernel` for `void at::native::some_kernel<4, ...>(int, ...)`."""
    bare, shorter = "", name.replace("(anonymous namespace)", "")
    while bare != shorter:
        bare, shorter = shorter, re.sub(r"<[^<>]*>", "", shorter)
    words = bare.split("(")[0].split()
    bare = words[-1] if words else name
    return bare if bare.startswith("aten::") else bare.split("::")[-1] or bare


def _value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else _cut(repr(value), 24)


def _cut(cell: str, longest: int) -> str:
    cell = cell.replace("\n", " ")
    return cell if len(cell) <= longest else cell[: longest - 1] + "…"


def _quoted(label: str) -> str:
    plain = label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{plain}"'


# The arguments of a break


def named(call: Call) -> list[tuple[str, Any]]:
    """Each argument after the function's own name for it; `args[1]` where that cannot be known."""
    try:
        parameters = list(inspect.signature(call.fn).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "")
    own = len(names)
    names += [f"{rest}[{i - own}]" if rest else f"args[{i}]" for i in range(own, len(call.args))]
    return [*zip(names, call.args, strict=False), *call.kwargs.items()]


def frozen(call: Call) -> list[tuple[str, Any]]:
    """The plain Python values that capture froze, each after its name."""
    return [
        (place.path, place.value)
        for name, value in named(call)
        for place in (flatten(value, name) if isinstance(value, tuple) else flatten(value, name)[:1])
        if isinstance(place.value, PLAIN)
    ]
