"""One CUDA graph as a graph segment: its launch, its step in a replay, and what CUDA's errors mean."""

from collections.abc import Callable
from typing import Any

import torch

from segcapture.backends.driver import Launch
from segcapture.backends.forks import ordered, wait_for_all
from segcapture.backends.kernels import nodes_of
from segcapture.backends.pool import OwnedGraph, call_boxed
from segcapture.replay import Around
from segcapture.segments import EagerSegment

BREAK = (
    "Move it, with what uses its value, into a function marked `@eager_break_during_capture` that returns "
    "tensors of fixed shapes."
)
ADVICE = {  # https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html, cudaError
    1: "Typical of waiting for an event that was recorded in a segment that has ended: record it again, or "
    "use `wait_stream`.",
    900: f"The operation waits for the device or reads from it, which a capture forbids. {BREAK}",
    901: f"An operation before it had failed and made the capture invalid. {BREAK}",
    902: "Two captures were merged: do not wait for a stream that another capture records.",
    904: "Work on a side stream was not joined: let the stream of the capture wait for it.",
    905: "It waits for work that is not part of this segment: an event recorded before the capture, or in "
    "a segment that has ended. Record the event again, or use `wait_stream`.",
    906: "It depends on the legacy default stream: use a stream of your own.",
    907: "It uses an event whose last record is in a capture, on a stream that is not captured.",
}


class CudaGraph(OwnedGraph):
    """One instantiated CUDA graph."""

    def __init__(self, captured: OwnedGraph, operations: int, direct: Launch | None) -> None:
        super().__init__(captured.hand_over())
        self.operations = operations
        self.launch: Launch = direct or _prepared_launch(self._box)

    def nodes(self) -> list[tuple[str, str]]:
        """Kind and name of each node, kernels demangled."""
        return nodes_of(self.graph)


def _prepared_launch(box: list[torch.cuda.CUDAGraph]) -> Launch:
    """Through torch, which sets seed and offset of the graph's random numbers before each launch."""

    def launch(stream: Any) -> tuple[int]:
        call_boxed(box, "replay")
        return (0,)

    return launch


def across(segment: EagerSegment) -> Around | None:
    """Orders side streams around a function and its write-back, on whatever stream the replay is."""
    if not segment.forks:
        return None

    def around(call: Callable[[], Any], store: Callable[[Any], None]) -> Callable[[], None]:
        def ordered_call() -> None:
            main = torch.cuda.current_stream()
            with ordered(main, segment.forks), torch.cuda.stream(segment.stream):
                out = call()
                wait_for_all((*segment.forks, main), main.device)
                store(out)

        return ordered_call

    return around
