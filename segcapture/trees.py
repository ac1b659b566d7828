"""Values as flat lists of places: the one walker of the package.

Containers are tuples, NamedTuples, lists, dicts and their subclasses (Hugging Face's `ModelOutput` too),
dataclasses and attrs classes (frozen and slotted too), and plain objects with attributes. A plain object is
walked one level: an object in it is a leaf, as are modules and everything unknown.
"""

import collections
import dataclasses
import enum
import functools
import gc
import json
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attr
import attrs
import torch

PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    types.NoneType,
    torch.Size,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
"""Types of values that are compared, frozen and shown by value."""

OPAQUE = (
    torch.nn.Module,
    torch.Generator,
    torch.Stream,
    torch.Event,
    torch.UntypedStorage,
    enum.Enum,
    type,
    types.ModuleType,
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    functools.partial,
)
"""Types that are not looked into."""

_LEAVES = (torch.Tensor, *PLAIN)
_NO_OBJECTS = (*_LEAVES, *OPAQUE, tuple, list, dict)

_HOLDERS = (
    collections.deque,
    set,
    frozenset,
    types.MappingProxyType,
    collections.abc.KeysView,
    collections.abc.ValuesView,
    collections.abc.ItemsView,
)

HELD = "_segcapture_held"
"""The attribute in which an object keeps what belongs to its decorated methods."""

Child = tuple[Any, str, Any]
"""Key, path suffix and value of an item."""


@attrs.define(eq=False)
class Place:
    """One place in a value."""

    path: str
    """How a user would write it: `out["k"][0]`."""
    parent: int
    """Index of the container's place; -1 for the root."""
    key: Any
    """What the container knows it by: an index, a key or an attribute name."""
    value: Any
    in_object: bool = False
    """Whether it is inside of a plain object, where others of its kind are leaves."""
    inside: range | None = None
    """Indices of a container's items; None for a leaf."""
    same_as: int = -1
    """Index of the place at which this very container is walked (a cycle, one list twice)."""

    @property
    def is_container(self) -> bool:
        """Whether it has items, here or where the same container is walked."""
        return self.inside is not None or self.same_as >= 0


def flatten(root: Any, name: str = "out") -> list[Place]:
    """All places in `root`, itself first: each container before its items, which follow each other."""
    places = [Place(name, -1, None, root)]
    seen: dict[int, int] = {}
    for index, place in enumerate(places):  # it grows meanwhile
        content = children(place.value, place.in_object)
        if content is None:
            continue
        place.same_as = seen.setdefault(id(place.value), index)
        if place.same_as != index:
            continue
        place.same_as = -1
        place.inside = range(len(places), len(places) + len(content))
        within = place.in_object or is_plain_object(place.value)
        places += [Place(place.path + suffix, index, key, item, within) for key, suffix, item in content]
    for place in places:
        # In an object it is a leaf, and further down, outside of one, a container.
        if not place.is_container and id(place.value) in seen:
            place.same_as = seen[id(place.value)]
    return places


def children(value: Any, in_object: bool = False) -> list[Child] | None:
    """The items of a container; None for a leaf."""
    if isinstance(value, _LEAVES):
        return None
    if isinstance(value, tuple):
        fields = getattr(value, "_fields", ())
        named = bool(fields) and len(fields) == len(value)
        names = [f".{name}" for name in fields] if named else [f"[{i}]" for i in range(len(value))]
        return [(i, name, item) for i, (name, item) in enumerate(zip(names, value, strict=True))]
    if isinstance(value, list):
        return [(i, f"[{i}]", item) for i, item in enumerate(value)]
    if isinstance(value, dict):
        return [(key, f"[{_key(key)}]", item) for key, item in value.items()]
    if isinstance(value, OPAQUE):
        return None
    if is_record(value):
        return _attributes(value, _record_fields(value))
    if is_plain_object(value) and not in_object:
        return _attributes(value, _object_fields(value))
    return None


def tensors_in(*values: Any) -> Iterator[torch.Tensor]:
    """Every tensor in the values and in the containers among them."""
    for value in values:
        for place in flatten(value):
            if isinstance(place.value, torch.Tensor):
                yield place.value


def is_record(value: Any) -> bool:
    """Whether `value` is an instance of a dataclass or an attrs class."""
    return not isinstance(value, type) and (dataclasses.is_dataclass(value) or attrs.has(type(value)))


def is_plain_object(value: Any) -> bool:
    """Whether `value` is an instance of a user's ordinary class."""
    if isinstance(value, _NO_OBJECTS) or is_record(value):
        return False
    kind = type(value)
    return kind.__module__ not in ("builtins", "torch") and (
        hasattr(value, "__dict__") or any("__slots__" in vars(base) for base in kind.__mro__[:-1])
    )


def _key(key: Any) -> str:
    return json.dumps(key, ensure_ascii=False) if type(key) is str else repr(key)


def _record_fields(value: Any) -> Iterator[str]:
    if dataclasses.is_dataclass(value):
        return (field.name for field in dataclasses.fields(value))
    return (field.name for field in attr.fields(type(value)))


def _object_fields(value: Any) -> Iterable[str]:
    names = [name for name in getattr(value, "__dict__", ()) if name != HELD]
    return dict.fromkeys([*_slots(value), *names])  # a slot may be declared again


def _slots(value: Any) -> Iterator[str]:
    for base in type(value).__mro__[:-1]:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                yield f"_{base.__name__.lstrip('_')}{name}" if name.startswith("__") else name


def _attributes(value: Any, names: Iterable[str]) -> list[Child]:
    missing = object()
    found = ((name, getattr(value, name, missing)) for name in names)
    return [(name, f".{name}", item) for name, item in found if item is not missing]


# Items of containers


def get_item(container: Any, key: Any) -> Any:
    """One item of a container."""
    return container[key] if isinstance(container, list | dict | tuple) else getattr(container, key)


def set_item(container: Any, key: Any, value: Any) -> None:
    """Replace one item of a list, dict, record (a frozen one too) or object."""
    if isinstance(container, list | dict):
        container[key] = value
    else:
        object.__setattr__(container, key, value)


def tuple_like(kind: Any, attributes: Mapping[str, Any], items: Iterable[Any]) -> Any:
    """A tuple of a class, with attributes besides its items."""
    # The results of `max` and `topk` are struct sequences, which tuple.__new__ refuses.
    made = kind(items) if hasattr(kind, "n_sequence_fields") else tuple.__new__(kind, items)
    if attributes:
        vars(made).update(attributes)
    return made


def map_tuples(value: Any, replace: Callable[[Any], Any]) -> Any:
    """`value` with `replace` applied to its leaves, through tuples and NamedTuples alone."""
    kind = type(value)
    if kind is not tuple and (not isinstance(value, tuple) or not hasattr(value, "_fields")):
        return replace(value)
    items = [map_tuples(item, replace) for item in value]
    changed = any(new is not old for new, old in zip(items, value, strict=True))
    return tuple_like(kind, getattr(value, "__dict__", {}), items) if changed else value


def attributes_besides(value: Any, content: Sequence[Child]) -> list[tuple[str, Any]]:
    """Name and value of what a container or record has besides its items and fields.

    A subclass of list, tuple or dict may have attributes, a record such that are no fields. Hugging Face's
    `ModelOutput` has its items as attributes of their names, and sets the two together.
    """
    attributes: Mapping[str, Any] | None = getattr(value, "__dict__", None)
    if not attributes:
        return []
    known = {key: item for key, _, item in content}
    return [
        (name, item)
        for name, item in attributes.items()
        if name != HELD and (name not in known or known[name] is not item)
    ]


# Ownership

_only_a_list = 0


def references(objects: Sequence[object]) -> list[int]:
    """How many references there are to each, besides that of the list they come in."""
    return [sys.getrefcount(objects[i]) - _only_a_list for i in range(len(objects))]


# What is read for an object that only a list holds differs between Python versions.
_only_a_list = references([object()])[0]


def find_owned(places: list[Place]) -> list[bool]:
    """Whether each container or leaf of a value belongs to the value alone. False for tensors.

    `places` must hold the only references to the value. What is in a container that others hold is theirs,
    wherever else it stands.
    """
    objects = {id(p.value): p.value for p in places if not isinstance(p.value, torch.Tensor)}
    expected = Counter(id(place.value) for place in places)
    for place in places:
        if place.inside is not None:
            expected.update(_referents(place.value))
    found = list(objects.values())
    objects = dict.fromkeys(objects)
    sole = {key: count <= expected[key] for key, count in zip(objects, references(found), strict=True)}
    del found
    owned = [sole.get(id(p.value), False) and _has_own_attributes(p) for p in places]
    above = [(i if p.same_as < 0 else p.same_as, p.parent) for i, p in enumerate(places)]
    lost = [0]
    while lost:
        lost = [i for i, parent in above if owned[i] and parent >= 0 and not owned[parent]]
        for index in lost:
            owned[index] = False
    return [owned[i] for i, _ in above]


def _referents(container: object) -> list[int]:
    """Ids of what a container refers to, each as often as it does, its attribute dict included."""
    attributes = getattr(container, "__dict__", None)
    referents = gc.get_referents(container)
    if isinstance(attributes, dict) and any(item is attributes for item in referents):
        referents += gc.get_referents(attributes)
    return [id(item) for item in referents]


def _has_own_attributes(place: Place) -> bool:
    """Whether no other object holds the attribute dict of a container."""
    boxed = [getattr(place.value, "__dict__", None) if place.is_container else None]
    return not isinstance(boxed[0], dict) or references(boxed)[0] <= 1


def _any_tensor(tensor: torch.Tensor) -> bool:
    return True


def hidden_tensor(place: Place, which: Callable[[torch.Tensor], bool] = _any_tensor) -> str | None:
    """What holds a tensor, of a container or leaf, where `flatten` finds none: in words, or None.

    Only tensors that are `which` count.
    """
    value = place.value
    if isinstance(value, _LEAVES) or place.same_as >= 0:
        return None
    if place.inside is None:
        return "what is in it" if holds_tensor(value, which) else None
    if isinstance(value, tuple | list | dict) or is_record(value):
        for name, item in attributes_besides(value, children(value) or ()):
            if holds_tensor(item, which):
                return f"its attribute `{name}`"
    return None


def holds_tensor(value: Any, which: Callable[[torch.Tensor], bool] = _any_tensor) -> bool:
    """Whether there is a tensor at any depth, in sets, deques and objects inside of objects too."""
    seen: dict[int, Any] = {}
    todo = [value]
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        for place in flatten(value):
            if isinstance(place.value, torch.Tensor) and which(place.value):
                return True
            if isinstance(place.value, _HOLDERS):
                items = place.value
                todo += items.values() if isinstance(items, types.MappingProxyType) else items
            elif place.inside is None and is_plain_object(place.value):
                todo.append(place.value)
    return False
