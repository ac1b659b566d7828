"""What a CUDA capture refuses, for the tape to refuse too.

An explicit table, since operator tags are wrong both ways: `aten::index` is tagged as dynamic though
integer indices are fine, and conversions to Python reach no operator at all.
"""

from typing import Any

import torch

from segcapture.errors import CaptureFailedError
from segcapture.source import location

# CUDA's own words for error 900, cudaErrorStreamCaptureUnsupported.
CUDA_WORDS = "operation not permitted when stream is capturing"

_ALWAYS = {
    "aten::_local_scalar_dense": "(`.item()`) reads a value on the host",
    "aten::item": "reads a value on the host",
    "aten::is_nonzero": "(`bool(t)`) reads a value on the host",
    "aten::equal": "(`torch.equal`) reads a value on the host",
    "aten::allclose": "reads a value on the host",
    "aten::_linalg_check_errors": "reads an error code on the host",
    **dict.fromkeys(
        (
            "aten::nonzero",
            "aten::nonzero_numpy",
            "aten::argwhere",
            "aten::masked_select",
            "aten::_unique",
            "aten::_unique2",
            "aten::unique_dim",
            "aten::unique_consecutive",
            "aten::unique_dim_consecutive",
            "aten::bincount",
            "aten::combinations",
            "aten::repeat_interleave.Tensor",
        ),
        "has a result whose size depends on the data, which is read on the host",
    ),
}

_CONVERSIONS = {
    "item": "(`.item()`) reads a value on the host",
    "tolist": "(`.tolist()`) reads values on the host",
    "numpy": "(`.numpy()`) reads values on the host",
    "cpu": "(`.cpu()`) copies to the host and waits",
    "__array__": "(a conversion to NumPy) reads values on the host",
    "__bool__": "(`bool(t)`, `if t:`) reads a value on the host",
    "__int__": "(`int(t)`) reads a value on the host",
    "__float__": "(`float(t)`) reads a value on the host",
    "__complex__": "(`complex(t)`) reads a value on the host",
    "__index__": "(a tensor as an index of Python) reads a value on the host",
    "__contains__": "(`x in t`) reads a value on the host",
    "__repr__": "(printing a tensor) reads values on the host",
    "__format__": "(formatting a tensor) reads values on the host",
}


def check_operator(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise CaptureFailedError for an operator that CUDA would not capture."""
    name: str = func._schema.name
    reason = _ALWAYS.get(name) or _ALWAYS.get(f"{name}.{func._schema.overload_name}")
    if reason is None:
        reason = _depending_on_arguments(name, args, kwargs)
    if reason is not None:
        _refuse(name, reason)


def check_conversion(func: Any, args: tuple[Any, ...], device: torch.device) -> None:
    """Raise CaptureFailedError for a conversion of a tensor on `device` to Python."""
    name = getattr(func, "__name__", "")
    if name not in _CONVERSIONS or not args:
        return
    tensor = args[0]
    if isinstance(tensor, torch.Tensor) and tensor.device == device:
        if name == "__format__" and len(args) > 1 and not args[1] and tensor.dim():
            name = "__repr__"
        _refuse(f"Tensor.{name}", _CONVERSIONS[name])


def _depending_on_arguments(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    if name in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
        masks = [t for t in args[1] if t is not None and t.dtype in (torch.bool, torch.uint8)]
        if masks and not (name != "aten::index" and _is_masked_fill(args, kwargs)):
            return "with a boolean mask has a size that depends on the data, which is read on the host"
    if name == "aten::where" and len(args) == 1:
        return "with one argument is nonzero, whose size depends on the data"
    if name == "aten::repeat_interleave" and kwargs.get("output_size") is None:
        repeats = args[1] if len(args) > 1 else kwargs.get("repeats", args[0])
        if isinstance(repeats, torch.Tensor):
            return "without output_size reads the sum of the repeats on the host"
    if name == "aten::one_hot" and (args[1] if len(args) > 1 else kwargs.get("num_classes", -1)) == -1:
        return "without num_classes reads the largest class on the host"
    return None


def _is_masked_fill(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """`x[mask] = one value` becomes masked_fill on CUDA, which needs no size."""
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    indices = [t for t in args[1] if t is not None]
    value: torch.Tensor = args[2]
    return not accumulate and len(indices) == 1 and value.numel() == 1


def _refuse(name: str, reason: str) -> None:
    raise CaptureFailedError(
        f"`{name}` {reason} at {location()}: {CUDA_WORDS}. Move it into a function marked "
        f"`@eager_break_during_capture`."
    )
