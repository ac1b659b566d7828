"""State besides the arguments: the modules that a function reads, and what it changes by Python alone."""

import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, compress
from typing import Any

import torch
from torch import nn

from segcapture.errors import CaptureFailedError
from segcapture.tensors import View
from segcapture.trees import PLAIN, Place, flatten

_training = operator.attrgetter("training")
_KEPT = ("_parameters", "_modules", "_forward_pre_hooks", "_forward_hooks")


class Modules:
    """The modules that a function reads: those that are seen in it, those that are given, and all in them."""

    def __init__(self, fn: Callable[..., Any], given: Sequence[nn.Module], *, watched: bool) -> None:
        self._fn, self._given, self._watched = fn, given, watched
        self.roots: list[nn.Module] = []
        self._all: list[nn.Module] | None = None

    def look(self) -> None:
        """Look for them anew, as they are now."""
        self.roots = [*_modules_of(self._fn), *self._given]
        self._all = with_children(self.roots)

    def training(self) -> bool | tuple[bool, ...] | None:
        """`training` of all: one value if they agree."""
        if self._all is None:
            self.look()
        return training_flags(self._all or [])

    def weights(self, arguments: Any) -> "Weights | None":
        """Their weights, and those of modules among the arguments, as they are now; None if not watched."""
        among = [place.value for place in flatten(arguments) if isinstance(place.value, nn.Module)]
        return Weights(with_children([*(self._all or ()), *among])) if self._watched else None


def _modules_of(fn: Callable[..., Any]) -> list[nn.Module]:
    """The modules that a function can be seen to use: itself, its object's, its closure's and globals."""
    owner = getattr(fn, "__self__", None if inspect.isroutine(fn) else fn)
    values: Iterable[Any] = ()
    if isinstance(fn, functools.partial):
        values = [*_modules_of(fn.func), *fn.args, *fn.keywords.values()]
    elif owner is not None:
        values = [owner, *getattr(owner, "__dict__", {}).values()]
    elif inspect.isfunction(body := inspect.unwrap(fn)):
        seen = inspect.getclosurevars(body)
        values = [*seen.nonlocals.values(), *seen.globals.values()]
    return [value for value in values if isinstance(value, nn.Module)]


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
    """Parameters, buffers, submodules and hooks, as they were at capture."""

    def __init__(self, modules: list[nn.Module]) -> None:
        kept = [(vars(module)[name], type(module).__qualname__) for module in modules for name in _KEPT]
        self._sizes = [(items, len(items), kind) for items, kind in kept]
        self._items = [items.values() for items, _ in kept]  # they show what is there at any time
        # Buffers may come up while another signature runs: masks, say.
        found = [(m, name) for m in modules for name, value in m._buffers.items() if value is not None]
        self._buffers = [(module._buffers, name) for module, name in found]
        self._names = [f"{kind}.{name}" for items, kind in kept for name in items]
        self._names += [f"{type(module).__qualname__}.{name}" for module, name in found]
        self._values = self._now()
        addressed = list(map(_has_address, self._values))
        self._tensors = list(compress(self._values, addressed))
        self._addressed = list(compress(self._names, addressed))
        self._addresses = list(map(torch.Tensor.data_ptr, self._tensors))

    def _now(self) -> list[Any]:
        return [*chain.from_iterable(self._items), *[buffers.get(name) for buffers, name in self._buffers]]

    @property
    def values(self) -> Sequence[Any]:
        """All of them."""
        return self._values

    def change(self) -> str | None:
        """What is another object or at another address than at capture, in words; or None."""
        now = self._now()
        if len(now) != len(self._values):
            kind = next((kind for items, size, kind in self._sizes if len(items) != size), "?")
            return f"A parameter, module or hook of a {kind} was added or taken out"
        same, names = list(map(operator.is_, now, self._values)), self._names
        if all(same):
            addresses, names = list(map(torch.Tensor.data_ptr, self._tensors)), self._addressed
            if addresses == self._addresses:
                return None
            same = list(map(operator.eq, addresses, self._addresses))
        return f"{names[same.index(False)]} was replaced"


def _has_address(value: Any) -> bool:
    try:
        return isinstance(value, torch.Tensor) and not value.is_nested and value.data_ptr() is not None
    except (RuntimeError, ValueError):  # sparse, a wrapper subclass, a lazy parameter
        return False


class StateBefore:
    """What a function must leave as it is, since no replay changes it again. Made before the function runs.

    Args:
        arguments: Its arguments with their names.
        copied: The tensors among them that a replay copies.
        weights: Of its modules; None where they may change.
    """

    def __init__(
        self, arguments: Sequence[tuple[str, Any]], copied: Sequence[torch.Tensor], weights: Weights | None
    ) -> None:
        self._arguments, self._copied, self._weights = arguments, copied, weights
        self._values = self._now()
        self._views = {path: View.of(value) for path, value in self._values.items() if _has_address(value)}
        self._gradients = list(map(_gradient, copied))

    def _now(self) -> dict[str, Any]:
        return {p.path: p.value for name, value in self._arguments for p in flatten(value, name)}

    def check(self, places: Sequence[Place], grad: bool) -> None:
        """Compare with what there is now, and look at what the function returned, flattened.

        Raises:
            CaptureFailedError: another object, value, shape, stride, address or gradient in some place of the
                arguments; another weight; an output that is part of an autograd graph.
        """
        after = self._now()
        for path in {**self._values, **after}:
            if path not in after or path not in self._values or _differ(self._values[path], after[path]):
                raise CaptureFailedError(
                    f"The function put something else at `{path}` of its arguments, and no replay does that "
                    f"again. Return it instead, or write into the tensor that is there."
                )
        for path, view in self._views.items():
            if what := view.changes(View.of(after[path])):
                raise CaptureFailedError(
                    f"The function changed `{path}` of its arguments in place ({what}), and a replay writes "
                    f"values alone. Work on a view or a copy of it, and return that."
                )
        if any(map(operator.is_not, map(_gradient, self._copied), self._gradients)):
            raise CaptureFailedError(
                "The function accumulated into `.grad` of an argument that had none, and a replay does so "
                "for the static input alone. Use `torch.autograd.grad` and return what it gives."
            )
        if change := self._weights and self._weights.change():
            raise CaptureFailedError(
                f"{change} by the function, and no replay does that again. Write into what is there "
                f"(`copy_`, `mul_`), or pass weights='ignore'."
            )
        for place in places:
            out = place.value
            if isinstance(out, torch.Tensor) and (out.grad_fn is not None or (grad and out.requires_grad)):
                raise CaptureFailedError(
                    f"The function returned a tensor that requires grad at `{place.path}`, and a replay "
                    f"makes no autograd graph. Call it under `torch.no_grad()` or "
                    f"`torch.inference_mode()`; or do the whole training step in it, returning none."
                )


def _differ(old: Any, new: Any) -> bool:
    return old is not new and not (type(old) is type(new) and type(old) in PLAIN and old == new)


def _gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    return tensor.grad if tensor.requires_grad and tensor.is_leaf else None
