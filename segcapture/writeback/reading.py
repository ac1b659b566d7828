"""Outputs that are built as the captured one, read without a walk over every node."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from segcapture.errors import OutputMismatchError
from segcapture.writeback.structure import Node, children

Items = Callable[[Any], Iterable[Any]]
"""The items of a container that is built as the captured one; else an OutputMismatchError."""


class Reader:
    """Finds in a new output what stands in the places of a captured one.

    Args:
        nodes: The walked output; their values are not kept.
        where: The segment, for messages.
    """

    def __init__(self, nodes: list[Node], where: str) -> None:
        self._where = where
        self._containers = [
            (index, _items_of(node, [nodes[i] for i in node.inside], where))
            for index, node in enumerate(nodes)
            if node.container and node.same_as < 0
        ]
        self.containers = [index for index, _ in self._containers]
        """Indices of the nodes whose items are read."""
        self._twice = [(i, node.same_as, node.path) for i, node in enumerate(nodes) if node.same_as >= 0]
        mutable = [i for i in self.containers if not isinstance(nodes[i].value, tuple)]
        self._apart = mutable if len(mutable) > 1 else []

    def __call__(self, out: Any) -> list[Any]:
        """The value of each node, in the order of the walk.

        Raises:
            OutputMismatchError: a container is of another class, or has other items.
        """
        values = [out]
        for index, items in self._containers:
            values += items(values[index])
        for index, first, path in self._twice:
            if values[index] is not values[first]:
                raise _mismatch(
                    self._where, f"another structure: two objects, and one at capture, at `{path}`"
                )
        if self._apart and len({id(values[i]) for i in self._apart}) < len(self._apart):
            raise _mismatch(self._where, "another structure: one container in two places, and two at capture")
        return values


# Functions of the module: what they return must not refer to the reader, which refers to it.
def _items_of(node: Node, inside: list[Node], where: str) -> Items:
    kind, path, in_object = type(node.value), node.path, node.in_object
    # 1, 1.0 and True are equal keys.
    paths = {(type(item.key), item.key): item.path for item in inside}
    names = [item.key for item in inside] if {type(item.key) for item in inside} <= {str} else None

    def by_key(new: Any) -> Iterable[Any]:
        if type(new) is kind is dict and list(new) == names:
            return new.values()
        content = children(new, in_object) if type(new) is kind else None
        if content is None:
            raise other_kind(where, path, kind, new)
        found = {(type(key), key): item for key, _, item in content}
        if found.keys() != paths.keys():
            raise _other_items(where, paths, {(type(key), key): path + suffix for key, suffix, _ in content})
        return [found[key] for key in paths]

    def in_order(new: Any) -> Iterable[Any]:
        items: Iterable[Any] = new
        return items if type(new) is kind and len(new) == len(paths) else by_key(new)

    return in_order if isinstance(node.value, list | tuple) else by_key


def other_kind(where: str, path: str, kind: type, new: Any) -> OutputMismatchError:
    """The error for something else than at capture in one place."""
    before, now = _describe(kind), _describe(type(new))
    return _mismatch(where, f"another structure: later segments read {before} at `{path}`, found {now}")


def _other_items(where: str, before: Mapping[Any, str], now: Mapping[Any, str]) -> OutputMismatchError:
    missing = [f"no `{path}`" for key, path in before.items() if key not in now]
    added = [f"an additional `{path}`" for key, path in now.items() if key not in before]
    what = " and ".join([*missing[:1], *added[:1]])
    if len(before) != len(now):
        what += f": {len(before)} items there at capture, {len(now)} now (pad it to one length)"
    return _mismatch(where, what)


def _mismatch(where: str, what: str) -> OutputMismatchError:
    return OutputMismatchError(
        f"{where} returned {what}. The structure of an output is fixed at capture: return the same one each "
        f"time, or capture again."
    )


def _describe(kind: type) -> str:
    return "a tensor" if issubclass(kind, torch.Tensor) else f"a {kind.__qualname__}"
