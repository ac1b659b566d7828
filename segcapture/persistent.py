"""Leaves of an output that are somebody's memory, and stay it: an argument, a cache (contract C4)."""

import gc
import weakref
from typing import Any, Protocol

import attrs
import torch

from segcapture.bridges import Memory, check_layout, check_repeats, unbridgeable
from segcapture.errors import OutputMismatchError
from segcapture.memory import copy_into, same_memory
from segcapture.ownership import own_alias, owned_by_us_alone, storage_id
from segcapture.structure import Node


class Holders(Protocol):
    """Tells how many references to a tensor the capture's own recorded calls keep."""

    def __call__(self, tensor: torch.Tensor, /) -> int: ...


@attrs.frozen(eq=False)
class Persistent:
    """A leaf that is somebody's memory: an argument, or a tensor that others own too."""

    path: str
    tensor: torch.Tensor
    """An alias that is no owner."""
    captured: "tuple[weakref.ref[torch.Tensor], ...]"
    """The captured tensors on its storage; empty where nothing may be copied to it."""

    def is_same(self, new: Any) -> bool:
        """Whether a leaf is the captured memory; False may also be a doubt."""
        tensor = self.tensor
        return new is tensor or (
            type(new) is torch.Tensor is type(tensor)
            and new.shape == tensor.shape
            and new.dtype is tensor.dtype
            and new.device == tensor.device
            and new.layout is torch.strided
            and same_memory(tensor, new)
        )

    def check(self, new: Any, where: str) -> None:
        """Accept the same shape, dtype and device."""
        check_layout(where, self.path, self.tensor, new)

    def store(self, new: torch.Tensor, holders: Holders, where: str) -> None:
        """Accept the same memory, or copy where nobody else can see the captured tensor."""
        if same_memory(self.tensor, new):
            return
        if not self.captured or not self._is_ours_alone(holders):
            owner = "memory that others own too" if self.captured else "the memory of an argument or subclass"
            raise OutputMismatchError(
                f"{where} returned other memory at `{self.path}`: later segments read {owner}, "
                f"{_place(self.tensor)}, found {_place(new)}. Copying would change the owner's data, not "
                f"copying would be stale: return a new tensor (`.clone()`), or the same one each time."
            )
        check_repeats(where, self.path, self.tensor, new)
        with torch.no_grad():
            copy_into(self.tensor, new)

    def _is_ours_alone(self, holders: Holders) -> bool:
        if owned_by_us_alone(self.tensor, self.captured, holders):
            return True
        gc.collect()  # a cycle may hold it that nobody can reach
        return owned_by_us_alone(self.tensor, self.captured, holders)


def _place(tensor: torch.Tensor) -> str:
    return f"0x{tensor.data_ptr():x} with strides {list(tensor.stride())}"


def keep(
    index: int, nodes: list[Node], same_storage: list[int], given: set[int], memory: Memory
) -> Persistent:
    """A leaf that is not fresh, as an alias or, where memory does not show all of it, as itself."""
    path, tensor = nodes[index].path, nodes[index].value
    if unbridgeable(tensor):
        return Persistent(path, tensor, ())
    alias = memory.alias(tensor)
    if alias is not None or storage_id(tensor) in given:
        return Persistent(path, own_alias(tensor) if alias is None else alias, ())
    seen = {id(nodes[i].value): weakref.ref(nodes[i].value) for i in same_storage}
    return Persistent(path, own_alias(tensor), tuple(seen.values()))
