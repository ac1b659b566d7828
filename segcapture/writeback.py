"""Outputs of an eager segment: bridged at capture, checked and written back at replay (contract C4)."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from segcapture.bridges import Bridges, Memory
from segcapture.errors import CaptureFailedError, FrozenValueWarning, OutputMismatchError
from segcapture.leaves import leaf_reader
from segcapture.memory import Sharing
from segcapture.ownership import fresh_nodes, storage_id
from segcapture.persistent import Holders, Persistent, keep
from segcapture.reach import check_replaced, check_within_reach
from segcapture.source import warn
from segcapture.structure import (
    Node,
    children,
    has_item,
    replace_items,
    set_item,
    walk,
)

Store = Callable[[Any], None]


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
        self._lengths = {i: len(nodes[i].value) for i in kept if isinstance(nodes[i].value, list)}
        self._order = {node.path: index for index, node in enumerate(nodes)}
        self._leaves = sorted([*bridges.nodes, *persistent])
        self._read = leaf_reader(nodes[0].value)
        leaves = [index for index, node in enumerate(nodes) if not node.container]
        place = {index: i for i, index in enumerate(leaves)}  # in what `_read` finds
        self._bridged = [place[index] for index in bridges.nodes]
        self._tensors = [place[index] for index in self._leaves]
        self._plain = [index for index in leaves if not self._is_tensor(index)]
        self._unchanged = [(place[i], self._check_of(i)) for i in sorted([*self._plain, *persistent])]
        self.store: Store = self._store_tree if self._read is None else self._store_plain
        if len(nodes) == len(bridges) == 1:
            self.store = bridges.store_one
        for index, node in enumerate(nodes):  # keep no tensor alive, and no container without need
            if index not in kept and (node.container or isinstance(node.value, torch.Tensor)):
                node.value = None

    def _check_of(self, index: int) -> Callable[[Any], bool]:
        """Whether a leaf that is no bridge is as it was, so that nothing is to be done about it."""
        if index in self.persistent:
            return self.persistent[index].is_same
        node, replaced = self._nodes[index], self._nodes[index].parent in self._updates
        return lambda new: node.value is new or (not replaced and _equal(node.value, new))

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
        plain = [self._nodes[index] for index in self._plain]
        return [(node.path, node.value) for node in plain if node.parent not in self._updates]

    def _is_tensor(self, index: int) -> bool:
        return issubclass(self._types[index], torch.Tensor)

    def _store_plain(self, out: Any) -> None:
        """An output of plain containers, in the usual case: the rest is left to the walk."""
        assert self._read is not None
        found: list[Any] = []
        if not self._read(out, found) or not all(check(found[i]) for i, check in self._unchanged):
            self._store_tree(out)
            return
        bridged = [found[i] for i in self._bridged] if self._unchanged else found
        if self.persistent:
            self.bridges.check_layouts(bridged)
            leaves = [found[i] for i in self._tensors]
            self._sharing.check(leaves, [leaf.data_ptr() for leaf in leaves])
        self.bridges.store(bridged)

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
            leaf.store(found[index].value, self._held_by_us, self.where)
        self.bridges.write(new, [leaf.data_ptr() for leaf in new])
        # An object that is in itself is a leaf there, and stays the captured one.
        walked = {id(node.value) for node in found if node.container}
        for index in self._plain:
            new_value = found[index].value
            if id(new_value) not in walked:
                old = self._nodes[index]
                self._update_value(index, old, new_value, found[old.parent].value)

    def _held_by_us(self, tensor: torch.Tensor) -> int:
        """How many references recorded calls keep, and the containers that are kept here."""
        containers = [self._nodes[index].value for index in self._updates & self._owned]
        kept = sum(item is tensor for value in containers for _, _, item in children(value) or ())
        return self._holders(tensor) + kept

    def _compare_structure(self, found: list[Node]) -> None:
        for index, (old, new) in enumerate(zip(self._nodes, found, strict=False)):
            old_type = self._types[index]
            same_kind = (
                old.parent == new.parent  # not the path: the `repr` of a key may be its address
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
            before, now = (sum(n.parent == extra.parent for n in nodes) for nodes in (self._nodes, found))
            raise OutputMismatchError(
                f"{self.where} returned {verb} `{extra.path}`: {before} items there at capture, {now} now. "
                f"The structure is fixed at capture: pad it to one length, or use it in the break."
            )

    def _update_value(self, index: int, old: Node, new: Any, container: Any) -> None:
        if old.value is new:
            return
        captured = self._nodes[old.parent].value if old.parent in self._updates else None
        if captured is not None and (captured is container or old.parent in self._owned):
            if isinstance(captured, list) and len(captured) != self._lengths[old.parent]:
                raise OutputMismatchError(
                    f"{self.where} returned {new!r} at `{old.path}`, and {old.value!r} at capture, in a list "
                    f"that has become longer or shorter since, so its place is not known. Return a tuple."
                )
            if has_item(captured, old.key):  # else the captured code has taken it out
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
            quantized tensor), the output holds tensors where they are not found (in a set, say), or a
            container of it does not take other tensors.
    """
    leaves = [i for i, node in enumerate(nodes) if isinstance(node.value, torch.Tensor)]
    # The common break that returns nothing needs no look at its arguments.
    arguments = list(arguments) if leaves else []
    fresh = set() if nodes[0].value is None else fresh_nodes(nodes, arguments)
    check_within_reach(nodes, fresh, where)
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
    persistent = {i: keep(i, nodes, [j for j in kept if groups[j] == groups[i]], given, memory) for i in kept}
    received = bridges.build()
    try:
        root = replace_items(nodes, received)
    except Exception as error:
        raise CaptureFailedError(
            f"{where} returned a container or object that does not take a new tensor in the place of its "
            f"own. Return a plain dict, list or object."
        ) from error
    check_replaced(nodes, received, where)
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
