"""Who else holds a tensor: what decides between a fresh output and somebody's memory (contract C4).

A storage counts the tensors on it, a tensor its C++ owners, and Python the references to the tensor
object. None of the three alone tells `return t + 1` from `return self.cache`. So all three are
compared with what the output itself, and only it, accounts for.
"""

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch

from segcapture.writeback.aliases import own_aliases, storage_id
from segcapture.writeback.structure import Node

_only_a_list = 0


def references(objects: Sequence[object]) -> list[int]:
    """How many references there are to each, besides that of the list they come in."""
    return [sys.getrefcount(objects[i]) - _only_a_list for i in range(len(objects))]


# What is read for an object that only a list holds differs between Python versions.
_only_a_list = references([object()])[0]


def _references_of_cpp_owners() -> int:
    # A tensor that C++ holds too: here the base of a view. Torch versions differ in whether C++ then
    # holds a reference to the Python object.
    with torch.inference_mode(False), torch.no_grad():
        view = torch.empty(2, device="cpu")[1:]
        return references([view._base])[0]


_CPP_OWNERS = _references_of_cpp_owners()


def fresh_nodes(nodes: list[Node], arguments: Iterable[torch.Tensor]) -> set[int]:
    """Indices of the tensors, containers and objects that nobody but the output owns.

    `nodes` must hold the only references to the output (besides its own containers), and
    `arguments` are the tensors that the function was given: their memory is never fresh.
    """
    objects: list[object] = []
    index_of: dict[int, int] = {}
    expected: Counter[int] = Counter()
    for node in nodes:
        expected[id(node.value)] += 1
        if id(node.value) not in index_of:
            index_of[id(node.value)] = len(objects)
            objects.append(node.value)
            if isinstance(node.value, torch.Tensor) and _use_count(node.value) > 1:
                expected[id(node.value)] += _CPP_OWNERS
    for node in nodes:
        if node.container and node.same_as < 0:
            expected.update(_held_by(node.value))
    counts = references(objects)
    sole = {key: count <= expected[key] for key, count in zip(index_of, counts, strict=True)}
    del objects

    owned = [sole[id(node.value)] and _has_own_attributes(node) for node in nodes]
    places = [(i if node.same_as < 0 else node.same_as, node.parent) for i, node in enumerate(nodes)]
    lost = [0]
    while lost:  # what stands in a container that others own is theirs, wherever else it stands
        lost = [i for i, parent in places if owned[i] and parent >= 0 and not owned[parent]]
        for index in lost:
            owned[index] = False
    argument_storages = {storage_id(t) for t in arguments if t.layout is torch.strided}

    by_storage: dict[int, list[int]] = {}
    for index, node in enumerate(nodes):
        if isinstance(node.value, torch.Tensor) and node.value.layout is torch.strided:
            by_storage.setdefault(storage_id(node.value), []).append(index)
    fresh = {i for i, node in enumerate(nodes) if owned[i] and not isinstance(node.value, torch.Tensor)}
    for key, group in by_storage.items():
        leaves = {id(nodes[i].value): nodes[i].value for i in group}
        if key not in argument_storages and all(owned[i] for i in group) and _all_of_storage(leaves):
            fresh.update(group)
    return fresh


def _held_by(container: object) -> list[int]:
    """Ids of what a container refers to, each as often as it does, its attribute dict included."""
    attributes = getattr(container, "__dict__", None)
    referents = gc.get_referents(container)
    if isinstance(attributes, dict) and any(item is attributes for item in referents):
        referents += gc.get_referents(attributes)
    return [id(item) for item in referents]


def _has_own_attributes(node: Node) -> bool:
    """Whether no other object holds the attribute dict of a container."""
    boxed = [getattr(node.value, "__dict__", None) if node.container else None]
    return not isinstance(boxed[0], dict) or references(boxed)[0] <= 1


def _all_of_storage(leaves: dict[int, torch.Tensor], aliases: int = 0) -> bool:
    """Whether these tensors, the bases of views among them, and so many aliases are all on a storage."""
    bases: dict[int, torch.Tensor] = {}
    uses: Counter[int] = Counter()
    hidden = 0
    for leaf in leaves.values():
        base = leaf._base
        if base is not None:
            of_base, intermediate = _held_by_view(leaf, base)
            uses[id(base)] += of_base
            hidden += intermediate
            if id(base) not in leaves:
                bases[id(base)] = base
        del base
    every = {**leaves, **bases}
    if any(count - _CPP_OWNERS > 2 for count in references(list(bases.values()))):  # `bases` and `every`
        return False
    if any(_use_count(tensor) > 1 + uses[key] for key, tensor in every.items()):
        return False
    any_tensor = next(iter(leaves.values()))
    return tensors_on_storage(any_tensor) <= len(every) + hidden + aliases


def _held_by_view(view: torch.Tensor, base: torch.Tensor) -> tuple[int, int]:
    """How often a view holds its base, and how many tensors between the two it holds.

    Most views hold it once, those of complex numbers more often. So the same view of another tensor, one
    without memory, is made and looked at.
    """
    probe = torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device="meta")
    same_view: torch.Tensor | None = getattr(view, "_view_func")(probe)  # noqa: B009
    if same_view is None:
        return 1, 0
    return _use_count(probe) - 1, tensors_on_storage(probe) - 2


def tensors_on_storage(tensor: torch.Tensor) -> int:
    """How many tensor objects share the storage of this one, itself included."""
    storage = tensor.untyped_storage()
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count - 1  # the handle just made


def _use_count(tensor: torch.Tensor) -> int:
    """How many C++ owners a tensor object has, its Python object being one."""
    count: int = getattr(tensor, "_use_count")()  # noqa: B009  (torch's stubs do not know it)
    return count


def owned_by_us_alone(
    alias: torch.Tensor,
    captured: Iterable["weakref.ref[torch.Tensor]"],
    holders: Callable[[torch.Tensor], int],
) -> bool:
    """Whether nothing but our own aliases and recorded calls keeps the memory of one of our aliases.

    `captured` are the tensors that were seen on this memory at capture, `holders` counts the references
    to one that recorded calls keep.
    """
    alive = [tensor for tensor in (ref() for ref in captured) if tensor is not None]
    ours = len(own_aliases(alias))
    if tensors_on_storage(alias) <= ours:
        return True
    expected = [holders(alive[i]) + _CPP_OWNERS * (_use_count(alive[i]) > 1) for i in range(len(alive))]
    counts = references(alive)
    if any(count > kept for count, kept in zip(counts, expected, strict=True)):
        return False
    return bool(alive) and _all_of_storage({id(tensor): tensor for tensor in alive}, ours)
