"""Tensors that graphs read where they are: held while they live, and their death is noticed."""

import contextlib
import functools
import types
import weakref
from collections.abc import Container
from typing import Any

import torch

from segcapture.inspect.snapshot import Slot
from segcapture.operators.intercept import Use
from segcapture.trees import get_item, is_plain_object, is_record


class _Token:
    """Stands in the `__dict__` of a tensor, and dies with it.

    A weak reference on the tensor itself would make `torch.utils.swap_tensors` fail.
    """

    def __reduce__(self) -> Any:
        return dict, ()  # a copy of the tensor is another tensor


_TOKEN = "_segcapture_token"


class HeldTensors:
    """Tensors that graphs read where they are: their memory, for as long as they live.

    Args:
        kept: Identities of tensors that the capture keeps itself, so that they do not die.
    """

    def __init__(self, kept: Container[int]) -> None:
        self._kept = kept
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._tokens: list[Any] = []
        self._attributes: list[tuple[weakref.ref[Any], str, int, int, tuple[str, Use | None]]] = []
        self._items: list[tuple[Any, Any, int, int, tuple[str, Use | None]]] = []
        self.dead: list[tuple[str, Use | None]] = []
        """Where tensors stood that have died, and what reads them."""
        self.replaying = False
        """Whether the graphs that read them run now: no memory goes meanwhile."""

    def add(self, slot: Slot, use: Use | None) -> None:
        """Hold a tensor that stands in a place."""
        tensor, what, owner = slot.value, (slot.path, use), slot.owner
        assert tensor is not None
        attributes = vars(tensor)
        if type(attributes.get(_TOKEN)) is not _Token:
            attributes[_TOKEN] = _Token()
        token = attributes[_TOKEN]
        self._storages[id(token)] = tensor.untyped_storage()
        died = functools.partial(_died, weakref.ref(self), id(token), what)
        self._tokens.append(weakref.ref(token, died))
        place = slot.key, id(tensor), tensor.data_ptr(), what
        if is_record(owner) or is_plain_object(owner):
            with contextlib.suppress(TypeError):  # it has slots, and none for weak references
                self._attributes.append((weakref.ref(owner), *place))
        elif id(tensor) in self._kept and isinstance(owner, list | dict | types.CellType):
            self._items.append((owner, *place))

    def change(self) -> tuple[str, Use | None] | None:
        """Where one stood that has died, has moved, or in whose place another one stands; what reads it."""
        if self.dead:
            return self.dead[0]
        # None has died, so that no other one has its identity.
        for owner, key, identity, address, what in self._attributes:
            tensor = getattr(owner(), key, None)
            if id(tensor) != identity or tensor.data_ptr() != address:  # type: ignore[union-attr]
                return what
        for holder, key, identity, address, what in self._items:
            tensor = _item(holder, key)
            if id(tensor) != identity or tensor.data_ptr() != address:
                return what
        return None


def _died(held: Any, token: int, what: tuple[str, Use | None], _: object) -> None:
    # A weak reference to those who hold: they hold the reference that calls this.
    if (holder := held()) is not None:
        holder.dead.append(what)
        if not holder.replaying:
            holder._storages.pop(token, None)


def _item(owner: Any, key: Any) -> Any:
    try:
        return get_item(owner, key)
    except (KeyError, IndexError, AttributeError, ValueError):
        return None
