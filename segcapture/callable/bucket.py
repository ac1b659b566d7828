"""Buckets: a dimension that varies is padded up to the next of a few sizes (so few captures serve all)."""

import bisect
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch

from segcapture.errors import CaptureFailedError
from segcapture.writeback.structure import walk


def _sizes(given: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(given)))


def _paths(given: Any) -> Any:
    """Places as `walk` writes them: with double quotes."""
    return {path.replace("'", '"'): v for path, v in given.items()} if isinstance(given, Mapping) else given


@attrs.frozen(kw_only=True)
class Bucket:
    """A dimension of the arguments that is padded up to the next of the given sizes.

    Args:
        sizes: What to pad to. Calls above the largest run eagerly.
        dims: The padded dimension of each tensor argument that has it: `{"ids": 1, "mask": 1}`. Names are
            the function's parameters, followed by the place in a container: `batch["ids"]`.
        out: The dimension to cut back in the outputs: one for every tensor, or by place, as in
            `{"out[0]": 1}` or `{'out["hidden"]': 1}`, which leaves the others alone. Left out: nothing is
            cut.
        fill: The value in the padding: one, or by argument.

    Raises:
        ValueError: no sizes, one below 1, or no dims.
    """

    sizes: tuple[int, ...] = attrs.field(converter=_sizes)
    dims: Mapping[str, int] = attrs.field(converter=_paths)
    out: int | Mapping[str, int] | None = attrs.field(default=None, converter=_paths)
    fill: float | Mapping[str, float] = attrs.field(default=0, converter=_paths)

    def __attrs_post_init__(self) -> None:
        if not self.sizes or self.sizes[0] < 1:
            raise ValueError(f"sizes takes one or more sizes from 1, got {self.sizes}")
        if not self.dims:
            raise ValueError("dims takes the padded dimension of at least one argument, got none")

    def size_for(self, length: int) -> int | None:
        """The smallest size that holds a length; None above the largest."""
        index = bisect.bisect_left(self.sizes, length)
        return self.sizes[index] if index < len(self.sizes) else None

    def check_names(self, fn: Callable[..., Any], names: Sequence[str]) -> None:
        """Raise ValueError if `dims` names what is no parameter of the function."""
        kinds = [p.kind for p in inspect.signature(fn).parameters.values()]
        if inspect.Parameter.VAR_KEYWORD in kinds:
            return
        for path in self.dims:
            if _root(path) not in names:
                raise ValueError(f"dims names {path!r}, and the parameters are {', '.join(names)}")

    def find(self, arguments: Sequence[tuple[str, Any]]) -> tuple[dict[int, "Padded"], int, int]:
        """The tensors to pad, by their id, in how many places they are, and their common length.

        Raises:
            ValueError: they differ in length, the call has none of them, or one has no such dimension, is a
                container, or is padded in two ways.
        """
        roots = {_root(path) for path in self.dims}
        found: dict[int, Padded] = {}
        lengths: dict[str, int] = {}
        for name, value in arguments:
            if name not in roots:
                continue
            for node in walk(value):
                path = name + node.path.removeprefix("out")
                if path in self.dims and node.container:
                    kind = type(node.value).__qualname__
                    raise ValueError(
                        f"dims names {path}, a {kind}: name the tensors in it, as in '{path}[0]'"
                    )
                if path not in self.dims or not isinstance(node.value, torch.Tensor):
                    continue
                dim = _dimension(path, self.dims[path], node.value)
                fill = self.fill.get(path, 0) if isinstance(self.fill, Mapping) else self.fill
                how = Padded(dim, fill)
                if repr(found.setdefault(id(node.value), how)) != repr(how):  # nan is nan
                    raise ValueError(
                        f"{path} is a tensor that is an argument in another place too, and is padded in "
                        f"another way there: pass a clone of it"
                    )
                lengths[path] = node.value.shape[dim]
        if len(set(lengths.values())) != 1:
            what = ", ".join(f"{path} has {length}" for path, length in lengths.items())
            raise ValueError(f"the arguments named in dims must agree in length: {what or 'none was given'}")
        return found, len(lengths), next(iter(lengths.values()))

    def out_dims(self, out: Any, size: int) -> dict[int, int]:
        """The dimension to cut of each output tensor, by its id.

        Raises:
            CaptureFailedError: an output has not the padded size there, or is not there at all.
        """
        found: dict[int, int] = {}
        missing = set(self.out) if isinstance(self.out, Mapping) else set()
        for node in walk(out) if self.out is not None else ():
            if not isinstance(node.value, torch.Tensor):
                continue
            dim = self.out.get(node.path) if isinstance(self.out, Mapping) else self.out
            missing.discard(node.path)
            if dim is None:
                continue
            shape = list(node.value.shape)
            if not -len(shape) <= dim < len(shape) or shape[dim] != size:
                raise CaptureFailedError(
                    f"The bucket cuts dimension {dim} of `{node.path}` back, but that is {shape} where the "
                    f"arguments are padded to {size}. {_choices(out, size)}"
                )
            found[id(node.value)] = dim % len(shape)
        if missing:
            raise CaptureFailedError(
                f"The bucket cuts {', '.join(sorted(missing))} back, and no such tensor was returned. "
                f"{_choices(out, size)}"
            )
        return found


def _dimension(path: str, dim: int, tensor: torch.Tensor) -> int:
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(f"dims pads dimension {dim} of {path}, which has {tensor.dim()} dimensions")
    return dim % tensor.dim()


def _choices(out: Any, size: int) -> str:
    """Which outputs have the padded size, and where."""
    found = {
        node.path: [dim for dim, length in enumerate(node.value.shape) if length == size]
        for node in walk(out)
        if isinstance(node.value, torch.Tensor)
    }
    fitting = ", ".join(f"{path!r}: {dims[0]}" for path, dims in found.items() if dims)
    return f"Name the outputs to cut, with their dimension; of that size are: out={{{fitting}}}."


@attrs.frozen
class Padded:
    """How one tensor is padded."""

    dim: int
    fill: float


def pad(tensor: torch.Tensor, dim: int, size: int, fill: float) -> torch.Tensor:
    """A contiguous copy that is `size` long in one dimension."""
    shape = (*tensor.shape[:dim], size, *tensor.shape[dim + 1 :])
    with torch.inference_mode(False), torch.no_grad():
        made = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
    pad_into(made, tensor, dim, fill)
    return made


def pad_into(target: torch.Tensor, tensor: torch.Tensor, dim: int, fill: float) -> None:
    """Copy a tensor to the front of a longer one, and fill the rest."""
    length, size = tensor.shape[dim], target.shape[dim]
    with torch.no_grad():
        target.narrow(dim, 0, length).copy_(tensor)
        if length < size:
            target.narrow(dim, length, size - length).fill_(fill)


def with_progress(items: Sequence[Any], title: str) -> Iterator[Any]:
    """Go through the items behind a progress bar, where tqdm or rich is installed and a person looks."""
    if not sys.stderr.isatty():
        return iter(items)
    try:
        from tqdm import tqdm
    except ImportError:
        pass
    else:
        return iter(tqdm(items, desc=title))
    try:
        from rich.progress import track
    except ImportError:
        return iter(items)
    return iter(track(items, description=title))


def _root(path: str) -> str:
    return path.partition("[")[0].partition(".")[0]
