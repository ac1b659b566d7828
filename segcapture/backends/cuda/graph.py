"""One CUDA graph as a graph segment: its capture, its launch, its end, and what CUDA's errors mean."""

import functools
import threading
from collections.abc import Sequence
from typing import Any

import torch

from segcapture.backends.cuda.driver import Launch
from segcapture.backends.cuda.kernels import nodes_of
from segcapture.backends.cuda.pool_memory import PoolId
from segcapture.thread import state

REGISTERS_GENERATORS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)
"""Whether a capture takes up by itself each generator that is drawn from, and does not say which."""

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


_registry_lock = threading.RLock()


class CudaGraph:
    """A CUDA graph of ours, which dies when it may.

    Inside of a capture of its thread that would invalidate the capture, so it waits for the end. And torch
    keeps the graphs of a generator in a set without a lock, to which a capture that begins adds and from
    which a graph that dies is taken, each without the interpreter's lock or not (CUDAGeneratorImpl.cpp and
    Graph.cpp, torch 2.11): the two take turns here.
    """

    operations = 0
    """Number of its nodes; -1 where it cannot be known."""
    _box: Any = ()

    def __init__(self, box: list[torch.cuda.CUDAGraph] | None = None) -> None:
        # A box, so that whoever empties it drops the last reference, and while holding the lock.
        self._box = [torch.cuda.CUDAGraph(keep_graph=True)] if box is None else box
        self.launch: Launch = functools.partial(_launch_by_torch, self._box)

    @property
    def graph(self) -> torch.cuda.CUDAGraph:
        """torch's object. Do not keep it."""
        graph: torch.cuda.CUDAGraph = self._box[0]
        return graph

    def begin(self, pool_id: PoolId, error_mode: str, generators: Sequence[torch.Generator] = ()) -> None:
        """Begin to capture on the current stream."""
        with _registry_lock:
            if not REGISTERS_GENERATORS:
                for generator in generators:
                    self.call("register_generator_state", generator)
            self.call("capture_begin", pool=pool_id, capture_error_mode=error_mode)

    def call(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Call a method of torch's object."""
        _call(self._box, method, *args, **kwargs)

    def nodes(self) -> list[tuple[str, str]]:
        """Kind and name of each node, kernels demangled."""
        return nodes_of(self.graph)

    def __del__(self) -> None:
        box, self._box = self._box, []
        if box and state.keep_alive is not None:
            state.keep_alive.append(CudaGraph(box))
        elif box:
            with _registry_lock:
                box.clear()


def _launch_by_torch(box: list[torch.cuda.CUDAGraph], stream: Any) -> tuple[int]:
    """It sets seed and offset of the graph's random numbers before."""
    _call(box, "replay")
    return (0,)


def _call(box: list[torch.cuda.CUDAGraph], method: str, *args: Any, **kwargs: Any) -> None:
    """An exception does not keep the frames of the call: they would keep the graph."""
    try:
        getattr(box[0], method)(*args, **kwargs)
    except BaseException as error:
        raise error.with_traceback(None)  # noqa: B904  (the same exception)
