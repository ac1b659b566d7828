"""One CUDA graph: its capture, its launch, its nodes, its end, and what CUDA's errors mean (contract C10)."""

import functools
import gc
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from segcapture.advice import BREAK
from segcapture.backends.cuda.driver import REGISTERS_GENERATORS, Launch, call, get_driver
from segcapture.thread import state

PoolId = Any  # (int, int): torch's stubs make a type of their own of it

INVALID = (
    f"{BREAK} A torch.cuda.CUDAGraph that dies in the block does the same, be it as the old value of `g` in "
    f"`with ... as g:`: drop it before."
)
ADVICE = {  # https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html, cudaError
    1: "Typical of waiting for an event that was recorded in a segment that has ended: record it again, or "
    "use `wait_stream`.",
    900: "The operation waits for the device or reads from it, which a capture forbids.",
    901: f"An operation before it had failed and made the capture invalid. {INVALID}",
    902: "Two captures were merged: do not wait for a stream that another capture records.",
    904: "Work on a side stream was not joined: let the stream of the capture wait for it.",
    905: "It waits for work that is not part of this segment: an event recorded before the capture, or in "
    "a segment that has ended. Record the event again, or use `wait_stream`.",
    906: "It depends on the legacy default stream: use a stream of your own.",
    907: "It uses an event whose last record is in a capture, on a stream that is not captured.",
}
# What torch refuses itself, before it calls CUDA, has no code and is a plain RuntimeError: only words tell.
BY_TORCH = {
    "Cannot copy between CPU and CUDA tensors during CUDA graph capture": "A capture waits for no copy "
    "between host and device. Make a constant before it, or on the device (`torch.full`).",
    "Attempting CUDA graph capture of step()": "",
}


_registry_lock = threading.RLock()


class CudaGraph:
    """A CUDA graph of ours, which dies when it may.

    Inside of a capture of its thread that would invalidate the capture, so it waits for the end. And torch
    keeps the graphs of a generator in a set without a lock, to which a capture that begins adds and from
    which a graph that dies is taken, each without the interpreter's lock or not (CUDAGeneratorImpl.cpp and
    Graph.cpp, torch 2.11): only one thread at a time does either here.
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
                    self._call("register_generator_state", generator)
            self._call("capture_begin", pool=pool_id, capture_error_mode=error_mode)

    def end(self) -> None:
        """End the capture on the current stream, which is the one it began on."""
        self._call("capture_end")

    def instantiate(self, operations: int) -> None:
        """Make it ready to launch."""
        self.operations = operations
        self._call("instantiate")

    def first_launch(self, generators: Sequence[torch.Generator]) -> None:
        """Launch it on the current stream, and from then on by the driver alone if it draws no numbers.

        Whether it does shows in the generators' offsets. Where others than those that are known may be drawn
        from, it counts as drawing.
        """
        before = [generator.get_offset() for generator in generators]
        self._call("replay")
        direct = get_driver().launcher(self.graph)
        drew = REGISTERS_GENERATORS or before != [generator.get_offset() for generator in generators]
        if direct is not None and not drew:
            self.launch = direct

    def nodes(self) -> list[tuple[str, str]]:
        """Kind and name of each node: `("kernel", "void at::native::...")`, `("memcpy", "")`, ...

        Empty where cuda-python is absent (ROCm).
        """
        try:
            from cuda.bindings import driver
        except ImportError:
            return []
        return list(_nodes(driver, driver.CUgraph(self.graph.raw_cuda_graph())))

    def _call(self, method: str, *args: Any, **kwargs: Any) -> None:
        _call(self._box, method, *args, **kwargs)

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


@contextmanager
def collections_relaxed(error_mode: str) -> Iterator[None]:
    """Let a garbage collection destroy CUDA graphs without invalidating the capture that is running.

    Switching the collector off instead would be seen by all threads, and overlapping captures would
    switch it on under each other. This leaves no state behind, and costs 2 us a collection. Collections
    of other threads disturb a capture in the error mode `global` alone.
    """
    owner, exchange_mode = threading.get_ident(), get_driver().exchange_mode
    modes: defaultdict[int, list[int]] = defaultdict(list)

    def hook(phase: str, info: dict[str, int]) -> None:
        me = threading.get_ident()
        if me == owner or error_mode == "global":
            if phase == "start":
                modes[me].append(exchange_mode())
            elif modes[me]:
                exchange_mode(modes[me].pop())

    gc.callbacks.append(hook)
    try:
        yield
    finally:
        gc.callbacks.remove(hook)
        for mode in reversed(modes[owner]):
            exchange_mode(mode)


_spare_streams: dict[int | None, torch.cuda.Stream] = {}


def empty_graph(pool_id: PoolId, device: torch.device) -> CudaGraph:
    """Captured on a stream for nothing else: another thread may be capturing on any other one."""
    made, driver = CudaGraph(), get_driver()
    with torch.cuda.device(device), collections_relaxed("thread_local"):
        stream = _spare_streams.pop(device.index, None) or driver.create_stream()
        with torch.cuda.stream(stream):
            try:
                made.begin(pool_id, driver.error_mode("thread_local"))
            finally:  # also where an interrupt came after it
                if driver.is_valid(stream.cuda_stream):
                    driver.add_empty_node(stream.cuda_stream)
                    made.end()
    _spare_streams[device.index] = stream  # not after a failure, which may leave it capturing
    return made


def undo_begin(pool_id: PoolId, device: torch.device) -> None:
    """Repair torch after a capture that did not begin.

    The allocator may be left recording into the pool, and the generator capturing.
    """
    with suppress(RuntimeError):  # the first refuses where the allocator had not begun
        torch._C._cuda_endAllocateToPool(device.index, pool_id)
        torch._C._cuda_releasePool(device.index, pool_id)
    empty_graph(torch.cuda.graph_pool_handle(), device)


def _nodes(driver: Any, graph: Any) -> Iterator[tuple[str, str]]:
    count = call(driver, "cuGraphGetNodes", graph, 0)[-1]
    nodes = call(driver, "cuGraphGetNodes", graph, count)[0] if count else ()
    kinds = driver.CUgraphNodeType
    for node in nodes[:count]:
        kind = call(driver, "cuGraphNodeGetType", node)[0]
        if kind == kinds.CU_GRAPH_NODE_TYPE_KERNEL:
            yield "kernel", _kernel_name(driver, node)
        elif kind == kinds.CU_GRAPH_NODE_TYPE_GRAPH:
            yield from _nodes(driver, call(driver, "cuGraphChildGraphNodeGetGraph", node)[0])
        else:
            yield str(kind.name).removeprefix("CU_GRAPH_NODE_TYPE_").lower(), ""


def _kernel_name(driver: Any, node: Any) -> str:
    """A kernel of a library (`kern`) and one of a module (`func`) are asked in two ways."""
    (params,) = call(driver, "cuGraphKernelNodeGetParams", node)
    for handle, question in ((params.kern, "cuKernelGetName"), (params.func, "cuFuncGetName")):
        if handle is not None and int(handle):
            status, name = getattr(driver, question)(handle)
            if not status:
                return demangle(name.decode() if isinstance(name, bytes) else str(name))
    return "?"


def demangle(name: str) -> str:
    """A C++ name as it is written, by the C++ runtime of torch; others as they are."""
    from_torch: Any = torch._C
    return str(from_torch._demangle(name)) if name.startswith("_Z") else name
