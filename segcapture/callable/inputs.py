"""The static inputs of one capture: where calls copy their tensors to, and back from."""

import functools
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
            self.tensors = list(map(self._made_like, range(len(tensors)), tensors))
            for overlap in request.overlaps:
                device = tensors[overlap.positions[0]].device
                memory = torch.empty(overlap.nbytes, dtype=torch.uint8, device=device).untyped_storage()
                for i, offset in zip(overlap.positions, overlap.offsets, strict=False):
                    self.tensors[i] = View.of(tensors[i]).on(memory, offset)
            for i, tensor in enumerate(tensors):
                if isinstance(tensor, torch.nn.Parameter):
                    self.tensors[i] = torch.nn.Parameter(self.tensors[i], False)
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

    def _made_like(self, position: int, tensor: torch.Tensor) -> torch.Tensor:
        if position in self._padded:
            return tensor.new_empty(self._padded[position].shape(tensor.shape))
        if tensor.is_contiguous():  # whatever the strides of dimensions of size 1 are
            return tensor.new_empty(tensor.shape)
        return tensor.new_empty_strided(tensor.shape, tensor.stride())

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
        for i, static in enumerate(self.tensors if self.holds(tensor) else ()):
            view, of = View.of(tensor), View.of(static)
            (low, high), (start, end) = view.byte_range(), of.byte_range()
            shared = storage_id(tensor) == storage_id(static) and low < end and start < high
            if shared and view.dtype is of.dtype and i not in self._padded:
                return OwnTensor(i, view, of)
        return None

    # Copies

    def check_places(self, request: Request) -> None:
        """Raise CaptureFailedError if a tensor of a call is memory of another static input than its own."""
        if self._storages.isdisjoint(request.storages):
            return
        for tensor, pointer in zip(request.tensors, self._pointers, strict=True):
            if tensor.data_ptr() != pointer and self.holds(tensor):
                raise CaptureFailedError(
                    "An argument is the static input of another, which the call overwrites: pass a clone."
                )

    def fill(self, request: Request) -> None:
        """Copy a call's tensors in; one that already is the static input is not copied."""
        targets, sources = [], []
        for i, (target, source) in enumerate(zip(self.tensors, request.tensors, strict=True)):
            if i in self._padded or i in self._repeating:
                with torch.no_grad():
                    self._padded[i].copy_into(target, source) if i in self._padded else copy_into(
                        target, source
                    )
            elif source.data_ptr() != self._pointers[i]:
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
            same = static._version == self._versions[i]
            if not (same and torch.equal(_bits(self._front(i, tensor)), _bits(tensor))):
                self.written.append(i)
        self._check_written()

    def find_newly_written(self) -> list[int]:
        """Positions that are found written after a replay for the first time: an eager break wrote there.

        What graph segments write was found at capture. Writes past autograd (`.data`, NumPy) are not seen.

        Raises:
            CaptureFailedError: as `find_written`.
        """
        pairs = enumerate(zip(map(_version, self.tensors), self._versions, strict=True))
        new = [i for i, (now, before) in pairs if now != before and i not in self.written]
        self.written += new
        if new:
            self._check_written()
        return new

    def _check_written(self) -> None:
        if not self._read_only.isdisjoint(self.written):
            raise CaptureFailedError(
                "The function writes to an argument whose elements repeat (`expand`), or of two that share "
                "memory where one is padded to a bucket. Pass a clone of it."
            )

    def _front(self, position: int, like: torch.Tensor) -> torch.Tensor:
        static = self.tensors[position]
        return self._padded[position].front(static, like) if position in self._padded else static

    def copy_back(self, request: Request) -> None:
        """Copy what the function wrote to the call's own tensors."""
        if self.written:
            own = request.tensors
            away = [i for i in self.written if own[i].data_ptr() != self._pointers[i]]
            _copy([own[i] for i in away], [self._front(i, own[i]) for i in away])


@attrs.frozen
class OwnTensor:
    """From the tensors of a call to one of them, or to what a view of its static input is in it."""

    position: int
    _view: View | None = None
    _static: View | None = None

    def __call__(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        tensor, view, static = tensors[self.position], self._view, self._static
        if view is None or static is None:
            return tensor
        move = functools.partial(_moved, static.stride, tensor.stride(), tensor.shape)
        offset = tensor.storage_offset() + move(view.offset - static.offset)
        made = tensor.as_strided(view.shape, list(map(move, view.stride)), offset)
        made = made.conj() if view.bits[0] else made
        return torch._neg_view(made) if view.bits[1] else made


def _moved(before: tuple[int, ...], now: tuple[int, ...], shape: torch.Size, distance: int) -> int:
    """A distance in elements, in a tensor of the same shape that may have other gaps."""
    if before == now:
        return distance
    moved = 0
    for stride, new, size in sorted(zip(before, now, shape, strict=True), reverse=True):
        if size > 1:
            steps, distance = divmod(distance, stride)
            moved += steps * new
    return moved + distance  # the rest is of dimensions of size 1


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if torch.is_grad_enabled():  # else the context would cost as much as a copy
        with torch.no_grad():
            return _copy(targets, sources)
    if len(targets) == 1:
        targets[0].copy_(sources[0])
    elif targets:
        torch._foreach_copy_(targets, sources)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
