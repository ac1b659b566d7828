"""Bridges: tensors at a fixed address in the pool that carry eager outputs to later segments."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from segcapture.errors import CaptureFailedError, OutputMismatchError
from segcapture.memory import (
    Sharing,
    byte_range,
    copy_into,
    has_repeats,
    place_on,
    repeats_alike,
    same_memory,
)
from segcapture.ownership import own_alias

_ALIGNMENT = 256  # bytes; what the CUDA allocator's blocks have, and vectorised kernels may ask for


class Memory(Protocol):
    """Where bridges live, and which tensors need no owner (a part of the backend)."""

    device: torch.device

    def allocate(self, nbytes: int, device: torch.device) -> torch.UntypedStorage:
        """Memory of the pool, or plain memory of another device."""

    def alias(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A non-owning alias, or None for a tensor that must be kept strongly."""

    def wait_for_host_copies(self) -> None:
        """Wait until copies to the host that an eager function started are there."""


class Bridges:
    """The bridges of one eager segment's output, leaf by leaf."""

    def __init__(self, where: str, memory: Memory) -> None:
        self.where = where
        self.nodes: list[int] = []
        """Index of each leaf's node in the walked output."""
        self.position: dict[int, int] = {}
        self.nbytes = 0
        self._memory = memory
        self._paths: list[str] = []
        self._sources: list[torch.Tensor] = []
        self._spans: list[tuple[int, int]] = []  # the addresses of each bridge
        self.targets: list[torch.Tensor] = []
        self._kept: list[torch.Tensor] = []

    def __len__(self) -> int:
        return len(self.nodes)

    def add(self, node: int, path: str, tensor: torch.Tensor) -> None:
        """Take a fresh leaf of the captured output."""
        kind = unbridgeable(tensor)
        if kind:
            raise CaptureFailedError(
                f"{self.where} returned a {kind} at `{path}`, which cannot be carried to later segments. "
                f"Return a plain dense torch.Tensor, for example the parts that it is made of."
            )
        self.position[node] = len(self.nodes)
        self.nodes.append(node)
        self._paths.append(path)
        self._sources.append(tensor)

    def build(self) -> dict[int, torch.Tensor]:
        """Allocate the bridges, fill them, and return what the model receives, by node."""
        sources, self._sources = self._sources, []
        storages = [tensor.untyped_storage()._cdata for tensor in sources]
        if not sources:
            self._compile(False, storages)
            return {}
        made: dict[int, torch.Tensor] = {}
        for storage in dict.fromkeys(storages):
            made.update(self._build_group([(i, t) for i, t in enumerate(sources) if storages[i] == storage]))
        on_host = any(t.device != self._memory.device for t in sources)
        if on_host:
            self._memory.wait_for_host_copies()
        with torch.no_grad():
            for i, tensor in enumerate(sources):
                copy_into(made[i], tensor)
        for i in range(len(sources)):
            alias = self._memory.alias(made[i])
            if alias is None:
                # Another object than the model's, which may change the shape of its own in place.
                alias = own_alias(made[i])
                self._kept.append(made[i])
            self.targets.append(alias)
        self._compile(on_host, storages)
        return {self.nodes[i]: made[i] for i in range(len(sources))}

    def _build_group(self, leaves: list[tuple[int, torch.Tensor]]) -> dict[int, torch.Tensor]:
        """One bridge for leaves that share a storage, over the bytes that they cover."""
        ranges = [byte_range(tensor) for _, tensor in leaves]
        low = min(start for start, _ in ranges) // _ALIGNMENT * _ALIGNMENT
        high = max(end for _, end in ranges)
        device = leaves[0][1].device
        storage = self._memory.allocate(high - low, device)
        self.nbytes += high - low
        seen: dict[int, torch.Tensor] = {}  # one object for a tensor that occurs twice
        for _, tensor in leaves:
            if id(tensor) not in seen:
                offset = int(tensor.storage_offset()) * tensor.element_size() - low if tensor.numel() else 0
                seen[id(tensor)] = place_on(storage, tensor, offset, device)
        start = storage.data_ptr()
        self._spans.append((start, start + high - low))
        return {i: seen[id(tensor)] for i, tensor in leaves}

    def _compile(self, on_host: bool, storages: Sequence[int]) -> None:
        self._on_host = on_host
        self._pointers = [t.data_ptr() for t in self.targets]
        self._repeats = any(has_repeats(t) for t in self.targets)
        self._one_by_one = self._repeats or on_host or any(t.is_conj() or t.is_neg() for t in self.targets)
        self._sharing = Sharing(self.where, self._paths, self.targets, storages)
        self._low = min((low for low, _ in self._spans), default=0)
        self._high = max((high for _, high in self._spans), default=0)
        self._same_layout: Callable[..., bool] = _unsure

    def store_one(self, new: Any) -> None:
        """Write back an output that is one tensor."""
        if not self._same_layout(new):
            self.check_layouts([new])
        pointers = [new.data_ptr()]
        if pointers != self._pointers or not same_memory(self.targets[0], new):
            self.write([new], pointers)

    def store(self, new: Sequence[Any]) -> None:
        """Write back the leaves of an output, in the order of the captured ones.

        Raises:
            OutputMismatchError: a leaf has another shape, dtype or device, is no tensor, or leaves
                share memory in another way than at capture.
        """
        if new:
            if not self._same_layout(*new):
                self.check_layouts(new)
            pointers = list(map(torch.Tensor.data_ptr, new))
            self._sharing.check(new, pointers)
            self.write(new, pointers)

    def check_layouts(self, new: Sequence[Any]) -> None:
        """Raise OutputMismatchError unless each leaf is a tensor of its captured layout."""
        if not self._same_layout(*new):
            for path, target, tensor in zip(self._paths, self.targets, new, strict=True):
                check_layout(self.where, path, target, tensor)
            # Made here and not at capture, since it compares the thread's dispatch state too.
            self._same_layout = _layout_guard(new)

    def write(self, new: Sequence[torch.Tensor], pointers: list[int]) -> None:
        """Copy the values of checked leaves to the bridges."""
        if self._on_host:
            self._memory.wait_for_host_copies()
        if torch.is_grad_enabled():  # entering no_grad costs as much as ten checks
            with torch.no_grad():
                self._copy(new, pointers)
        else:
            self._copy(new, pointers)

    def _copy(self, new: Sequence[torch.Tensor], pointers: list[int]) -> None:
        targets: Sequence[torch.Tensor] = self.targets
        if self._repeats:
            for path, target, tensor in zip(self._paths, targets, new, strict=True):
                check_repeats(self.where, path, target, tensor)
        low, high = self._low, self._high
        if [pointer for pointer in pointers if low <= pointer < high]:
            targets, new = self._apart(new, pointers)
        if self._one_by_one:
            for target, tensor in zip(targets, new, strict=True):
                copy_into(target, tensor)
        elif len(targets) > 1:
            torch._foreach_copy_(targets, new)  # type: ignore[arg-type]
        elif targets:
            targets[0].copy_(new[0])

    def _apart(
        self, new: Sequence[torch.Tensor], pointers: list[int]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Leave out what is in its bridge already, and clone what is in another one, or moved in it."""
        pairs = [
            (target, tensor.clone() if any(low <= pointer < high for low, high in self._spans) else tensor)
            for target, tensor, pointer in zip(self.targets, new, pointers, strict=True)
            if not same_memory(target, tensor)
        ]
        return [target for target, _ in pairs], [tensor for _, tensor in pairs]


def unbridgeable(tensor: torch.Tensor) -> str:
    """What a tensor is that a block of memory cannot carry, or an empty string."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return type(tensor).__qualname__
    if tensor.layout is not torch.strided:
        return f"{tensor.layout} tensor"
    return "nested tensor" if tensor.is_nested else "quantized tensor" if tensor.is_quantized else ""


def _unsure(*tensors: object) -> bool:
    return False


def _layout_guard(seen: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A quick test whether tensors are laid out as those seen before; False may also be a doubt.

    torch.compile's guards compare type, dtype, device and shape of a list of tensors in one call of C++:
    0.1 us a tensor, where comparing in Python costs 0.5.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards

        sizes: Any = [list(t.shape) for t in seen]
        strides: Any = [[None] * t.dim() for t in seen]
        guards = TensorGuards(*seen, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    except (ImportError, TypeError, RuntimeError):
        return _unsure
    check: Callable[..., bool] = guards.check
    return check


def check_layout(where: str, path: str, captured: torch.Tensor, new: Any) -> None:
    """Raise OutputMismatchError unless `new` is a tensor of the captured shape, dtype and device."""
    expected = _layout(captured)
    if not isinstance(new, torch.Tensor):
        raise OutputMismatchError(
            f"{where} returned a {type(new).__qualname__} at `{path}`; later segments read {expected}. "
            f"The structure of an output is fixed at capture."
        )
    if new.layout is not torch.strided or new.is_nested:
        raise OutputMismatchError(
            f"{where} returned a {unbridgeable(new)} at `{path}`; later segments read {expected}. Return a "
            f"plain dense tensor."
        )
    if (new.shape, new.dtype, new.device) != (captured.shape, captured.dtype, captured.device):
        hint = ""
        if new.shape != captured.shape and new.dim() == captured.dim() > 0:
            hint = f": pad to {_list(captured.shape)}, or capture again for {_list(new.shape)}"
        raise OutputMismatchError(
            f"{where} returned {_layout(new)} at `{path}`; later segments read {expected}. "
            f"Shapes, dtypes and devices are fixed at capture{hint}."
        )


def check_repeats(where: str, path: str, captured: torch.Tensor, new: torch.Tensor) -> None:
    """Raise OutputMismatchError where the captured tensor has no room for all values of `new`."""
    if not repeats_alike(captured, new):
        raise OutputMismatchError(
            f"{where} returned a tensor with strides {_list(new.stride())} at `{path}`, and one with strides "
            f"{_list(captured.stride())} at capture, whose elements share memory. Return it expanded each "
            f"time, or never (`.contiguous()`)."
        )


def _layout(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {_list(tensor.shape)} on {tensor.device}"


def _list(values: Sequence[int]) -> str:
    return f"[{', '.join(map(str, values))}]"
