"""Bridges: tensors at a fixed address in the pool that carry eager outputs to later segments."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch

from segcapture.errors import CaptureFailedError, OutputMismatchError
from segcapture.memory import byte_range, copy_into, has_repeats, place_on

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
        self.targets: list[torch.Tensor] = []

    def __len__(self) -> int:
        return len(self.nodes)

    def add(self, node: int, path: str, tensor: torch.Tensor) -> None:
        """Take a fresh leaf of the captured output."""
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
            kind = type(tensor).__qualname__ if type(tensor) is not torch.Tensor else str(tensor.layout)
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
        groups: dict[int, list[int]] = {}
        for i, tensor in enumerate(sources):
            groups.setdefault(tensor.untyped_storage()._cdata, []).append(i)
        made: dict[int, torch.Tensor] = {}
        self._group_of = [0] * len(sources)
        for group in groups.values():
            made.update(self._build_group([(i, sources[i]) for i in group]))
            for i in group:
                self._group_of[i] = group[0]
        on_host = any(t.device != self._memory.device for t in sources)
        if on_host:
            self._memory.wait_for_host_copies()
        with torch.no_grad():
            for i, tensor in enumerate(sources):
                copy_into(made[i], tensor)
        for i in range(len(sources)):
            alias = self._memory.alias(made[i])
            self.targets.append(made[i] if alias is None else alias)
        self._compile(on_host)
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
        return {i: seen[id(tensor)] for i, tensor in leaves}

    def _compile(self, on_host: bool) -> None:
        self._on_host = on_host
        self._shapes = [t.shape for t in self.targets]
        self._dtypes = [t.dtype for t in self.targets]
        self._devices = [t.device for t in self.targets]
        self._pointers = [t.data_ptr() for t in self.targets]
        self._repeats = any(has_repeats(t) for t in self.targets)
        self._shared = [i for i in range(len(self.targets)) if self._group_of.count(self._group_of[i]) > 1]
        if len(self.targets) == 1:
            self._target, self._shape = self.targets[0], self._shapes[0]
            self._dtype, self._device, self._pointer = self._dtypes[0], self._devices[0], self._pointers[0]

    def store_one(self, new: Any) -> None:
        """Write back an output that is one tensor."""
        if (
            type(new) is not torch.Tensor
            or new.shape != self._shape
            or new.dtype is not self._dtype
            or new.device != self._device
        ):
            check_layout(self.where, self._paths[0], self._target, new)
        if new.data_ptr() == self._pointer and new.stride() == self._target.stride():
            return
        if self._on_host:
            self._memory.wait_for_host_copies()
        with torch.no_grad():
            if self._repeats:
                copy_into(self._target, new)
            else:
                self._target.copy_(new)

    def store(self, new: Sequence[Any]) -> None:
        """Write back the leaves of an output, in the order of the captured ones.

        Raises:
            OutputMismatchError: a leaf has another shape, dtype or device, is no tensor, or leaves
                share memory in another way than at capture.
        """
        if not new:
            return
        for i, tensor in enumerate(new):
            if (
                type(tensor) is not torch.Tensor
                or tensor.shape != self._shapes[i]
                or tensor.dtype is not self._dtypes[i]
                or tensor.device != self._devices[i]
            ):
                check_layout(self.where, self._paths[i], self.targets[i], tensor)
        pointers = [tensor.data_ptr() for tensor in new]
        self._check_sharing(new, pointers)
        if self._on_host:
            self._memory.wait_for_host_copies()
        with torch.no_grad():
            if self._repeats or self._on_host:
                for target, tensor, pointer in zip(self.targets, new, pointers, strict=True):
                    if target.data_ptr() != pointer:
                        copy_into(target, tensor)
                return
            targets: Sequence[torch.Tensor] = self.targets
            if any(map(int.__eq__, pointers, self._pointers)):
                moved = [i for i, pointer in enumerate(pointers) if pointer != self._pointers[i]]
                targets, new = [self.targets[i] for i in moved], [new[i] for i in moved]
            if len(targets) > 1:
                torch._foreach_copy_(targets, new)  # type: ignore[arg-type]
            elif targets:
                targets[0].copy_(new[0])

    def _check_sharing(self, new: Sequence[torch.Tensor], pointers: list[int]) -> None:
        """Leaves that shared memory still do, at the same distances, and no others."""
        for i in self._shared:
            first = self._group_of[i]
            same_distance = pointers[i] - pointers[first] == self._pointers[i] - self._pointers[first]
            if new[i].numel() and not (same_distance and new[i].stride() == self.targets[i].stride()):
                raise OutputMismatchError(
                    f"{self.where} returned `{self._paths[first]}` and `{self._paths[i]}` as views of one "
                    f"memory at capture, and not in the same way now (strides {_list(new[i].stride())}, "
                    f"expected {_list(self.targets[i].stride())}). How outputs share memory is fixed at "
                    f"capture: return clones, or the same views."
                )
        order = sorted(range(len(new)), key=pointers.__getitem__)
        for before, after in pairwise(order):
            if self._group_of[before] == self._group_of[after] or not new[before].numel():
                continue
            low, high = byte_range(new[before])
            if pointers[before] + high - low > pointers[after] and new[after].numel():
                raise OutputMismatchError(
                    f"{self.where} returned `{self._paths[before]}` and `{self._paths[after]}` as views of "
                    f"one memory, and as separate tensors at capture. How outputs share memory is fixed "
                    f"at capture: return clones."
                )


def check_layout(where: str, path: str, captured: torch.Tensor, new: Any) -> None:
    """Raise OutputMismatchError unless `new` is a tensor of the captured shape, dtype and device."""
    expected = _layout(captured)
    if not isinstance(new, torch.Tensor):
        raise OutputMismatchError(
            f"{where} returned a {type(new).__qualname__} at `{path}`; later segments read {expected}. "
            f"The structure of an output is fixed at capture."
        )
    same = (new.shape, new.dtype, new.device) == (captured.shape, captured.dtype, captured.device)
    if not same or new.layout is not torch.strided:
        hint = ""
        if new.shape != captured.shape and new.dim() == captured.dim() > 0:
            hint = f": pad to {_list(captured.shape)}, or capture again for {_list(new.shape)}"
        raise OutputMismatchError(
            f"{where} returned {_layout(new)} at `{path}`; later segments read {expected}. "
            f"Shapes, dtypes and devices are fixed at capture{hint}."
        )


def _layout(tensor: torch.Tensor) -> str:
    kind = "" if tensor.layout is torch.strided else f"{tensor.layout} "
    return f"{kind}{str(tensor.dtype).removeprefix('torch.')} {_list(tensor.shape)} on {tensor.device}"


def _list(values: Sequence[int]) -> str:
    return f"[{', '.join(map(str, values))}]"
