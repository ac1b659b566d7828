"""The segment table."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from segcapture.segments import EagerSegment, describe_frozen
from segcapture.source import short

if TYPE_CHECKING:
    from segcapture.capture import BreakableCUDAGraphCapture


def table(capture: "BreakableCUDAGraphCapture") -> str:
    """One line per segment: index, kind, name, place, operations, bridge bytes, frozen arguments."""
    rows = [("#", "kind", "name", "where", "ops", "bridges", "frozen")]
    for segment in capture.segments:
        rows.append(
            (
                str(segment.index),
                segment.kind,
                segment.name,
                short(segment.location),
                "" if isinstance(segment, EagerSegment) else str(segment.operations),
                f"{segment.bridge_bytes} B" if isinstance(segment, EagerSegment) else "",
                describe_frozen(segment),
            )
        )
    title = f"capture {capture.name!r}" if capture.name else "capture"
    head = (
        f"{title} on {capture.device}, mode {capture.mode}: {capture.num_graphs} graph segments, "
        f"{capture.num_eager_breaks} eager segments"
    )
    return "\n".join([head, *_aligned(rows)])


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
