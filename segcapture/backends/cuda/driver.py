"""The one door to the CUDA driver: captures, their nodes, streams and launches.

The driver knows what torch does not say: which streams belong to a capture, and whether it recorded
anything. cuda-python gives it (https://nvidia.github.io/cuda-python, 12.9 to 13). On ROCm there is no
cuda-python, and `Driver` does what torch's own API can.
"""

import ctypes
import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

# What the version of torch decides, here and by `hasattr(torch.Stream, "is_capturing")` (2.13).
_TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
ONE_CAPTURE_A_DEVICE = _TORCH < (2, 12)
"""Whether a generator knows only one capture at a time, whatever thread it is in."""
REGISTERS_GENERATORS = _TORCH >= (2, 14)
"""Whether a capture takes up by itself each generator that is drawn from, and does not say which."""
CACHES_WORKSPACES = _TORCH < (2, 15) or os.environ.get("TORCH_CUBLAS_WORKSPACE_CACHE") == "1"
"""Whether a stream keeps its cuBLAS workspace: from 2.15 on each call allocates one, in a capture from the
capture's pool (https://github.com/pytorch/pytorch/pull/194311)."""

Launch = Callable[[Any], tuple[int]]
Question = Callable[[], list[torch.cuda.Stream]]
"""Which of some streams are capturing now."""

RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED."""
_ACTIVE = 1
"""CU_STREAM_CAPTURE_STATUS_ACTIVE."""

# Names up to version 12 of cuda-python, where the plain functions fail for edges of programmatic launches.
_WITH_EDGE_DATA = {
    "cuStreamGetCaptureInfo": "cuStreamGetCaptureInfo_v3",
    "cuStreamUpdateCaptureDependencies": "cuStreamUpdateCaptureDependencies_v2",
}


@functools.cache
def _function(cuda: Any, name: str) -> Callable[..., tuple[Any, ...]]:
    with_edge_data = _WITH_EDGE_DATA.get(name, name)
    found: Any = getattr(cuda, with_edge_data if hasattr(cuda, with_edge_data) else name)
    return found  # type: ignore[no-any-return]


def call(cuda: Any, name: str, *args: Any) -> tuple[Any, ...]:
    """Call a function of `cuda.bindings.driver`; a status other than success is a RuntimeError."""
    status, *values = _function(cuda, name)(*args)
    if status:
        raise RuntimeError(f"{name} failed with CUDA error {int(status)} ({status.name})")
    return tuple(values)


_has_cuda = functools.cache(torch.cuda.is_available)


def is_captured() -> bool:
    """Whether the current stream is being captured. False where there is no GPU."""
    return _has_cuda() and bool(torch._C._cuda_isCurrentStreamCapturing())


def bind_context() -> None:
    """Give this thread a current CUDA context: torch's calls make one, the driver's need one."""
    has_context: Any = getattr(torch._C, "_cuda_hasPrimaryContext")  # noqa: B009  (unknown to the stubs)
    if not has_context(torch.cuda.current_device()):
        torch.cuda.mem_get_info()  # the first call of the process; the next one would make none
    torch._C._cuda_isCurrentStreamCapturing()


class Driver:
    """What torch alone can say and do (HIP underneath, on ROCm). Streams are raw handles.

    Never run on a ROCm machine: tests run it on CUDA, as a stand-in.
    """

    handle: Callable[[int], Any] = int
    """What `launch` takes for a stream."""
    _bytes: ClassVar[dict[int, torch.Tensor]] = {}
    """Of each device one, that an empty node may write to."""

    def create_stream(self) -> torch.cuda.Stream:
        """A non-blocking stream that nobody else can get: here one that hardly anybody asks for."""
        stream = torch.cuda.Stream(priority=-3)
        with torch.inference_mode(False):
            byte = torch.zeros(1, dtype=torch.uint8, device=stream.device)
        self._bytes.setdefault(stream.device_index, byte)
        return stream

    def is_valid(self, raw: int) -> bool:
        """Whether the stream is capturing, and can go on."""
        with torch.cuda.stream(self._stream(raw)):
            return torch.cuda.is_current_stream_capturing()

    def question(self, streams: Sequence[torch.cuda.Stream]) -> Question:
        """Tells which of these streams are capturing when it is called."""
        ask = getattr(torch.Stream, "is_capturing", lambda stream: self.is_valid(stream.cuda_stream))
        return lambda: list(filter(ask, streams))

    def capture_id(self, raw: int) -> int:
        """Which capture a capturing stream belongs to. 0: not known, so too many streams count as forked."""
        return 0

    def join(self, raw: int, forks: Sequence[torch.cuda.Stream]) -> int | None:
        """Make a capturing stream wait for everything in its capture, before that ends: joins all forks.

        Returns the number of nodes recorded so far; -1 where it cannot be known; None: it is invalid.
        """
        if not self.is_valid(raw):
            return None
        for stream in forks:
            self._stream(raw).wait_stream(stream)
        return -1

    def add_empty_node(self, raw: int) -> None:
        """Record a node that changes nothing, so that torch does not warn about an empty graph."""
        with torch._C._DisableTorchDispatch():  # it is no operator of the user's
            self._bytes[torch.cuda.current_device()].zero_()

    def discard(self, raw: int, forks: Sequence[torch.cuda.Stream]) -> None:
        """Make of a capture, however broken, one that torch can end in the usual way: here of a valid one."""
        self.join(raw, forks)
        self.add_empty_node(raw)

    def error_mode(self, wanted: str) -> str:
        """The mode to capture in: here the one in which graphs may die, as `exchange_mode` does nothing."""
        return "relaxed"

    def launcher(self, graph: torch.cuda.CUDAGraph) -> Launch | None:
        """A function of the stream's handle that launches the instantiated graph; None: torch must."""
        return None

    def order(self, after: int, before: int) -> None:
        """Let the stream `after` wait for what `before` has been given so far: both of the current device."""
        self._stream(after).wait_stream(self._stream(before))

    def exchange_mode(self, mode: int = RELAXED) -> int:
        """Set how much of what a capture forbids this thread may do; returns what was set before."""
        return mode

    def _stream(self, raw: int) -> torch.cuda.Stream:
        return torch.cuda.ExternalStream(raw) if raw else torch.cuda.default_stream()


class CudaDriver(Driver):
    """Through cuda-python."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self._cuda: Any = driver
        self.handle = functools.cache(driver.CUstream)
        self._info_of, self._nodes_of, self._add_dependencies = (
            functools.partial(call, driver, name)
            for name in ("cuStreamGetCaptureInfo", "cuGraphGetNodes", "cuStreamUpdateCaptureDependencies")
        )
        flags = driver.CUstreamUpdateCaptureDependencies_flags
        self._add = int(flags.CU_STREAM_ADD_CAPTURE_DEPENDENCIES)
        no_timing = driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
        self._event = functools.cache(lambda device, raw: self._call("cuEventCreate", no_timing)[0])

    def _call(self, name: str, *args: Any) -> tuple[Any, ...]:
        return call(self._cuda, name, *args)

    def create_stream(self) -> torch.cuda.Stream:
        """A stream outside of torch's fixed set, in the current context."""
        bind_context()
        (stream,) = self._call("cuStreamCreate", self._cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)
        return torch.cuda.ExternalStream(int(stream))

    def is_valid(self, raw: int) -> bool:
        """By its status."""
        return int(self._info(raw)[0]) == _ACTIVE

    def _info(self, raw: int) -> tuple[Any, ...]:
        """Status, id, graph, dependencies, ..."""
        return self._info_of(self.handle(raw))

    def question(self, streams: Sequence[torch.cuda.Stream]) -> Question:
        """One that answers with an error counts as capturing, and raises when it is asked for more."""
        if hasattr(torch.Stream, "is_capturing"):
            return super().question(streams)
        # cuda-python takes twice as long as this, to make an enum each time.
        library = ctypes.PyDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        answers = (ctypes.c_int * len(streams))()
        handles = [ctypes.c_void_p(stream.cuda_stream) for stream in streams]
        into = [ctypes.byref(answers, i * ctypes.sizeof(ctypes.c_int)) for i in range(len(streams))]

        def ask() -> list[torch.cuda.Stream]:
            errors = list(map(library.cuStreamIsCapturing, handles, into))
            if not any(errors) and not bytes(answers).strip(b"\0"):
                return []
            return [stream for stream, *found in zip(streams, errors, answers, strict=True) if any(found)]

        return ask

    def capture_id(self, raw: int) -> int:
        """By `cuStreamGetCaptureInfo`, which costs more than the question whether it is capturing."""
        return int(self._info(raw)[1])

    def join(self, raw: int, forks: Sequence[torch.cuda.Stream]) -> int | None:
        """By the nodes of the graph, so that streams which nobody knows are joined too.

        Nothing is recorded after it, so that it does no harm to wait for inner nodes as well, and only the
        leaves would have to be looked for among all edges.
        """
        status, _, graph, dependencies, *_ = self._info(raw)
        if int(status) != _ACTIVE:
            return None
        count = int(self._nodes_of(graph, 0)[-1])
        if count > len(dependencies):
            joined = {int(node) for node in dependencies}
            others = [node for node in self._nodes_of(graph, count)[0] if int(node) not in joined]
            self._add_dependencies(self.handle(raw), others, None, len(others), self._add)
        return count

    def add_empty_node(self, raw: int) -> None:
        """Keeps torch from warning about an empty graph."""
        self._call("cuGraphAddEmptyNode", self._info(raw)[2], None, 0)

    def discard(self, raw: int, forks: Sequence[torch.cuda.Stream]) -> None:
        """By a new and empty one, after which all of torch's own state is as after any other."""
        handle = self.handle(raw)
        self._cuda.cuStreamEndCapture(handle)  # its status is the error that brought us here
        mode = self._cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._call("cuStreamBeginCapture", handle, mode)
        self.add_empty_node(raw)

    def error_mode(self, wanted: str) -> str:
        """As it is wanted."""
        return wanted

    def launcher(self, graph: torch.cuda.CUDAGraph) -> Launch | None:
        """`cuGraphLaunch`, about 1 us cheaper than `CUDAGraph.replay`, which prepares random numbers."""
        executable = self._cuda.CUgraphExec(graph.raw_cuda_graph_exec())
        return functools.partial(self._cuda.cuGraphLaunch, executable)

    def order(self, after: int, before: int) -> None:
        """With one event for each stream that is waited for, made once."""
        bind_context()
        event = self._event(torch.cuda.current_device(), before)  # the default stream of each device is 0
        self._call("cuEventRecord", event, self.handle(before))
        self._call("cuStreamWaitEvent", self.handle(after), event, 0)

    def exchange_mode(self, mode: int = RELAXED) -> int:
        """`cuThreadExchangeStreamCaptureMode`."""
        wanted = self._cuda.CUstreamCaptureMode(mode)
        return int(self._call("cuThreadExchangeStreamCaptureMode", wanted)[0])


@functools.cache
def get_driver() -> Driver:
    """The driver of this process."""
    return CudaDriver() if torch.version.cuda else Driver()
