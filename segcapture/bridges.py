"""Bridges: tensors at a fixed address in the pool that carry eager outputs to later segments."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import eq
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
        self._separate = self._group_of == list(range(len(self.targets)))
        self._same_layout: Callable[..., bool] = _unsure

    def store_one(self, new: Any) -> None:
        """Write back an output that is one tensor."""
        if (
            type(new) is not torch.Tensor
            or new.shape != self._shapes[0]
            or new.dtype is not self._dtypes[0]
            or new.device != self._devices[0]
        ):
            check_layout(self.where, self._paths[0], self.targets[0], new)
        if new.data_ptr() == self._pointers[0] and new.stride() == self.targets[0].stride():
            return
        with _no_grad():
            self._copy([new], self.targets)

    def store(self, new: Sequence[Any]) -> None:
        """Write back the leaves of an output, in the order of the captured ones.

        Raises:
            OutputMismatchError: a leaf has another shape, dtype or device, is no tensor, or leaves
                share memory in another way than at capture.
        """
        if not new:
            return
        if not self._same_layout(*new):
            for path, target, tensor in zip(self._paths, self.targets, new, strict=True):
                check_layout(self.where, path, target, tensor)
            # Made here and not at capture, since it compares the thread's dispatch state too.
            self._same_layout = _layout_guard(new)
        pointers = [tensor.data_ptr() for tensor in new]
        self._check_sharing(new, pointers)
        targets: Sequence[torch.Tensor] = self.targets
        if any(map(eq, pointers, self._pointers)):
            moved = [i for i, pointer in enumerate(pointers) if pointer != self._pointers[i]]
            targets, new = [targets[i] for i in moved], [new[i] for i in moved]
        with _no_grad():
            self._copy(new, targets)

    def _copy(self, new: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        if self._on_host:
            self._memory.wait_for_host_copies()
        if self._repeats or self._on_host:
            for target, tensor in zip(targets, new, strict=True):
                copy_into(target, tensor)
        elif len(targets) > 1:
            torch._foreach_copy_(targets, new)  # type: ignore[arg-type]
        elif targets:
            targets[0].copy_(new[0])

    def _check_sharing(self, new: Sequence[torch.Tensor], pointers: list[int]) -> None:
        """Leaves that shared a storage still do, at the same distances, and no others."""
        storages = [tensor.untyped_storage()._cdata for tensor in new]
        if self._separate and len(set(storages)) == len(new):
            return
        first_with: dict[int, int] = {}
        for i, tensor in enumerate(new):
            first = first_with.setdefault(storages[i], i)
            captured_first = self._group_of[i]
            if first == captured_first == i:
                continue
            same_distance = (
                pointers[i] - pointers[first] == self._pointers[i] - self._pointers[first]
                and tensor.stride() == self.targets[i].stride()
            )
            if tensor.numel() and (first != captured_first or not same_distance):
                raise self._shared_otherwise(new, i, min(first, captured_first))

    def _shared_otherwise(self, new: Sequence[torch.Tensor], i: int, other: int) -> OutputMismatchError:
        at_capture = self._group_of[i] == other
        now = new[i].untyped_storage()._cdata == new[other].untyped_storage()._cdata
        how = {True: "views of one memory", False: "separate tensors"}
        found = how[now]
        if at_capture and now:
            found = (
                f"other views of it: strides {_list(new[i].stride())} at byte distance "
                f"{new[i].data_ptr() - new[other].data_ptr()}, expected strides "
                f"{_list(self.targets[i].stride())} at {self._pointers[i] - self._pointers[other]}"
            )
        return OutputMismatchError(
            f"{self.where} returned `{self._paths[other]}` and `{self._paths[i]}` as {how[at_capture]} at "
            f"capture, and now as {found}. How outputs share memory is fixed at capture: return the same "
            f"views, or clones."
        )


def _no_grad() -> AbstractContextManager[object]:
    """`torch.no_grad()`, where it makes a difference: entering it costs as much as ten checks."""
    return torch.no_grad() if torch.is_grad_enabled() else nullcontext()


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
