"""What is fixed at capture about the tensors of an output, and checked at each replay."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from segcapture.errors import OutputMismatchError
from segcapture.writeback.memory import has_repeats, repeats_alike, same_bits, unbridgeable

_storage_offset = torch.Tensor.storage_offset


class Layouts:
    """Shape, dtype and device of an output's tensors, and how they share storages.

    Args:
        where: The segment, for messages.
        paths: Path of each tensor.
        captured: The tensors as later segments read them.
        storages: Identity of the storage that each had in the captured output.
    """

    def __init__(
        self, where: str, paths: Sequence[str], captured: Sequence[torch.Tensor], storages: Sequence[int]
    ) -> None:
        self.paths = paths
        self._where, self._captured = where, captured
        self._pointers = [tensor.data_ptr() for tensor in captured]
        first_with: dict[int, int] = {}
        # Leaves of no elements share nothing.
        self._first = [
            first_with.setdefault(storages[i], i) if tensor.numel() else i
            for i, tensor in enumerate(captured)
        ]
        self._separate = self._first == list(range(len(captured)))
        self.have_repeats = any(map(has_repeats, captured))
        """Whether the same bytes of a tensor show more than once."""
        self._fit: Callable[..., bool] = _unsure

    def check(self, new: Sequence[Any]) -> list[int]:
        """The addresses of new tensors that are laid out as the captured ones.

        Raises:
            OutputMismatchError: they are not, or something is no tensor.
        """
        if not self._fit(*new):
            for path, captured, tensor in zip(self.paths, self._captured, new, strict=True):
                self._check_one(path, captured, tensor)
            # Made here and not at capture, since it compares the thread's dispatch state too.
            self._fit = _guard(new)
        if self.have_repeats:
            self._check_repeats(new)
        if len(new) == 1:
            return [new[0].data_ptr()]
        pointers = list(map(torch.Tensor.data_ptr, new))
        # Each at the start of a storage, and no two at one address: the common case, in 1 us.
        if not self._separate or len(set(pointers)) < len(new) or any(map(_storage_offset, new)):
            self._check_sharing(new, pointers)
        return pointers

    def _check_one(self, path: str, captured: torch.Tensor, new: Any) -> None:
        what, advice = "", "Shapes, dtypes and devices are fixed at capture"
        if not isinstance(new, torch.Tensor):
            what, advice = f"a {type(new).__qualname__}", "Return a tensor each time, or capture again"
        elif new.layout is not torch.strided or new.is_nested:
            what, advice = f"a {unbridgeable(new)}", "Return a plain dense tensor"
        elif (new.shape, new.dtype, new.device) != (captured.shape, captured.dtype, captured.device):
            what = _layout(new)
            if new.shape != captured.shape and new.dim() == captured.dim() > 0:
                advice += f": pad to {_list(captured.shape)}, or capture again for {_list(new.shape)}"
            elif new.shape == captured.shape:
                advice += f": convert it (`.to(...)`), or capture again for {_layout(new)}"
        if what:
            expected = f"later segments read {_layout(captured)}"
            raise OutputMismatchError(f"{self._where} returned {what} at `{path}`; {expected}. {advice}.")

    def _check_repeats(self, new: Sequence[torch.Tensor]) -> None:
        for path, captured, tensor in zip(self.paths, self._captured, new, strict=True):
            if not repeats_alike(captured, tensor):
                raise OutputMismatchError(
                    f"{self._where} returned a tensor with strides {_list(tensor.stride())} at `{path}`, and "
                    f"one with strides {_list(captured.stride())} at capture, whose elements share memory. "
                    f"Return it expanded each time, or never (`.contiguous()`)."
                )

    def _check_sharing(self, new: Sequence[torch.Tensor], pointers: Sequence[int]) -> None:
        """Leaves that shared a storage still do, at the same distances, and no others."""
        storages = [tensor.untyped_storage()._cdata for tensor in new]
        if self._separate and len(set(storages)) == len(new):
            return
        first_with: dict[int, int] = {}
        for i, tensor in enumerate(new):
            if not pointers[i]:
                continue
            now, before = first_with.setdefault(storages[i], i), self._first[i]
            other = min(now, before)
            if other == i:
                continue
            captured = self._captured[i]
            alike = _same_view(tensor, captured) and _same_view(new[other], self._captured[other])
            if alike and (pointers[i], pointers[other]) == (self._pointers[i], self._pointers[other]):
                continue
            distance, expected = pointers[i] - pointers[other], self._pointers[i] - self._pointers[other]
            if now != before or distance != expected or not alike:
                raise OutputMismatchError(
                    f"{self._where} returned `{self.paths[other]}` and `{self.paths[i]}` as "
                    f"{_how(before == other)} at capture, and now as {_how(now == other)} (strides "
                    f"{list(tensor.stride())} at a distance of {distance} bytes, expected "
                    f"{list(captured.stride())} at {expected}). How outputs share memory is fixed at "
                    f"capture: return the same views, or clones."
                )


def _unsure(*tensors: object) -> bool:
    return False


def _guard(seen: Sequence[torch.Tensor]) -> Callable[..., bool]:
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


def _same_view(tensor: torch.Tensor, captured: torch.Tensor) -> bool:
    strides = zip(tensor.shape, tensor.stride(), captured.stride(), strict=True)
    return all(size < 2 or now == before for size, now, before in strides) and same_bits(tensor, captured)


def _how(shared: bool) -> str:
    return "views of one memory" if shared else "separate tensors"


def _layout(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {_list(tensor.shape)} on {tensor.device}"


def _list(values: Sequence[int]) -> str:
    return f"[{', '.join(map(str, values))}]"
