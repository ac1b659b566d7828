"""The leaves of plain outputs (nested tuples, lists and dicts), read without a walk over every node."""

import operator
from collections.abc import Callable
from typing import Any

from segcapture.structure import children

Read = Callable[[Any, list[Any]], bool]
"""Appends the leaves of an output to a list; False where its containers are others than at capture."""


def leaf_reader(value: Any) -> Read | None:
    """How to read outputs that are built as this one; None where it has other containers, or one twice."""
    return _reader(value, set())


def _are_same(new: list[Any], keys: list[Any]) -> bool:
    return all(map(operator.is_, new, keys))


def _leaf(new: Any, into: list[Any]) -> bool:
    into.append(new)
    return True


def _reader(value: Any, seen: set[int]) -> Read | None:
    kind, content = type(value), children(value)
    if content is None:
        return _leaf
    if not (kind is list or kind is dict or isinstance(value, tuple)) or id(value) in seen:
        return None
    seen.add(id(value))
    parts: list[Any] = [_reader(item, seen) for _, _, item in content]
    if None in parts:
        return None
    keys = list(value) if kind is dict else None
    # Of one string there are many objects. 1, 1.0 and True are equal, and a tensor has no truth.
    same = operator.eq if all(type(key) is str for key in keys or ()) else _are_same
    flat = all(part is _leaf for part in parts)

    def read(new: Any, into: list[Any]) -> bool:
        if type(new) is not kind or len(new) != len(parts):
            return False
        items = new
        if keys is not None:
            if not same(list(new), keys):
                return False
            items = new.values()
        if flat:
            into += items
            return True
        return all(part(item, into) for part, item in zip(parts, items, strict=True))

    return read
