"""Bridges: tensors at a fixed address in the pool that carry eager outputs to later segments."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import attrs
import torch

from segcapture.writeback.aliases import own_alias
from segcapture.writeback.memory import byte_range, copy_into, place_on

_ALIGNMENT = 256  # bytes; what the CUDA allocator's blocks have, and vectorised kernels may ask for


class Memory(ABC):
    """Where bridges live, and which tensors need no owner (a part of the backend)."""

    device: torch.device

    @abstractmethod
    def allocate(self, nbytes: int, device: torch.device) -> torch.UntypedStorage:
        """Memory of the pool, or plain memory of another device."""

    def alias(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A non-owning alias of memory of the pool, or None for a tensor that must be kept strongly."""
        return None

    @abstractmethod
    def wait_for_host_copies(self) -> None:
        """Wait until all that was started is done, copies to the host among it."""


@attrs.frozen(eq=False)
class Bridges:
    """The bridges of one eager segment's output, in the order of its fresh leaves."""

    targets: list[torch.Tensor]
    """Tensors on them that keep no memory of the pool alive."""
    spans: list[tuple[int, int]]
    """The first address of each, and the one past its last."""
    kept: list[torch.Tensor]
    """Those that nothing else keeps alive."""

    @property
    def nbytes(self) -> int:
        """Bytes of all."""
        return sum(high - low for low, high in self.spans)


def bridge(leaves: Sequence[torch.Tensor], memory: Memory) -> tuple[list[torch.Tensor], Bridges]:
    """Allocate bridges for fresh tensors, one for those that share a storage, and fill them.

    Returns what the model receives for each, and what is kept.
    """
    groups: dict[int, list[torch.Tensor]] = {}
    for tensor in leaves:
        groups.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    bridges, by_id = Bridges([], [], []), {}
    for group in groups.values():
        placed, span = _place_group(group, memory)
        by_id.update(placed)
        bridges.spans.append(span)
    made = [by_id[id(tensor)] for tensor in leaves]
    if any(tensor.device != memory.device for tensor in leaves):
        memory.wait_for_host_copies()
    with torch.no_grad():
        for target, tensor in zip(made, leaves, strict=True):
            copy_into(target, tensor)
    for tensor in made:
        alias = memory.alias(tensor)
        if alias is None:
            # Another object than the model's, which may change the shape of its own in place.
            alias = own_alias(tensor)
            bridges.kept.append(tensor)
        bridges.targets.append(alias)
    return made, bridges


def _place_group(
    leaves: Sequence[torch.Tensor], memory: Memory
) -> tuple[dict[int, torch.Tensor], tuple[int, int]]:
    """One bridge for leaves that share a storage, over the bytes that they cover: by the id of each leaf."""
    ranges = [byte_range(tensor) for tensor in leaves]
    low = min(start for start, _ in ranges) // _ALIGNMENT * _ALIGNMENT
    nbytes = max(end for _, end in ranges) - low
    device = leaves[0].device
    storage = memory.allocate(nbytes, device)
    placed: dict[int, torch.Tensor] = {}  # one object for a tensor that occurs twice
    for tensor in leaves:
        if id(tensor) not in placed:
            offset = int(tensor.storage_offset()) * tensor.element_size() - low if tensor.numel() else 0
            placed[id(tensor)] = place_on(storage, tensor, offset, device)
    return placed, (storage.data_ptr(), storage.data_ptr() + nbytes)
