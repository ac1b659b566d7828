"""The memory of a pool: what it has reserved, and whose memory a tensor is in (contract C3)."""

import bisect
import ctypes
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from segcapture.tensors import cannot_be_copied, shows_memory_alone

PoolId = Any  # (int, int): torch's stubs make a type of their own of it


@contextmanager
def allocating_from(pool_id: PoolId, device: torch.device) -> Iterator[None]:
    """For the block, what this thread allocates on the device comes from a pool."""
    torch._C._cuda_beginAllocateCurrentThreadToPool(device.index, pool_id)
    try:
        yield
    finally:
        torch._C._cuda_endAllocateToPool(device.index, pool_id)
        torch._C._cuda_releasePool(device.index, pool_id)


def segments_of(pool_id: PoolId) -> list[dict[str, Any]]:
    """The ranges of memory that a pool has reserved, and the blocks in them.

    torch (2.11: THCPModule_memorySnapshot) takes a reference to each item of the id that nobody gave it.
    Numbers above 256 are objects that die, so from the 257th pool on that corrupts memory. It gets one of
    its own here; a torch that does not take it leaks one number for each pool.
    """
    for item in (*pool_id, True):  # later versions pass `include_traces` on with them
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(item))
    found: list[dict[str, Any]] = torch.cuda.memory_snapshot(pool_id)
    return found


def bytes_of(pool_id: PoolId) -> tuple[int, int]:
    """Bytes that a pool has reserved, and those in use."""
    segments = segments_of(pool_id)
    return sum(s["total_size"] for s in segments), sum(s["active_size"] for s in segments)


def borrowed(pointer: int, device: torch.device, nbytes: int, keeper: object) -> Any:
    """A storage that does not own its memory, and keeps alive what does. `is_borrowed` knows it."""
    made: Any = torch._C._construct_storage_from_data_pointer(pointer, device, nbytes)
    made._segcapture_pool = keeper
    return made


def is_borrowed(storage: torch.UntypedStorage) -> bool:
    """Whether a storage came from `borrowed`."""
    return hasattr(storage, "_segcapture_pool")


class PoolMemory:
    """The memory of a pool during one capture: bridges come from it, and arguments may point into it.

    What an alias must keep alive is `keeper`.
    """

    def __init__(self, pool_id: PoolId, device: torch.device, keeper: object) -> None:
        self._id = pool_id
        self._device = device
        self._keeper = keeper
        self._elsewhere: set[int] = set()
        self._reserved = self._bytes_reserved()
        segments = segments_of(pool_id)
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
        with allocating_from(self._id, self._device):
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device).untyped_storage()

    def alias(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A non-owning alias of a plain tensor that was allocated from the pool in this capture."""
        plain = shows_memory_alone(tensor) and not cannot_be_copied(tensor)
        if not plain or tensor.device != self._device or tensor.is_conj() or tensor.is_neg():
            return None
        storage = tensor.untyped_storage()
        pointer = storage.data_ptr()
        if pointer == 0 or pointer in self._foreign or not self._in_pool(pointer):
            return None
        key = storage._cdata
        if key not in self._storages:
            # User code may store an alias. The pool then outlives the capture, and with it the mapping.
            self._storages[key] = borrowed(pointer, tensor.device, storage.nbytes(), self._keeper)
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
        # A snapshot costs 175 us and the statistics 12: look again only when memory was added.
        reserved = self._bytes_reserved()
        if reserved != self._reserved:
            self._reserved = reserved
            self._pool = _ranges_of(segments_of(self._id))
        found = pointer in self._pool
        if not found:
            # Should the pool get this very address later, its tensor is kept strongly: that costs memory,
            # and nothing else.
            self._elsewhere.add(pointer)
        return found

    def _bytes_reserved(self) -> int:
        """Of the whole device."""
        found: int = torch._C._cuda_memoryStats(self._device.index)["reserved_bytes"]["all"]["current"]
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


def make_room(device: torch.device) -> None:
    """Give back what the allocator caches, if that is more than there is free.

    While a capture is running, torch does not do so when memory runs out.
    """
    free, total = torch.cuda.mem_get_info(device)
    limit = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    free = min(free, limit - torch.cuda.memory_reserved(device))
    if torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) > free:
        torch.cuda.empty_cache()
