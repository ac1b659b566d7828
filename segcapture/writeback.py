"""Outputs of an eager segment: bridged at capture, checked and written back at replay (contract C4)."""

import warnings
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import attrs
import torch

from segcapture.bridges import Bridges, Memory, check_layout
from segcapture.errors import FrozenValueWarning, OutputMismatchError
from segcapture.ownership import fresh_nodes, owned_by_us_alone
from segcapture.structure import Node, replace_items, set_item, walk

Store = Callable[[Any], None]


class Holders(Protocol):
    """Tells how many references to a tensor the capture's own recorded calls keep."""

    def __call__(self, tensor: torch.Tensor, /) -> int: ...


@attrs.frozen(eq=False)
class Persistent:
    """A leaf that is somebody's memory: an argument, or a tensor that others own too."""

    path: str
    tensor: torch.Tensor
    argument: bool

    def store(self, new: Any, holders: Holders, where: str) -> None:
        """Accept the same memory, or copy where nobody else can see the captured tensor."""
        check_layout(where, self.path, self.tensor, new)
        if new.data_ptr() == self.tensor.data_ptr() and new.stride() == self.tensor.stride():
            return
        if self.argument or not owned_by_us_alone([self.tensor], holders(self.tensor) + 1):
            owner = "an argument's memory" if self.argument else "memory that others own too"
            raise OutputMismatchError(
                f"{where} returned a tensor at another address at `{self.path}`: later segments read "
                f"{owner} at 0x{self.tensor.data_ptr():x}, found 0x{new.data_ptr():x}. Copying would "
                f"change the owner's data, not copying would be stale: return a new tensor "
                f"(`.clone()`), or the same one each time."
            )
        with torch.no_grad():
            self.tensor.copy_(new)


class Writeback:
    """The compiled plan of one eager segment's output.

    `store(out)` checks a new output against the captured one and brings its values to where later
    segments read them.
    """

    def __init__(
        self,
        nodes: list[Node],
        where: str,
        bridges: Bridges,
        persistent: dict[int, Persistent],
        holders: Holders,
    ) -> None:
        self.where = where
        self.bridges = bridges
        self.persistent = persistent
        self._holders = holders
        self._warned: set[int] = set()
        kept = _containers_to_update(nodes)
        self._nodes = [
            attrs.evolve(
                node,
                value=node.value if index in kept or not _is_bulky(node) else None,
            )
            for index, node in enumerate(nodes)
        ]
        self._types = [type(node.value) for node in nodes]
        self._updates = kept
        self.store: Store = self._specialised(nodes)

    def _specialised(self, nodes: list[Node]) -> Store:
        """The shortest way to do the same: no walk for one tensor or a flat container of tensors."""
        if len(nodes) == 1 and nodes[0].value is None:
            return self._store_none
        if self.persistent or len(self.bridges) != sum(isinstance(n.value, torch.Tensor) for n in nodes):
            return self._store_tree
        if len(nodes) == 1 and len(self.bridges) == 1:
            return self.bridges.store_one
        root = nodes[0].value
        flat = len(nodes) == 1 + len(self.bridges) and not self._updates
        if flat and isinstance(root, tuple | list):
            return self._store_sequence
        if flat and isinstance(root, dict):
            self._keys = list(root)
            return self._store_dict
        return self._store_tree

    def _store_none(self, out: Any) -> None:
        if out is not None:
            self._store_tree(out)

    def _store_sequence(self, out: Any) -> None:
        if type(out) is not self._types[0] or len(out) != len(self.bridges):
            self._store_tree(out)
        else:
            self.bridges.store(out)

    def _store_dict(self, out: Any) -> None:
        if type(out) is not self._types[0] or list(out) != self._keys:
            self._store_tree(out)
        else:
            self.bridges.store(list(out.values()))

    def _store_tree(self, out: Any) -> None:
        """Any structure: compare node by node, then write the leaves back."""
        found = walk(out)
        order = {node.path: index for index, node in enumerate(self._nodes)}
        if all(node.path in order for node in found):
            found.sort(key=lambda node: order[node.path])  # a dict is its keys, not their order
        self._compare_structure(found)
        self.bridges.store([found[i].value for i in self.bridges.nodes])
        for index, leaf in self.persistent.items():
            leaf.store(found[index].value, self._holders, self.where)
        for index, (old, new) in enumerate(zip(self._nodes, found, strict=True)):
            if not old.container and index not in self.persistent and index not in self.bridges.position:
                self._update_value(index, old, new.value)

    def _compare_structure(self, found: list[Node]) -> None:
        for index, (old, new) in enumerate(zip(self._nodes, found, strict=False)):
            old_type = self._types[index]
            same_kind = (
                old.path == new.path
                and old.container == new.container
                and old.same_as == new.same_as
                and (not old.container or old_type is type(new.value))
                and isinstance(new.value, torch.Tensor) == issubclass(old_type, torch.Tensor)
            )
            if not same_kind:
                raise OutputMismatchError(
                    f"{self.where} returned another structure: later segments read "
                    f"{_describe_type(old_type)} at `{old.path}`, found "
                    f"{_describe_type(type(new.value))} at `{new.path}`. The structure of an output is "
                    f"fixed at capture: return the same one each time, or capture again."
                )
        if len(found) != len(self._nodes):
            longer = found if len(found) > len(self._nodes) else self._nodes
            extra = longer[min(len(found), len(self._nodes))]
            verb = "an additional" if longer is found else "no"
            raise OutputMismatchError(
                f"{self.where} returned {verb} `{extra.path}`: {len(self._nodes)} items at capture, "
                f"{len(found)} now. The structure of an output is fixed at capture."
            )

    def _update_value(self, index: int, old: Node, new: Any) -> None:
        if _equal(old.value, new):
            return
        if old.parent in self._updates:
            set_item(self._nodes[old.parent].value, old.key, new)
            old.value = new
        elif index not in self._warned:
            self._warned.add(index)
            warnings.warn(
                f"{self.where} returned {new!r} at `{old.path}`, and {old.value!r} at capture. Later "
                f"segments were recorded for the old value. Return it as a tensor, or in a list, dict "
                f"or object that a later eager segment reads.",
                FrozenValueWarning,
                stacklevel=2,
            )


def _containers_to_update(nodes: list[Node]) -> set[int]:
    """Mutable containers with fields that are no tensors: kept, so that replay can replace those."""
    return {
        node.parent
        for node in nodes
        if node.parent >= 0
        and not node.container
        and not isinstance(node.value, torch.Tensor)
        and not isinstance(nodes[node.parent].value, tuple)
    }


def _is_bulky(node: Node) -> bool:
    return node.container or isinstance(node.value, torch.Tensor)


def _equal(old: Any, new: Any) -> bool:
    if old is new:
        return True
    if type(old) is not type(new):
        return False
    try:
        return bool(old == new)
    except Exception:
        return False


def _describe_type(kind: type) -> str:
    return "a tensor" if issubclass(kind, torch.Tensor) else f"a {kind.__qualname__}"


def plan(
    nodes: list[Node],
    arguments: Iterable[torch.Tensor],
    memory: Memory,
    where: str,
    holders: Holders,
) -> tuple[Any, Writeback]:
    """Bridge the fresh leaves of an output that was just made, and compile its write-back.

    Returns what the model code receives, and the plan. `nodes` must hold the only references to the
    output (see `ownership.fresh_nodes`).

    Raises:
        CaptureFailedError: a fresh output is a tensor that cannot be bridged (a subclass, a sparse or
            quantized tensor).
    """
    arguments = list(arguments)
    fresh = fresh_nodes(nodes, arguments)
    given = {t.untyped_storage()._cdata for t in arguments if t.layout is torch.strided}
    leaves = [i for i, node in enumerate(nodes) if isinstance(node.value, torch.Tensor)]
    bridges = Bridges(where, memory)
    persistent: dict[int, Persistent] = {}
    for index in leaves:
        node = nodes[index]
        tensor = node.value
        # Anything that cannot be counted (a sparse tensor, say) is refused as if it were fresh.
        if index in fresh or tensor.layout is not torch.strided:
            bridges.add(index, node.path, tensor)
        else:
            alias = memory.alias(tensor)
            argument = tensor.untyped_storage()._cdata in given or alias is not None
            persistent[index] = Persistent(node.path, tensor if alias is None else alias, argument)
    received = bridges.build()
    root = replace_items(nodes, received)
    after = [
        attrs.evolve(node, value=received.get(i, node.value)) if i in received else node
        for i, node in enumerate(nodes)
    ]
    return root, Writeback(after, where, bridges, persistent, holders)
