"""The modules that a function reads: their weights, where they are, and whether they train."""

import functools
import inspect
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from segcapture.writeback.structure import walk

_training = operator.attrgetter("training")


def modules_of(fn: Callable[..., Any]) -> list[nn.Module]:
    """The modules that a function can be seen to use: itself, its object's, its closure's and globals."""
    if isinstance(fn, nn.Module):
        return [fn]
    if isinstance(fn, functools.partial):
        held = [*fn.args, *fn.keywords.values()]
        return [*modules_of(fn.func), *(value for value in held if isinstance(value, nn.Module))]
    owner = getattr(fn, "__self__", None)
    if owner is None and not inspect.isroutine(fn):
        owner = fn  # a callable object
    if owner is not None:
        values: Iterable[Any] = [owner, *getattr(owner, "__dict__", {}).values()]
    else:
        body = inspect.unwrap(fn)
        if not inspect.isfunction(body):
            return []
        seen = inspect.getclosurevars(body)
        values = [*seen.nonlocals.values(), *seen.globals.values()]
    return [value for value in values if isinstance(value, nn.Module)]


def modules_in(arguments: Any) -> list[nn.Module]:
    """The modules among nested arguments."""
    return [node.value for node in walk(arguments) if isinstance(node.value, nn.Module)]


def with_children(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules and all in them, each once."""
    return list({id(child): child for module in modules for child in module.modules()}.values())


def training_flags(modules: list[nn.Module]) -> bool | tuple[bool, ...] | None:
    """`training` of all: one value if they agree."""
    if not modules:
        return None
    flags = tuple(map(_training, modules))
    return flags[0] if flags.count(flags[0]) == len(flags) else flags


class Weights:
    """Parameters, buffers and submodules as they were at capture."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._slots: list[tuple[dict[str, Any], str]] = []
        self._values: list[Any] = []
        self._names: list[str] = []
        self._pointers: list[int] = []
        self._counts = [(kept, len(kept), type(m).__qualname__) for m in modules for kept in _dicts(m)]
        tensors: list[tuple[Any, str, str]] = []
        others: list[tuple[Any, str, str]] = []
        for module in modules:
            kind = type(module).__qualname__
            owned: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for items in owned:
                # Buffers may come up while another signature runs: masks, say.
                lazy = items is module._buffers
                named = [name for name, value in items.items() if not lazy or value is not None]
                tensors += [(items, name, kind) for name in named]
            others += [(module._modules, name, kind) for name in module._modules]
        tensors.sort(key=lambda slot: not _has_address(slot[0][slot[1]]))  # those with an address first
        for items, name, kind in [*tensors, *others]:
            self._slots.append((items, name))
            self._values.append(items[name])
            self._names.append(f"{kind}.{name}")
        addressed = [value for value in self._values if _has_address(value)]
        self._count = len(addressed)
        self._pointers = list(map(torch.Tensor.data_ptr, addressed))

    def change(self) -> str | None:
        """What is another object or at another address than at capture, in words; or None."""
        for kept, count, kind in self._counts:
            if len(kept) != count:
                how = "added" if len(kept) > count else "taken out"
                return f"A parameter or module of a {kind} was {how}"
        now: list[Any] = [items.get(name) for items, name in self._slots]
        if all(map(operator.is_, now, self._values)):
            pointers = list(map(torch.Tensor.data_ptr, now[: self._count]))
            if pointers == self._pointers:
                return None
            moved = (self._names[i] for i, at in enumerate(pointers) if at != self._pointers[i])
            return f"{next(moved)} was replaced"
        pairs = zip(self._names, now, self._values, strict=True)
        return f"{next(name for name, new, old in pairs if new is not old)} was replaced"


def _dicts(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return module._parameters, module._modules


def _has_address(value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    try:
        value.data_ptr()
    except (RuntimeError, ValueError):  # a wrapper subclass; a lazy parameter
        return False
    return True
