"""Tensors in an output where no copy of it can replace them."""

import gc
import types
from collections.abc import Callable, Collection
from typing import Any

import torch

from segcapture.errors import CaptureFailedError
from segcapture.writeback.structure import Node, children, walk

_NOT_LOOKED_INTO = (
    torch.nn.Module,
    type,
    types.ModuleType,
    types.FunctionType,
    types.CodeType,
    types.FrameType,
    types.TracebackType,
)


def check_within_reach(out: Any, keep: Collection[int], owned: Callable[[torch.Tensor], bool]) -> None:
    """Raise CaptureFailedError if an output holds a capture's tensor outside of the known containers.

    Args:
        out: What the function returned.
        keep: Ids of objects that are handed out as they are.
        owned: Whether a tensor is memory of the capture, or a static input.
    """
    nodes = walk(out)
    kept: list[bool] = []
    for node in nodes:
        kept.append(id(node.value) in keep or (node.parent >= 0 and kept[node.parent]))
        if kept[-1] or node.same_as >= 0 or isinstance(node.value, (torch.Tensor, *_NOT_LOOKED_INTO)):
            continue
        if _hides(node, owned):
            raise CaptureFailedError(
                f"The function returned a {type(node.value).__qualname__} at `{node.path}` that holds a "
                f"tensor of the capture where no copy can replace it: in an object inside of an object, in a "
                f"deque or set, or in an attribute that is no field. Return it in a tuple, list, dict or "
                f"dataclass."
            )


def _hides(node: Node, owned: Callable[[torch.Tensor], bool]) -> bool:
    known = [child for _, _, child in children(node.value) or ()] if node.container else []
    seen = {id(item): item for item in known}
    todo = gc.get_referents(node.value)
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, _NOT_LOOKED_INTO):
            continue
        seen[id(item)] = item
        if not isinstance(item, torch.Tensor):
            todo += gc.get_referents(item)
        elif owned(item):
            return True
    return False
