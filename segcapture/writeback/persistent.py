"""Leaves of an output that are somebody's memory, and stay it: an argument, a cache (contract C4)."""

import gc
import weakref
from collections.abc import Callable, Iterable

import torch

from segcapture.errors import OutputMismatchError
from segcapture.writeback.aliases import own_alias
from segcapture.writeback.bridges import Memory
from segcapture.writeback.memory import unbridgeable
from segcapture.writeback.ownership import owned_by_us_alone

Captured = tuple["weakref.ref[torch.Tensor]", ...]
"""The captured tensors on the storage of a leaf; none where nothing may be copied to it."""
Holders = Callable[[torch.Tensor], int]
"""Tells how many references to a tensor the capture's own recorded calls keep."""


def keep(
    tensor: torch.Tensor, on_storage: Iterable[torch.Tensor], given: bool, memory: Memory
) -> tuple[torch.Tensor, Captured]:
    """What is kept of a leaf: an alias or, where memory does not show all of it, itself.

    `on_storage` are the kept leaves on its storage, itself among them; `given` says whether it is memory of
    an argument.
    """
    if unbridgeable(tensor):
        return tensor, ()
    alias = memory.alias(tensor)
    if alias is not None or given:
        return own_alias(tensor) if alias is None else alias, ()
    seen = {id(leaf): weakref.ref(leaf) for leaf in on_storage}
    return own_alias(tensor), tuple(seen.values())


def check_ours(
    kept: torch.Tensor, captured: Captured, holders: Holders, new: torch.Tensor, where: str, path: str
) -> None:
    """Raise OutputMismatchError for a leaf that has moved, unless nobody else can see the captured one."""
    if captured and _is_ours_alone(kept, captured, holders):
        return
    owner = "memory that others own too" if captured else "the memory of an argument or subclass"
    raise OutputMismatchError(
        f"{where} returned other memory at `{path}`: later segments read {owner}, {_place(kept)}, found "
        f"{_place(new)}. Copying would change the owner's data, not copying would be stale: return a new "
        f"tensor (`.clone()`), or the same one each time."
    )


def _is_ours_alone(kept: torch.Tensor, captured: Captured, holders: Holders) -> bool:
    if owned_by_us_alone(kept, captured, holders):
        return True
    gc.collect()  # a cycle may hold it that nobody can reach
    return owned_by_us_alone(kept, captured, holders)


def _place(tensor: torch.Tensor) -> str:
    return f"0x{tensor.data_ptr():x} with strides {list(tensor.stride())}"
