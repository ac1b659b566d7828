"""The one door to the CUDA driver: captures, their nodes, streams and launches.

The driver knows what torch does not say: which streams belong to a capture, and whether it recorded
anything. cuda-python gives it (https://nvidia.github.io/cuda-python, 12.9 to 13). On ROCm there is no
cuda-python, and `Driver` does what torch's own API can.
"""

import ctypes
import functools
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

Launch = Callable[[Any], tuple[int]]

RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED."""

# Names up to version 12 of cuda-python, where the plain functions fail for edges of programmatic launches.
_WITH_EDGE_DATA = {
    "cuStreamGetCaptureInfo": "cuStreamGetCaptureInfo_v3",
    "cuStreamUpdateCaptureDependencies": "cuStreamUpdateCaptureDependencies_v2",
    "cuGraphGetEdges": "cuGraphGetEdges_v2",
}


def call(cuda: Any, name: str, *args: Any) -> tuple[Any, ...]:
    """Call a function of `cuda.bindings.driver`; a status other than success is a RuntimeError."""
    function = getattr(cuda, _WITH_EDGE_DATA.get(name, name), None) or getattr(cuda, name)
    status, *values = function(*args)
    if status:
        raise RuntimeError(f"{name} failed with CUDA error {int(status)} ({status.name})")
    return tuple(values)


class _InThread(threading.local):
    bound = False
    """Whether this thread has a current CUDA context: torch's calls make one, the driver's need one."""


in_thread = _InThread()


_has_cuda = functools.cache(torch.cuda.is_available)


def is_captured() -> bool:
    """Whether the current stream is being captured. False where there is no GPU."""
    if not _has_cuda():
        return False
    captured = bool(torch._C._cuda_isCurrentStreamCapturing())
    in_thread.bound = True
    return captured


bind_context = is_captured
"""Gives this thread a current CUDA context, as any call of the runtime does."""


class Driver:
    """What torch alone can say and do (HIP underneath, on ROCm). Streams are raw handles.

    Never run on a ROCm machine: tests run it on CUDA, as a stand-in.
    """

    handle: Callable[[int], Any] = int
    """What `launch` takes for a stream."""
    _bytes: ClassVar[dict[int, torch.Tensor]] = {}
    """Of each device one, that an empty node may write to."""

    def create_stream(self) -> torch.cuda.Stream:
        """A non-blocking stream that nobody else can get: here as long as less than 32 are used."""
        stream = torch.cuda.Stream()
        with torch.inference_mode(False):
            byte = torch.zeros(1, dtype=torch.uint8, device=stream.device)
        self._bytes.setdefault(stream.device_index, byte)
        return stream

    def is_valid(self, raw: int) -> bool:
        """Whether the stream is capturing, and can go on."""
        with torch.cuda.stream(self._stream(raw)):
            return torch.cuda.is_current_stream_capturing()

    def question(self, handles: Sequence[int]) -> Callable[[], list[int]]:
        """Tells which of these streams are capturing when it is called."""
        return lambda: [raw for raw in handles if self.is_valid(raw)]

    def capture_id(self, raw: int) -> int:
        """Which capture a capturing stream belongs to. 0: not known, so too many streams count as forked."""
        return 0

    def join(self, raw: int, forks: Sequence[torch.cuda.Stream]) -> int:
        """Make a capturing stream wait for everything in its capture: joins all forks.

        Returns the number of nodes recorded so far; -1 where it cannot be known.
        """
        for stream in forks:
            self._stream(raw).wait_stream(stream)
        return -1

    def add_empty_node(self, raw: int) -> None:
        """Record a node that changes nothing, so that torch does not warn about an empty graph."""
        with torch._C._DisableTorchDispatch():  # it is no operator of the user's
            self._bytes[torch.cuda.current_device()].zero_()

    def restart(self, raw: int) -> None:
        """End an invalid capture and begin a valid one, so that torch can end it in the usual way."""

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


class _MadeOnce(dict[Any, Any]):
    """What `make` makes of each key, when it is first asked for."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, key: Any) -> Any:
        return self.setdefault(key, self._make(key))


class CudaDriver(Driver):
    """Through cuda-python."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self._cuda: Any = driver
        self.handle = _MadeOnce(driver.CUstream).__getitem__
        no_timing = driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
        self._events = _MadeOnce(lambda key: self._call("cuEventCreate", no_timing)[0])
        # Asked of 128 streams at each boundary: cuda-python takes twice as long, to make an enum each time.
        library = ctypes.PyDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        self._is_capturing = library.cuStreamIsCapturing

    def _call(self, name: str, *args: Any) -> tuple[Any, ...]:
        return call(self._cuda, name, *args)

    def create_stream(self) -> torch.cuda.Stream:
        """A stream outside of torch's fixed set, in the current context."""
        bind_context()
        (stream,) = self._call("cuStreamCreate", self._cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)
        return torch.cuda.ExternalStream(int(stream))

    def _status(self, raw: int) -> int:
        return int(self._call("cuStreamIsCapturing", self.handle(raw))[0])

    def is_valid(self, raw: int) -> bool:
        """By CU_STREAM_CAPTURE_STATUS_ACTIVE."""
        return self._status(raw) == 1

    def _info(self, raw: int) -> tuple[Any, ...]:
        """Status, id, graph, dependencies, ..."""
        return self._call("cuStreamGetCaptureInfo", self.handle(raw))

    def question(self, handles: Sequence[int]) -> Callable[[], list[int]]:
        """One that answers with an error counts as capturing, and raises when it is asked for more."""
        answers = (ctypes.c_int * len(handles))()
        pointers = [ctypes.c_void_p(raw) for raw in handles]
        into = [ctypes.byref(answers, i * ctypes.sizeof(ctypes.c_int)) for i in range(len(handles))]

        def ask() -> list[int]:
            errors = list(map(self._is_capturing, pointers, into))
            if not any(errors) and not bytes(answers).strip(b"\0"):
                return []
            return [raw for raw, *found in zip(handles, errors, answers, strict=True) if any(found)]

        return ask

    def capture_id(self, raw: int) -> int:
        """By `cuStreamGetCaptureInfo`, which costs more than the question whether it is capturing."""
        return int(self._info(raw)[1])

    def join(self, raw: int, forks: Sequence[torch.cuda.Stream]) -> int:
        """By the nodes that nothing depends on, so that streams which nobody knows are joined too."""
        _, _, graph, dependencies, *_ = self._info(raw)
        count = int(self._call("cuGraphGetNodes", graph, 0)[-1])
        joined = {int(node) for node in dependencies}
        if count == 0 or (count == 1 and joined):
            return count
        nodes = self._call("cuGraphGetNodes", graph, count)[0]
        edges = int(self._call("cuGraphGetEdges", graph, 0)[-1])
        sources = self._call("cuGraphGetEdges", graph, edges)[0] if edges else ()
        inner = {int(node) for node in sources}
        leaves = [n for n in nodes if int(n) not in inner and int(n) not in joined]
        if leaves:
            flag = self._cuda.CUstreamUpdateCaptureDependencies_flags.CU_STREAM_ADD_CAPTURE_DEPENDENCIES
            self._call(
                "cuStreamUpdateCaptureDependencies", self.handle(raw), leaves, None, len(leaves), int(flag)
            )
        return count

    def add_empty_node(self, raw: int) -> None:
        """Keeps torch from warning about an empty graph."""
        self._call("cuGraphAddEmptyNode", self._info(raw)[2], None, 0)

    def restart(self, raw: int) -> None:
        """torch can then end a valid, empty capture, and all of its own state is as after any other."""
        handle = self.handle(raw)
        if self._status(raw) != 0:
            self._cuda.cuStreamEndCapture(handle)  # its status is the error that brought us here
        mode = self._cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._call("cuStreamBeginCapture", handle, mode)

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
        event = self._events[torch.cuda.current_device(), before]  # the default stream of each device is 0
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
