"""Who else holds a tensor: what decides between a fresh output and somebody's memory (contract C4).

A storage counts the tensors on it, a tensor its C++ owners, and Python the references to the tensor
object. None of the three alone tells `return t + 1` from `return self.cache`. So all three are
compared with what the output itself, and only it, accounts for.
"""

import gc
import sys
from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from segcapture.structure import Node


def _reference_counts(objects: Sequence[object]) -> list[int]:
    return [sys.getrefcount(objects[i]) for i in range(len(objects))]


# What getrefcount reads for an object that only a list holds: it differs between Python versions.
_ONLY_A_LIST = _reference_counts([object()])[0]


def _references_of_cpp_owners() -> int:
    # A tensor that C++ holds too: here the base of a view. Torch versions differ in whether C++ then
    # holds a reference to the Python object.
    with torch.inference_mode(False), torch.no_grad():
        view = torch.empty(2, device="cpu")[1:]
        return _reference_counts([view._base])[0] - _ONLY_A_LIST


_CPP_OWNERS = _references_of_cpp_owners()


def storage_id(tensor: torch.Tensor) -> int:
    """Identity of the storage under a tensor."""
    return int(tensor.untyped_storage()._cdata)


def fresh_nodes(nodes: list[Node], arguments: Iterable[torch.Tensor]) -> set[int]:
    """Indices of the tensor nodes that nobody but the output owns.

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
    counts = _reference_counts(objects)
    sole = {key: count - _ONLY_A_LIST <= expected[key] for key, count in zip(index_of, counts, strict=True)}
    del objects

    owned: dict[int, bool] = {}
    for index, node in enumerate(nodes):
        above = node.parent < 0 or owned[node.parent]
        owned[index] = above and sole[id(node.value)]
    argument_storages = {storage_id(t) for t in arguments if t.layout is torch.strided}

    by_storage: dict[int, list[int]] = {}
    for index, node in enumerate(nodes):
        if isinstance(node.value, torch.Tensor) and node.value.layout is torch.strided:
            by_storage.setdefault(storage_id(node.value), []).append(index)
    fresh: set[int] = set()
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


def _all_of_storage(leaves: dict[int, torch.Tensor]) -> bool:
    """Whether these tensors, and the bases that views among them hold, are all there is on a storage."""
    bases: dict[int, torch.Tensor] = {}
    views_of: Counter[int] = Counter()
    for leaf in leaves.values():
        base = leaf._base
        if base is not None:
            views_of[id(base)] += 1
            if id(base) not in leaves:
                bases[id(base)] = base
        del base
    every = {**leaves, **bases}
    for count in _reference_counts(list(bases.values())):
        if count - _ONLY_A_LIST - _CPP_OWNERS > 2:  # `bases` and `every`
            return False
    for key, tensor in every.items():
        if _use_count(tensor) > 1 + views_of[key]:
            return False
    any_tensor = next(iter(leaves.values()))
    return tensors_on_storage(any_tensor) <= len(every)


def tensors_on_storage(tensor: torch.Tensor) -> int:
    """How many tensor objects share the storage of this one, itself included."""
    storage = tensor.untyped_storage()
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count - 1  # the handle just made


def _use_count(tensor: torch.Tensor) -> int:
    """How many C++ owners a tensor object has, its Python object being one."""
    count: int = getattr(tensor, "_use_count")()  # noqa: B009  (torch's stubs do not know it)
    return count


def owned_by_us_alone(boxed: list[torch.Tensor], references: int) -> bool:
    """Whether the given number of Python references, all ours, are all that keeps a tensor.

    The tensor comes in a list of one, so that no variable on the way counts as an owner.
    """
    base = boxed[0]._base
    if base is not None and _reference_counts([base])[0] - _ONLY_A_LIST - _CPP_OWNERS > 1:  # `base`
        return False
    tensors = 1 if base is None else 2
    return (
        _reference_counts(list(boxed))[0] - _ONLY_A_LIST <= references + 1  # `boxed`
        and _use_count(boxed[0]) <= 1
        and tensors_on_storage(boxed[0]) <= tensors
    )
