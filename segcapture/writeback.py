"""Outputs of an eager segment: bridged at capture, checked and written back at replay (contract C4)."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import attrs
import torch

from segcapture.bridges import Bridges, Memory, check_layout, check_repeats, unbridgeable
from segcapture.errors import CaptureFailedError, FrozenValueWarning, OutputMismatchError
from segcapture.memory import Sharing, copy_into, same_memory
from segcapture.ownership import fresh_nodes, own_alias, owned_by_us_alone, storage_id
from segcapture.source import warn
from segcapture.structure import Node, out_of_reach, replace_items, set_item, walk

Store = Callable[[Any], None]


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

    def check(self, new: Any, where: str) -> None:
        """Accept the same shape, dtype and device."""
        check_layout(where, self.path, self.tensor, new)

    def store(self, new: torch.Tensor, holders: Holders, where: str) -> None:
        """Accept the same memory, or copy where nobody else can see the captured tensor."""
        if same_memory(self.tensor, new):
            return
        if not self.captured or not owned_by_us_alone(self.tensor, self.captured, holders):
            owner = "memory that others own too" if self.captured else "the memory of an argument or subclass"
            raise OutputMismatchError(
                f"{where} returned other memory at `{self.path}`: later segments read {owner}, "
                f"{_place(self.tensor)}, found {_place(new)}. Copying would change the owner's data, not "
                f"copying would be stale: return a new tensor (`.clone()`), or the same one each time."
            )
        check_repeats(where, self.path, self.tensor, new)
        with torch.no_grad():
            copy_into(self.tensor, new)


def _place(tensor: torch.Tensor) -> str:
    return f"0x{tensor.data_ptr():x} with strides {list(tensor.stride())}"


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
        sharing: Sharing,
        owned: set[int],
    ) -> None:
        self.where = where
        self.bridges = bridges
        self.persistent = persistent
        self._holders = holders
        self._sharing = sharing
        self._owned = owned
        self._warned: set[int] = set()
        kept = _containers_to_update(nodes)
        self._types = [type(node.value) for node in nodes]
        self._nodes = nodes
        self._updates = kept
        self._order = {node.path: index for index, node in enumerate(nodes)}
        self._leaves = sorted([*bridges.nodes, *persistent])
        self.store: Store = self._specialised(nodes)
        for index, node in enumerate(nodes):  # keep no tensor alive, and no container without need
            if index not in kept and (node.container or isinstance(node.value, torch.Tensor)):
                node.value = None

    @property
    def expects_none(self) -> bool:
        """Whether the function returned None, so that there is nothing to store."""
        return len(self._nodes) == 1 and self._types[0] is type(None)

    def leaves(self) -> list[tuple[str, torch.Tensor]]:
        """Path of each tensor in the output, and the memory in which later segments read it."""
        carried = dict(zip(self.bridges.nodes, self.bridges.targets, strict=True))
        return [
            (self._nodes[i].path, carried[i] if i in carried else self.persistent[i].tensor)
            for i in self._leaves
        ]

    def frozen(self) -> list[tuple[str, Any]]:
        """Path of each plain value in the output that cannot be replaced, and the value at capture."""
        return [
            (node.path, node.value)
            for index, node in enumerate(self._nodes)
            if not node.container and node.parent not in self._updates and not self._is_tensor(index)
        ]

    def _is_tensor(self, index: int) -> bool:
        return issubclass(self._types[index], torch.Tensor)

    def _specialised(self, nodes: list[Node]) -> Store:
        """The shortest way to do the same: no walk for one tensor or a flat container of tensors."""
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
        found = walk(out, self._order)
        self._compare_structure(found)
        new = [found[i].value for i in self.bridges.nodes]
        self.bridges.check_layouts(new)
        for index, leaf in self.persistent.items():
            leaf.check(found[index].value, self.where)
        leaves = [found[i].value for i in self._leaves]
        self._sharing.check(leaves, [leaf.data_ptr() for leaf in leaves])
        for index, leaf in self.persistent.items():
            leaf.store(found[index].value, self._holders, self.where)
        self.bridges.write(new, [leaf.data_ptr() for leaf in new])
        for index, (old, node) in enumerate(zip(self._nodes, found, strict=True)):
            if not old.container and index not in self.persistent and index not in self.bridges.position:
                self._update_value(index, old, node.value, found[old.parent].value)

    def _compare_structure(self, found: list[Node]) -> None:
        for index, (old, new) in enumerate(zip(self._nodes, found, strict=False)):
            old_type = self._types[index]
            same_kind = (
                old.path == new.path
                and _same_key(old.key, new.key)
                and old.container == new.container
                and old.same_as == new.same_as
                and (not old.container or old_type is type(new.value))
                and isinstance(new.value, torch.Tensor) == self._is_tensor(index)
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

    def _update_value(self, index: int, old: Node, new: Any, container: Any) -> None:
        if old.value is new:
            return
        captured = self._nodes[old.parent].value if old.parent in self._updates else None
        if captured is not None and (captured is container or old.parent in self._owned):
            set_item(captured, old.key, new)
            old.value = new
        elif index not in self._warned and not _equal(old.value, new):
            self._warned.add(index)
            warn(
                f"{self.where} returned {new!r} at `{old.path}`, and {old.value!r} at capture. Later "
                f"segments were recorded for the old value. Return it as a tensor, or in a new list, "
                f"dict or object that a later eager segment reads.",
                FrozenValueWarning,
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


def _equal(old: Any, new: Any) -> bool:
    if type(old) is not type(new):
        return False
    try:
        return bool(old == new or (old != old and new != new))  # nan
    except Exception:
        return False


def _same_key(old: Any, new: Any) -> bool:
    """Keys of one `repr` may be different ones."""
    return old is new or _equal(old, new)


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

    Returns what the model code receives, and the plan, which takes over `nodes`. They must hold the only
    references to the output (see `ownership.fresh_nodes`).

    Raises:
        CaptureFailedError: a fresh output is a tensor that cannot be bridged (a subclass, a sparse or
            quantized tensor), or the output holds tensors where they are not found (in a set, say).
    """
    leaves = [i for i, node in enumerate(nodes) if isinstance(node.value, torch.Tensor)]
    for node in nodes:
        unreached = None if isinstance(node.value, torch.Tensor) else out_of_reach(node.value)
        if unreached is not None:
            raise CaptureFailedError(
                f"{where} returned a {type(node.value).__qualname__} at `{node.path}`, in which {unreached} "
                f"cannot be written back, and holds a tensor. Return the tensor in a tuple, list, dict, or a "
                f"field of the class."
            )
    # The common break that returns nothing needs no look at its arguments.
    arguments = list(arguments) if leaves else []
    fresh = fresh_nodes(nodes, arguments) if len(nodes) > 1 or leaves else set()
    given = {storage_id(t) for t in arguments if t.layout is torch.strided}
    bridges = Bridges(where, memory)
    kept: list[int] = []
    for index in leaves:
        tensor = nodes[index].value
        # Anything whose memory cannot be seen (a sparse tensor, say) is refused as if it were fresh.
        if index in fresh or tensor.layout is not torch.strided or tensor.is_nested:
            bridges.add(index, nodes[index].path, tensor)
        else:
            kept.append(index)
    groups = {i: storage_id(nodes[i].value) for i in leaves}
    persistent = {
        i: _keep(i, nodes, [j for j in kept if groups[j] == groups[i]], given, memory) for i in kept
    }
    received = bridges.build()
    root = replace_items(nodes, received)
    for i, bridge in received.items():
        nodes[i].value = bridge
    carried = dict(zip(bridges.nodes, bridges.targets, strict=True))
    sharing = Sharing(
        where,
        [nodes[i].path for i in leaves],
        [persistent[i].tensor if i in persistent else carried[i] for i in leaves],
        [groups[i] for i in leaves],
    )
    return root, Writeback(nodes, where, bridges, persistent, holders, sharing, fresh)


def _keep(
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
