"""The two kinds of segments that a capture is made of."""

from typing import Any, Protocol

import attrs

from segcapture.ambient import Ambient
from segcapture.arguments import Call
from segcapture.outputs import WriteBack
from segcapture.thread import short


class Graph(Protocol):
    """What a backend makes of the operations between two breaks."""

    @property
    def operations(self) -> int:
        """Number of nodes of the CUDA graph (-1: not known), or of operators on the tape."""

    def nodes(self) -> list[tuple[str, str]]:
        """Kind and name of each node: of kernels the demangled name, of operators theirs."""

    def launch(self, stream: Any) -> tuple[int]:
        """Run it once on the current stream, of which the argument is the handle; returns a status."""


@attrs.frozen(eq=False, kw_only=True)
class GraphSegment:
    """Operations that replay without Python: a CUDA graph, or a tape on the emulated backend."""

    index: int
    """Position in the capture, from 0."""
    name: str
    """Where it begins: `start`, `after` and the name of the break before it, or the name of `break_graph`."""
    location: str
    """`file:line` of the user's call that opened it."""
    graph: Graph = attrs.field(repr=False)

    kind = "graph"

    @property
    def operations(self) -> int:
        """Nodes of the CUDA graph (kernels, copies, fills), or operators on the tape."""
        return self.graph.operations

    @property
    def nodes(self) -> list[tuple[str, str]]:
        """Kind and name of each node: `("kernel", ...)`, `("memcpy", "")`, or `("operator", "aten::mm")`.

        Empty where they cannot be known (ROCm).
        """
        return self.graph.nodes()

    def __str__(self) -> str:
        return f"graph segment {self.index} ({self.name}, {short(self.location)})"


@attrs.frozen(eq=False, kw_only=True)
class EagerSegment:
    """A Python function that runs on the host at each replay, and its write-back."""

    index: int
    """Position in the capture, from 0."""
    name: str
    """Name of the break."""
    location: str
    """`file:line` of the user's call."""
    call: Call = attrs.field(repr=False)
    writeback: WriteBack = attrs.field(repr=False)
    ambient: Ambient = attrs.field(repr=False)
    """What was set around the call at capture."""
    forks: tuple[Any, ...] = attrs.field(default=(), repr=False)
    """Side streams whose fork crosses this break."""
    stream: Any = attrs.field(default=None, repr=False)
    """The side stream that was current at the call, if it was not the capture's own."""

    kind = "eager"

    @property
    def bridge_bytes(self) -> int:
        """Bytes of pool memory that carry the output to later segments."""
        return sum(block.nbytes for block in self.writeback.bridges)

    def __str__(self) -> str:
        return f"eager segment {self.index} ({self.name}, {short(self.location)})"


Segment = GraphSegment | EagerSegment
