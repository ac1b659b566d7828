"""What a capture keeps in memory, and in which segment."""

from typing import TYPE_CHECKING

import attrs
import torch

from segcapture.inspect.table import aligned, size, title
from segcapture.segments import EagerSegment, Segment
from segcapture.tensors import storage_id
from segcapture.thread import short
from segcapture.trees import tensors_in

if TYPE_CHECKING:
    from segcapture.capture import BreakableCUDAGraphCapture


@attrs.frozen(eq=False, kw_only=True)
class SegmentMemory:
    """Bytes of one segment."""

    segment: Segment = attrs.field(repr=False)
    bridges: int
    """Memory that carries its output to later segments."""
    arguments: int
    """Memory that it alone, or it first, keeps alive for its arguments; 0 for what is in the pool."""
    results: int
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
        pooled = self.reserved is not None
        rows = [["#", "kind", "name", "where", "bridges", "kept arguments", *([] if pooled else ["results"])]]
        for row in self.segments:
            segment = row.segment
            cells = [str(segment.index), segment.kind, segment.name, short(segment.location)]
            cells += [size(n) if n else "" for n in (row.bridges, row.arguments)]
            rows.append(cells if pooled else [*cells, size(row.results) if row.results else ""])
        total = ["", "", "total", "", size(self.bridges), size(self.arguments)]
        rows.append(total if pooled else [*total, size(sum(row.results for row in self.segments))])
        pool = (
            f"pool: {size(self.reserved)} reserved, {size(self.active or 0)} in use"
            if self.reserved is not None
            else "no pool: segments are emulated, and each keeps what its operators made"
        )
        return "\n".join([self.title, *aligned(rows), pool])


def memory_report(capture: "BreakableCUDAGraphCapture") -> MemoryReport:
    """Measure; see `BreakableCUDAGraphCapture.memory_report`."""
    backend = capture._backend
    counted: set[int] = set()
    rows = []
    for segment in capture.segments:
        bridges = arguments = results = 0
        if isinstance(segment, EagerSegment):
            bridges = segment.bridge_bytes
            for tensor in tensors_in(*segment.call.args, *segment.call.kwargs.values()):
                if not backend.is_alias(tensor) and not _counted(counted, tensor):
                    arguments += tensor.untyped_storage().nbytes()
        else:
            results = getattr(segment.graph, "nbytes", int)()
        rows.append(SegmentMemory(segment=segment, bridges=bridges, arguments=arguments, results=results))
    reserved, active = backend.pool_bytes() or (None, None)
    return MemoryReport(title=title(capture), reserved=reserved, active=active, segments=tuple(rows))


def _counted(seen: set[int], tensor: torch.Tensor) -> bool:
    """Whether a tensor's storage was there before; from now on it is."""
    if tensor.layout is not torch.strided:
        return True
    key = storage_id(tensor)
    known = key in seen
    seen.add(key)
    return known
