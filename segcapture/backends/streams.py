"""Capture streams, the order of replays that share memory, and forks (contracts C5 and C6)."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from segcapture.backends.driver import Driver, get_driver
from segcapture.backends.pool_memory import allocating_from, bytes_of

_PRIORITIES = (0, -1, -2, -3)
_STREAMS_PER_PRIORITY = 32


# Before 2.12 a generator knows only one capture at a time, whatever thread it is in.
_ONE_CAPTURE_A_DEVICE = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12)
_device_locks: dict[int | None, threading.RLock] = {}


class Workspace:
    """The cuBLAS workspaces of a lane (32 MiB each on Hopper), in memory that nobody else ever gets.

    Graphs hold their addresses. One that is made during a capture would come from the capture's pool and
    outlive it. And torch frees all workspaces at times (`_cuda_clearCublasWorkspaces`, which torch.compile
    calls when it records CUDA graphs), after which others would get the memory, or nobody would have it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # Without the release that belongs to it: the pool stays open.
        torch._C._cuda_beginAllocateCurrentThreadToPool(device.index, self._pool)
        torch._C._cuda_endAllocateToPool(device.index, self._pool)

    def prepare(self) -> None:
        """Make the one that the current stream still lacks, for the calling thread's cuBLAS handle."""
        with allocating_from(self._pool, self._device):
            torch.cuda.current_blas_handle()

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return bytes_of(self._pool)[0]


class Lane:
    """A capture stream, and the order among all that was captured on it.

    Graphs that were captured on one stream share its cuBLAS workspace, and those of one pool share
    memory: their replays must not overlap, whatever streams and threads they are on.
    """

    def __init__(self, stream: torch.cuda.Stream, driver: Driver) -> None:
        self.stream = stream
        self.raw = stream.cuda_stream
        self.lock = threading.RLock()
        self.last = self.raw
        """Raw handle of the stream that was used last."""
        self.capturing = False
        self.workspace = Workspace(stream.device)
        self._driver = driver

    def move_to(self, raw: int) -> None:
        """Let a stream wait for the one used last, if it is another."""
        if raw != self.last:
            self._driver.order(after=raw, before=self.last)
            self.last = raw

    @contextmanager
    def turn(self, raw: int) -> Iterator[None]:
        """For the block: the stream comes after the one used last, and no other thread uses the lane."""
        with self.lock, torch.cuda.device(self.stream.device):
            self.move_to(raw)
            yield


_lanes: dict[tuple[int, int], Lane] = {}
_lanes_lock = threading.Lock()
_private: dict[int, list[Lane]] = {}


def lane_of(stream: torch.cuda.Stream) -> Lane:
    """The lane of a user's stream."""
    key = (stream.device_index, stream.cuda_stream)
    with _lanes_lock:
        if key not in _lanes:
            _lanes[key] = Lane(stream, get_driver())
        return _lanes[key]


def free_lane(device: torch.device) -> Lane:
    """A private lane that no capture is running on. Streams are kept for the life of the process."""
    assert device.index is not None
    with _lanes_lock:
        lanes = _private.setdefault(device.index, [])
        for lane in lanes:
            if not lane.capturing:
                return lane
        with torch.cuda.device(device):
            # No `torch.cuda.Stream()` of the user can be this one.
            lane = Lane(get_driver().create_stream(), get_driver())
        lanes.append(lane)
        _lanes[device.index, lane.raw] = lane
        return lane


_torch_streams: dict[int, dict[int, torch.cuda.Stream]] = {}


def torch_streams(device: torch.device) -> dict[int, torch.cuda.Stream]:
    """Every stream that torch hands out on a device, by raw handle: it takes them from a fixed set."""
    assert device.index is not None
    with _lanes_lock:
        if device.index not in _torch_streams:
            made = [
                torch.cuda.Stream(device, priority=priority)
                for priority in _PRIORITIES
                for _ in range(_STREAMS_PER_PRIORITY)
            ]
            _torch_streams[device.index] = {s.cuda_stream: s for s in made}
        return _torch_streams[device.index]


class Forks:
    """The side streams that are forked into one capture."""

    def __init__(self, main: torch.cuda.Stream, device: torch.device, driver: Driver) -> None:
        self._main = main
        self._driver = driver
        self._candidates = torch_streams(device)
        self.streams: tuple[torch.cuda.Stream, ...] = ()
        self.current: torch.cuda.Stream | None = None
        """The stream that is current in the user's code, if it is not the capture's own."""

    def join(self) -> int:
        """Find the forked streams and join them all, before a segment ends; returns its node count."""
        raw = self._main.cuda_stream
        candidates = self._candidates
        self.current = None
        if torch._C._cuda_getCurrentRawStream(self._main.device_index) != raw:
            self.current = torch.cuda.current_stream()
        if self.current is not None or self.streams:
            # Streams from outside of torch are found while they are current, and remembered.
            strangers = (*self.streams, self.current or self._main)
            candidates = {**candidates, **{s.cuda_stream: s for s in strangers}}
        self.streams = tuple(self._driver.members(raw, candidates))
        return self._driver.join(raw, self.streams)

    def fork(self) -> None:
        """Fork them into the capture again: after a segment began."""
        for stream in self.streams:
            stream.wait_stream(self._main)

    def crossing(self) -> tuple[torch.cuda.Stream, ...]:
        """The streams whose order with the main one an eager function may rely on."""
        known = {s.cuda_stream: s for s in self.streams}
        if self.current is not None:
            known[self.current.cuda_stream] = self.current
        return tuple(known.values())


@contextmanager
def beside(lane: Lane, stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Run eager code on a lane's stream (or another one), ordered with the current stream both ways."""
    with torch.cuda.device(lane.stream.device):
        outer, stream = torch.cuda.current_stream(), stream or lane.stream
        with lane.turn(outer.cuda_stream):
            stream.wait_stream(outer)
            try:
                with torch.cuda.stream(stream):
                    lane.workspace.prepare()
                    yield
            finally:
                outer.wait_stream(stream)


@contextmanager
def ordered(main: torch.cuda.Stream, sides: Sequence[torch.cuda.Stream]) -> Iterator[None]:
    """Around an eager function: work on side streams comes after `main`'s, and `main` goes on after it."""
    for stream in sides:
        stream.wait_stream(main)
    try:
        yield
    finally:
        for stream in sides:
            main.wait_stream(stream)


def one_capture(device: torch.device) -> AbstractContextManager[Any]:
    """The turn of a capture on a device, where torch needs turns."""
    if not _ONE_CAPTURE_A_DEVICE:
        return nullcontext()
    return _device_locks.setdefault(device.index, threading.RLock())


@contextmanager
def occupied(lane: Lane) -> Iterator[None]:
    """No other capture chooses the lane for the block."""
    lane.capturing = True
    try:
        yield
    finally:
        lane.capturing = False


def hand_over(lane: Lane, outer: torch.cuda.Stream, stream: torch.cuda.Stream) -> None:
    """The stream outside goes on after the capture's last work."""
    outer.wait_stream(stream)
    lane.last = outer.cuda_stream
