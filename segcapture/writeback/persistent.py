"""Leaves of an output that are somebody's memory, and stay it: an argument, a cache (contract C4)."""

import gc
import weakref
from collections.abc import Callable, Iterable

import attrs
import torch

from segcapture.errors import OutputMismatchError
from segcapture.writeback.bridges import Memory
from segcapture.writeback.layouts import unbridgeable
from segcapture.writeback.ownership import own_alias, owned_by_us_alone

Holders = Callable[[torch.Tensor], int]
"""Tells how many references to a tensor the capture's own recorded calls keep."""


@attrs.frozen(eq=False)
class Persistent:
    """A leaf that is somebody's memory: an argument, or a tensor that others own too."""

    path: str
    tensor: torch.Tensor
    """An alias that is no owner."""
    captured: "tuple[weakref.ref[torch.Tensor], ...]"
    """The captured tensors on its storage; empty where nothing may be copied to it."""

    @classmethod
    def of(
        cls, path: str, tensor: torch.Tensor, on_storage: Iterable[torch.Tensor], given: bool, memory: Memory
    ) -> "Persistent":
        """Keep a leaf as an alias or, where memory does not show all of it, as itself.

        `on_storage` are the kept leaves on its storage, itself among them; `given` says whether it is memory
        of an argument.
        """
        if unbridgeable(tensor):
            return cls(path, tensor, ())
        alias = memory.alias(tensor)
        seen = {id(leaf): weakref.ref(leaf) for leaf in on_storage} if alias is None and not given else {}
        return cls(path, own_alias(tensor) if alias is None else alias, tuple(seen.values()))

    def check_ours(self, new: torch.Tensor, holders: Holders, where: str) -> None:
        """Raise OutputMismatchError for other memory, unless nobody else can see the captured tensor."""
        if self.captured and self._is_ours_alone(holders):
            return
        owner = "memory that others own too" if self.captured else "the memory of an argument or subclass"
        raise OutputMismatchError(
            f"{where} returned other memory at `{self.path}`: later segments read {owner}, "
            f"{_place(self.tensor)}, found {_place(new)}. Copying would change the owner's data, not "
            f"copying would be stale: return a new tensor (`.clone()`), or the same one each time."
        )

    def _is_ours_alone(self, holders: Holders) -> bool:
        if owned_by_us_alone(self.tensor, self.captured, holders):
            return True
        gc.collect()  # a cycle may hold it that nobody can reach
        return owned_by_us_alone(self.tensor, self.captured, holders)


def _place(tensor: torch.Tensor) -> str:
    return f"0x{tensor.data_ptr():x} with strides {list(tensor.stride())}"
