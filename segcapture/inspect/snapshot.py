"""Values kept for later: tensors that a function may change, random states, and comparisons."""

import functools
import inspect
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch

from segcapture.trees import children

_DEPTH = 6
_LARGEST_KEPT = 64 * 2**20  # bytes: of larger tensors an even sample is kept

# As torch.testing.assert_close has them (https://docs.pytorch.org/docs/2.11/testing.html): rtol, atol.
_TOLERANCES = {
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float32: (1.3e-6, 1e-5),
    torch.complex64: (1.3e-6, 1e-5),
    torch.float64: (1e-7, 1e-7),
    torch.complex128: (1e-7, 1e-7),
}


def tensors_of(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """Tensors that a call can reach, with names: in its arguments, and what the function itself refers to.

    That is: parameters, buffers and tensor attributes of modules, the object of a bound method, what a
    function closes over, and the globals that it names.
    """
    found = _Search()
    found.visit_call(fn, args, kwargs)
    return found.tensors


class _Search:
    """A flatten through Python objects that meets each tensor once."""

    def __init__(self) -> None:
        self.tensors: list[tuple[str, torch.Tensor]] = []
        self.generators: list[torch.Generator] = []
        # The objects themselves: the id of one that died could be another one's.
        self._seen: dict[int, Any] = {}

    def visit_call(self, fn: Any, args: Any, kwargs: Any) -> None:
        """What a call can reach: its arguments, and then what the function itself refers to."""
        for i, value in enumerate(args):
            self.visit(f"args[{i}]", value, 0)
        for key, value in kwargs.items():
            self.visit(key, value, 0)
        self.visit(getattr(fn, "__name__", type(fn).__name__), fn, 0)

    def visit(self, name: str, value: Any, depth: int) -> None:
        """Add what can be reached from a value."""
        if id(value) in self._seen or depth > _DEPTH:
            return
        self._seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            if value.layout is torch.strided and type(value) in (torch.Tensor, torch.nn.Parameter):
                self.tensors.append((name, value))
            return
        if isinstance(value, torch.Generator):
            self.generators.append(value)
            return
        for suffix, child in _reachable(value):
            self.visit(name + suffix, child, depth + 1)


def _reachable(value: Any) -> Iterator[tuple[str, Any]]:
    if type(value).__module__.partition(".")[0] == "segcapture":
        return  # a capture, say: what its segments hold is compared segment by segment
    if isinstance(value, torch.nn.Module):
        yield from ((f".{name}", t) for name, t in value.named_parameters())
        yield from ((f".{name}", t) for name, t in value.named_buffers())
        for name, module in value.named_modules():
            attributes = {k: v for k, v in vars(module).items() if k not in _OF_MODULES}
            prefix = f".{name}" if name else ""
            yield from ((f"{prefix}.{k}", v) for k, v in attributes.items())
    elif isinstance(value, torch.optim.Optimizer):
        yield ".param_groups", value.param_groups
        yield from ((f".state[{i}]", state) for i, state in enumerate(value.state.values()))
    elif isinstance(value, functools.partial):
        yield "", value.func
        yield from ((f".args[{i}]", item) for i, item in enumerate(value.args))
        yield from ((f".{key}", item) for key, item in value.keywords.items())
    elif inspect.ismethod(value):
        yield "", value.__self__
        yield "", value.__func__
    elif inspect.isfunction(value):
        yield from _named_by(value)
    else:
        yield from ((suffix, child) for _, suffix, child in children(value) or ())


_OF_MODULES = set(vars(torch.nn.Module()))


def _named_by(fn: Any) -> Iterator[tuple[str, Any]]:
    """What a function closes over, and the globals of its module that it names."""
    if "__wrapped__" in vars(fn):
        yield "", fn.__wrapped__
        return
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            yield f".{name}", cell.cell_contents
        except ValueError:
            continue  # not assigned yet
    for name in fn.__code__.co_names:
        value = fn.__globals__.get(name)
        foreign = getattr(value, "__globals__", fn.__globals__) is not fn.__globals__
        if value is not None and not foreign and not inspect.ismodule(value) and not inspect.isclass(value):
            yield f".{name}", value


class State:
    """Everything that a run may change, as it was when this was made.

    Kept are values of tensors, which tensor is a parameter's `grad`, and the random states of torch, the
    device, Python and NumPy. What else a function changes (a Python counter, say) is not.
    """

    def __init__(self, roots: Any, fn: Any, args: Any, kwargs: Any, device: torch.device) -> None:
        search = _Search()
        search.visit_call(fn, args, kwargs)
        search.visit("state", roots, 0)
        self.named = search.tensors
        """Name and tensor, as the caller knows them."""
        with torch.inference_mode():
            self._values = [tensor.clone() for _, tensor in self.named]
            self._gradients = [
                (t, t.grad, None if t.grad is None else t.grad.clone())
                for _, t in self.named
                if t.requires_grad and t.is_leaf
            ]
        self._random = list(_random_states(device))
        self._random += [(g.set_state, g.get_state()) for g in search.generators]

    def restore(self) -> None:
        """Put everything back, in place."""
        with torch.inference_mode():
            for (_, tensor), value in zip(self.named, self._values, strict=True):
                if tensor.shape == value.shape:
                    tensor.copy_(value)
            for _, gradient, copied in self._gradients:
                if gradient is not None and copied is not None:
                    gradient.copy_(copied)
        for tensor, gradient, _ in self._gradients:
            tensor.grad = gradient
        for set_state, random_state in self._random:
            set_state(random_state)


def _random_states(device: torch.device) -> Iterator[tuple[Callable[[Any], object], Any]]:
    yield torch.set_rng_state, torch.get_rng_state()
    yield random.setstate, random.getstate()
    if device.type != "cpu":
        module = torch.get_device_module(device)
        yield functools.partial(module.set_rng_state, device=device), module.get_rng_state(device)
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"].random
        yield numpy.set_state, numpy.get_state()


def keep(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor's values; of a very large one an even sample."""
    return sample(tensor).clone()


def sample(tensor: torch.Tensor) -> torch.Tensor:
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


def compare(
    expected: torch.Tensor, found: torch.Tensor, rtol: float | None, atol: float | None
) -> Mismatch | None:
    """How two tensors differ by more than the tolerances of their dtype, or None if they do not."""
    if (expected.shape, expected.dtype, expected.device) != (found.shape, found.dtype, found.device):
        return Mismatch(f"expected {_layout(expected)}, found {_layout(found)}")
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
    count = int((~close).sum())
    place = f" at {index}" if index else ""
    return Mismatch(
        f"largest difference {largest:.4g}{place}: expected {_number(a[at])}, found {_number(b[at])}; "
        f"{count} of {close.numel()} elements differ by more than rtol={tolerance[0]:g}, "
        f"atol={tolerance[1]:g}",
        largest,
    )


def _number(value: torch.Tensor) -> str:
    return f"{value.item():.4g}"


def _layout(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}"
