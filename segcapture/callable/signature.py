"""What two calls must have in common to be served by one capture."""

from collections.abc import Collection, Hashable, Mapping, Sequence
from types import NoneType
from typing import Any

import attrs
import torch

from segcapture.callable.bucket import Padded
from segcapture.callable.weights import training_flags, with_children
from segcapture.errors import CaptureFailedError
from segcapture.writeback.aliases import storage_id
from segcapture.writeback.memory import byte_range, unbridgeable
from segcapture.writeback.structure import Child, Node, attributes_besides, children, is_plain_object, walk

PLAIN = frozenset((bool, int, str, bytes, NoneType, torch.dtype, torch.device, torch.Size))
"""Types of values that are compared by value."""

_TYPED = PLAIN | {float, complex, set, frozenset}
_ALIGNMENT = 16  # bytes; what tensors that share memory keep of their addresses

Share = tuple[tuple[int, int], ...]
"""Tensors that overlap: position in the call, and byte offset in the memory of all."""


@attrs.frozen(hash=False, eq=False)
class Same:
    """An object that is compared by identity, and kept so that no other can have its id."""

    value: Any = attrs.field(repr=False)

    def __eq__(self, other: object) -> bool:
        return type(other) is Same and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class Reading:
    """The arguments of one call, flattened: what is compared, and the tensors that are copied."""

    __slots__ = ("_padded", "_places", "_seen", "in_place", "key", "padded", "tensors")

    def __init__(self, padded: Mapping[int, tuple[Padded, int]] | None = None) -> None:
        self.key: list[Any] = []
        self.tensors: list[torch.Tensor] = []
        self.in_place: set[int] = set()
        """Storages of the tensors in objects, which are used where they are."""
        self.padded: dict[int, tuple[Padded, int]] = {}
        """Position of a tensor to pad: how, and its size after."""
        self._padded = padded or {}
        self._seen: dict[int, int] = {}
        self._places: dict[int, int] = {}  # of tensors: one that is passed twice is no two of one memory

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any], parameters: Collection[str] | None) -> None:
        """Flatten the arguments of a call.

        Keyword order makes no difference for the names in `parameters` (None: for all): the function
        sees that of the others in its `**kwargs`.

        Raises:
            CaptureFailedError: an argument that cannot be compared with another call's.
        """
        self.key.append(len(args))
        for value in args:
            self._visit(value)
        if kwargs:
            names = sorted(kwargs if parameters is None else kwargs.keys() & parameters)
            if len(names) < len(kwargs):
                names += [name for name in kwargs if name not in names]
            self.key += (len(names), *names)
            for name in names:
                self._visit(kwargs[name])
        if self.in_place:
            self.key.append(self.overlaps_objects())

    def overlaps_objects(self) -> bool:
        """Whether a tensor that is copied shares memory with one that is used where it is."""
        return not self.in_place.isdisjoint(map(storage_id, self.tensors))

    def _visit(self, value: Any) -> None:
        kind = type(value)
        key = self.key
        if kind is torch.Tensor or isinstance(value, torch.Tensor):
            self._tensor(value)
        elif kind in PLAIN:
            key += (kind, value)
        elif kind is float or kind is complex:
            key += (kind, repr(value))  # 0.0 is not -0.0, and nan is nan
        elif kind is tuple:
            key += (kind, len(value))
            for item in value:
                self._visit(item)
        elif id(value) in self._seen:
            key += ("again", self._seen[id(value)])
        else:
            self._seen[id(value)] = len(self._seen)
            self._container_or_object(kind, value)

    def _tensor(self, tensor: torch.Tensor) -> None:
        if what := unbridgeable(tensor):
            raise CaptureFailedError(
                f"An argument is a {what}, whose values cannot be copied to a static input. "
                f"Pass a plain dense torch.Tensor, for example the parts that it is made of."
            )
        position = len(self.tensors)
        self.tensors.append(tensor)
        layout: Hashable = tensor.stride()
        shape: Hashable = tensor.shape
        if self._padded and id(tensor) in self._padded:
            how, size = self.padded[position] = self._padded[id(tensor)]
            dim = how.dim
            shape, layout = (*tensor.shape[:dim], size, *tensor.shape[dim + 1 :]), dim
        grad = tensor.requires_grad and (1 + has_grad(tensor))
        flags = (type(tensor), grad, tensor.is_conj(), tensor.is_neg())
        first = self._places.setdefault(id(tensor), position)
        self.key.append((shape, layout, tensor.dtype, tensor.device, flags, first))

    def _container_or_object(self, kind: type, value: Any) -> None:
        key = self.key
        if kind is slice:
            key.append(kind)
            for part in (value.start, value.stop, value.step):
                self._visit(part)
            return
        if kind is set or kind is frozenset:
            key.append(typed(value))
            return
        content = children(value)
        if content is None:
            key += (kind, _value_or_identity(value))
            if isinstance(value, torch.nn.Module):
                key.append(training_flags(with_children([value])))
        elif is_plain_object(value):
            key += (kind, Same(value))
            for node in walk(value)[1:]:
                key += (node.path, _in_place(node))
                if isinstance(node.value, torch.Tensor) and node.value.layout is torch.strided:
                    self.in_place.add(storage_id(node.value))
        else:
            key += (kind, len(content))
            for name, _, child in content:
                key += (type(name), name if type(name) in PLAIN else typed(name))
                self._visit(child)
            if kind is not list and kind is not dict:
                self._attributes(kind, value, content)

    def _attributes(self, kind: type, value: Any, content: Sequence[Child]) -> None:
        """What a container or record has besides its items and fields."""
        for name, item in attributes_besides(value, content):
            for node in walk(item):
                place = f".{name}{node.path.removeprefix('out')}"
                if isinstance(node.value, torch.Tensor):
                    raise CaptureFailedError(
                        f"An argument is a {kind.__qualname__} that has a tensor at `{place}`, which is no "
                        f"item or field of it and is not copied. Make it one, or pass the tensor by itself."
                    )
                self.key += (place, _in_place(node))


def _value_or_identity(value: Any) -> Hashable:
    if isinstance(value, float | complex):
        return (float if isinstance(value, float) else complex).__repr__(value)
    equal: Any = type(value).__eq__
    if equal is object.__eq__:
        return Same(value)
    try:
        hash(value)
    except TypeError:
        raise CaptureFailedError(
            f"An argument is a {type(value).__qualname__}, which has no hash, so that no other call can be "
            f"compared with this one. Pass a tensor, or a hashable value."
        ) from None
    return value  # type: ignore[no-any-return]


def _in_place(node: Node) -> Any:
    """What is compared of an object's contents, which are used where they are."""
    value = node.value
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            return Same(value)
        bits = (value.is_conj(), value.is_neg())
        return (value.data_ptr(), value.shape, value.stride(), value.dtype, value.device, bits)
    if node.container:
        return type(value)
    if isinstance(value, torch.nn.Module):
        return Same(value), training_flags(with_children([value]))
    return typed(value) if type(value) in _TYPED else Same(value)


def typed(value: Any) -> Hashable:
    """A value that equals another of the same types alone, also inside: 1 is not 1.0, nor True."""
    kind = type(value)
    if kind is float or kind is complex:
        return kind, repr(value)  # 0.0 is not -0.0, and nan is nan
    if kind in (tuple, set, frozenset):
        return kind, tuple(map(typed, value))  # the order of a set shows when it is walked
    return kind, value if kind in PLAIN else _value_or_identity(value)


def shared_memory(
    tensors: Sequence[torch.Tensor], storages: Sequence[int], padded: Mapping[int, Any]
) -> tuple[Share, ...]:
    """Which tensors overlap in memory, and how; `storages` are the identities of theirs."""
    if len(set(storages)) == len(tensors):
        return ()
    by_storage: dict[int, list[int]] = {}
    for position, storage in enumerate(storages):
        by_storage.setdefault(storage, []).append(position)
    found: list[Share] = []
    for positions in by_storage.values():
        ranges = [(*byte_range(tensors[i]), i) for i in positions if i not in padded]
        for group in _overlapping(sorted(r for r in ranges if r[0] < r[1])):
            base = group[0][0] // _ALIGNMENT * _ALIGNMENT
            found.append(tuple(sorted((position, low - base) for low, position in group)))
    return tuple(sorted(found))


def twins_among(tensors: Sequence[torch.Tensor], padded: Mapping[int, Any]) -> tuple[tuple[int, int], ...]:
    """Padded tensors that show the same memory in the same way as an earlier one: position and its."""
    seen: dict[Hashable, int] = {}
    found = []
    for i, how in padded.items():
        t = tensors[i]
        first = seen.setdefault((t.data_ptr(), t.shape, t.stride(), t.dtype, how), i)
        if first != i and t.numel():
            found.append((i, first))
    return tuple(found)


def clashes_among(
    tensors: Sequence[torch.Tensor], padded: Mapping[int, Any], twins: Sequence[tuple[int, int]]
) -> tuple[int, ...]:
    """Tensors that overlap in the call, but not in the static inputs: one of the two is padded."""
    first = dict(twins)
    found: set[int] = set()
    for i in padded:
        for k, other in enumerate(tensors):
            if first.get(i, i) != first.get(k, k) and overlap(tensors[i], other):
                found |= {i, k}
    return tuple(sorted(found))


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether any byte is in the range of both."""
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    (low, high), (other_low, other_high) = byte_range(a), byte_range(b)
    return low < other_high and other_low < high


def _overlapping(ranges: list[tuple[int, int, int]]) -> list[list[tuple[int, int]]]:
    """Groups of two or more among sorted (first byte, one past the last, position)."""
    groups: list[list[tuple[int, int]]] = []
    end = -1
    for low, high, position in ranges:
        if low >= end:
            groups.append([])
        groups[-1].append((low, position))
        end = max(end, high)
    return [group for group in groups if len(group) > 1]


def has_grad(tensor: torch.Tensor) -> bool:
    """Whether gradients have been accumulated for a tensor."""
    return tensor.is_leaf and tensor.grad is not None
