"""Tensors as byte ranges of a storage: aliases that own nothing, and copies that skip repeats."""

import torch


def byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and the one past the last that a strided tensor covers, from its storage's start."""
    item = tensor.element_size()
    low = high = int(tensor.storage_offset())
    if tensor.numel() == 0:
        return low * item, low * item
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        high += (size - 1) * int(stride)
    return low * item, (high + 1) * item


def without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with each dimension of stride 0 cut to one element: every byte of it once."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def has_repeats(tensor: torch.Tensor) -> bool:
    """Whether a dimension of stride 0 shows the same bytes more than once."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy values between tensors of one shape, each byte once."""
    if has_repeats(target):
        for dim, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
            if stride == 0 and size > 1:
                source = source.narrow(dim, 0, 1)
        target = without_repeats(target)
    target.copy_(source)


def place_on(
    storage: torch.UntypedStorage, like: torch.Tensor, byte_offset: int, device: torch.device
) -> torch.Tensor:
    """A tensor with the dtype, shape and strides of `like` on a storage, at a byte offset in it."""
    tensor = torch.empty(0, dtype=like.dtype, device=device)
    return tensor.set_(storage, byte_offset // like.element_size(), like.shape, like.stride())
