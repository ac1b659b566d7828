"""Outputs of an eager segment: bridged at capture, checked and written back at replay (contract C4)."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from segcapture.errors import CaptureFailedError
from segcapture.writeback.aliases import storage_id
from segcapture.writeback.bridges import Bridges, Memory, bridge
from segcapture.writeback.layouts import Layouts
from segcapture.writeback.memory import copy_into, same_memory, unbridgeable
from segcapture.writeback.ownership import fresh_nodes
from segcapture.writeback.persistent import Captured, Holders, check_ours, keep
from segcapture.writeback.plain import Plain
from segcapture.writeback.reach import check_replaced, check_within_reach
from segcapture.writeback.reading import Reader
from segcapture.writeback.structure import Node, children, replace_items


class Writeback:
    """The compiled plan of one eager segment's output.

    `store(out)` brings the values of a new output to where later segments read them. It raises
    OutputMismatchError for one that is built in another way than at capture, with a leaf of another shape,
    dtype or device, or with leaves that share memory in another way.
    """

    def __init__(
        self,
        where: str,
        reader: Reader,
        tensors: dict[int, torch.Tensor],
        bridges: Bridges,
        persistent: dict[int, Captured],
        layouts: Layouts,
        plain: dict[int, Plain],
        memory: Memory,
        holders: Holders,
    ) -> None:
        self.where = where
        self.bridges = bridges
        self._read = reader
        self._places = list(tensors)
        """Indices of the tensors' nodes."""
        self._tensors = list(tensors.values())
        """The memory in which later segments read them."""
        self._captured = [persistent.get(index) for index in tensors]
        """None for a bridge."""
        self._layouts = layouts
        self._plain = plain
        self._memory = memory
        self._holders = holders
        self._on_host = any(tensor.device != memory.device for tensor in bridges.targets)
        self._low = min((low for low, _ in bridges.spans), default=0)
        self._high = max((high for _, high in bridges.spans), default=0)
        # Where elements are read in another way, or some would be written twice.
        self._one_by_one = layouts.have_repeats or any(
            t.is_conj() or t.is_neg() or t.device != memory.device for t in self._tensors
        )

    @property
    def store(self) -> Callable[[Any], None]:
        """Write back a new output."""
        return self._write_alone if self._places == [0] else self._store

    @property
    def expects_none(self) -> bool:
        """Whether the function returned None, so that there is nothing to store."""
        return 0 in self._plain and self._plain[0].node.value is None

    def leaves(self) -> list[tuple[str, torch.Tensor]]:
        """Path of each tensor in the output, and the memory in which later segments read it."""
        return list(zip(self._layouts.paths, self._tensors, strict=True))

    def frozen(self) -> list[tuple[str, Any]]:
        """Path of each plain value in the output that cannot be replaced, and the value at capture."""
        return [(p.node.path, p.node.value) for p in self._plain.values() if p.container is None]

    def _store(self, out: Any) -> None:
        values = self._read(out)
        changed = [(plain, i) for i, plain in self._plain.items() if values[i] is not plain.node.value]
        walked = {id(values[i]) for i in self._read.containers} if changed else ()
        for plain, i in changed:
            plain.check(values[i], walked, self.where)
        if self._tensors:
            self._write([values[i] for i in self._places])
        for plain, i in changed:
            plain.store(values[i], values[plain.node.parent], self.where)

    def _write_alone(self, out: Any) -> None:
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
        for i, (target, tensor, at) in enumerate(zip(self._tensors, new, pointers, strict=True)):
            if same_memory(target, tensor):
                continue
            captured = self._captured[i]
            if captured is not None:
                check_ours(target, captured, self._held_by_us, tensor, self.where, self._layouts.paths[i])
                if tensor.device != self._memory.device:
                    self._memory.wait_for_host_copies()
            targets.append(target)
            within = any(low <= at < high for low, high in self.bridges.spans)
            sources.append(tensor.clone() if within else tensor)
        return targets, sources

    def _held_by_us(self, tensor: torch.Tensor) -> int:
        """How many references recorded calls keep, and the containers that are kept here."""
        ours = {id(p.container): p.container for p in self._plain.values() if p.owned}
        kept = sum(item is tensor for value in ours.values() for _, _, item in children(value) or ())
        return self._holders(tensor) + kept


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
    check_within_reach(nodes, fresh, where)
    leaves = {i: node.value for i, node in enumerate(nodes) if isinstance(node.value, torch.Tensor)}
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
    made, bridges = bridge([leaves[i] for i in bridged], memory)
    tensors = dict(zip(bridged, bridges.targets, strict=True))
    persistent: dict[int, Captured] = {}
    kept = [i for i in leaves if i not in tensors]
    for i in kept:
        together = [leaves[j] for j in kept if storages[j] == storages[i]]
        tensors[i], persistent[i] = keep(leaves[i], together, storages[i] in given, memory)
    tensors = {i: tensors[i] for i in leaves}
    root = _receive(nodes, dict(zip(bridged, made, strict=True)), where)
    paths = [nodes[i].path for i in leaves]
    layouts = Layouts(where, paths, list(tensors.values()), list(storages.values()))
    plain = {
        i: Plain.of(node, nodes, fresh)
        for i, node in enumerate(nodes)
        if not node.container and i not in leaves
    }
    reader = Reader(nodes, where)
    return root, Writeback(where, reader, tensors, bridges, persistent, layouts, plain, memory, holders)


def _receive(nodes: list[Node], bridges: dict[int, torch.Tensor], where: str) -> Any:
    """What the model code receives: the output with bridges in the places of fresh leaves."""
    try:
        root = replace_items(nodes, bridges)
    except Exception as error:
        raise CaptureFailedError(
            f"{where} returned a container or object that does not take a new tensor in the place of its "
            f"own. Return a plain dict, list or object."
        ) from error
    check_replaced(nodes, bridges, where)
    return root
