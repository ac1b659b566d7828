"""Values kept for later: what a function may change, as it was, and how tensors differ."""

import contextlib
import functools
import inspect
import math
import numbers
import random
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any

import attrs
import torch

from segcapture.tensors import View, on_bytes, own_alias, shows_memory_alone, storage_id
from segcapture.trees import PLAIN, children, get_item, set_item

_DEPTH = 6
_LARGEST_KEPT = 64 * 2**20  # bytes: of larger tensors an even sample is kept
_MOST_VALUES = 256  # in one container: of a vocabulary nobody wants to know each word
_VALUES = (*PLAIN, numbers.Number, Enum)
_SIZED = (list, dict, set, deque)

# As torch.testing.assert_close has them (https://docs.pytorch.org/docs/2.11/testing.html): rtol, atol.
_TOLERANCES = {
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float32: (1.3e-6, 1e-5),
    torch.complex64: (1.3e-6, 1e-5),
    torch.float64: (1e-7, 1e-7),
    torch.complex128: (1e-7, 1e-7),
}


# What a call can reach


@attrs.frozen(eq=False)
class Slot:
    """Where a tensor stands, or None."""

    path: str
    owner: Any
    key: Any
    value: torch.Tensor | None


class Search:
    """What a call can reach: by its arguments, by the function itself, by what else its user names.

    That is: what is in containers and objects; parameters, buffers, attributes and gradients of modules; the
    object of a bound method; what a function closes over, its defaults, and the globals that it names. It
    ends after `most` objects.
    """

    def __init__(
        self,
        fn: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        others: Any = (),
        most: float = math.inf,
    ) -> None:
        self._most = most
        self.slots: list[Slot] = []
        self.values: dict[str, Any] = {}
        """Tensors of all kinds and plain values, by path."""
        self.lengths: dict[str, int] = {}
        """Of containers."""
        self.kinds: dict[str, str] = {}
        """Names of the classes of objects."""
        self.generators: list[torch.Generator] = []
        # The objects themselves: the id of one that died could be another one's.
        self._seen: dict[int, Any] = {}
        for i, value in enumerate(args):
            self._visit(f"args[{i}]", value)
        for key, value in kwargs.items():
            self._visit(key, value)
        self._visit(getattr(fn, "__name__", type(fn).__name__), fn)
        self._visit("state", others)

    def _visit(self, path: str, value: Any, owner: Any = (), key: Any = None, depth: int = 0) -> None:
        """Add what can be reached from a value, which stands at a key of its owner."""
        if value is None or is_dense(value):
            self.slots.append(Slot(path, owner, key, value))
        if isinstance(value, (torch.Tensor, *_VALUES)):
            self.values[path] = value
        if isinstance(value, _VALUES) or id(value) in self._seen or depth > _DEPTH:
            return
        if len(self._seen) >= self._most:
            return
        self._seen[id(value)] = value
        self.kinds[path] = type(value).__name__
        if isinstance(value, _SIZED) and not _is_ours(value):
            self.lengths[path] = len(value)
            if len(value) > _MOST_VALUES and _has_values_alone(value):
                return
        if isinstance(value, torch.Generator):
            self.generators.append(value)
        elif not isinstance(value, torch.Tensor):
            with contextlib.suppress(Exception):  # of its own code, or of a thread that changes it meanwhile
                for parent, name, suffix, child in _reachable(value):
                    self._visit(path + suffix, child, parent, name, depth + 1)
        elif value.requires_grad and value.is_leaf:
            self._visit(f"{path}.grad", value.grad, value, "grad", depth)


def is_dense(value: Any) -> bool:
    """Whether it is a tensor that is nothing but strided memory."""
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.layout is torch.strided
        and not (value.is_nested or value.is_quantized)
    )


def _reachable(value: Any) -> Iterator[tuple[Any, Any, str, Any]]:
    """Owner, key, path suffix and value of what an object refers to."""
    if _is_ours(value):
        return  # a capture, say: what its segments hold is compared segment by segment
    if isinstance(value, torch.nn.Module):
        for name, module in value.named_modules():
            for owner in (module._parameters, module._buffers, vars(module)):
                for key, item in owner.items():
                    if key not in _OF_MODULES:
                        yield owner, key, f".{name}.{key}" if name else f".{key}", item
    elif isinstance(value, torch.optim.Optimizer):
        yield (), None, ".param_groups", value.param_groups
        yield from (((), None, f".state[{i}]", state) for i, state in enumerate(value.state.values()))
    elif isinstance(value, functools.partial):
        yield (), None, "", value.func
        yield from ((value.args, i, f".args[{i}]", item) for i, item in enumerate(value.args))
        yield from ((value.keywords, key, f".{key}", item) for key, item in value.keywords.items())
    elif inspect.ismethod(value):
        yield (), None, "", value.__self__
        yield (), None, "", value.__func__
    elif inspect.isfunction(value):
        yield from _named_by(value)
    elif isinstance(value, deque):
        yield from (((), None, f"[{i}]", item) for i, item in enumerate(value))
    else:
        yield from ((value, *child) for child in children(value) or ())


def _is_ours(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "segcapture"


def _has_values_alone(value: Any) -> bool:
    return all(isinstance(item, _VALUES) for item in (value.values() if isinstance(value, dict) else value))


_OF_MODULES = set(vars(torch.nn.Module()))


def _named_by(fn: Any) -> Iterator[tuple[Any, Any, str, Any]]:
    """What a function closes over, its defaults, and the globals of its module that it names."""
    if "__wrapped__" in vars(fn):
        yield (), None, "", fn.__wrapped__
        return
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not assigned yet
            yield cell, "cell_contents", f".{name}", cell.cell_contents
    defaults = fn.__defaults__ or ()
    positional = fn.__code__.co_varnames[: fn.__code__.co_argcount]
    for name, value in zip(positional[len(positional) - len(defaults) :], defaults, strict=True):
        yield (), None, f".{name}", value
    for name, value in (fn.__kwdefaults__ or {}).items():
        yield fn.__kwdefaults__, name, f".{name}", value
    for name in fn.__code__.co_names:
        value = fn.__globals__.get(name, inspect)  # a module, if there is none
        foreign = getattr(value, "__globals__", fn.__globals__) is not fn.__globals__
        if not foreign and not inspect.ismodule(value) and not inspect.isclass(value):
            yield fn.__globals__, name, f".{name}", value


# What a run may change


class Snapshot:
    """Everything that a run may change, as it was when this was made.

    Kept are the bytes of tensors, which tensor stands where (as an item, an attribute, a gradient, in a
    closure), and the random states of torch, the device, Python and NumPy. What else a function changes
    (a Python counter, say) is not.

    Args:
        reach: Makes a search of what the run can reach.
        others: Tensors that are no part of what `now` tells.
        device: The one whose random state is kept, besides the CPU.
    """

    def __init__(
        self, reach: Callable[[], Search], others: Iterable[torch.Tensor], device: torch.device
    ) -> None:
        self._reach = reach
        search = reach()
        self._slots = [(slot.path, slot.owner, slot.key, _held(slot.value)) for slot in search.slots]
        found = [slot.value for slot in search.slots if slot.value is not None]
        ranges: dict[int, tuple[torch.Tensor, int, int]] = {}
        for tensor in (*found, *filter(is_dense, others)):
            low, high = View.of(tensor).byte_range()
            _, start, end = ranges.get(storage_id(tensor), (tensor, low, high))
            ranges[storage_id(tensor)] = tensor, min(low, start), max(high, end)
        self._memory = [
            (own_alias(tensor), low, on_bytes(tensor.untyped_storage(), low, high).clone())
            for tensor, low, high in ranges.values()
        ]
        self._random = list(_random_states(device))
        self._random += [(g.set_state, g.get_state()) for g in search.generators]

    def now(self) -> dict[str, torch.Tensor | None]:
        """What stands at each path now."""
        return {slot.path: slot.value for slot in self._reach().slots}

    def replaced(self) -> list[str]:
        """The paths where another tensor stands now, or none, or one where was none."""
        before, now = {path: held() for path, _, _, held in self._slots}, self.now()
        return [path for path in {**before, **now} if before.get(path) is not now.get(path)]

    def restore(self, *, places: bool = True) -> None:
        """Put all values back, in place, and each tensor to its place."""
        with torch.inference_mode():
            for alias, low, copied in self._memory:
                storage, high = alias.untyped_storage(), low + copied.numel()
                if high <= storage.nbytes():
                    on_bytes(storage, low, high).copy_(copied)
        for _, owner, key, held in self._slots if places else ():
            # The place may be gone by now; items of tuples stay by themselves.
            with contextlib.suppress(KeyError, IndexError, AttributeError, TypeError):
                if get_item(owner, key) is not (value := held()):
                    set_item(owner, key, value)
        for set_state, random_state in self._random:
            set_state(random_state)


def _held(tensor: torch.Tensor | None) -> Callable[[], torch.Tensor | None]:
    """Gives a tensor back. What write-back finds to have no owner must not have one in us."""
    if tensor is None or not shows_memory_alone(tensor):
        return lambda: tensor
    alias, last = own_alias(tensor), [weakref.ref(tensor)]

    def held() -> torch.Tensor:
        living = last[0]()
        again = alias.detach() if living is None else living
        last[0] = weakref.ref(again)
        return again

    return held


def _random_states(device: torch.device) -> Iterator[tuple[Callable[[Any], object], Any]]:
    yield torch.set_rng_state, torch.get_rng_state()
    yield random.setstate, random.getstate()
    if device.type != "cpu":
        module = torch.get_device_module(device)
        yield functools.partial(module.set_rng_state, device=device), module.get_rng_state(device)
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"].random
        yield numpy.set_state, numpy.get_state()


# Comparison


@attrs.frozen(eq=False)
class Kept:
    """A value as it was: of a tensor a copy, of a very large one an even sample."""

    value: Any
    address: int = 0
    storage: int = 0
    """Address of its storage."""


def keep(values: Iterable[tuple[str, Any]]) -> dict[str, Kept]:
    """Copies of values by their paths. Left out are tensors that are more than strided memory."""
    copies: dict[int, Kept] = {}
    kept = {}
    with torch.inference_mode():
        for path, value in values:
            if not isinstance(value, torch.Tensor):
                kept[path] = Kept(value)
            elif is_dense(value):
                if id(value) not in copies:
                    storage = value.untyped_storage().data_ptr()
                    copies[id(value)] = Kept(_sample(value).clone(), value.data_ptr(), storage)
                kept[path] = copies[id(value)]
    return kept


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or of a very large one each n-th slice of its longest dimension."""
    nbytes = tensor.numel() * tensor.element_size()
    tensor = tensor.detach()
    if nbytes <= _LARGEST_KEPT:
        return tensor
    longest = max(range(tensor.dim()), key=lambda dim: tensor.shape[dim])
    step = -(-nbytes // _LARGEST_KEPT)
    return tensor[(*[slice(None)] * longest, slice(None, None, step))]


@attrs.frozen
class Mismatch:
    """How two values differ."""

    text: str
    largest: float | None = None
    """Largest difference of elements; None where they cannot be subtracted."""


def compare(expected: Any, found: Any, rtol: float | None, atol: float | None) -> Mismatch | None:
    """How two values differ, tensors by more than the tolerances of their dtype; None if they do not."""
    if isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor):
        return _compare_tensors(expected, found, rtol, atol)
    if type(expected) is type(found) and (expected == found or expected != expected):
        return None
    return Mismatch(f"expected {brief(expected)}, found {brief(found)}")


def _compare_tensors(
    expected: torch.Tensor, found: torch.Tensor, rtol: float | None, atol: float | None
) -> Mismatch | None:
    if (expected.shape, expected.dtype, expected.device) != (found.shape, found.dtype, found.device):
        return Mismatch(f"expected {View.of(expected)}, found {View.of(found)}")
    if expected.numel() == 0:
        return None
    usual = _TOLERANCES.get(expected.dtype, (0.0, 0.0))
    tolerance = (usual[0] if rtol is None else rtol, usual[1] if atol is None else atol)
    wide = torch.complex128 if expected.dtype.is_complex else torch.float64
    a, b = expected.to(wide), found.to(wide)
    close = torch.isclose(b, a, rtol=tolerance[0], atol=tolerance[1], equal_nan=True)
    if close.all():
        return None
    difference = torch.where(close, 0.0, (a - b).abs())
    ranked = torch.nan_to_num(difference, nan=float("inf"))
    index = [int(i) for i in torch.unravel_index(ranked.argmax(), ranked.shape)]
    at = tuple(index)
    largest = float(difference[at])
    place = f" at {index}" if index else ""
    return Mismatch(
        f"largest difference {largest:.4g}{place}: expected {a[at].item():.4g}, found {b[at].item():.4g}; "
        f"{int((~close).sum())} of {close.numel()} elements differ by more than rtol={tolerance[0]:g}, "
        f"atol={tolerance[1]:g}",
        largest,
    )


def brief(value: Any) -> str:
    """A value for messages."""
    return f"a tensor {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
