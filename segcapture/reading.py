"""Outputs that are built as the captured one, read without a walk over every node."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from segcapture.errors import OutputMismatchError
from segcapture.structure import Node, children


class Reader:
    """Finds in a new output what stands in the places of a captured one.

    Args:
        nodes: The walked output; their values are not kept.
        where: The segment, for messages.
    """

    def __init__(self, nodes: list[Node], where: str) -> None:
        self._where = where
        self._containers = [
            (index, self._items_of(node, [nodes[i] for i in node.inside]))
            for index, node in enumerate(nodes)
            if node.container and node.same_as < 0
        ]
        self._twice = [(i, node.same_as, node.path) for i, node in enumerate(nodes) if node.same_as >= 0]

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
                raise self.mismatch(f"another structure: two objects, of which `{path}` was one at capture")
        return values

    def mismatch(self, what: str) -> OutputMismatchError:
        """The error for an output that is built in another way."""
        return OutputMismatchError(
            f"{self._where} returned {what}. The structure of an output is fixed at capture: return the same "
            f"one each time (pad it to one length, say), or capture again."
        )

    def _items_of(self, node: Node, inside: list[Node]) -> Callable[[Any], Iterable[Any]]:
        kind, count, in_object = type(node.value), len(inside), node.in_object
        # 1, 1.0 and True are equal keys.
        paths = {(type(item.key), item.key): item.path for item in inside}
        keys = [item.key for item in inside] if all(type(item.key) is str for item in inside) else None
        path = node.path

        def in_order(new: Any) -> Iterable[Any]:
            if type(new) is kind and len(new) == count:
                items: Iterable[Any] = new
                return items
            return by_key(new)

        def by_key(new: Any) -> Iterable[Any]:
            if keys is not None and type(new) is kind is dict and list(new) == keys:
                return new.values()
            content = children(new, in_object) if type(new) is kind else None
            if content is None:
                raise self.other_kind(path, kind, new)
            found = {(type(key), key): item for key, _, item in content}
            if found.keys() != paths.keys():
                now = {(type(key), key): path + suffix for key, suffix, _ in content}
                raise self._other_items(paths, now)
            return [found[key] for key in paths]

        return in_order if isinstance(node.value, list | tuple) else by_key

    def other_kind(self, path: str, kind: type, new: Any) -> OutputMismatchError:
        """The error for something else than at capture in one place."""
        before, now = _describe(kind), _describe(type(new))
        return self.mismatch(f"another structure: later segments read {before} at `{path}`, found {now}")

    def _other_items(self, before: dict[Any, str], now: dict[Any, str]) -> OutputMismatchError:
        missing = [f"no `{path}`" for key, path in before.items() if key not in now]
        added = [f"an additional `{path}`" for key, path in now.items() if key not in before]
        what = " and ".join([*missing[:1], *added[:1]])
        kind = "another structure: " if missing and added else ""
        return self.mismatch(f"{kind}{what}: {len(before)} items there at capture, {len(now)} now")


def _describe(kind: type) -> str:
    return "a tensor" if issubclass(kind, torch.Tensor) else f"a {kind.__qualname__}"
