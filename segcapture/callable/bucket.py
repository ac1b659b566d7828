"""Buckets: a dimension that varies is padded up to the next of a few sizes (so few captures serve all)."""

import bisect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch

from segcapture.errors import CaptureFailedError
from segcapture.trees import Place, flatten


def _sizes(given: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(given)))


def _paths(given: Any) -> Any:
    """Places as `flatten` writes them: with double quotes."""
    return {path.replace("'", '"'): v for path, v in given.items()} if isinstance(given, Mapping) else given


@attrs.frozen(kw_only=True)
class Bucket:
    """A dimension of the arguments that is padded up to the next of the given sizes.

    Args:
        sizes: What to pad to. Calls above the largest run eagerly.
        dims: The padded dimension of each tensor argument that has it: `{"ids": 1, "mask": 1}`. Names are
            the function's parameters, followed by the place in a container: `batch["ids"]`. A number is the
            dimension of every tensor argument.
        out: The dimension to cut back in the outputs: one for every tensor, or by place, as in
            `{"out[0]": 1}` or `{'out["hidden"]': 1}`, which leaves the others alone. Left out: nothing is
            cut.
        fill: The value in the padding: one, or by argument.

    Raises:
        ValueError: no sizes, one below 1, or no dims.
        TypeError: dims or out is neither a number nor a dict of numbers.
    """

    sizes: tuple[int, ...] = attrs.field(converter=_sizes)
    dims: int | Mapping[str, int] = attrs.field(converter=_paths)
    out: int | Mapping[str, int] | None = attrs.field(default=None, converter=_paths)
    fill: float | Mapping[str, float] = attrs.field(default=0, converter=_paths)

    def __attrs_post_init__(self) -> None:
        if not self.sizes or self.sizes[0] < 1:
            raise ValueError(f"sizes takes one or more sizes from 1, got {self.sizes}")
        if self.dims is None or self.dims == {}:
            raise ValueError("dims takes the padded dimension of at least one argument, got none")
        for option, given in (("dims", self.dims), ("out", 0 if self.out is None else self.out)):
            found = given.values() if isinstance(given, Mapping) else (given,)
            if not all(isinstance(dim, int) for dim in found):
                raise TypeError(f'{option} takes a dimension, or {{"name": dimension}}, got {given!r}')

    def check_names(self, names: Sequence[str]) -> None:
        """Raise ValueError if `dims` names what is none of a function's parameters."""
        for path in self.dims if isinstance(self.dims, Mapping) else ():
            if _root(path) not in names:
                raise ValueError(f"dims names {path!r}, and the parameters are {', '.join(names)}")

    def find(self, arguments: Sequence[tuple[str, Any]]) -> tuple[dict[int, "Padding"], int, int]:
        """The tensors to pad, by their id, in how many places they are, and their common length.

        Raises:
            TooLongError: they are longer than the largest size.
            ValueError: they differ in length, the call has none of them, or one has no such dimension, is a
                container, or is padded in two ways.
        """
        dims = self.dims if isinstance(self.dims, Mapping) else None
        roots = None if dims is None else set(map(_root, dims))
        found: dict[str, tuple[torch.Tensor, int]] = {}
        for place in (p for name, v in arguments if roots is None or name in roots for p in flatten(v, name)):
            if dims is not None and place.path in dims and place.is_container:
                kind = type(place.value).__qualname__
                raise ValueError(
                    f"dims names {place.path}, a {kind}: name the tensors in it, as in '{place.path}[0]'"
                )
            dim = self.dims if dims is None else dims.get(place.path)
            if isinstance(place.value, torch.Tensor) and isinstance(dim, int):
                found[place.path] = place.value, _dimension(place.path, dim, place.value)
        lengths = {path: tensor.shape[dim] for path, (tensor, dim) in found.items()}
        if len(set(lengths.values())) != 1:
            what = ", ".join(f"{path} has {length}" for path, length in lengths.items())
            raise ValueError(f"the arguments named in dims must agree in length: {what or 'none was given'}")
        length = next(iter(lengths.values()))
        if length > self.sizes[-1]:
            raise TooLongError(f"{length} is above the largest bucket, {self.sizes[-1]}")
        size = self.sizes[bisect.bisect_left(self.sizes, length)]
        paddings: dict[int, Padding] = {}
        for path, (tensor, dim) in found.items():
            fill = self.fill.get(path, 0) if isinstance(self.fill, Mapping) else self.fill
            how = Padding(dim, size, fill)
            if repr(paddings.setdefault(id(tensor), how)) != repr(how):  # nan is nan
                raise ValueError(
                    f"{path} is a tensor that is an argument in another place too, and is padded in "
                    f"another way there: pass a clone of it"
                )
        return paddings, len(found), length

    def find_cuts(self, places: Sequence[Place], size: int) -> dict[int, int]:
        """The dimension to cut of each output tensor, by its id; `places` are those of the output.

        Raises:
            CaptureFailedError: an output has not the padded size there, or is not there at all.
        """
        tensors = {p.path: p.value for p in places if isinstance(p.value, torch.Tensor)}
        wanted = self.out if isinstance(self.out, Mapping) else dict.fromkeys(tensors, self.out)
        found: dict[int, int] = {}
        for path, dim in wanted.items():
            shape = list(tensors[path].shape) if path in tensors else None
            if dim is None:
                continue
            if shape is None or not -len(shape) <= dim < len(shape) or shape[dim] != size:
                sizes = {p: list(tensor.shape) for p, tensor in tensors.items()}
                fitting = ", ".join(f"{p!r}: {s.index(size)}" for p, s in sizes.items() if size in s)
                raise CaptureFailedError(
                    f"The bucket cuts dimension {dim} of `{path}` back, but that is "
                    f"{'not there' if shape is None else shape}, and the arguments are padded to {size}. "
                    f"Name the outputs to cut, with their dimension; of that size are: out={{{fitting}}}."
                )
            found[id(tensors[path])] = dim % len(shape)
        return found


class TooLongError(Exception):
    """The call is above the largest bucket."""


@attrs.frozen
class Padding:
    """How one tensor is padded."""

    dim: int
    size: int
    fill: float

    def shape(self, shape: torch.Size) -> tuple[int, ...]:
        """A tensor's shape after it."""
        return (*shape[: self.dim], self.size, *shape[self.dim + 1 :])

    def front(self, padded: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """The part of a padded tensor that is as long as another one."""
        return padded.narrow(self.dim, 0, like.shape[self.dim])

    def copy_into(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a tensor to the front of a padded one, and fill the rest."""
        length = source.shape[self.dim]
        self.front(target, source).copy_(source)
        target.narrow(self.dim, length, self.size - length).fill_(self.fill)


def _dimension(path: str, dim: int, tensor: torch.Tensor) -> int:
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(f"dims pads dimension {dim} of {path}, which has {tensor.dim()} dimensions")
    return dim % tensor.dim()


def _root(path: str) -> str:
    return path.partition("[")[0].partition(".")[0]
