"""What a call gets back: copies of what was captured, in the structure that the function returned."""

import copy
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch

from segcapture.callable.inputs import OwnTensor, StaticInputs
from segcapture.callable.signature import Arguments, Request, weak
from segcapture.errors import CaptureFailedError
from segcapture.tensors import cannot_be_copied, storage_id
from segcapture.trees import (
    PLAIN,
    Place,
    children,
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
        self._copied: list[tuple[int, list[tuple[Any, int]]]] = []
        self._tuples: list[tuple[int, list[int]]] = []  # those that are in others before those
        first: dict[int, int] = {}
        met = [p.is_container or isinstance(p.value, torch.Tensor) for p in places]
        at = [first.setdefault(id(p.value), i) if met[i] > whole[i] else i for i, p in enumerate(places)]
        tuples: dict[int, list[int]] = {}
        for i, place in enumerate(places):
            if place.inside is None or whole[i]:
                continue
            if isinstance(place.value, tuple):
                tuples[i] = [at[k] for k in place.inside]
            else:
                self._copied.append((i, [(places[k].key, at[k]) for k in place.inside]))
        while tuples:
            ready = {i: items for i, items in tuples.items() if tuples.keys().isdisjoint(items)}
            self._tuples += ready.items()
            tuples = {i: items for i, items in tuples.items() if i not in ready}

    def make(self, values: list[Any]) -> Any:
        """The value, from what is in each place (of a tensor in several, in the first). Replaces it there."""
        for i, _ in self._copied:
            values[i] = copy.copy(values[i])  # before their items, which may lead back here
        for i, items in self._tuples:
            made = [values[k] for k in items]
            kind, attributes = type(values[i]), getattr(values[i], "__dict__", {})
            values[i] = tuple(made) if kind is tuple else tuple_like(kind, attributes, made)
        for i, pairs in self._copied:
            for key, k in pairs:
                set_item(values[i], key, values[k])
        return values[0]


def with_tensors(request: Request, tensors: Sequence[torch.Tensor]) -> Arguments:
    """The arguments of a call with others in place of its tensors. Objects stay themselves."""
    new = {id(tensor): tensors[i] for i, tensor in enumerate(request.tensors)}
    places = flatten(request.arguments)
    whole = _all_of(places, {i for i, place in enumerate(places) if is_plain_object(place.value)})
    values = [new.get(id(place.value), place.value) for place in places]
    return Template(places, whole).make(values)  # type: ignore[no-any-return]


def _all_of(places: Sequence[Place], chosen: Collection[int]) -> list[bool]:
    """Of each place, whether it is chosen or in one that is."""
    found: list[bool] = []
    for i, place in enumerate(places):
        found.append(i in chosen or (i > 0 and found[place.parent]))
    return found


class CallOutputs:
    """The outputs of one capture.

    An output that is a static input, or a view of one, is handed out as the call's own tensor: the
    function returned its argument.

    Raises:
        CaptureFailedError: an output cannot be cut as the bucket says, or holds a tensor where no copy can
            replace it.
    """

    def __init__(self, out: Any, inputs: StaticInputs, request: Request, capture: Any, clone: bool) -> None:
        self.out, self.clone = out, clone
        places = flatten(out)
        self._values = [place.value for place in places]
        self._read: list[tuple[Any, Any, bool]] | None = None  # nobody changes the output
        if capture.num_eager_breaks:
            keys = [None if p.inside is None else _content(p.value, p.in_object)[0] for p in places]
            self._read = [(p.value, keys[i], p.in_object) for i, p in enumerate(places)]
        sizes = [padding.size for padding in request.padded.values()]
        cuts = request.bucket.find_cuts(places, sizes[0]) if request.bucket else {}
        _check_no_hidden_tensor(places, inputs, capture.storages if clone else list)
        objects = {i for i, value in enumerate(self._values) if is_plain_object(value)}
        # An object among the arguments is the call's own, not a result.
        arguments = {i for i in objects if any(self._values[i] is value for value in request.objects)}
        without = {i for i in objects if next(tensors_in(self._values[i]), None) is None}
        whole = _all_of(places, arguments | without)
        self._own: list[tuple[int, OwnTensor]] = []
        """Places where a tensor of the call is, and how to get it."""
        made: dict[int, int] = {}
        for i, tensor in enumerate(self._values):
            if not isinstance(tensor, torch.Tensor) or whole[i]:
                continue
            if (own_of := inputs.own_of(tensor)) is not None:
                self._own.append((i, own_of))
            else:
                made.setdefault(id(tensor), i)
        self._made = list(made.values())
        """The first places of the other tensors."""
        self._tensors: list[torch.Tensor] = [self._values[i] for i in self._made]
        self._cuts = [cuts.get(id(tensor)) for tensor in self._tensors] if cuts else None
        dense = [tensor for tensor in self._tensors if not cannot_be_copied(tensor)]
        self._at_once = len(dense) == len(self._tensors) > 1
        # With clones nothing of them is in a caller's hands.
        self._overwritten = frozenset() if clone else frozenset(map(storage_id, dense))
        self.nbytes = sum({storage_id(tensor): tensor.nbytes for tensor in dense}.values())
        """Bytes of the outputs, inputs among them left out."""
        self._template = Template(places, whole)
        self._arguments: list[tuple[int, Any]] = []
        if self._read is None:
            # Objects of the call are held weakly, and containers as they are now.
            self._arguments = [(i, weak(self._values[i])) for i in arguments]
            forgotten = [i in arguments or (i > 0 and whole[p.parent]) for i, p in enumerate(places)]
            self._values = [None if forgotten[i] else place.value for i, place in enumerate(places)]
            self.out = self._template.make(self._values)

    def check_free(self, request: Request, written: Iterable[int]) -> None:
        """Raise CaptureFailedError if a call writes to, or gets back, an output that it passes.

        `written` are the positions of its tensors that it writes to.
        """
        if not self._overwritten:
            return
        returned = {own_of.position for _, own_of in self._own}
        if any(storage_id(request.tensors[i]) in self._overwritten for i in {*written, *returned}):
            raise CaptureFailedError(
                "An argument that the function writes to or returns is an output of an earlier call, which "
                "this one overwrites as clone_outputs is False. Pass a clone of it, `out.clone()`."
            )

    def is_current(self) -> bool:
        """Whether eager functions have left the output's containers and tensors as they were at capture.

        Reads plain values, which may be others.
        """
        if self._read is None:
            return True
        values = [self.out]
        for i, (before, keys, in_object) in enumerate(self._read):
            value = values[i]
            if value is not before and not (type(value) in PLAIN and type(before) in PLAIN):
                return False
            if keys is not None:
                found, items = _content(value, in_object)
                if found != keys:
                    return False
                values += items
        self._values = values
        return True

    def collect(self, request: Request) -> Any:
        """The outputs of the replay that just ran, for a call."""
        values = self._values.copy()
        made = self._copies(request.length)
        for i, tensor in zip(self._made, made, strict=True):
            values[i] = tensor
        for i, own_of in self._own:
            values[i] = own_of(request.tensors)
        for i, argument in self._arguments:
            values[i] = argument()
        return self._template.make(values)

    def _copies(self, length: int) -> list[torch.Tensor]:
        found = self._tensors
        if self._cuts is not None:
            pairs = zip(found, self._cuts, strict=True)
            found = [t if dim is None else t.narrow(dim, 0, length) for t, dim in pairs]
        if not self.clone:
            return found
        if not self._at_once:
            return [tensor.clone() for tensor in found]
        made = [torch.empty_like(tensor) for tensor in found]
        torch._foreach_copy_(made, found)
        return made


def _check_no_hidden_tensor(
    places: Sequence[Place], inputs: StaticInputs, storages: Callable[[], Iterable[torch.UntypedStorage]]
) -> None:
    def is_ours(tensor: torch.Tensor) -> bool:
        if inputs.holds(tensor) or cannot_be_copied(tensor):
            return inputs.holds(tensor)
        return any(0 <= tensor.data_ptr() - memory.data_ptr() < memory.nbytes() for memory in storages())

    for place in places:
        if what := hidden_tensor(place, is_ours):
            raise CaptureFailedError(
                f"The function returned a {type(place.value).__qualname__} at `{place.path}` that holds a "
                f"captured tensor where no copy can replace it: {what}. Return it in a tuple, list, dict or "
                f"dataclass."
            )


def _content(container: Any, in_object: bool) -> tuple[Any, Iterable[Any]]:
    """Keys (their number where they are positions) and items of a container."""
    if isinstance(container, tuple | list):
        return len(container), container
    if isinstance(container, dict):
        return list(container), container.values()
    content = children(container, in_object) or ()
    return [key for key, _, _ in content], [item for *_, item in content]
