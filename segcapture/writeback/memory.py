"""Tensors as byte ranges of a storage: which are alike, and copies that skip repeats."""

import contextlib
from collections.abc import Mapping
from typing import Any

import torch


def unbridgeable(tensor: torch.Tensor) -> str:
    """What a tensor is that a block of memory cannot carry, or an empty string."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return type(tensor).__qualname__
    if tensor.layout is not torch.strided:
        return f"{tensor.layout} tensor"
    return "nested tensor" if tensor.is_nested else "quantized tensor" if tensor.is_quantized else ""


def byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and the one past the last that a strided tensor covers, from its storage's start."""
    item = tensor.element_size()
    low = high = int(tensor.storage_offset())
    if tensor.numel() == 0:
        return low * item, low * item
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        high += (size - 1) * int(stride)
    return low * item, (high + 1) * item


def without_repeats(tensor: torch.Tensor, of: torch.Tensor | None = None) -> torch.Tensor:
    """The tensor with each dimension in which `of`, or itself, has stride 0 cut to one element."""
    of = tensor if of is None else of
    for dim, (size, stride) in enumerate(zip(of.shape, of.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def has_repeats(tensor: torch.Tensor) -> bool:
    """Whether the same bytes show more than once: in a dimension of stride 0, or in windows."""
    cut = without_repeats(tensor)
    return cut is not tensor or _has_windows(cut)


def _has_windows(tensor: torch.Tensor) -> bool:
    low, high = byte_range(tensor)
    return tensor.numel() * tensor.element_size() > high - low


def repeats_alike(captured: torch.Tensor, new: torch.Tensor) -> bool:
    """Whether `new` repeats its values wherever `captured` does, so that a copy loses none."""
    for size, before, now in zip(captured.shape, captured.stride(), new.stride(), strict=True):
        if size > 1 and before == 0 != now:
            return False
    return not _has_windows(without_repeats(captured)) or new.stride() == captured.stride()


def same_bits(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both read the values of their memory in the same way: conjugated, negated, or plainly."""
    return tensor.is_conj() == other.is_conj() and tensor.is_neg() == other.is_neg()


def same_memory(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype are the same elements at the same addresses."""
    if tensor is other:
        return True
    pointer = tensor.data_ptr()
    return (
        pointer == other.data_ptr()
        and tensor.stride() == other.stride()
        and same_bits(tensor, other)
        and (pointer != 0 or not tensor.numel())  # tensors without memory of their own are not alike
    )


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy values between tensors of one shape, each byte once."""
    without_repeats(target).copy_(without_repeats(source, target))


def place_on(
    storage: torch.UntypedStorage, like: torch.Tensor, byte_offset: int, device: torch.device
) -> torch.Tensor:
    """A tensor with the dtype, shape and strides of `like` on a storage, at a byte offset in it."""
    empty = torch.empty(0, dtype=like.dtype, device=device)
    tensor = empty.set_(storage, byte_offset // like.element_size(), like.shape, like.stride())
    if like.is_conj():
        tensor = tensor.conj()
    return torch._neg_view(tensor) if like.is_neg() else tensor


def view_of(value: Any) -> dict[str, Any]:
    """What a tensor shows of its memory, by name; nothing for other values and what is not strided."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_nested:
        return {}
    view = {"shape": list(value.shape), "stride": list(value.stride()), "offset": value.storage_offset()}
    with contextlib.suppress(RuntimeError):  # a wrapper subclass has none
        view["address"] = value.data_ptr()
    return view


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What differs between two views of a tensor, in words; empty if nothing does."""
    return "; ".join(
        f"{name} {now.get(name)}, before {old}" for name, old in before.items() if old != now.get(name)
    )
