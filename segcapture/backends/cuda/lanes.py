"""Capture streams, and the order of what shares one: its cuBLAS workspace, and pools (contracts C5, C6)."""

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from segcapture.backends.cuda.driver import get_driver
from segcapture.backends.cuda.pool_memory import allocating_from
from segcapture.backends.cuda.streams import ordered

# Before 2.12 a generator knows only one capture at a time, whatever thread it is in.
_BEFORE_2_12 = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12)
_device_locks: dict[int | None, threading.RLock] = {}


def one_capture(device: torch.device) -> AbstractContextManager[Any]:
    """The turn of a capture on a device, where torch needs turns."""
    if not _BEFORE_2_12:
        return nullcontext()
    return _device_locks.setdefault(device.index, threading.RLock())


class Workspace:
    """The cuBLAS workspaces of a lane (32 MiB each on Hopper), in memory that torch gives nobody else.

    Graphs hold their addresses. One that is made during a capture would come from the capture's pool and
    outlive it. And torch frees workspaces at times: all of them when torch.compile records CUDA graphs
    (`_cuda_clearCublasWorkspaces`), and from 2.12 on those of a stream when a graph dies that was captured
    on it. They come back to the pool here, which is never released, and from it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.pool = torch.cuda.graph_pool_handle()
        # Without the release that belongs to it: the pool stays open.
        torch._C._cuda_beginAllocateCurrentThreadToPool(device.index, self.pool)
        torch._C._cuda_endAllocateToPool(device.index, self.pool)
        with torch.inference_mode(False):
            self._one, self._out = (torch.ones(16, 16, device=device, dtype=torch.float32) for _ in range(2))

    def prepare(self) -> None:
        """Make those that the current stream still lacks, for the calling thread's cuBLAS handle."""
        self.prepare_handle()
        configured = os.environ.get("CUBLAS_WORKSPACE_CONFIG") in (":4096:8", ":16:8")
        # Else torch refuses cuBLAS, where it is told to be deterministic.
        if _BEFORE_2_12 and (configured or not torch.are_deterministic_algorithms_enabled()):
            with allocating_from(self.pool, self._device):
                # cuBLASLt may have one of its own there, and nothing but its use makes it.
                torch.addmm(self._one[0], self._one, self._one, out=self._out)

    def prepare_handle(self) -> None:
        """The part that calls no operator."""
        with allocating_from(self.pool, self._device):
            torch.cuda.current_blas_handle()


class Lane:
    """A capture stream, and the order among all that was captured on it.

    Graphs that were captured on one stream share its cuBLAS workspace, and those of one pool share
    memory: their replays must not overlap, whatever streams and threads they are on.
    """

    def __init__(self, stream: torch.cuda.Stream, *, on_offer: bool = False) -> None:
        self.stream = stream
        self.on_offer = on_offer
        """Whether pools may choose it: not a user's, and not one whose failed capture could not be ended."""
        self.lock = threading.RLock()
        self.last = stream.cuda_stream
        """Raw handle of the stream that was used last."""
        self.running: int | None = None
        """Raw handle of the stream of the capture or replay that is under way."""
        self.free = True
        """Whether no capture is running on it."""
        self.workspace = Workspace(stream.device)

    def move_to(self, raw: int) -> None:
        """Let a stream wait for the one used last, if it is another."""
        if raw != self.last:
            get_driver().order(after=raw, before=self.last)
            self.last = raw

    def move_back(self) -> None:
        """What is under way around this goes on after it."""
        if self.running is not None:
            self.move_to(self.running)

    @contextmanager
    def turn(self, raw: int) -> Iterator[None]:
        """For the block: the stream comes after the one used last, and no other thread uses the lane."""
        with self.lock, torch.cuda.device(self.stream.device):
            self.move_to(raw)
            try:
                yield
            finally:
                self.move_back()

    @contextmanager
    def beside(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """Run eager code on a stream of the lane, ordered with the current stream both ways."""
        with torch.cuda.device(self.stream.device):
            outer = torch.cuda.current_stream()
            with self.turn(outer.cuda_stream), ordered(outer, [stream]), torch.cuda.stream(stream):
                self.workspace.prepare()
                yield

    @contextmanager
    def capturing(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """For a capture: `stream` is current and comes after all else, and the current one after it.

        The lane's lock comes before the device's, as in a replay that captures in an eager function.
        """
        with self.lock, one_capture(stream.device):
            outer, around, chosen = torch.cuda.current_stream(), self.running, self.free
            self.move_to(stream.cuda_stream)
            self.running, self.free = stream.cuda_stream, False
            try:
                with ordered(outer, [stream]), torch.cuda.stream(stream):
                    self.workspace.prepare()
                    yield
            finally:
                self.running, self.free = around, chosen
                self.last = outer.cuda_stream
                self.move_back()


_lanes: dict[tuple[int, int], Lane] = {}
_lanes_lock = threading.Lock()


def lane_of(stream: torch.cuda.Stream) -> Lane:
    """The lane of a user's stream."""
    key = (stream.device_index, stream.cuda_stream)
    with _lanes_lock:
        if key not in _lanes:
            _lanes[key] = Lane(stream)
        return _lanes[key]


def free_lane(device: torch.device) -> Lane:
    """A private lane that no capture is running on now. Streams are kept for the life of the process."""
    with _lanes_lock:
        for lane in _lanes.values():
            if lane.on_offer and lane.free and lane.stream.device == device:
                return lane
        with torch.cuda.device(device):
            # No `torch.cuda.Stream()` of the user can be this one.
            lane = Lane(get_driver().create_stream(), on_offer=True)
        _lanes[device.index, lane.stream.cuda_stream] = lane
        return lane
