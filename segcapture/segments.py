"""The two kinds of segments that a capture is made of."""

from collections.abc import Callable
from typing import Any, Protocol

import attrs

from segcapture.ambient import Ambient
from segcapture.arguments import Call
from segcapture.source import short
from segcapture.writeback import Writeback

Step = Callable[[Any], tuple[int]]
"""One segment in the replay loop: takes the stream's handle, returns a status as `cuGraphLaunch` does."""
Around = Callable[[Callable[[], Any]], Callable[[], Any]]
DONE = (0,)


class Graph(Protocol):
    """What a backend makes of the operations between two breaks."""

    operations: int
    """Number of nodes of the CUDA graph, or of operators on the tape."""

    def launch(self) -> None:
        """Run it once on the current stream."""


@attrs.frozen(eq=False, kw_only=True)
class GraphSegment:
    """Operations that replay without Python: a CUDA graph, or a tape on the emulated backend."""

    index: int
    """Position in the capture, from 0."""
    name: str
    """What opened it: the name of the break before it, or `start`."""
    location: str
    """`file:line` of the user's call that opened it."""
    graph: Graph = attrs.field(repr=False)

    kind = "graph"

    @property
    def operations(self) -> int:
        """Nodes of the CUDA graph (kernels, copies, fills), or operators on the tape."""
        return self.graph.operations

    def run(self) -> None:
        """Launch once on the current stream."""
        self.graph.launch()

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
    writeback: Writeback = attrs.field(repr=False)
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
        return self.writeback.bridges.nbytes

    def run(self) -> None:
        """Call the function once and write its output back."""
        self.compiled(self.ambient)(None)

    def compiled(self, base: Ambient, around: Around | None = None) -> Step:
        """What replay does, with everything that is known now looked up already.

        `base` is the ambient state that the replay loop has set. `around` wraps the function's call (not
        the write-back of its output).
        """
        call, store, explain = self.call, self.writeback.store, self.explain
        fn, args = call.fn, call.args
        invoke = call.invoke if around is None else around(call.invoke)

        def run_positional(stream: Any) -> tuple[int]:
            try:
                store(fn(*args))
            except BaseException as error:
                explain(error)
                raise
            return DONE

        def run(stream: Any) -> tuple[int]:
            try:
                store(invoke())
            except BaseException as error:
                explain(error)
                raise
            return DONE

        def run_in_own_ambient(stream: Any) -> tuple[int]:
            with self.ambient.entered():
                return run(stream)

        if self.ambient != base:
            return run_in_own_ambient
        return run if around is not None or call.live or call.kwargs else run_positional

    def explain(self, error: BaseException) -> None:
        """Say in a note which segment an exception at replay came from."""
        error.add_note(
            f"segcapture: raised in {self} during replay. The segments after it did not run; the capture "
            f"can be replayed again."
        )

    def __str__(self) -> str:
        return f"eager segment {self.index} ({self.name}, {short(self.location)})"


Segment = GraphSegment | EagerSegment


def describe_frozen(segment: Any) -> str:
    """The plain values that an eager segment froze at capture, for the table."""
    return ", ".join(segment.call.frozen()) if isinstance(segment, EagerSegment) else ""
