"""What a CUDA capture refuses, for the tape to refuse too.

An explicit table, since operator tags are wrong both ways: `aten::index` is tagged as dynamic though
integer indices are fine, and conversions to Python reach no operator at all.
"""

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from segcapture.errors import CaptureFailedError
from segcapture.operators.composites import names_of
from segcapture.thread import location

# CUDA's own words for error 900, cudaErrorStreamCaptureUnsupported.
CUDA_WORDS = "operation not permitted when stream is capturing"

# Composite operators reach the tape in parts (`torch.where(c)` and `argwhere` as `nonzero`, say).
_ON_HOST = "reads a value on the host"
_DYNAMIC = "has a result whose size depends on the data, which is read on the host"
_MASK = "with a boolean mask has a size that depends on the data, which is read on the host"
_ALWAYS = {
    "aten::_local_scalar_dense": f"(`.item()`) {_ON_HOST}",
    "aten::equal": f"(`torch.equal`) {_ON_HOST}",
    "aten::allclose": _ON_HOST,
    "aten::_linalg_check_errors": "reads an error code on the host",
    "aten::linalg_eig": "is computed on the host",
    # Their standard deviations are checked on the host.
    "aten::normal.float_Tensor": _ON_HOST,
    "aten::normal.Tensor_Tensor": _ON_HOST,
    "c10d::barrier": "waits on the host for all ranks",
    "c10d::monitored_barrier_": "waits on the host for all ranks",
    "higher_order::cond": "reads its condition on the host",
    "higher_order::while_loop": "reads its condition on the host",
    **dict.fromkeys(("aten::nonzero", "aten::masked_select", "aten::bincount", "aten::_to_sparse"), _DYNAMIC),
    **dict.fromkeys(("aten::_unique", "aten::_unique2", "aten::unique_dim"), _DYNAMIC),
    **dict.fromkeys(("aten::unique_consecutive", "aten::unique_dim_consecutive"), _DYNAMIC),
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
    name, overload = names_of(func)
    always = _ALWAYS.get(name) or _ALWAYS.get(f"{name}.{overload}")
    reason = always or _depending_on_arguments(name, args, kwargs)
    if reason is not None:
        _refuse(name, reason)


def check_function(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> None:
    """Raise CaptureFailedError for what operators do not show: conversions of tensors on `device` to Python.

    And for values on `device` that CUDA's kernels read on the host, where Python numbers are fine: the CPU
    knows no such difference, and by the time of the operator both are tensors.
    """
    name = getattr(func, "__name__", "")
    if not args or not isinstance(args[0], torch.Tensor) or args[0].device != device:
        return
    if name in _CONVERSIONS:
        if name == "__format__" and len(args) > 1 and not args[1] and args[0].dim():
            name = "__repr__"
        _refuse(f"Tensor.{name}", _CONVERSIONS[name])
    if name == "__deepcopy__":
        raise CaptureFailedError(
            f"`Tensor.__deepcopy__` at {location()} copies memory past the operators that the tape records "
            f"(a CUDA graph would hold it). Write `.clone()`.",
            operator="Tensor.__deepcopy__",
        )
    value = args[-1] if len(args) > 2 else kwargs.get("value")
    if isinstance(value, torch.Tensor) and value.device == device:
        if name in _FILLS:
            _refuse(f"Tensor.{name}", "with a tensor as the value reads it on the host: give it a number")
        if name in ("__setitem__", "index_put", "index_put_") and any(map(_is_mask, tree_leaves(args[1]))):
            _refuse(f"Tensor.{name}", _MASK)


def is_stricter_on_cpu(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether only the CPU reads values in a function: one_hot does, to check the range of the classes."""
    classes = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
    return getattr(func, "__name__", "") == "one_hot" and bool(classes != -1)


_FILLS = ("masked_fill", "masked_fill_", "index_fill", "index_fill_")


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def _depending_on_arguments(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    if name in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
        masks = any(map(_is_mask, args[1]))
        if masks and (name == "aten::index" or not _is_masked_fill(args, kwargs)):
            return _MASK
    if name == "aten::repeat_interleave" and kwargs.get("output_size") is None:
        return "without output_size reads the sum of the repeats on the host"
    if name == "aten::histc" and (len(args) < 4 or args[2] == args[3]):
        return "without a range reads the smallest and the largest value on the host"
    if name in ("aten::copy_", "aten::_to_copy"):
        return _waiting_copy(name, args, kwargs)
    return None


def _waiting_copy(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """CUDA captures copies between host and device that it need not wait for: pinned, and non_blocking."""
    in_place = name == "aten::copy_"
    source: torch.Tensor = args[1] if in_place else args[0]
    target: torch.device | None = args[0].device if in_place else kwargs.get("device")
    if target is None or (source.device.type == "cpu") == (target.type == "cpu"):
        return None
    non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    host = source if source.device.type == "cpu" else args[0] if in_place else None
    if non_blocking and (host is None or host.is_pinned()):
        return None
    return "copies between host and device and waits for it (pinned memory and non_blocking would not)"


def _is_masked_fill(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """`x[mask] = one value` becomes masked_fill on CUDA, which needs no size."""
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    indices = [t for t in args[1] if t is not None]
    value: torch.Tensor = args[2]
    return not accumulate and len(indices) == 1 and value.numel() == 1


def _refuse(name: str, reason: str) -> None:
    raise CaptureFailedError(
        f"`{name}` {reason} at {location()}: {CUDA_WORDS}. Move it, with what uses its value, into a "
        f"function marked `@eager_break_during_capture` that returns tensors of fixed shapes.",
        operator=name,
        reason=reason,
    )
