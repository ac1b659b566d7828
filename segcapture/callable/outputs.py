"""What a capture hands out: copies of its outputs, in the structure that the function returned."""

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from segcapture.callable.hidden import check_within_reach
from segcapture.callable.inputs import Give, StaticInputs
from segcapture.callable.trees import copy_tree, template
from segcapture.capture import BreakableCUDAGraphCapture
from segcapture.errors import CaptureFailedError, OutputMismatchError
from segcapture.writeback.aliases import storage_id
from segcapture.writeback.reading import Reader
from segcapture.writeback.structure import is_plain, is_plain_object, walk


class Outputs:
    """The outputs of one capture.

    An output that is a static input, or a view of one, is handed out as the call's own tensor: the
    function returned its argument.
    """

    def __init__(
        self,
        out: Any,
        inputs: StaticInputs,
        cut: Mapping[int, int],
        arguments: Collection[int],
        capture: BreakableCUDAGraphCapture,
        clone: bool,
    ) -> None:
        self.out = out
        self._cut = cut
        self.clone = clone
        # A class of the user's among the arguments is the call's own object, not a result.
        self._keep = {id(n.value) for n in walk(out) if is_plain_object(n.value) and id(n.value) in arguments}
        self._given: dict[int, Give] = {}
        """By the id of an output that is a call's own tensor: how to get it from the call."""
        self._made: list[torch.Tensor] = []
        """The other output tensors, each once."""
        copy_tree(out, self._sort(inputs), objects=True, keep=self._keep)

        def is_ours(tensor: torch.Tensor) -> bool:
            return inputs.holds(tensor) or (clone and _is_within(tensor, capture.storages()))

        check_within_reach(out, self._keep, is_ours)
        self._returned = {give.args[0] for give in self._given.values()}
        # With clones nothing of them is in a caller's hands.
        self._lent = frozenset() if clone else frozenset(map(storage_id, filter(_is_dense, self._made)))
        self._all_dense = all(map(_is_dense, self._made))
        self._rebuild = None
        if not self._given:
            self._rebuild = template(out, {id(tensor): i for i, tensor in enumerate(self._made)})
        # Weakly: an output may belong to somebody who counts its owners.
        nodes = walk(out)
        tensors = {i: node.value for i, node in enumerate(nodes) if isinstance(node.value, torch.Tensor)}
        self._leaves = {index: weakref.ref(tensor) for index, tensor in tensors.items()}
        plain = {i: node for i, node in enumerate(nodes) if not node.container and i not in tensors}
        self._plain = {index: node.in_object for index, node in plain.items()}
        self._read = Reader(nodes, "The function") if capture.num_eager_breaks else None

    @property
    def nbytes(self) -> int:
        """Bytes of the outputs, inputs among them left out."""
        storages = {t.untyped_storage().data_ptr(): t.nbytes for t in self._made if _is_dense(t)}
        return sum(storages.values())

    def _sort(self, inputs: StaticInputs) -> Callable[[torch.Tensor], torch.Tensor]:
        def sort(tensor: torch.Tensor) -> torch.Tensor:
            give = inputs.giver_of(tensor)
            if give is not None:
                self._given[id(tensor)] = give
            else:
                self._made.append(tensor)
            return tensor

        return sort

    def check_not_lent(self, tensors: Sequence[torch.Tensor], mutated: Iterable[int]) -> None:
        """Raise CaptureFailedError if a call writes to, or gets back, an output that it passes.

        Args:
            tensors: The call's.
            mutated: Positions of those that it writes to.
        """
        if self._lent and any(storage_id(tensors[i]) in self._lent for i in (*mutated, *self._returned)):
            raise CaptureFailedError(
                "An argument that the function writes to or returns is an output of an earlier call, which "
                "this one overwrites as clone_outputs is False. Pass a clone of it, `out.clone()`."
            )

    def collect(self, tensors: Sequence[torch.Tensor], length: int) -> Any:
        """The outputs of the replay that just ran, for a call with these tensors."""
        made = self._copies(length)
        if self._rebuild is not None:
            return self._rebuild(made)
        copies = {id(old): new for old, new in zip(self._made, made, strict=True)}

        def replace(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) in self._given:
                return self._given[id(tensor)](tensors)
            return copies[id(tensor)]

        return copy_tree(self.out, replace, objects=True, keep=self._keep)

    def is_current(self) -> bool:
        """Whether the containers of the output hold the same tensors: eager functions may fill them."""
        if self._read is None:
            return True
        try:
            found = self._read(self.out)
        except OutputMismatchError:
            return False
        same = all(leaf() is found[i] for i, leaf in self._leaves.items())
        return same and all(is_plain(found[i], in_object) for i, in_object in self._plain.items())

    def _copies(self, length: int) -> list[torch.Tensor]:
        found = self._made
        if self._cut:
            found = [t if id(t) not in self._cut else t.narrow(self._cut[id(t)], 0, length) for t in found]
        if not self.clone:
            return found
        if len(found) < 2 or not self._all_dense:
            return [tensor.clone() for tensor in found]
        made = [torch.empty_like(tensor) for tensor in found]
        torch._foreach_copy_(made, found)
        return made


def check_no_grad(out: Any, grad: bool) -> None:
    """Raise CaptureFailedError if an output is part of an autograd graph."""
    for node in walk(out):
        tensor = node.value
        if isinstance(tensor, torch.Tensor) and (
            tensor.grad_fn is not None or (grad and tensor.requires_grad)
        ):
            raise CaptureFailedError(
                f"The function returned a tensor that requires grad at `{node.path}`, and a replay makes no "
                f"autograd graph. Call it under `torch.no_grad()` or `torch.inference_mode()`; or do the "
                f"whole training step in it, and return detached tensors."
            )


def _is_within(tensor: torch.Tensor, storages: Iterable[torch.UntypedStorage]) -> bool:
    if not _is_dense(tensor):
        return False
    address = tensor.data_ptr()
    return any(s.data_ptr() <= address < s.data_ptr() + s.nbytes() for s in storages)


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and type(tensor) in (torch.Tensor, torch.nn.Parameter)
