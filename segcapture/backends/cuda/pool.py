"""Pools: opening them, and keeping them and their graphs alive (contracts C5 and C10)."""

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from segcapture.backends.cuda.driver import get_driver
from segcapture.backends.cuda.graph import CudaGraph
from segcapture.backends.cuda.lanes import Lane, free_lane, lane_of, one_capture
from segcapture.backends.cuda.pool_memory import PoolId, borrowed, segments_of
from segcapture.errors import CaptureStateError
from segcapture.thread import state


class PoolState:
    """What lives as long as a pool does: an empty graph that holds it open, and its lane.

    torch counts the graphs of a pool, in the allocator of the device and in that of pinned memory, and
    a pool whose count fell to zero cannot be opened again (torch 2.11). The empty graph keeps both
    counts up while there is a capture, a `Pool`, or an alias that points into the pool.
    """

    def __init__(self, pool_id: PoolId, device: torch.device, lane: Lane) -> None:
        self.id = pool_id
        self.lane = lane
        self.given: torch.cuda.MemPool | None = None
        """The user's object for the pool, which gives its memory back when it dies."""
        self.in_use = False
        """Whether a capture of it, or a replay that calls eager functions, is under way."""
        try:
            self._anchor = _empty_graph(pool_id, device)
        except RuntimeError as error:
            undo_begin(device, pool_id)
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise CaptureStateError(
                f"The pool handle {pool_id} cannot be opened: its last graph has died, and torch closes a "
                f"pool with its last graph. Keep a capture of it, or share `capture.pool`."
            ) from error

    def __del__(self) -> None:
        # A MemPool that dies while its thread captures ends the process.
        if state.keep_alive is not None and self.given is not None:
            state.keep_alive.append(self.given)

    def overwritten(self) -> CaptureStateError:
        """What is raised where an eager function uses the pool of the capture that it belongs to."""
        return CaptureStateError(
            "An eager function captures or replays in the pool of the capture that it belongs to. Those of "
            "one pool use the same memory one after the other, so this would overwrite what is still needed: "
            "give the inner one a pool of its own."
        )

    @contextmanager
    def used(self) -> Iterator[None]:
        """For the block, nothing else of this thread may use the memory.

        Raises:
            CaptureStateError: something does already.
        """
        if self.in_use:
            raise self.overwritten()
        self.in_use = True
        try:
            yield
        finally:
            self.in_use = False

    def storages(self) -> list[torch.UntypedStorage]:
        """The memory that the pool has reserved, one storage for each range; they keep the pool open."""
        device, segments = self.lane.stream.device, segments_of(self.id)
        return [borrowed(s["address"], device, s["total_size"], self) for s in segments]


_anchor_streams: dict[int | None, torch.cuda.Stream] = {}


def _empty_graph(pool_id: PoolId, device: torch.device) -> CudaGraph:
    """Captured on a stream for nothing else: another thread may be capturing on any of the lanes."""
    owned, driver = CudaGraph(), get_driver()
    with torch.cuda.device(device), collections_relaxed("thread_local"):
        stream = _anchor_streams.pop(device.index, None) or driver.create_stream()
        with torch.cuda.stream(stream):
            try:
                owned.begin(pool_id, driver.error_mode("thread_local"))
            finally:  # also where an interrupt came after it
                if driver.is_valid(stream.cuda_stream):
                    driver.add_empty_node(stream.cuda_stream)
                    owned.call("capture_end")
    _anchor_streams[device.index] = stream  # not after a failure, which may leave it capturing
    return owned


def undo_begin(device: torch.device, pool_id: PoolId) -> None:
    """Repair torch after a capture that did not begin.

    The allocator may be left recording into the pool, and the generator capturing.
    """
    with _pools_lock:
        with suppress(RuntimeError):  # the first refuses where the allocator had not begun
            torch._C._cuda_endAllocateToPool(device.index, pool_id)
            torch._C._cuda_releasePool(device.index, pool_id)
        _empty_graph(torch.cuda.graph_pool_handle(), device)


class Pool(tuple[int, int]):
    """A pool's id, as `torch.cuda.graph(pool=...)` takes it too. Keeps the pool while it lives."""

    state: PoolState

    def __new__(cls, pool_state: PoolState) -> "Pool":
        made = super().__new__(cls, pool_state.id)
        made.state = pool_state
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> "Pool":
        return self


_pools: "weakref.WeakValueDictionary[tuple[int | None, PoolId], PoolState]" = weakref.WeakValueDictionary()
_pools_lock = threading.RLock()


def pool_id_of(pool: Any, device: torch.device) -> PoolId:
    """The id behind anything that `pool=` takes."""
    place = device
    if isinstance(pool, torch.cuda.MemPool):
        place, pool = torch.device(getattr(pool, "device", device)), pool.id
    elif isinstance(pool, Pool):
        place = pool.state.lane.stream.device
    if place.index not in (None, device.index):
        raise ValueError(f"pool is of {place}, and the capture of {device}")
    valid = isinstance(pool, tuple) and len(pool) == 2 and all(isinstance(part, int) for part in pool)
    if not valid:
        raise ValueError(
            f"pool must be the `pool` of a capture, a torch.cuda.MemPool or a graph_pool_handle(), "
            f"got {pool!r}"
        )
    return (pool[0], pool[1])


def open_pool(given: Any, device: torch.device, stream: torch.cuda.Stream | None) -> PoolState:
    """The state of a pool, made on first use; None makes a new pool."""
    with one_capture(device), _pools_lock:
        pool_id = torch.cuda.graph_pool_handle() if given is None else pool_id_of(given, device)
        found = _pools.get((device.index, pool_id))
        if found is None:
            lane = free_lane(device) if stream is None else lane_of(stream)
            found = PoolState(pool_id, device, lane)
            _pools[device.index, pool_id] = found
        if isinstance(given, torch.cuda.MemPool):
            found.given = given
        return found


@contextmanager
def collections_relaxed(error_mode: str) -> Iterator[None]:
    """Let a garbage collection destroy CUDA graphs without invalidating the capture that is running.

    Switching the collector off instead would be seen by all threads, and overlapping captures would
    switch it on under each other. This leaves no state behind, and costs 2 us a collection. Collections
    of other threads disturb a capture in the error mode `global` alone.
    """
    owner, exchange_mode = threading.get_ident(), get_driver().exchange_mode
    modes: dict[int, list[int]] = {}

    def hook(phase: str, info: dict[str, int]) -> None:
        if error_mode != "global" and threading.get_ident() != owner:
            return
        mine = modes.setdefault(threading.get_ident(), [])
        if phase == "start":
            mine.append(exchange_mode())
        elif mine:
            exchange_mode(mine.pop())

    gc.callbacks.append(hook)
    try:
        yield
    finally:
        gc.callbacks.remove(hook)
        for mode in reversed(modes.get(owner, [])):
            exchange_mode(mode)
