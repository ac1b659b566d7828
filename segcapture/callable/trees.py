"""Copies of nested arguments and outputs with other tensors in them."""

import copy
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from segcapture.writeback.structure import children, is_plain_object, set_item, tensors_in, tuple_like

Replace = Callable[[torch.Tensor], torch.Tensor]
Template = Callable[[Sequence[torch.Tensor]], Any]


def copy_tree(value: Any, replace: Replace, *, objects: bool = False, keep: Collection[int] = ()) -> Any:
    """A copy of the containers in `value`, with `replace` applied to the tensors in them.

    Tuples, lists, dicts and records (dataclasses, attrs classes) are copied as what they are. Objects of
    other classes stay themselves; with `objects`, those that hold tensors are copied too, but for those
    whose id is in `keep`.
    """
    return _Copier(replace, objects, keep).copy(value)


def template(value: Any, positions: Mapping[int, int]) -> Template | None:
    """What `copy_tree` does with tensors in plain tuples, lists and dicts, with everything looked up before.

    Takes the new tensors; `positions` has the place of each old one, by its id, among them. None where
    `value` holds anything else (a plain value may change: an eager segment writes it back), or a container
    twice.
    """
    return _template(value, positions, set())


def _template(value: Any, positions: Mapping[int, int], seen: set[int]) -> Template | None:
    if isinstance(value, torch.Tensor):
        return operator.itemgetter(positions[id(value)])
    kind = type(value)
    if kind not in (tuple, list, dict) or id(value) in seen:
        return None
    seen.add(id(value))
    items = value.values() if kind is dict else value
    parts: list[Any] = [_template(item, positions, seen) for item in items]
    if None in parts:
        return None
    if kind is dict:
        keys = tuple(value)
        return lambda made: dict(zip(keys, [part(made) for part in parts], strict=True))
    return lambda made: kind([part(made) for part in parts])


class _Copier:
    def __init__(self, replace: Replace, objects: bool, keep: Collection[int]) -> None:
        self._replace, self._objects, self._keep = replace, objects, keep
        self._made: dict[int, Any] = {}

    def copy(self, value: Any, in_object: bool = False) -> Any:
        if id(value) not in self._made:
            self._made[id(value)] = self._copy(value, in_object)
        return self._made[id(value)]

    def _copy(self, value: Any, in_object: bool) -> Any:
        if isinstance(value, torch.Tensor):
            return self._replace(value)
        content = children(value, in_object)
        if content is None:
            return value
        if isinstance(value, tuple):
            return tuple_like(value, [self.copy(child, in_object) for _, _, child in content])
        if is_plain_object(value):
            if not self._objects or id(value) in self._keep or next(tensors_in(value), None) is None:
                return value
            in_object = True
        made = copy.copy(value)
        self._made[id(value)] = made  # before its contents: they may lead back here
        for key, _, child in content:
            new = self.copy(child, in_object)
            if new is not child:
                set_item(made, key, new)
        return made
