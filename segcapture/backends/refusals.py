"""What a CUDA capture refuses, for the tape and `find_breaks` to refuse too.

An explicit table, since operator tags are wrong both ways: `aten::index` is tagged as dynamic though
integer indices are fine, and conversions to Python reach no operator at all.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from segcapture.errors import CaptureFailedError
from segcapture.operators.composites import names_of, tensor_leaves
from segcapture.thread import location

# CUDA's own words for error 900, cudaErrorStreamCaptureUnsupported.
CUDA_WORDS = "operation not permitted when stream is capturing"
ADVICE = (
    "Move it, with what uses its value, into a function marked `@eager_break_during_capture` that returns "
    "tensors of fixed shapes (with `enable=False`, and in mode='full', a marked function is captured too)."
)

# Composite operators reach the tape in parts (`torch.where(c)` and `argwhere` as `nonzero`, say).
_ON_HOST = "reads a value on the host"
_LENGTHS = "copies the lengths between host and device and waits for it"
_DYNAMIC = "has a result whose size depends on the data, which is read on the host"
_MASK = "with a boolean mask has a size that depends on the data, which is read on the host"
_NESTED = "has a nested tensor, whose sizes are read and kept on the host"
_ALWAYS = {
    "aten::_local_scalar_dense": f"(`.item()`) {_ON_HOST}",
    "aten::equal": f"(`torch.equal`) {_ON_HOST}",
    "aten::allclose": _ON_HOST,
    "aten::_linalg_check_errors": "reads an error code on the host",
    "aten::linalg_eig": "is computed on the host",
    # Their standard deviations are checked on the host.
    "aten::normal.float_Tensor": _ON_HOST,
    "aten::normal.Tensor_Tensor": _ON_HOST,
    "aten::_ctc_loss": _LENGTHS,
    "aten::_pack_padded_sequence": _LENGTHS,
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


def check_operator(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    made: Callable[[torch.Tensor], bool] = lambda tensor: False,
) -> None:
    """Raise CaptureFailedError for an operator that CUDA would not capture.

    `made` tells whether the captured code itself made a tensor.
    """
    name, reason = names_of(func)[0], _always(func)
    if reason is None and name in _DEPENDING:
        reason = _DEPENDING[name](args, kwargs)
    if reason is None and name in _COPIES:
        reason = _waiting_copy(name, args, kwargs, made)
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
_COPIES = {"aten::copy_", "aten::_to_copy"}


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


def _index(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    return _MASK if any(map(_is_mask, args[1])) else None


def _index_put(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """`x[mask] = one value` becomes masked_fill on CUDA, which needs no size."""
    indices = [t for t in args[1] if t is not None]
    fills = len(indices) == 1 and args[2].numel() == 1 and not _given(args, kwargs, 3, "accumulate", False)
    return None if fills else _index(args, kwargs)


def _repeat_interleave(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    if kwargs.get("output_size") is not None:
        return None
    return "without output_size reads the sum of the repeats on the host"


def _histc(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    if len(args) > 3 and args[2] != args[3]:
        return None
    return "without a range reads the smallest and the largest value on the host"


_DEPENDING = {
    "aten::index": _index,
    **dict.fromkeys(("aten::index_put", "aten::index_put_", "aten::_index_put_impl_"), _index_put),
    "aten::repeat_interleave": _repeat_interleave,
    "aten::histc": _histc,
}


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


def _refuse(name: str, reason: str, then: str = f"{CUDA_WORDS}. {ADVICE}") -> None:
    raise CaptureFailedError(f"`{name}` {reason} at {location()}: {then}", operator=name, reason=reason)
