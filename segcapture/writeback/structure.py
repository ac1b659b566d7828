"""What an eager function may return: containers walked into a flat list of nodes with paths.

Known containers are tuples, NamedTuples, lists, dicts and their subclasses (Hugging Face's
`ModelOutput` too), dataclasses and attrs classes (frozen and slotted too), and plain objects with
attributes. A plain object is walked one level; modules and everything unknown are opaque leaves.
"""

import dataclasses
import enum
import json
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attr
import attrs
import torch

_OPAQUE = (
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
)
_SCALAR = (str, bytes, int, float, complex, torch.Size, types.NoneType)

HELD = "_segcapture_held"
"""The attribute in which an object keeps what belongs to its decorated methods."""

Child = tuple[Any, str, Any]


@attrs.define(eq=False)
class Node:
    """One place in an output."""

    path: str
    """How a user would write it: `out["k"][0]`."""
    parent: int
    """Index of the container's node; -1 for the root."""
    key: Any
    """What the container knows it by: an index, a key or an attribute name."""
    value: Any
    in_object: bool = False
    """Whether it is inside of a plain object, where others of its kind are leaves."""
    container: bool = False
    same_as: int = -1
    """Index of the node at which this very container is walked (cycles, one list twice)."""
    inside: range = range(0)
    """Indices of a container's contents."""


def walk(root: Any) -> list[Node]:
    """All nodes below and including `root`: each container before its contents, which follow each other."""
    nodes = [Node("out", -1, None, root)]
    seen: dict[int, int] = {}
    for index, node in enumerate(nodes):  # it grows meanwhile
        node.same_as = seen.get(id(node.value), -1)
        content = children(node.value, node.in_object) if node.same_as < 0 else None
        node.container = content is not None or node.same_as >= 0
        if content is not None:
            seen[id(node.value)] = index
            node.inside = range(len(nodes), len(nodes) + len(content))
            within = node.in_object or is_plain_object(node.value)
            nodes += [Node(node.path + suffix, index, key, item, within) for key, suffix, item in content]
    for node in nodes:
        if not node.container and id(node.value) in seen:  # in an object, and outside of one further down
            node.same_as, node.container = seen[id(node.value)], True
    return nodes


def children(value: Any, in_object: bool = False) -> list[Child] | None:
    """Key, path suffix and value of each item of a known container; None for a leaf."""
    if isinstance(value, (*_SCALAR, torch.Tensor)):
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
    if isinstance(value, _OPAQUE):
        return None
    if is_record(value):
        return _attributes(value, _record_fields(value))
    if is_plain_object(value) and not in_object:
        return _attributes(value, _object_fields(value))
    return None


def is_plain(value: Any, in_object: bool) -> bool:
    """Whether a value is neither a tensor nor a known container."""
    return not isinstance(value, torch.Tensor) and children(value, in_object) is None


def _key(key: Any) -> str:
    return json.dumps(key, ensure_ascii=False) if type(key) is str else repr(key)


def is_plain_object(value: Any) -> bool:
    """Whether `value` is an instance of a user's ordinary class."""
    if isinstance(value, (*_SCALAR, torch.Tensor, tuple, list, dict, *_OPAQUE)) or is_record(value):
        return False
    kind = type(value)
    return kind.__module__ not in ("builtins", "torch") and (
        hasattr(value, "__dict__") or any("__slots__" in vars(base) for base in kind.__mro__[:-1])
    )


def replace_items(nodes: list[Node], new: Mapping[int, Any]) -> Any:
    """The root with the values of `new`, by the index of their nodes, in their places.

    Mutable containers and records change in place (a frozen record too: it was made by the function
    a moment ago, and nobody else has seen it); tuples are rebuilt as what they are.

    Raises:
        TypeError: a tuple to rebuild is in itself, through another container.
    """
    return _replaced(nodes, dict(new), set(), 0) if new else nodes[0].value


# A function of the module: a recursive closure is a reference cycle, which would keep the output alive.
def _replaced(nodes: list[Node], done: dict[int, Any], met: set[int], index: int) -> Any:
    if nodes[index].same_as >= 0:
        index = nodes[index].same_as
    if index in done:
        met.add(index)
        return done[index]
    node = nodes[index]
    done[index] = node.value  # before its contents, which may hold it
    items = [_replaced(nodes, done, met, i) for i in node.inside]
    changed = [i for i, item in zip(node.inside, items, strict=True) if item is not nodes[i].value]
    if not isinstance(node.value, tuple):
        for i in changed:
            set_item(node.value, nodes[i].key, items[i - node.inside.start])
    elif changed:
        if index in met:
            raise TypeError(f"the {type(node.value).__qualname__} at `{node.path}` is in itself")
        done[index] = tuple_like(node.value, items)
    return done[index]


def rebuild(value: Any, replace: Callable[[Any], Any]) -> Any:
    """`value` with `replace` applied to its leaves, through tuples and NamedTuples alone."""
    if not isinstance(value, tuple) or isinstance(value, torch.Size):
        return replace(value)
    if type(value) is not tuple and not hasattr(value, "_fields"):
        return value
    items = [rebuild(item, replace) for item in value]
    changed = any(new is not old for new, old in zip(items, value, strict=True))
    return tuple_like(value, items) if changed else value


def tuple_like(value: tuple[Any, ...], items: list[Any]) -> Any:
    """A tuple of the class and with the attributes of another, and with other items."""
    kind: Any = type(value)
    # The results of `max` and `topk` are struct sequences, which tuple.__new__ refuses.
    made = kind(items) if hasattr(kind, "n_sequence_fields") else tuple.__new__(kind, items)
    if attributes := getattr(value, "__dict__", None):
        vars(made).update(attributes)
    return made


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


def has_item(container: Any, key: Any) -> bool:
    """Whether `set_item` would replace something."""
    if isinstance(container, list):
        return bool(key < len(container))
    return key in container if isinstance(container, dict) else hasattr(container, key)


def get_item(container: Any, key: Any) -> Any:
    """One item of a mutable container or record."""
    return container[key] if isinstance(container, list | dict) else getattr(container, key)


def set_item(container: Any, key: Any, value: Any) -> None:
    """Replace one item of a mutable container or record."""
    if isinstance(container, list | dict):
        container[key] = value
    else:
        object.__setattr__(container, key, value)


def is_record(value: Any) -> bool:
    """Whether `value` is an instance of a dataclass or an attrs class."""
    return not isinstance(value, type) and (dataclasses.is_dataclass(value) or attrs.has(type(value)))


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


def tensors_in(*values: Any) -> Iterator[torch.Tensor]:
    """Every tensor in the values and in the known containers among them."""
    for value in values:
        for node in walk(value):
            if isinstance(node.value, torch.Tensor):
                yield node.value
