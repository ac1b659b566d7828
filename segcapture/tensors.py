"""Tensors as views of a storage: what they show of it, aliases that are no owners, and copies."""

import weakref
from typing import Any, NamedTuple

import torch


class View(NamedTuple):
    """What a plain strided tensor shows of its memory."""

    address: int
    """Of its first element; 0 if it has none."""
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    """In elements, from the start of the storage."""
    dtype: torch.dtype
    device: torch.device
    bits: tuple[bool, bool]
    """Whether values are conjugated, and whether they are negated, when they are read."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "View":
        """The view that a tensor is."""
        return cls(
            tensor.data_ptr(),
            tensor.shape,
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.dtype,
            tensor.device,
            (tensor.is_conj(), tensor.is_neg()),
        )

    def on(self, storage: torch.UntypedStorage, byte_offset: int | None = None) -> torch.Tensor:
        """A new tensor that shows a storage like this, at its own offset or at another one in bytes."""
        offset = self.offset if byte_offset is None else byte_offset // self.dtype.itemsize
        made = torch.empty(0, dtype=self.dtype, device=storage.device)
        return made.set_(storage, offset, self.shape, self.stride)

    def byte_range(self) -> tuple[int, int]:
        """First byte and the one past the last that it covers, from the start of the storage."""
        low = high = self.offset
        for size, stride in zip(self.shape, self.stride, strict=True):
            if size == 0:
                return low * self.dtype.itemsize, low * self.dtype.itemsize
            high += (size - 1) * stride
        return low * self.dtype.itemsize, (high + 1) * self.dtype.itemsize

    def has_repeats(self) -> bool:
        """Whether the same bytes show more than once: in a dimension of stride 0, or in windows."""
        low, high = self.byte_range()
        expanded = any(size > 1 and stride == 0 for size, stride in zip(self.shape, self.stride, strict=True))
        return (expanded and high > low) or self.shape.numel() * self.dtype.itemsize > high - low

    def changes(self, now: "View") -> str:
        """What differs in another view, in words; empty if nothing does."""
        return "; ".join(
            f"{name} {new}, before {old}"
            for name, old, new in zip(self._fields, self, now, strict=True)
            if old != new
        )

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)} on {self.device}"


_dispatch_keys: Any = torch._C._dispatch_keys
_plain_keys: set[int] = set()
"""Sets of dispatch keys of plain tensors: one question, where a look at each property costs eight."""


def cannot_be_copied(tensor: torch.Tensor) -> str:
    """What a tensor is whose values a block of memory cannot hold, or an empty string."""
    keys = _dispatch_keys(tensor).raw_repr()
    if keys in _plain_keys and type(tensor) is torch.Tensor:
        return ""
    what = _what_it_is(tensor)
    if not what:
        _plain_keys.add(keys)
    return what


def _what_it_is(tensor: torch.Tensor) -> str:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return type(tensor).__qualname__
    if tensor.layout is not torch.strided:
        return f"{tensor.layout} tensor"
    if tensor.is_conj() or tensor.is_neg():
        return "conjugate or negative view (`.resolve_conj()`, `.resolve_neg()`)"
    return "nested tensor" if tensor.is_nested else "quantized tensor" if tensor.is_quantized else ""


def storage_id(tensor: torch.Tensor) -> int:
    """Identity of the storage under a tensor."""
    return int(tensor.untyped_storage()._cdata)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 [bytes]: all memory from a tensor's first element to its last."""
    low, high = View.of(tensor).byte_range()
    return on_bytes(tensor.untyped_storage(), low, high)


def on_bytes(storage: torch.UntypedStorage, low: int, high: int) -> torch.Tensor:
    """uint8 [high - low]: a range of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, low, (high - low,), (1,))


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy values between tensors of one shape; where elements of the target repeat, as bytes."""
    if View.of(target).has_repeats():
        bytes_of(target).copy_(bytes_of(source))
    else:
        target.copy_(source)


def own_alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as another tensor object, which does not count as an owner of it."""
    alias = tensor.detach()
    if tensor.layout is torch.strided:
        aliases = own_aliases(tensor)
        aliases.append(weakref.ref(alias, aliases.remove))
    return alias


def own_aliases(tensor: torch.Tensor) -> "list[weakref.ref[torch.Tensor]]":
    """The aliases on a tensor's storage that `own_alias` made."""
    # torch keeps the attributes of a storage's Python object for as long as the storage lives.
    attributes = vars(tensor.untyped_storage())
    found: list[weakref.ref[torch.Tensor]] = attributes.setdefault("_segcapture_aliases", [])
    return found


def has_own_aliases(storage: torch.UntypedStorage) -> bool:
    """Whether an alias of ours is on a storage."""
    return bool(getattr(storage, "_segcapture_aliases", ()))


def shows_memory_alone(tensor: torch.Tensor) -> bool:
    """Whether a tensor is nothing but its memory, so that an alias can stand for it."""
    return type(tensor) is torch.Tensor and not tensor.requires_grad and not vars(tensor)
