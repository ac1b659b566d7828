"""What two calls must have in common to be served by one capture."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from types import NoneType
from typing import Any

import attrs
import torch

from segcapture.callable.buckets import Padded
from segcapture.errors import CaptureFailedError
from segcapture.memory import byte_range
from segcapture.ownership import storage_id
from segcapture.structure import Node, children, is_plain_object, walk

_VALUES = frozenset((bool, int, str, bytes, NoneType, torch.dtype, torch.device, torch.Size))
_TENSORS = (torch.Tensor, torch.nn.Parameter)
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

    __slots__ = ("_padded", "_seen", "in_place", "key", "padded", "tensors")

    def __init__(self, padded: Mapping[int, tuple[Padded, int]] | None = None) -> None:
        self.key: list[Any] = []
        self.tensors: list[torch.Tensor] = []
        self.in_place: set[int] = set()
        """Storages of the tensors in objects, which are used where they are."""
        self.padded: dict[int, tuple[Padded, int]] = {}
        """Position of a tensor to pad: how, and its size after."""
        self._padded = padded or {}
        self._seen: dict[int, int] = {}

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Flatten the arguments of a call; keyword order makes no difference.

        Raises:
            CaptureFailedError: an argument that cannot be compared with another call's.
        """
        self.key.append(len(args))
        for value in args:
            self._visit(value)
        if kwargs:
            names = sorted(kwargs)
            self.key += (len(names), *names)
            for name in names:
                self._visit(kwargs[name])
        if self.in_place:
            self.key.append(self.overlaps_objects())

    def overlaps_objects(self) -> bool:
        """Whether a tensor that is copied shares memory with one that is used where it is."""
        return any(storage_id(tensor) in self.in_place for tensor in self.tensors)

    def _visit(self, value: Any) -> None:
        kind = type(value)
        key = self.key
        if kind is torch.Tensor or isinstance(value, torch.Tensor):
            self._tensor(value)
        elif kind in _VALUES:
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
        if type(tensor) not in _TENSORS or tensor.layout is not torch.strided:
            name = type(tensor).__qualname__ if type(tensor) not in _TENSORS else str(tensor.layout)
            raise CaptureFailedError(
                f"An argument is a {name}, whose values cannot be copied to a static input. Pass a plain "
                f"dense torch.Tensor, for example the parts that it is made of."
            )
        position = len(self.tensors)
        self.tensors.append(tensor)
        layout: Hashable = tensor.stride()
        shape: Hashable = tensor.shape
        if self._padded and id(tensor) in self._padded:
            how, size = self.padded[position] = self._padded[id(tensor)]
            dim = how.dim
            shape, layout = (*tensor.shape[:dim], size, *tensor.shape[dim + 1 :]), dim
        flags = (tensor.requires_grad, tensor.is_conj(), tensor.is_neg())
        self.key.append((shape, layout, tensor.dtype, tensor.device, flags))

    def _container_or_object(self, kind: type, value: Any) -> None:
        key = self.key
        if kind is slice:
            key.append(kind)
            for part in (value.start, value.stop, value.step):
                self._visit(part)
            return
        if kind is set:
            key += (kind, frozenset(value))
            return
        content = children(value)
        if content is None:
            key += (kind, _value_or_identity(value))
        elif is_plain_object(value):
            key += (kind, Same(value))
            for node in walk(value)[1:]:
                key += (node.path, _in_place(node))
                if isinstance(node.value, torch.Tensor) and node.value.layout is torch.strided:
                    self.in_place.add(storage_id(node.value))
        else:
            key += (kind, len(content))
            for name, _, child in content:
                key += (type(name), name)
                self._visit(child)


def _value_or_identity(value: Any) -> Hashable:
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
        return (value.data_ptr(), value.shape, value.stride(), value.dtype, value.device)
    if node.container:
        return type(value)
    if type(value) in _VALUES:
        return (type(value), value)
    return repr(value) if type(value) in (float, complex) else Same(value)


def shared_memory(tensors: Sequence[torch.Tensor], padded: Mapping[int, Any]) -> tuple[Share, ...]:
    """Which tensors overlap in memory, and how."""
    by_storage: dict[int, list[int]] = {}
    for position, tensor in enumerate(tensors):
        by_storage.setdefault(storage_id(tensor), []).append(position)
    if len(by_storage) == len(tensors):
        return ()
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


# For people


def named(args: tuple[Any, ...], kwargs: Mapping[str, Any], names: Sequence[str]) -> list[tuple[str, Any]]:
    """The arguments with the names that the function gives them."""
    positional = [(names[i] if i < len(names) else f"args[{i}]", value) for i, value in enumerate(args)]
    return [*positional, *sorted(kwargs.items())]


def contents(arguments: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Each place in the arguments, and what is there."""
    return {
        name + node.path.removeprefix("out"): node.value for name, value in arguments for node in walk(value)
    }


def changed_place(before: Mapping[str, Any], after: Mapping[str, Any]) -> str | None:
    """A place where a function put another object or value, or None."""
    for path in [*before, *after]:
        if path not in before or path not in after:
            return path
        old, new = before[path], after[path]
        if old is not new and not (type(old) is type(new) and type(old) in _VALUES and old == new):
            return path
    return None


def described(places: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """The places of a call in words, to be compared with another call's."""
    return {path: _in_words(value) for path, value in places.items()}


def _in_words(value: Any) -> dict[str, str]:
    if isinstance(value, torch.Tensor):
        words = {"dtype": str(value.dtype).removeprefix("torch."), "shape": str(list(value.shape))}
        if value.layout is torch.strided:
            words["stride"] = str(list(value.stride()))
        words |= {"device": str(value.device), "requires_grad": str(value.requires_grad)}
        return words
    if (content := children(value)) is None:
        return {"value": _short(repr(value))}
    words = {"type": type(value).__qualname__}
    return words | ({"object": hex(id(value))} if is_plain_object(value) else {"items": str(len(content))})


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def difference(new: Mapping[str, Mapping[str, str]], old: Mapping[str, Mapping[str, str]]) -> list[str]:
    """In which places two described calls differ, the few most telling words of each."""
    found = []
    for path in [*old, *(path for path in new if path not in old)]:
        if path not in new or path not in old:
            found.append(f"{path}: {'absent' if path not in new else 'present'} here")
            continue
        a, b = new[path], old[path]
        aspects = [k for k in {**b, **a} if a.get(k) != b.get(k)]
        if "shape" in aspects and "stride" in aspects:
            aspects.remove("stride")  # it follows
        if aspects:
            words = (f"{k} {a.get(k, 'none')}, not {b.get(k, 'none')}" for k in aspects)
            found.append(f"{path}: {'; '.join(words)}")
    return found


def explain(
    new: Mapping[str, Mapping[str, str]], others: Sequence[tuple[str, Mapping[str, Mapping[str, str]]]]
) -> str:
    """Why no other signature fits: what differs from the nearest."""
    if not others:
        return "the first signature"
    measure: Callable[[tuple[str, list[str]]], int] = lambda pair: len(pair[1])  # noqa: E731
    name, found = min(((name, difference(new, old)) for name, old in others), key=measure)
    more = f"; and {len(found) - 3} more" if len(found) > 3 else ""
    # Memory at other addresses, or shared in another way, is not in the words.
    what = "; ".join(found[:3]) + more if found else "which tensors share memory, or the address of one"
    return f"nearest to {name}, which differs in {what}"
