"""Other tensor objects for the same memory, which are no owners of it to those who count."""

import weakref

import torch


def storage_id(tensor: torch.Tensor) -> int:
    """Identity of the storage under a tensor."""
    return int(tensor.untyped_storage()._cdata)


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


def shows_memory_alone(tensor: torch.Tensor) -> bool:
    """Whether a tensor is nothing but its memory, so that an alias can stand for it."""
    return type(tensor) is torch.Tensor and not tensor.requires_grad and not vars(tensor)
