"""The ways to capture and replay the same work that the benchmarks compare."""

import ctypes
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timing import Call

from segcapture import BreakableCUDAGraphCapture, GraphSegment
from segcapture.backends.cuda.driver import get_driver

try:
    import breakable_cuda_graphs as peer
except ImportError:
    peer = None

OURS = "segcapture"
EAGER = "eager"
TORCH = "torch.cuda.graph"
PEER = "breakable-cuda-graphs"
ALONE = "torch alone, no checks"
C_LOOP = "C loop of cuGraphLaunch"
BARE = "the same launches and calls, nothing else"

Break = Callable[..., Any]
"""A function that breaks the capture, whoever captures."""

_C_LOOP = """
typedef int (*launch_function)(void *exec, void *stream);
int launch_all(launch_function launch, void **execs, int count, void *stream) {
    for (int i = 0; i < count; i++) {
        int status = launch(execs[i], stream);
        if (status) return status;
    }
    return 0;
}
"""


def capture_ours(body: Call, device: torch.device, **options: Any) -> BreakableCUDAGraphCapture:
    """Capture with segcapture."""
    with BreakableCUDAGraphCapture(device=device, **options) as capture:
        body()
    return capture


def capture_torch(body: Call, pool: Any = None) -> torch.cuda.CUDAGraph:
    """Capture as one CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        body()
    return graph


class Alone:
    """Segments by torch's own calls and nothing else: the floor of a capture.

    Each break ends the graph, instantiates and launches it, calls the function, and begins the next.
    """

    def __init__(self, fn: Break) -> None:
        self._fn = fn
        self._stream = torch.cuda.Stream()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._pool: Any = None

    def break_(self, *args: Any) -> Any:
        """End a segment, run the function, begin the next segment."""
        if not self._graphs:  # a warm-up
            return self._fn(*args)
        self._end()
        out = self._fn(*args)
        self._begin()
        return out

    def capture(self, body: Call, pool: Any) -> tuple[object, Any]:
        """Capture the work; returns the graphs and their pool."""
        self._pool = torch.cuda.graph_pool_handle() if pool is None else pool
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._begin()
            body()
            self._end()
        torch.cuda.current_stream().wait_stream(self._stream)
        made, self._graphs = self._graphs, []
        return made, self._pool

    def _begin(self) -> None:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._graphs.append(graph)

    def _end(self) -> None:
        graph = self._graphs[-1]
        graph.capture_end()
        graph.instantiate()
        graph.replay()


def capture_peer(body: Call, pool: Any = None) -> Any:
    """Capture with breakable-cuda-graphs; its breaks are made with `peer.no_graph`."""
    assert peer is not None
    graph = peer.BreakableCUDAGraph(pool=pool)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*CUDA Graph is empty.*")
        with peer.breakable_graph(graph):
            body()
    return graph


def c_loop(capture: BreakableCUDAGraphCapture) -> Call:
    """Launch the graph segments of a capture from a C loop: the floor. Eager segments are left out."""
    launch_all = _compile()
    # A pointer to the driver's function, not to one of ctypes.
    launch = ctypes.cast(ctypes.CDLL("libcuda.so.1").cuGraphLaunch, ctypes.c_void_p)
    graphs = [segment.graph.graph for segment in capture.segments if isinstance(segment, GraphSegment)]
    handles = [int(graph.raw_cuda_graph_exec()) for graph in graphs]
    execs = (ctypes.c_void_p * len(handles))(*handles)
    count, device = len(handles), capture.device.index

    def call() -> None:
        status = launch_all(launch, execs, count, torch._C._cuda_getCurrentRawStream(device))
        if status:
            raise RuntimeError(f"cuGraphLaunch failed with CUDA error {status}")

    call.keep = graphs  # type: ignore[attr-defined]
    return call


def bare_loop(capture: BreakableCUDAGraphCapture) -> Call:
    """The launches and calls of a capture whose breaks return None, in a loop that checks nothing."""
    device = capture.device
    steps = [
        (segment.graph.launch, None)
        if isinstance(segment, GraphSegment)
        else (segment.call.fn, segment.call.args)
        for segment in capture.segments
    ]

    def call() -> None:
        stream = (
            get_driver().handle(torch.cuda.current_stream(device).cuda_stream)
            if device.type == "cuda"
            else None
        )
        for fn, args in steps:
            if args is None:
                fn(stream)
            else:
                fn(*args)

    call.keep = capture  # type: ignore[attr-defined]
    return call


def has_compiler() -> bool:
    """Whether there is a C compiler."""
    return shutil.which("cc") is not None


def _compile() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "loop.c"), Path(folder, "loop.so")
        source.write_text(_C_LOOP)
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
        function = ctypes.CDLL(str(library)).launch_all
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
    function.restype = ctypes.c_int
    return function
