"""The static inputs of one capture: where calls copy their tensors to, and back from."""

import operator
from collections.abc import Sequence

import attrs
import torch

from segcapture.callable.signature import Request
from segcapture.errors import CaptureFailedError
from segcapture.tensors import View, copy_into, storage_id

_version = operator.attrgetter("_version")


class StaticInputs:
    """Tensors at fixed addresses that share memory as those of the call do; padded ones have their own.

    They hold the values of the tensors that they are made from.
    """

    def __init__(self, request: Request) -> None:
        tensors, self._padded = request.tensors, request.padded
        with torch.inference_mode(False), torch.no_grad():
            self.tensors = [
                torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
                if i not in self._padded and not tensor.is_contiguous()
                else tensor.new_empty(
                    self._padded[i].shape(tensor.shape) if i in self._padded else tensor.shape
                )
                for i, tensor in enumerate(tensors)
            ]
            for overlap in request.overlaps:
                self._place(overlap.positions, overlap.offsets, tensors)
            self.tensors = [
                torch.nn.Parameter(static, False) if isinstance(tensor, torch.nn.Parameter) else static
                for static, tensor in zip(self.tensors, tensors, strict=True)
            ]
        for static, tensor in zip(self.tensors, tensors, strict=True):
            static.requires_grad_(tensor.requires_grad)
        for i, gradient in request.gradients.items():
            self.tensors[i].grad = self.tensors[gradient]
        self._pointers = [tensor.data_ptr() for tensor in self.tensors]
        self._storages = frozenset(map(storage_id, self.tensors))
        self._repeating = {i for i, tensor in enumerate(self.tensors) if View.of(tensor).has_repeats()}
        apart = [overlap.positions for overlap in request.overlaps if not overlap.offsets]
        self._read_only = self._repeating.union(*apart)
        self.on_host = any(tensor.device.type == "cpu" for tensor in self.tensors)
        """Whether any of them is in host memory."""
        self.written: list[int] = []
        """Positions of those that the function writes to."""
        self.watched = True
        """Whether a replay may write to another one: an eager break runs in it."""
        self.fill(request)

    def _place(
        self, positions: Sequence[int], offsets: Sequence[int], tensors: Sequence[torch.Tensor]
    ) -> None:
        """Lay out static inputs that overlap at the same distances as the call's tensors."""
        views = {i: View.of(tensors[i]) for i in positions}
        ends = [
            offset + view.byte_range()[1] - view.byte_range()[0]
            for offset, view in zip(offsets, views.values(), strict=False)
        ]
        for i, offset in zip(positions, offsets, strict=False):
            if i == positions[0]:
                memory = torch.empty(max(ends), dtype=torch.uint8, device=tensors[i].device)
            self.tensors[i] = views[i].on(memory.untyped_storage(), offset)

    @property
    def nbytes(self) -> int:
        """Bytes of all."""
        storages = {storage_id(tensor): tensor.untyped_storage().nbytes() for tensor in self.tensors}
        return sum(storages.values())

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is memory of a static input."""
        return tensor.layout is torch.strided and storage_id(tensor) in self._storages

    def own_of(self, tensor: torch.Tensor) -> "OwnTensor | None":
        """How to get, from the tensors of a call, its own one for a static input or a view of one."""
        for i, static in enumerate(self.tensors):
            if tensor is static:
                return OwnTensor(i)
        if not self.holds(tensor):
            return None
        view = View.of(tensor)
        low, high = view.byte_range()
        for i, static in enumerate(self.tensors):
            if (
                i in self._padded
                or tensor.dtype is not static.dtype
                or storage_id(tensor) != storage_id(static)
            ):
                continue
            start, end = View.of(static).byte_range()
            if low < end and start < high:
                return OwnTensor(i, view, View.of(static))
        return None

    # Copies

    def check_places(self, request: Request) -> None:
        """Raise CaptureFailedError for a tensor of a call that is memory of another static input than its own."""
        if request.storages and not self._storages.isdisjoint(request.storages):
            for i, tensor in enumerate(request.tensors):
                if tensor.data_ptr() != self._pointers[i] and self.holds(tensor):
                    raise CaptureFailedError(
                        "An argument is the static input of another argument, which this call overwrites. "
                        "Pass a clone of it."
                    )

    def fill(self, request: Request) -> None:
        """Copy a call's tensors in; one that already is the static input is not copied."""
        targets, sources = [], []
        for i, (target, source) in enumerate(zip(self.tensors, request.tensors, strict=True)):
            if i in self._padded:
                with torch.no_grad():
                    self._padded[i].copy_into(target, source)
            elif source.data_ptr() == self._pointers[i]:
                continue
            elif i in self._repeating:
                with torch.no_grad():
                    copy_into(target, source)
            else:
                targets.append(target)
                sources.append(source)
        _copy(targets, sources)
        if self.watched:
            self._versions = list(map(_version, self.tensors))

    def find_written(self, request: Request) -> None:
        """Compare with the tensors that they were filled from: which did the function write to?

        Raises:
            CaptureFailedError: one whose elements repeat, or that is padded and shares memory with another.
        """
        for i, (static, tensor) in enumerate(zip(self.tensors, request.tensors, strict=True)):
            # The version misses kernels that torch does not know, the values a write of the same values.
            if static._version != self._versions[i] or not torch.equal(
                _bits(self._front(i, tensor)), _bits(tensor)
            ):
                self.written.append(i)
        self._check_written()

    def find_newly_written(self) -> list[int]:
        """Positions that are found written after a replay for the first time: an eager break wrote there.

        What graph segments write was found at capture. Writes past autograd (`.data`, NumPy) are not seen.

        Raises:
            CaptureFailedError: as `find_written`.
        """
        versions = list(map(_version, self.tensors))
        if versions == self._versions:
            return []
        new = [i for i, now in enumerate(versions) if now != self._versions[i] and i not in self.written]
        self.written += new
        self._check_written()
        return new

    def _check_written(self) -> None:
        if not self._read_only.isdisjoint(self.written):
            raise CaptureFailedError(
                "The function writes to an argument that is padded to a bucket and shares memory with "
                "another argument, or to that other one, or to one whose elements repeat (`expand`). Pass a "
                "clone of it."
            )

    def _front(self, position: int, like: torch.Tensor) -> torch.Tensor:
        static = self.tensors[position]
        return self._padded[position].front(static, like) if position in self._padded else static

    def copy_back(self, request: Request) -> None:
        """Copy what the function wrote to the call's own tensors."""
        own = request.tensors
        away = [i for i in self.written if own[i].data_ptr() != self._pointers[i]]
        _copy([own[i] for i in away], [self._front(i, own[i]) for i in away])


@attrs.frozen
class OwnTensor:
    """From the tensors of a call to one of them, or to a view that is to it what one is to its static input."""

    position: int
    _view: View | None = None
    _static: View | None = None

    def __call__(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        tensor, view, static = tensors[self.position], self._view, self._static
        if view is None or static is None:
            return tensor
        dims = sorted(zip(static.stride, tensor.stride(), tensor.shape, strict=True), reverse=True)

        def moved(elements: int) -> int:
            # The call's tensor may have other gaps between its rows.
            if tensor.stride() == static.stride:
                return elements
            found = 0
            for before, now, size in dims:
                if size > 1:
                    steps, elements = divmod(elements, before)
                    found += steps * now
            return found

        offset = tensor.storage_offset() + moved(view.offset - static.offset)
        made = tensor.as_strided(view.shape, list(map(moved, view.stride)), offset)
        made = made.conj() if view.bits[0] else made
        return torch._neg_view(made) if view.bits[1] else made


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if not targets:
        return
    if torch.is_grad_enabled():  # else the context would cost as much as a copy
        with torch.no_grad():
            _copy(targets, sources)
    elif len(targets) == 1:
        targets[0].copy_(sources[0])
    else:
        torch._foreach_copy_(targets, sources)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
