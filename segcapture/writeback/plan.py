"""Outputs of an eager segment: bridged at capture, checked and written back at replay (contract C4)."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from segcapture.errors import CaptureFailedError, FrozenValueWarning, OutputMismatchError
from segcapture.source import warn
from segcapture.writeback.bridges import Bridges, Memory, bridge
from segcapture.writeback.layouts import Layouts, unbridgeable
from segcapture.writeback.memory import copy_into, same_memory
from segcapture.writeback.ownership import fresh_nodes, storage_id
from segcapture.writeback.persistent import Holders, Persistent
from segcapture.writeback.reach import check_replaced, check_within_reach
from segcapture.writeback.reading import Reader, other_kind
from segcapture.writeback.structure import Node, children, has_item, replace_items, set_item


class Writeback:
    """The compiled plan of one eager segment's output.

    `store(out)` brings the values of a new output to where later segments read them. It raises
    OutputMismatchError for one that is built in another way than at capture, with a leaf of another shape,
    dtype or device, or with leaves that share memory in another way.
    """

    def __init__(
        self,
        where: str,
        nodes: list[Node],
        bridges: Bridges,
        leaves: dict[int, torch.Tensor],
        persistent: dict[int, Persistent],
        layouts: Layouts,
        owned: set[int],
        memory: Memory,
        holders: Holders,
    ) -> None:
        self.where = where
        self.bridges = bridges
        self._nodes = nodes
        self._tensors = list(leaves.values())
        """The memory in which later segments read each tensor of the output."""
        self._places = list(leaves)
        """Indices of their nodes."""
        self._persistent = [persistent.get(index) for index in leaves]
        self._layouts = layouts
        self._owned = owned
        self._memory = memory
        self._holders = holders
        self._read = Reader(nodes, where)
        self._plain = [i for i, node in enumerate(nodes) if not node.container and i not in leaves]
        self._updates = {nodes[i].parent for i in self._plain if nodes[i].parent >= 0}
        self._updates -= {i for i in self._updates if isinstance(nodes[i].value, tuple)}
        """Mutable containers with fields that are no tensors: kept, so that replay can replace those."""
        self._lengths = {i: len(nodes[i].value) for i in self._updates if isinstance(nodes[i].value, list)}
        self._warned: set[int] = set()
        self._on_host = any(tensor.device != memory.device for tensor in bridges.targets)
        self._low = min((low for low, _ in bridges.spans), default=0)
        self._high = max((high for _, high in bridges.spans), default=0)
        # Where the elements are read in another way, or some would be written twice.
        self._one_by_one = layouts.have_repeats or any(
            t.is_conj() or t.is_neg() or t.device != memory.device for t in self._tensors
        )
        for index, node in enumerate(nodes):  # keep no tensor alive, and no container without need
            if index not in self._updates and (node.container or index in leaves):
                node.value = None

    @property
    def store(self) -> Callable[[Any], None]:
        """Write back a new output."""
        return self._store_alone if self._places == [0] else self._store

    @property
    def expects_none(self) -> bool:
        """Whether the function returned None, so that there is nothing to store."""
        return self._plain == [0] and self._nodes[0].value is None

    def leaves(self) -> list[tuple[str, torch.Tensor]]:
        """Path of each tensor in the output, and the memory in which later segments read it."""
        return [(self._nodes[i].path, t) for i, t in zip(self._places, self._tensors, strict=True)]

    def frozen(self) -> list[tuple[str, Any]]:
        """Path of each plain value in the output that cannot be replaced, and the value at capture."""
        plain = [self._nodes[index] for index in self._plain]
        return [(node.path, node.value) for node in plain if node.parent not in self._updates]

    def _store(self, out: Any) -> None:
        values = self._read(out)
        changed = [i for i in self._plain if values[i] is not self._nodes[i].value]
        self._check_plain(changed, values)
        if self._tensors:
            self._write([values[i] for i in self._places])
        for index in changed:
            self._update_value(index, values)

    def _store_alone(self, out: Any) -> None:
        self._write([out])

    def _write(self, new: Sequence[Any]) -> None:
        pointers = self._layouts.check(new)
        if self._on_host:
            self._memory.wait_for_host_copies()
        if torch.is_grad_enabled():  # entering no_grad costs as much as ten checks
            with torch.no_grad():
                self._copy(new, pointers)
        else:
            self._copy(new, pointers)

    def _copy(self, new: Sequence[torch.Tensor], pointers: Sequence[int]) -> None:
        """Copy the values of checked leaves to where they are read."""
        targets: Sequence[torch.Tensor] = self._tensors
        low, high = self._low, self._high
        if len(self.bridges.targets) < len(new) or [at for at in pointers if low <= at < high]:
            targets, new = self._moved(new, pointers)
        if self._one_by_one:
            for target, tensor in zip(targets, new, strict=True):
                copy_into(target, tensor)
        elif len(targets) > 1:
            torch._foreach_copy_(targets, new)  # type: ignore[arg-type]
        elif targets:
            targets[0].copy_(new[0])

    def _moved(
        self, new: Sequence[torch.Tensor], pointers: Sequence[int]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What is not where it is read already, and its values: cloned where a bridge holds them."""
        targets, sources = [], []
        for leaf, target, tensor, at in zip(self._persistent, self._tensors, new, pointers, strict=True):
            if same_memory(target, tensor):
                continue
            if leaf is not None:
                leaf.check_ours(tensor, self._held_by_us, self.where)
                if tensor.device != self._memory.device:
                    self._memory.wait_for_host_copies()
            targets.append(target)
            within = any(low <= at < high for low, high in self.bridges.spans)
            sources.append(tensor.clone() if within else tensor)
        return targets, sources

    def _held_by_us(self, tensor: torch.Tensor) -> int:
        """How many references recorded calls keep, and the containers that are kept here."""
        containers = [self._nodes[index].value for index in self._updates & self._owned]
        kept = sum(item is tensor for value in containers for _, _, item in children(value) or ())
        return self._holders(tensor) + kept

    def _check_plain(self, changed: list[int], values: list[Any]) -> None:
        """Raise OutputMismatchError where there is no plain value any more."""
        for index in changed:
            old, new = self._nodes[index], values[index]
            if isinstance(new, torch.Tensor) or children(new, old.in_object) is not None:
                raise other_kind(self.where, old.path, type(old.value), new)

    def _captured(self, index: int) -> Any:
        """The captured container of a plain value, if the value can be replaced there."""
        parent = self._nodes[index].parent
        return self._nodes[parent].value if parent in self._updates else None

    def _update_value(self, index: int, values: list[Any]) -> None:
        old, new = self._nodes[index], values[index]
        captured = self._captured(index)
        if captured is not None and (captured is values[old.parent] or old.parent in self._owned):
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


def _equal(old: Any, new: Any) -> bool:
    if type(old) is not type(new):
        return False
    try:
        return bool(old == new or (old != old and new != new))  # nan
    except Exception:
        return False


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
    # The common break that returns nothing needs no look at its arguments.
    arguments = list(arguments) if any(isinstance(node.value, torch.Tensor) for node in nodes) else []
    fresh = set() if nodes[0].value is None else fresh_nodes(nodes, arguments)
    leaves = {i: node.value for i, node in enumerate(nodes) if isinstance(node.value, torch.Tensor)}
    check_within_reach(nodes, fresh, where)
    # Anything whose memory cannot be seen (a sparse tensor, say) is refused as if it were fresh.
    bridged = [i for i, t in leaves.items() if i in fresh or t.layout is not torch.strided or t.is_nested]
    for index in bridged:
        if kind := unbridgeable(leaves[index]):
            raise CaptureFailedError(
                f"{where} returned a {kind} at `{nodes[index].path}`, which cannot be carried to later "
                f"segments. Return a plain dense torch.Tensor, for example the parts that it is made of."
            )
    storages = {i: storage_id(t) for i, t in leaves.items()}
    given = {storage_id(t) for t in arguments if t.layout is torch.strided}
    kept = [i for i in leaves if i not in set(bridged)]
    persistent = {
        i: Persistent.of(
            nodes[i].path,
            leaves[i],
            [leaves[j] for j in kept if storages[j] == storages[i]],
            storages[i] in given,
            memory,
        )
        for i in kept
    }
    made, bridges = bridge([leaves[i] for i in bridged], memory)
    received = dict(zip(bridged, made, strict=True))
    try:
        root = replace_items(nodes, dict(received))
    except Exception as error:
        raise CaptureFailedError(
            f"{where} returned a container or object that does not take a new tensor in the place of its "
            f"own. Return a plain dict, list or object."
        ) from error
    check_replaced(nodes, received, where)
    carried = dict(zip(bridged, bridges.targets, strict=True))
    read = {i: carried[i] if i in carried else persistent[i].tensor for i in leaves}
    paths = [nodes[i].path for i in leaves]
    layouts = Layouts(where, paths, list(read.values()), list(storages.values()))
    return root, Writeback(where, nodes, bridges, read, persistent, layouts, fresh, memory, holders)
