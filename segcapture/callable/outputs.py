"""What a call gets back: copies of what was captured, in the structure that the function returned."""

import copy
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from segcapture.callable.bucket import Bucket
from segcapture.callable.inputs import StaticInputs
from segcapture.callable.signature import Request, weak
from segcapture.capture import BreakableCUDAGraphCapture
from segcapture.errors import CaptureFailedError
from segcapture.tensors import cannot_be_copied, storage_id
from segcapture.trees import (
    PLAIN,
    Place,
    flatten,
    hidden_tensor,
    is_plain_object,
    set_item,
    tensors_in,
    tuple_like,
)


class Template:
    """A nested value that is made again with other items in it.

    Containers are copied as what they are, but for those in places that are `whole`.
    """

    def __init__(self, places: Sequence[Place], whole: Sequence[bool]) -> None:
        at = [i if place.same_as < 0 else place.same_as for i, place in enumerate(places)]
        self._copied: list[tuple[int, list[tuple[Any, int]]]] = []
        tuples: dict[int, list[int]] = {}
        for i, place in enumerate(places):
            if place.inside is None or whole[i]:
                continue
            if isinstance(place.value, tuple):
                tuples[i] = [at[k] for k in place.inside]
            else:
                self._copied.append((i, [(places[k].key, at[k]) for k in place.inside]))
        self._tuples: list[tuple[int, list[int]]] = []  # those that are in others before those
        while tuples:
            ready = {i: items for i, items in tuples.items() if tuples.keys().isdisjoint(items)}
            self._tuples += ready.items()
            tuples = {i: items for i, items in tuples.items() if i not in ready}

    def make(self, values: list[Any]) -> Any:
        """The value, from what stands in each place, the old containers among that. They are replaced there."""
        for i, _ in self._copied:
            values[i] = copy.copy(values[i])  # before their items, which may lead back here
        for i, items in self._tuples:
            made = [values[k] for k in items]
            values[i] = tuple(made) if type(values[i]) is tuple else tuple_like(values[i], made)
        for i, pairs in self._copied:
            for key, k in pairs:
                set_item(values[i], key, values[k])
        return values[0]


def with_tensors(request: Request, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with others in place of its tensors. Objects stay themselves."""
    new = {id(tensor): tensors[i] for i, tensor in enumerate(request.tensors)}
    places = flatten((request.args, request.kwargs))
    whole = _below(places, [is_plain_object(place.value) for place in places])
    values = [p.value if whole[i] else new.get(id(p.value), p.value) for i, p in enumerate(places)]
    made: tuple[tuple[Any, ...], dict[str, Any]] = Template(places, whole).make(values)
    return made


def _below(places: Sequence[Place], chosen: list[bool]) -> list[bool]:
    """Of each place, whether it is chosen or in one that is."""
    for i, place in enumerate(places):
        chosen[i] = chosen[i] or (place.parent >= 0 and chosen[place.parent])
    return chosen


class CallOutputs:
    """The outputs of one capture.

    An output that is a static input, or a view of one, is handed out as the call's own tensor: the
    function returned its argument.

    Raises:
        CaptureFailedError: an output cannot be cut as the bucket says, or holds a tensor where no copy can
            replace it.
    """

    def __init__(
        self,
        out: Any,
        inputs: StaticInputs,
        request: Request,
        bucket: Bucket | None,
        capture: BreakableCUDAGraphCapture,
        clone: bool,
    ) -> None:
        self.out: Any = out
        self.clone = clone
        live = capture.num_eager_breaks > 0
        places = flatten(out)
        values = [place.value for place in places]
        cuts = {}
        if bucket is not None and bucket.out is not None:
            size = next(iter(request.padded.values())).size
            cuts = bucket.find_cuts(places, size)
        # An object among the arguments is the call's own, not a result.
        own = {id(value) for value in request.objects}
        arguments = _below(places, [is_plain_object(v) and id(v) in own for v in values])
        self._check_no_hidden_tensor(places, arguments, inputs, capture)
        self._tensors: list[torch.Tensor] = []
        """Those that are handed out, each once."""
        self._cuts: list[int | None] = []
        self._made: list[tuple[int, int]] = []
        """Places, and which of the tensors is there."""
        self._own: list[tuple[int, Any]] = []
        """Places where a tensor of the call is, and how to get it."""
        known: dict[int, int] = {}
        for i, tensor in enumerate(values):
            if not isinstance(tensor, torch.Tensor) or arguments[i]:
                continue
            if (own_of := inputs.own_of(tensor)) is not None:
                self._own.append((i, own_of))
                continue
            index = known.setdefault(id(tensor), len(self._tensors))
            if index == len(self._tensors):
                self._tensors.append(tensor)
                self._cuts.append(cuts.get(id(tensor)))
            self._made.append((i, index))
        self._is_cut = bool(cuts)
        dense = [tensor for tensor in self._tensors if not cannot_be_copied(tensor)]
        self._at_once = len(dense) == len(self._tensors) > 1
        # With clones nothing of them is in a caller's hands.
        self._lent = frozenset() if clone else frozenset(map(storage_id, dense))
        self.nbytes = sum({storage_id(tensor): tensor.nbytes for tensor in dense}.values())
        """Bytes of the outputs, inputs among them left out."""

        unchanged = [is_plain_object(v) and next(tensors_in(v), None) is None for v in values]
        whole = [a or b for a, b in zip(arguments, _below(places, unchanged), strict=True)]
        self._template = Template(places, whole)
        self._places = places if live else None
        self._values = values
        self._arguments: list[tuple[int, Any]] = []
        if not live:
            self._detach(places, arguments)

    def _detach(self, places: Sequence[Place], arguments: Sequence[bool]) -> None:
        """Keep containers that nobody else changes, and objects of the call weakly."""
        for i, place in enumerate(places):
            if not arguments[i]:
                continue
            if place.parent < 0 or not arguments[place.parent]:
                self._arguments.append((i, weak(place.value) or functools.partial(_itself, place.value)))
            self._values[i] = None
        self.out = self._template.make(self._values)

    def _check_no_hidden_tensor(
        self,
        places: Sequence[Place],
        arguments: Sequence[bool],
        inputs: StaticInputs,
        capture: BreakableCUDAGraphCapture,
    ) -> None:
        def is_ours(tensor: torch.Tensor) -> bool:
            if inputs.holds(tensor) or not self.clone or cannot_be_copied(tensor):
                return inputs.holds(tensor)
            address = tensor.data_ptr()
            return any(s.data_ptr() <= address < s.data_ptr() + s.nbytes() for s in capture.storages())

        for place, in_argument in zip(places, arguments, strict=True):
            if not in_argument and (what := hidden_tensor(place, is_ours)):
                raise CaptureFailedError(
                    f"The function returned a {type(place.value).__qualname__} at `{place.path}` that holds a "
                    f"tensor of the capture where no copy can replace it: {what}. Return it in a tuple, list, "
                    f"dict or dataclass."
                )

    def check_free(self, request: Request, written: Iterable[int]) -> None:
        """Raise CaptureFailedError if a call writes to, or gets back, an output that it passes.

        `written` are the positions of its tensors that it writes to.
        """
        if not self._lent:
            return
        returned = {own_of.position for _, own_of in self._own}
        if any(storage_id(request.tensors[i]) in self._lent for i in {*written, *returned}):
            raise CaptureFailedError(
                "An argument that the function writes to or returns is an output of an earlier call, which "
                "this one overwrites as clone_outputs is False. Pass a clone of it, `out.clone()`."
            )

    def is_current(self) -> bool:
        """Whether eager functions have left the output's containers and tensors as they were at capture.

        Reads plain values, which may be others.
        """
        if self._places is None:
            return True
        places = flatten(self.out)
        if len(places) != len(self._places) or not all(map(_alike, places, self._places)):
            return False
        self._values = [place.value for place in places]
        return True

    def collect(self, request: Request) -> Any:
        """The outputs of the replay that just ran, for a call."""
        values = self._values.copy()
        made = self._copies(request.length)
        for i, index in self._made:
            values[i] = made[index]
        for i, own_of in self._own:
            values[i] = own_of(request.tensors)
        for i, argument in self._arguments:
            values[i] = argument()
        return self._template.make(values)

    def _copies(self, length: int) -> list[torch.Tensor]:
        found = self._tensors
        if self._is_cut:
            pairs = zip(found, self._cuts, strict=True)
            found = [t if dim is None else t.narrow(dim, 0, length) for t, dim in pairs]
        if not self.clone:
            return found
        if not self._at_once:
            return [tensor.clone() for tensor in found]
        made = [torch.empty_like(tensor) for tensor in found]
        torch._foreach_copy_(made, found)
        return made


def _itself(value: Any) -> Any:
    return value


def _alike(now: Place, before: Place) -> bool:
    if now.value is before.value:
        return now.key is before.key or bool(now.key == before.key)
    return now.key == before.key and type(now.value) in PLAIN and type(before.value) in PLAIN
