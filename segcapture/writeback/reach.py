"""Tensors in an output where they cannot be written back: refused, or said, at capture (contract C4)."""

import collections
import collections.abc
import types
from typing import Any

import torch

from segcapture.errors import CaptureFailedError, FrozenValueWarning
from segcapture.thread import warn
from segcapture.writeback.structure import (
    Node,
    attributes_besides,
    children,
    is_plain_object,
    is_record,
    tensors_in,
    walk,
)

_HOLDERS = (
    collections.deque,
    set,
    frozenset,
    types.MappingProxyType,
    collections.abc.KeysView,
    collections.abc.ValuesView,
    collections.abc.ItemsView,
)


def check_within_reach(nodes: list[Node], fresh: set[int], where: str) -> None:
    """Raise CaptureFailedError for tensors that are neither found nor somebody else's.

    Warns (FrozenValueWarning) for those in an object inside of an object: eager segments get the new object,
    and often nobody else reads it.
    """
    for index, node in enumerate(nodes):
        if isinstance(node.value, torch.Tensor) or node.same_as >= 0:
            continue
        what = f"{where} returned a {type(node.value).__qualname__} at `{node.path}`"
        unreached = out_of_reach(node.value)
        if unreached is None and index in fresh and not node.container and hides_tensors(node.value):
            if is_plain_object(node.value):
                warn(
                    f"{what}, in which tensors are not written back: later eager segments get the new "
                    f"object, but graph segments read the tensors of the capture. Return those that graph "
                    f"code reads in a tuple, list, dict, or a field of the outer class.",
                    FrozenValueWarning,
                )
            else:
                unreached = "what is in its items"
        if unreached is not None:
            raise CaptureFailedError(
                f"{what}, in which {unreached} cannot be written back, and holds a tensor. Return the tensor "
                f"in a tuple, list, dict, or a field of the class."
            )


def check_replaced(nodes: list[Node], received: dict[int, torch.Tensor], where: str) -> None:
    """Raise CaptureFailedError for a class that does not hold what is put into it, or has it twice."""
    for index in {nodes[i].parent for i in received} - {-1}:
        value = nodes[index].value
        if isinstance(value, tuple):
            continue
        content = children(value) or ()
        held = {id(item) for _, _, item in content}
        missing = any(id(bridge) not in held for i, bridge in received.items() if nodes[i].parent == index)
        if missing or out_of_reach(value) is not None:
            raise CaptureFailedError(
                f"{where} returned a {type(value).__qualname__} at `{nodes[index].path}`, which does not "
                f"take a new tensor in the place of an item, or keeps it in an attribute too. Return a plain "
                f"dict, list or object."
            )


def out_of_reach(value: Any) -> str | None:
    """What holds tensors where `walk` finds none, in a container or leaf: an attribute, or its items."""
    if isinstance(value, _HOLDERS):
        return "its items" if any(isinstance(item, torch.Tensor) for item in _items(value)) else None
    if not (isinstance(value, tuple | list | dict) or is_record(value)):
        return None
    for name, item in attributes_besides(value, children(value) or ()):
        if next(tensors_in(item), None) is not None:
            return f"its attribute `{name}`"
    return None


def hides_tensors(leaf: Any) -> bool:
    """Whether a leaf of a walk, an object in an object or a deque, say, holds tensors at any depth."""
    seen: dict[int, Any] = {}
    todo = [leaf]
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        for node in walk(value):
            if isinstance(node.value, torch.Tensor):
                return True
            if isinstance(node.value, _HOLDERS):
                todo += _items(node.value)
            elif not node.container and is_plain_object(node.value):
                todo.append(node.value)
    return False


def _items(holder: Any) -> list[Any]:
    return list(holder.values() if isinstance(holder, types.MappingProxyType) else holder)
