"""Pools: memory, a capture stream, and the order of all that uses them (contracts C3, C5, C6)."""

import bisect
import ctypes
import functools
import gc
import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch

from segcapture.backends.cuda.driver import CACHES_WORKSPACES, ONE_CAPTURE_A_DEVICE, get_driver
from segcapture.backends.cuda.graph import CudaGraph, PoolId, empty_graph, undo_begin
from segcapture.backends.cuda.streams import ordered
from segcapture.errors import CaptureStateError
from segcapture.exclusive import Exclusive
from segcapture.tensors import cannot_be_copied, shows_memory_alone
from segcapture.thread import state

_Made = TypeVar("_Made")

_device_locks: dict[int | None, Exclusive] = {}


def _one_capture(device: torch.device) -> AbstractContextManager[None]:
    """For a capture on a device: no other thread captures there, where torch needs that."""
    if not ONE_CAPTURE_A_DEVICE:
        return nullcontext()
    return _device_locks.get(device.index) or _device_locks.setdefault(device.index, Exclusive())


# A capture stream


class CaptureStream:
    """A stream to capture on, with its cuBLAS workspace, and the order of all that was captured on it.

    Graphs that were captured on one stream share its workspace, and those of one pool share memory: their
    replays must not overlap, whatever streams and threads they are on. A pool has one of these to itself, but
    for what a user passes as `stream=`.

    Graphs hold the address of the workspace (32 MiB on Hopper). One that is made during a capture would come
    from the capture's pool and outlive it. And torch frees workspaces at times: all of them when
    torch.compile records CUDA graphs (`_cuda_clearCublasWorkspaces`), and from 2.12 on those of a stream when
    a graph dies that was captured on it. So they come from a pool of their own that is never released, and
    come back to it. From 2.15 on there is none: see `driver.CACHES_WORKSPACES`.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self.raw: int = stream.cuda_stream
        self.device = stream.device
        self.lock = Exclusive()
        self.last = self.raw
        """Raw handle of the stream that was used last."""
        self.running: int | None = None
        """Raw handle of the stream of the capture or replay that is under way."""
        self._make_workspace()

    def _make_workspace(self) -> None:
        self.workspace_pool = torch.cuda.graph_pool_handle()
        # Without the release that belongs to it: the pool stays open.
        torch._C._cuda_beginAllocateCurrentThreadToPool(self.device.index, self.workspace_pool)
        torch._C._cuda_endAllocateToPool(self.device.index, self.workspace_pool)
        with torch.inference_mode(False):
            one, out = (torch.ones(16, 16, device=self.device, dtype=torch.float32) for _ in range(2))
        self._use_cublaslt = functools.partial(torch.addmm, one[0], one, one, out=out)

    def prepare(self) -> None:
        """Make the workspaces that the stream, which is current, lacks for the calling thread's cuBLAS."""
        self.prepare_handle()
        configured = os.environ.get("CUBLAS_WORKSPACE_CONFIG") in (":4096:8", ":16:8")
        # Else torch refuses cuBLAS, where it is told to be deterministic.
        if ONE_CAPTURE_A_DEVICE and (configured or not torch.are_deterministic_algorithms_enabled()):
            # cuBLASLt may have one of its own there (before 2.12), and nothing but its use makes it.
            _from_pool(self.workspace_pool, self.device, self._use_cublaslt)

    def prepare_handle(self) -> None:
        """The part that calls no operator."""
        if CACHES_WORKSPACES:
            _from_pool(self.workspace_pool, self.device, torch.cuda.current_blas_handle)

    def move_to(self, raw: int) -> None:
        """Let a stream wait for the one used last, if it is another."""
        if raw != self.last:
            get_driver().order(after=raw, before=self.last)
            self.last = raw

    @contextmanager
    def exclusive(self, raw: int) -> Iterator[None]:
        """For the block: a stream comes after the one used last, and no other thread uses this.

        What is under way around it goes on after it.
        """
        with self.lock, torch.cuda.device(self.device):
            self.move_to(raw)
            around, self.running = self.running, raw
            try:
                yield
            finally:
                self.running = around
                if around is not None:
                    self.move_to(around)

    @contextmanager
    def current(self) -> Iterator[None]:
        """For the block the stream is current, and ordered with the one outside both ways."""
        outer = torch.cuda.current_stream(self.device)
        with self.exclusive(self.raw):
            try:
                with ordered(outer, [self.stream]), torch.cuda.stream(self.stream):
                    self.prepare()
                    yield
            finally:
                # It has waited. A stream that cannot end its capture is left alone.
                self.last = outer.cuda_stream


_of_users: dict[tuple[int, int], CaptureStream] = {}
_free: defaultdict[int | None, list[CaptureStream]] = defaultdict(list)
"""By device, those of pools that have died. Streams, and what was last on them, are kept for the process."""
_lock = threading.RLock()


def capture_stream(stream: torch.cuda.Stream) -> CaptureStream:
    """What belongs to a stream that a user passes."""
    with _lock:
        key = (stream.device_index, stream.cuda_stream)
        if key not in _of_users:
            _of_users[key] = CaptureStream(stream)
        return _of_users[key]


@contextmanager
def _nested(outer: AbstractContextManager[None], inner: AbstractContextManager[None]) -> Iterator[None]:
    with outer, inner:
        yield


# A pool


class Pool:
    """What lives as long as a pool does: its capture stream, and an empty graph that holds it open.

    torch counts the graphs of a pool, in the allocator of the device and in that of pinned memory, and
    a pool whose count fell to zero cannot be opened again (torch 2.11). The empty graph keeps both
    counts up while there is a capture, a handle, or an alias that points into the pool.
    """

    given: torch.cuda.MemPool | None = None
    """The user's object for the pool, which gives its memory back when it dies."""
    in_use = False
    """Whether a capture of it, or a replay that calls eager functions, is under way."""
    free: "list[CaptureStream] | None" = None
    """Where its stream goes when it dies: None for a user's, and for one that is stuck capturing."""

    def __init__(self, pool_id: PoolId, device: torch.device, stream: torch.cuda.Stream | None) -> None:
        self.id = pool_id
        self.device = device
        if stream is not None:
            self.stream = capture_stream(stream)
        else:  # no `torch.cuda.Stream()` of the user can be this one
            free = _free[device.index]
            self.stream = free.pop() if free else CaptureStream(get_driver().create_stream())
            self.free = free
        self._anchor = self._open()

    def _open(self) -> CudaGraph:
        """torch closes a pool with its last graph, and forgets it when its caches are emptied."""
        try:
            return self._try_to_open()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            gc.collect()
        try:
            torch.cuda.empty_cache()
            torch._C._host_emptyCache()
            return self._try_to_open()
        except RuntimeError as error:
            raise CaptureStateError(
                f"The pool handle {self.id} cannot be opened: its last graph has died, and tensors of it are "
                f"alive. Drop them, keep a capture of the pool, or share `capture.pool`."
            ) from error

    def _try_to_open(self) -> CudaGraph:
        try:
            return empty_graph(self.id, self.device)
        except RuntimeError:
            undo_begin(self.id, self.device)
            raise

    def __del__(self) -> None:
        if self.free is not None:
            self.free.append(self.stream)
        # A MemPool that dies while its thread captures ends the process.
        if state.keep_alive is not None and self.given is not None:
            state.keep_alive.append(self.given)

    @contextmanager
    def capturing(self, on: CaptureStream) -> Iterator[None]:
        """For a capture: its stream is current, and nothing else of this thread may use the memory.

        The pool's lock comes before the device's, as in a replay that captures in an eager function.
        """
        beside = nullcontext() if on is self.stream else self.stream.exclusive(on.raw)
        with beside, on.current(), _one_capture(self.device):
            if self.in_use:
                raise self.overwritten()
            self.in_use = True
            try:
                yield
            finally:
                self.in_use = False

    def exclusive(self, on: CaptureStream) -> AbstractContextManager[None]:
        """For the block: the current stream comes after all captures and replays, and no other thread's."""
        raw = torch._C._cuda_getCurrentRawStream(self.device.index)
        own = self.stream.exclusive(raw)
        return own if on is self.stream else _nested(on.exclusive(raw), own)

    @staticmethod
    def overwritten() -> CaptureStateError:
        """What is raised where an eager function uses the pool of the capture that it belongs to."""
        return CaptureStateError(
            "An eager function captures or replays in the pool of the capture that it belongs to. Those of "
            "one pool use the same memory one after the other, so this would overwrite what is still needed: "
            "give the inner one a pool of its own."
        )

    def nbytes(self) -> tuple[int, int]:
        """Bytes that it has reserved, and those in use."""
        segments = segments_of(self.id)
        return sum(s["total_size"] for s in segments), sum(s["active_size"] for s in segments)

    def storages(self) -> list[torch.UntypedStorage]:
        """The memory that the pool has reserved, one storage for each range; they keep the pool open."""
        return [
            non_owning(segment["address"], self.device, segment["total_size"], self)
            for segment in segments_of(self.id)
        ]


class PoolHandle(tuple[int, int]):
    """A pool's id, as `torch.cuda.graph(pool=...)` takes it too. Keeps the pool while it lives."""

    state: Pool

    def __new__(cls, pool: Pool) -> "PoolHandle":
        made = super().__new__(cls, pool.id)
        made.state = pool
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> "PoolHandle":
        return self


_pools: "weakref.WeakValueDictionary[tuple[int | None, PoolId], Pool]" = weakref.WeakValueDictionary()


def pool_id_of(pool: Any, device: torch.device) -> PoolId:
    """The id behind anything that `pool=` takes."""
    place = device
    if isinstance(pool, torch.cuda.MemPool):
        place, pool = torch.device(getattr(pool, "device", device)), pool.id
    elif isinstance(pool, PoolHandle):
        place = pool.state.device
    if place.index not in (None, device.index):
        raise ValueError(f"pool is of {place}, and the capture of {device}")
    valid = isinstance(pool, tuple) and len(pool) == 2 and all(isinstance(part, int) for part in pool)
    if not valid:
        raise ValueError(
            f"pool must be the `pool` of a capture, a torch.cuda.MemPool or a graph_pool_handle(), "
            f"got {pool!r}"
        )
    return (pool[0], pool[1])


def open_pool(given: Any, device: torch.device, stream: torch.cuda.Stream | None) -> Pool:
    """A pool, made on first use; None makes a new one."""
    with _one_capture(device), _lock, torch.cuda.device(device):
        pool_id = torch.cuda.graph_pool_handle() if given is None else pool_id_of(given, device)
        found = _pools.get((device.index, pool_id))
        if found is None:
            found = _pools[device.index, pool_id] = Pool(pool_id, device, stream)
        if isinstance(given, torch.cuda.MemPool):
            found.given = given
        return found


# The order of replays


def in_order(pool: Pool, on: CaptureStream, run: Callable[[Any], None], *, calls: bool) -> Callable[[], None]:
    """A replay of what was captured on a stream: on the current one, after all that uses the same memory.

    `run` takes the stream's handle, and `calls` says whether it has eager segments.
    """
    place = pool.stream
    lock, device, index, handle = place.lock, place.device, place.device.index, get_driver().handle
    acquire_at_once, wait, release = lock.acquire_at_once, lock.wait, lock.release
    current_device, current = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream
    is_captured = torch._C._cuda_isCurrentStreamCapturing

    def replay_on_device() -> None:
        with lock:
            raw = current(index)
            if is_captured():
                raise CaptureStateError(
                    "The current stream is being captured by torch.cuda.graph or another library, where CUDA "
                    "launches no graph and eager segments would run in part: replay outside of it."
                )
            if pool.in_use:
                raise pool.overwritten()
            if raw != place.last:
                place.move_to(raw)
            around, place.running = place.running, raw
            pool.in_use = True
            try:
                run(handle(raw))
            finally:
                place.running, pool.in_use = around, False
                if around is not None:  # the replay or capture around this one goes on after it
                    place.move_to(around)

    def replay() -> None:
        if current_device() == index:
            replay_on_device()
        else:
            with torch.cuda.device(device):
                replay_on_device()

    def replay_graphs() -> None:
        # On the stream used last, and with nothing under way elsewhere, there is nothing to do or to refuse:
        # whether the stream is captured, CUDA says (error 900), and asking costs a fifth of a launch.
        if not acquire_at_once(False):
            wait()
        try:
            raw = current(index)
            around = place.running
            alone = (around is None or around == raw) and not pool.in_use
            if alone and raw == place.last and current_device() == index:
                run(handle(raw))
            else:
                replay()
        finally:
            release()

    def replay_of_both() -> None:
        with pool.exclusive(on):
            replay()

    if on is not place:
        return replay_of_both
    return replay if calls else replay_graphs


# Its memory


def _from_pool(pool_id: PoolId, device: torch.device, make: Callable[[], _Made]) -> _Made:
    """What `make` returns, where what it allocates on the device comes from a pool."""
    torch._C._cuda_beginAllocateCurrentThreadToPool(device.index, pool_id)
    try:
        return make()
    finally:
        torch._C._cuda_endAllocateToPool(device.index, pool_id)
        torch._C._cuda_releasePool(device.index, pool_id)


def segments_of(pool_id: PoolId) -> list[dict[str, Any]]:
    """The ranges of memory that a pool has reserved, and the blocks in them. Takes 4 us, with traces 160.

    torch (2.11: THCPModule_memorySnapshot) takes a reference to each item of the id that nobody gave it.
    Numbers above 256 are objects that die, so from the 257th pool on that corrupts memory. It gets one of
    its own here; a torch that does not take it leaks one number for each pool.
    """
    for item in (*pool_id, False):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(item))
    found: list[dict[str, Any]] = torch.cuda.memory_snapshot(pool_id, include_traces=False)
    return found


def non_owning(pointer: int, device: torch.device, nbytes: int, keeper: object) -> Any:
    """A storage that does not own its memory, and keeps alive what does. `is_non_owning` knows it."""
    made: Any = torch._C._construct_storage_from_data_pointer(pointer, device, nbytes)
    made._segcapture_pool = keeper
    return made


def is_non_owning(storage: torch.UntypedStorage) -> bool:
    """Whether a storage came from `non_owning`."""
    return hasattr(storage, "_segcapture_pool")


class PoolMemory:
    """The memory of a pool during one capture: bridges come from it, and arguments may point into it."""

    def __init__(self, pool: Pool) -> None:
        self._owner = pool
        self._device = pool.device
        _make_room(pool.device)
        self._elsewhere: set[int] = set()
        self._reserved = -1
        segments = segments_of(pool.id)
        self._pool = _ranges_of(segments)
        # Active now means of an earlier capture or owner: those blocks may be freed under us.
        blocks = [block for segment in segments for block in segment["blocks"]]
        self._foreign = _Ranges((b["address"], b["size"]) for b in blocks if b["state"] != "inactive")
        self._storages: dict[int, Any] = {}

    def forget_break(self) -> None:
        """Between breaks a storage dies, and its identity may be another one's later."""
        self._storages.clear()

    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        """A new block of the pool, for the current stream."""
        make = functools.partial(torch.empty, nbytes, dtype=torch.uint8, device=self._device)
        return _from_pool(self._owner.id, self._device, make).untyped_storage()

    def alias(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A non-owning alias of a plain tensor that was allocated from the pool in this capture."""
        if tensor.device != self._device or not shows_memory_alone(tensor) or cannot_be_copied(tensor):
            return None
        storage = tensor.untyped_storage()
        pointer = storage.data_ptr()
        if pointer == 0 or pointer in self._foreign or not self._in_pool(pointer):
            return None
        key = storage._cdata
        if key not in self._storages:
            # User code may store an alias. The pool then outlives the capture, and with it the mapping.
            self._storages[key] = non_owning(pointer, tensor.device, storage.nbytes(), self._owner)
        layout = {
            "size": tensor.shape,
            "stride": tensor.stride(),
            "storage_offset": tensor.storage_offset(),
            "dtype": tensor.dtype,
            "device": tensor.device,
        }
        # An eighth of the time of `torch.empty(0).set_(...)`.
        construct: Any = torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata
        alias: torch.Tensor = construct(layout, self._storages[key])
        return alias

    def _in_pool(self, pointer: int) -> bool:
        if pointer in self._pool:
            return True
        if pointer in self._elsewhere:
            return False
        # A look at a pool of many blocks takes longer than the statistics: only when memory was added.
        reserved = torch._C._cuda_memoryStats(self._device.index)["reserved_bytes"]["all"]["current"]
        if reserved != self._reserved:
            self._reserved = reserved
            self._pool = _ranges_of(segments_of(self._owner.id))
        found = pointer in self._pool
        if not found:
            # Should the pool get this very address later, its tensor is kept strongly: that costs memory,
            # and nothing else.
            self._elsewhere.add(pointer)
        return found


class _Ranges:
    """The addresses in blocks of memory, each given as its first and its size."""

    def __init__(self, blocks: Iterable[tuple[int, int]]) -> None:
        ordered = sorted(blocks)
        self._starts = [start for start, _ in ordered]
        self._ends = [start + size for start, size in ordered]

    def __contains__(self, pointer: int) -> bool:
        at = bisect.bisect_right(self._starts, pointer) - 1
        return at >= 0 and pointer < self._ends[at]


def _ranges_of(segments: Iterable[dict[str, Any]]) -> _Ranges:
    return _Ranges((s["address"], s["total_size"]) for s in segments)


def _make_room(device: torch.device) -> None:
    """Give back what the allocator caches, if that is more than there is free.

    While a capture is running, torch does not do so when memory runs out.
    """
    free, total = torch.cuda.mem_get_info(device)
    limit = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    if limit == total and free >= total - free:
        return  # it cannot be more: it is part of what is not free
    stats = torch._C._cuda_memoryStats(device.index)
    reserved, allocated = (stats[name]["all"]["current"] for name in ("reserved_bytes", "allocated_bytes"))
    if reserved - allocated > min(free, limit - reserved):
        torch.cuda.empty_cache()
