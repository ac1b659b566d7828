"""What a CUDA capture refuses, for the tape and `find_breaks` to refuse too.

An explicit table, since operator tags are wrong both ways: `aten::index` is tagged as dynamic though
integer indices are fine, and conversions to Python reach no operator at all.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from segcapture.advice import advice_here
from segcapture.errors import CaptureFailedError
from segcapture.operators.composites import names_of, tensor_leaves
from segcapture.thread import location

# CUDA's own words for error 900, cudaErrorStreamCaptureUnsupported.
CUDA_WORDS = "operation not permitted when stream is capturing"

_ON_HOST = "reads a value on the host"
_LENGTHS = "copies the lengths between host and device and waits for it"
_RANKS = "waits on the host for all ranks"
_DYNAMIC = "has a result whose size depends on the data, which is read on the host"
_MASK = "with a boolean mask has a size that depends on the data, which is read on the host"
_NESTED = "has a nested tensor, whose sizes are read and kept on the host"
_DYNAMIC_SIZES = (
    "nonzero masked_select bincount _to_sparse _unique _unique2 unique_dim unique_consecutive "
    "unique_dim_consecutive"
)
# Composite operators reach the tape in parts (`torch.where(c)` and `argwhere` as `nonzero`, say).
# Others check inside of their kernel, past the dispatcher (BatchLinearAlgebra.cpp).
_CHECKED = ["_linalg_check_errors", "_linalg_eigh", "_linalg_svd", "linalg_pinv"]
_ALWAYS = {
    "aten::_local_scalar_dense": f"(`.item()`) {_ON_HOST}",
    "aten::linalg_eig": "is computed on the host",
    "aten::linalg_matrix_exp": "reads norms on the host",
    "aten::embedding_renorm_": "(`max_norm=`) reads the number of different rows on the host",
    **dict.fromkeys((f"aten::{name}" for name in _CHECKED), "reads an error code on the host"),
    **dict.fromkeys(("aten::equal", "aten::allclose"), _ON_HOST),
    **dict.fromkeys(("aten::_ctc_loss", "aten::_pack_padded_sequence"), _LENGTHS),
    **dict.fromkeys(("c10d::barrier", "c10d::monitored_barrier_"), _RANKS),
    **dict.fromkeys(("higher_order::cond", "higher_order::while_loop"), "reads its condition on the host"),
    **dict.fromkeys((f"aten::{name}" for name in _DYNAMIC_SIZES.split()), _DYNAMIC),
}
if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15):  # their standard deviations were checked
    _ALWAYS |= dict.fromkeys(("aten::normal.float_Tensor", "aten::normal.Tensor_Tensor"), _ON_HOST)
_CONVERSIONS = {
    "cpu": "copies to the host and waits",
    "__bool__": f"(`bool(t)`, `if t:`) {_ON_HOST}",
    "__index__": f"(a tensor as an index of Python) {_ON_HOST}",
    "__repr__": "(printing a tensor) reads values on the host",
    **dict.fromkeys(("item", "__int__", "__float__", "__complex__", "__contains__"), _ON_HOST),
    **dict.fromkeys(("tolist", "numpy", "__array__", "__format__"), "reads values on the host"),
}


def check_operator(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    made: Callable[[torch.Tensor], bool] = lambda tensor: False,
) -> None:
    """Raise CaptureFailedError for an operator that CUDA would not capture.

    `made` tells whether the captured code itself made a tensor.
    """
    name = names_of(func)[0]
    reason = _always(func) or _depending_on_arguments(name, args, kwargs, made)
    if reason is None and any(tensor.is_nested for tensor in tensor_leaves(args, kwargs)):
        reason = _NESTED
    if reason is not None:
        _refuse(name, reason)


def check_function(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> None:
    """Raise CaptureFailedError for what operators do not show: conversions of tensors on `device` to Python.

    And for values on `device` that CUDA's kernels read on the host, where Python numbers are fine: the CPU
    knows no such difference, and by the time of the operator both are tensors.
    """
    name = getattr(func, "__name__", "")
    if name not in _FUNCTIONS or not args:
        return
    first = args[0]
    if name in _FROM_PYTHON:
        given = args[1:] if isinstance(first, torch.Tensor) else args
        if any(isinstance(item, list | tuple) and _on(device, item) for item in given):
            _refuse(f"torch.{name}", "of tensors reads each of them on the host (`torch.stack` does not)")
    if not isinstance(first, torch.Tensor) or first.device != device:
        return
    if name == "__deepcopy__":
        _refuse(
            "Tensor.__deepcopy__",
            "copies memory past the operators that the tape records",
            "a CUDA graph would hold it. Write `.clone()`.",
        )
    if name in _CONVERSIONS:
        if name == "__format__" and len(args) > 1 and not args[1] and first.dim():
            name = "__repr__"
        _refuse(f"Tensor.{name}", _CONVERSIONS[name])
    value = args[-1] if len(args) > 2 else kwargs.get("value")
    if isinstance(value, torch.Tensor) and value.device == device:
        if name in _FILLS:
            _refuse(f"Tensor.{name}", "with a tensor as the value reads it on the host: give it a number")
        if name in _WRITES and any(map(_is_mask, tensor_leaves(args[1]))):
            _refuse(f"Tensor.{name}", _MASK)


def is_stricter_on_cpu(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether only the CPU reads values in a function: one_hot does, to check the range of the classes."""
    if getattr(func, "__name__", "") != "one_hot":
        return False
    return bool(_given(args, kwargs, 1, "num_classes", -1) != -1)


_FILLS = {"masked_fill", "masked_fill_", "index_fill", "index_fill_"}
_WRITES = {"__setitem__", "index_put", "index_put_"}
_FROM_PYTHON = {"tensor", "as_tensor", "asarray", "new_tensor"}
_FUNCTIONS = {"__deepcopy__", *_CONVERSIONS, *_FILLS, *_WRITES, *_FROM_PYTHON}


@lru_cache(maxsize=4096)
def _always(func: Any) -> str | None:
    name, overload = names_of(func)
    if name.startswith("aten::_nested_"):
        return _NESTED
    return _ALWAYS.get(name) or _ALWAYS.get(f"{name}.{overload}")


def _given(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, name: str, default: Any) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)


def _on(device: torch.device, value: Any) -> bool:
    return any(tensor.device == device for tensor in tensor_leaves(value))


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def _depending_on_arguments(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], made: Callable[[torch.Tensor], bool]
) -> str | None:
    if name in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
        masks = any(map(_is_mask, args[1]))
        return _MASK if masks and (name == "aten::index" or not _is_masked_fill(args, kwargs)) else None
    if name == "aten::repeat_interleave" and kwargs.get("output_size") is None:
        return "without output_size reads the sum of the repeats on the host"
    if name == "aten::histc" and (len(args) < 4 or args[2] == args[3]):
        return "without a range reads the smallest and the largest value on the host"
    if name in ("aten::copy_", "aten::_to_copy"):
        return _waiting_copy(name, args, kwargs, made)
    return None


def _is_masked_fill(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """`x[mask] = one value` becomes masked_fill on CUDA, which needs no size."""
    indices = [t for t in args[1] if t is not None]
    return len(indices) == 1 and args[2].numel() == 1 and not _given(args, kwargs, 3, "accumulate", False)


def _waiting_copy(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], made: Callable[[torch.Tensor], bool]
) -> str | None:
    """CUDA captures copies between host and device that it need not wait for: pinned, and non_blocking.

    And copies of what the captured code itself made on the host, which is frozen.
    """
    in_place = name == "aten::copy_"
    source: torch.Tensor = args[1] if in_place else args[0]
    target: torch.device | None = args[0].device if in_place else kwargs.get("device")
    if target is None or (source.device.type == "cpu") == (target.type == "cpu"):
        return None
    from_host = source.device.type == "cpu"
    host = source if from_host else args[0] if in_place else None
    if from_host and made(source):
        return None
    if _given(args, kwargs, 2, "non_blocking", False) and (host is None or host.is_pinned()):
        return None
    return "copies between host and device and waits for it (pinned memory and non_blocking would not)"


def _refuse(name: str, reason: str, then: str = "") -> None:
    then = then or f"{CUDA_WORDS}. {advice_here()}"
    raise CaptureFailedError(f"`{name}` {reason} at {location()}: {then}", operator=name, reason=reason)
