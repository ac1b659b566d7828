"""The static inputs of one capture: where calls copy their tensors to, and back from."""

import functools
import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch

from segcapture.callable.bucket import Padded, pad, pad_into
from segcapture.callable.calls import Call
from segcapture.callable.signature import Share, has_grad, overlap
from segcapture.errors import CaptureFailedError
from segcapture.writeback.aliases import storage_id
from segcapture.writeback.memory import (
    byte_range,
    copy_into,
    has_repeats,
    place_on,
    same_bits,
    without_repeats,
)

Give = functools.partial[torch.Tensor]
"""From the tensors of a call to one that it gets back; its first argument is that one's position."""

_version = operator.attrgetter("_version")

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class StaticInputs:
    """Tensors at fixed addresses, that share memory as those of the call do.

    They hold the values of the tensors that they are made from. Padded ones are contiguous.
    """

    def __init__(self, call: Call) -> None:
        tensors, padded = call.tensors, call.padded
        self._padded = padded
        self._clashes = call.clashes
        placed = dict(_placed(tensors, call.shares))
        with torch.inference_mode(False), torch.no_grad():
            self.tensors = [
                placed[i] if i in placed else _like(tensor, padded.get(i)) for i, tensor in enumerate(tensors)
            ]
            self.tensors = [
                torch.nn.Parameter(static, False) if isinstance(tensor, torch.nn.Parameter) else static
                for static, tensor in zip(self.tensors, tensors, strict=True)
            ]
        for position, first in call.twins:
            self.tensors[position] = self.tensors[first]
        self._pointers = [tensor.data_ptr() for tensor in self.tensors]
        self._storages = frozenset(map(storage_id, self.tensors))
        self._firsts = self._first_of_each()
        # Layouts belong to the signature, so these hold for the tensors of every call.
        self._repeats = list(map(has_repeats, self.tensors))
        self._one_by_one = any(t.is_conj() or t.is_neg() for t in (*self.tensors, *tensors))
        self._on_host = any(t.device.type == "cpu" for t in self.tensors)
        self.mutated: list[int] = []
        """Positions of those that the function writes to."""
        self.watched = True
        """Whether a replay may write to one that is not mutated: an eager break runs in it."""
        self._away: list[int] = []
        """Positions of the call's tensors that are the memory of another static input than theirs."""
        self._with_grad: list[int] = []
        for i, (tensor, static) in enumerate(zip(tensors, self.tensors, strict=True)):
            static.requires_grad_(tensor.requires_grad)
            if tensor.requires_grad and has_grad(tensor):
                static.grad = torch.zeros_like(_grad(tensor))
                self._with_grad.append(i)
        self.fill(tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all."""
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self.tensors}
        return sum(storages.values())

    @property
    def on_host(self) -> bool:
        """Whether any of them is in host memory."""
        return self._on_host

    def _first_of_each(self) -> list[int]:
        """Positions without those that are the same bytes in the same shape as an earlier one."""
        seen: dict[Any, int] = {}
        for i, t in enumerate(self.tensors):
            seen.setdefault((self._pointers[i], t.shape, t.stride(), t.dtype) if t.numel() else i, i)
        return list(seen.values())

    def giver_of(self, tensor: torch.Tensor) -> Give | None:
        """How to get from a call its own tensor for one that is a static input, or a view of one."""
        if tensor.layout is not torch.strided:
            return None
        for i, static in enumerate(self.tensors):
            if tensor is static:
                return functools.partial(_given, i)
        for i, static in enumerate(self.tensors):
            if i not in self._padded and tensor.dtype is static.dtype and overlap(tensor, static):
                delta = int(tensor.storage_offset()) - int(static.storage_offset())
                view = functools.partial(_view_of_given, i, tensor.shape, tensor.stride(), delta)
                if same_bits(tensor, static):
                    return view
                conj, neg = tensor.is_conj() != static.is_conj(), tensor.is_neg() != static.is_neg()
                return functools.partial(_other_view_of_given, i, view, conj, neg)
        return None

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether it is memory of a static input."""
        return tensor.layout is torch.strided and storage_id(tensor) in self._storages

    def fill(self, tensors: Sequence[torch.Tensor], storages: Collection[int] = ()) -> None:
        """Copy a call's tensors in; one that already is the static input is not copied.

        `storages` are the identities of theirs, of no tensor's where none can be another's static input.
        """
        self._away = []
        if storages and not self._storages.isdisjoint(storages):
            self._away = [i for i in range(len(tensors)) if self._is_away(i, tensors[i])]
            tensors = [_apart(t) if i in self._away else t for i, t in enumerate(tensors)]
        targets, sources = [], []
        for i in self._firsts:
            tensor, target = tensors[i], self.tensors[i]
            if i in self._padded:
                how = self._padded[i][0]
                pad_into(target, tensor, how.dim, how.fill)
            elif tensor.data_ptr() != self._pointers[i]:
                if self._repeats[i]:
                    target, tensor = without_repeats(target), without_repeats(tensor)
                targets.append(target)
                sources.append(tensor)
        for i in self._with_grad:
            targets.append(_grad(self.tensors[i]))
            sources.append(_grad(tensors[i]))
        self._copy(targets, sources)
        if self.watched:
            self._versions = list(map(_version, self.tensors))

    def _is_away(self, position: int, tensor: torch.Tensor) -> bool:
        return tensor.data_ptr() != self._pointers[position] and self.holds(tensor)

    def find_mutated(self, tensors: Sequence[torch.Tensor]) -> None:
        """Compare with the tensors that they were filled from: which did the function write to?

        Raises:
            CaptureFailedError: one that is padded and shares memory with another argument.
        """
        for i, (static, tensor) in enumerate(zip(self.tensors, tensors, strict=True)):
            original = tensor
            if i in self._padded:
                how, size = self._padded[i]
                original = pad(tensor, how.dim, size, how.fill)
            # The version misses kernels that torch does not know, the values a write of the same values.
            if static._version != self._versions[i] or not _same_values(static, original):
                self.mutated.append(i)
        self._check_clashes()

    def find_newly_mutated(self) -> list[int]:
        """Positions that are found mutated after a replay for the first time: an eager break wrote there.

        What graph segments write was found at capture. Writes past autograd (`.data`, NumPy) are not seen.
        """
        versions = list(map(_version, self.tensors))
        if versions == self._versions:
            return []
        changed = (i for i, (a, b) in enumerate(zip(versions, self._versions, strict=True)) if a != b)
        new = [i for i in changed if i not in self.mutated]
        self.mutated += new
        self._check_clashes()
        return new

    def _check_clashes(self) -> None:
        if not set(self._clashes).isdisjoint(self.mutated):
            raise CaptureFailedError(
                "The function writes to an argument that is padded to a bucket and shares memory with "
                "another argument, or to that other one. Pass a copy of one of them."
            )

    def copy_back(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy what the function wrote to the call's own tensors."""
        targets, sources = [], []
        statics, written = self.tensors, self.mutated
        if self._away:  # `fill` wrote to these
            statics = [static.clone() for static in statics]
            written = sorted({*written, *self._away})
        for i in written:
            tensor, static = tensors[i], statics[i]
            if i in self._padded:
                static = static.narrow(self._padded[i][0].dim, 0, tensor.shape[self._padded[i][0].dim])
            elif tensor.data_ptr() == self._pointers[i]:
                continue
            if has_repeats(tensor):
                copy_into(tensor, static)
                continue
            targets.append(tensor)
            sources.append(static)
        self._copy(targets, sources)

    def _copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        if not targets:
            return
        if torch.is_grad_enabled():  # else the context would cost as much as a copy
            with torch.no_grad():
                self._copy(targets, sources)
        elif len(targets) == 1 or self._one_by_one:  # a list may have no lazy conjugates or negatives
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
        else:
            torch._foreach_copy_(targets, sources)


def _given(position: int, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[position]


def _view_of_given(
    position: int, shape: torch.Size, stride: tuple[int, ...], delta: int, tensors: Sequence[torch.Tensor]
) -> torch.Tensor:
    tensor = tensors[position]
    return tensor.as_strided(shape, stride, tensor.storage_offset() + delta)


def _other_view_of_given(
    position: int, view: Give, conj: bool, neg: bool, tensors: Sequence[torch.Tensor]
) -> torch.Tensor:
    """The view, and with it conjugated or negated."""
    tensor = view(tensors)
    if conj:
        tensor = tensor.conj()
    return torch._neg_view(tensor) if neg else tensor


def _grad(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.grad is not None
    return tensor.grad


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    return without_repeats(tensor).clone().expand(tensor.shape)


def _placed(tensors: Sequence[torch.Tensor], shares: Sequence[Share]) -> list[tuple[int, torch.Tensor]]:
    """The static inputs that overlap, at the same distances as the call's tensors."""
    made = []
    with torch.inference_mode(False), torch.no_grad():
        for share in shares:
            nbytes = 0
            for position, offset in share:
                low, high = byte_range(tensors[position])
                nbytes = max(nbytes, offset + high - low)
            device = tensors[share[0][0]].device
            storage = torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()
            made += [(i, place_on(storage, tensors[i], offset, device)) for i, offset in share]
    return made


def _like(tensor: torch.Tensor, padded: tuple[Padded, int] | None) -> torch.Tensor:
    options: dict[str, Any] = {"dtype": tensor.dtype, "device": tensor.device}
    if padded is None:
        return torch.empty_strided(tensor.shape, tensor.stride(), **options)
    dim, size = padded[0].dim, padded[1]
    return torch.empty((*tensor.shape[:dim], size, *tensor.shape[dim + 1 :]), **options)


def _same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    with torch.no_grad():
        a, b = (t.resolve_conj().resolve_neg() if t.is_conj() or t.is_neg() else t for t in (a, b))
        if a.dtype is torch.complex128:
            a, b = torch.view_as_real(a), torch.view_as_real(b)
        kind = _BITS[a.element_size()]
        return torch.equal(a.detach().view(kind), b.detach().view(kind))
