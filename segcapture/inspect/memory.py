"""What a capture keeps in memory, and in which segment."""

from collections.abc import Sequence

import attrs
import torch

from segcapture.backends.base import Backend
from segcapture.inspect.table import WHICH, aligned, size, which
from segcapture.segments import EagerSegment, Segment
from segcapture.tensors import storage_id
from segcapture.trees import tensors_in


@attrs.frozen(eq=False, kw_only=True)
class SegmentMemory:
    """Bytes of one segment."""

    segment: Segment = attrs.field(repr=False)
    bridges: int = 0
    """Memory that carries its output to later segments."""
    arguments: int = 0
    """Memory that it alone, or it first, keeps alive for its arguments; 0 for what is in the pool."""
    results: int = 0
    """Memory of what its operators made, where segments are emulated; elsewhere it is in the pool."""


@attrs.frozen(eq=False, kw_only=True)
class MemoryReport:
    """What `memory_report` found. Its text is a table."""

    title: str
    reserved: int | None
    """Bytes that the pool has reserved, for all captures that share it; None where there is no pool."""
    active: int | None
    """Bytes of those in use right now; the others are reused by the segments, one after the other."""
    segments: tuple[SegmentMemory, ...]

    @property
    def bridges(self) -> int:
        """Bytes of all bridges."""
        return sum(row.bridges for row in self.segments)

    @property
    def arguments(self) -> int:
        """Bytes of all kept arguments, each storage once."""
        return sum(row.arguments for row in self.segments)

    def __str__(self) -> str:
        columns = {"bridges": "bridges", "kept arguments": "arguments", "results": "results"}
        pool = "no pool: segments are emulated, and each keeps what its operators made"
        if self.reserved is not None:
            del columns["results"]
            pool = f"pool: {size(self.reserved)} reserved, {size(self.active or 0)} in use"
        numbers = [[getattr(row, name) for name in columns.values()] for row in self.segments]
        totals = [size(sum(row[i] for row in numbers)) for i in range(len(columns))]
        rows = [
            [*which(row.segment), *(size(n) if n else "" for n in values)]
            for row, values in zip(self.segments, numbers, strict=True)
        ]
        table = aligned([[*WHICH, *columns], *rows, ["", "", "total", "", *totals]])
        return "\n".join([self.title, *table, pool])


def memory_report(title: str, segments: Sequence[Segment], backend: Backend) -> MemoryReport:
    """Measure; see `BreakableCUDAGraphCapture.memory_report`."""
    counted: set[int] = set()
    rows = []
    for segment in segments:
        if isinstance(segment, EagerSegment):
            arguments = 0
            for tensor in tensors_in(*segment.call.args, *segment.call.kwargs.values()):
                if tensor.layout is torch.strided and not backend.is_alias(tensor):
                    arguments += tensor.untyped_storage().nbytes() * (storage_id(tensor) not in counted)
                    counted.add(storage_id(tensor))
            rows.append(SegmentMemory(segment=segment, bridges=segment.bridge_bytes, arguments=arguments))
        else:
            rows.append(SegmentMemory(segment=segment, results=getattr(segment.graph, "nbytes", int)()))
    reserved, active = backend.pool_bytes() or (None, None)
    return MemoryReport(title=title, reserved=reserved, active=active, segments=tuple(rows))
