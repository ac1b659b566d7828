"""What an eager function returns: bridged at capture, checked and written back at replay (contract C4).

Fresh means: it dies when we let go of it. At capture the tensors are taken out of the output, and only
their storages are kept. A storage that then has no other owner is fresh: later segments read a bridge, memory
of the pool at a fixed address. Any other is memory owned elsewhere (an argument, a cache), and stays itself.
"""

import contextlib
import gc
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from itertools import zip_longest
from typing import Any

import attrs
import torch

from segcapture.errors import CaptureFailedError, FrozenValueWarning, OutputMismatchError
from segcapture.tensors import (
    View,
    cannot_be_copied,
    copy_into,
    has_own_aliases,
    on_bytes,
    own_alias,
    own_aliases,
    shows_memory_alone,
    storage_id,
)
from segcapture.thread import warn
from segcapture.trees import (
    Place,
    children,
    find_owned,
    flatten,
    get_item,
    hidden_tensor,
    holds_tensor,
    references,
    set_item,
    tuple_like,
)

Containers = list[tuple[int, Any, list[Any]]]
"""Index, class and keys of each container."""
_OPEN = object()
"""Stands for a tuple while its items are put back."""
_ALIGNMENT = 256  # bytes; what the CUDA allocator's blocks have, and vectorised kernels may ask for


@attrs.frozen
class Layout:
    """What is fixed about a place in an output."""

    path: str = attrs.field(eq=False)
    parent: int
    same_as: int
    key: tuple[Any, ...]
    """Equals a key of the same type alone. By the hash first: that tells tensors apart."""
    kind: type | None
    """The class of a container, or `Tensor`; None for a plain value."""

    @classmethod
    def of(cls, place: Place) -> "Layout":
        """The layout of a place."""
        kind = torch.Tensor if isinstance(place.value, torch.Tensor) else None
        kind = type(place.value) if place.is_container else kind
        return cls(
            place.path, place.parent, place.same_as, (hash(place.key), type(place.key), place.key), kind
        )

    @property
    def is_plain(self) -> bool:
        """Whether it is a value that is neither a tensor nor a container."""
        return self.kind is None and self.same_as < 0

    def __str__(self) -> str:
        if self.kind is None:
            return "a plain value"
        what = "a tensor" if self.kind is torch.Tensor else f"a {self.kind.__qualname__}"
        return what if self.same_as < 0 else f"{what} that stands elsewhere too"


class Memory(ABC):
    """Where bridges live, and which tensors need no owner (a part of the backend)."""

    device: torch.device

    @abstractmethod
    def allocate(self, nbytes: int, device: torch.device) -> torch.UntypedStorage:
        """Memory of the pool, or plain memory of another device."""

    def alias(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A non-owning alias of memory of the pool, or None for a tensor that must be kept strongly."""
        return None

    @abstractmethod
    def wait_for_host_copies(self) -> None:
        """Wait until all that was started is done, copies to the host among it."""


@attrs.define(eq=False)
class Block:
    """A storage under leaves of an output."""

    storage: Any
    """The captured one, until it is known whose it is."""
    leaves: list[int] = attrs.field(factory=list)
    """Positions among the tensors of the output."""
    fresh: bool = False
    address: int = 0
    nbytes: int = 0
    """Address and size of a bridge."""
    memory: torch.Tensor | None = None
    """uint8 [bytes]: where several leaves are on a bridge, or elements repeat: it is copied as bytes."""
    movable: bool = False
    """Memory owned elsewhere: whether new values may be copied to it once nobody else owns it."""
    version: int = 0
    """Of a movable one: how often it had been written to when the break returned."""


@attrs.define(eq=False)
class Leaf:
    """A tensor of an output."""

    path: str
    block: Block | None
    view: Any
    """As it was, then as later segments read it. None for one that cannot be copied, as its block."""
    identity: int
    """Of the captured tensor."""
    captured: "weakref.ref[torch.Tensor]"
    kind: str
    """Why it cannot be copied, if so."""
    inference: bool
    """Whether it was made in inference mode: a view of a weight was not, even there."""
    target: Any = None
    """An alias of the memory that later segments read; of a tensor that cannot be copied, itself."""


@attrs.define(eq=False)
class Field:
    """A value of an output that is no tensor."""

    index: int
    place: Place
    """With the value of the capture."""
    container: Any = None
    """The captured one; None for a tuple's and the root."""
    owned: bool = False
    """Whether values can be put into the container."""
    length: int = 0
    """Of a list, at capture."""
    warned: bool = False

    def now(self) -> Any:
        """The value that stands there now, where it can be put; else that of the capture."""
        with contextlib.suppress(KeyError, AttributeError, IndexError):  # the captured code has taken it out
            return get_item(self.container, self.place.key) if self.owned else self.place.value
        return self.place.value


# At capture


def bridge(
    places: list[Place], given: Collection[int], memory: Memory, segment: int, where: str
) -> tuple[Any, "WriteBack"]:
    """Bridge the fresh tensors of an output that was just made.

    Returns what the model code receives, and the plan of its write-back. `places` must hold the only
    references to the output; its values are taken out. `given` are the identities of the arguments.

    Raises:
        CaptureFailedError: the output owns a tensor that cannot be bridged (a subclass, a sparse or quantized
            tensor), or holds one where it is not found (in a set, say); or a container of it does not take
            other tensors.
    """
    if len(places) == 1 and places[0].value is None:  # most breaks
        layout, fields = [Layout.of(places[0])], [Field(0, places[0])]
        return None, WriteBack(segment, where, layout, None, [], fields, memory)
    alone = isinstance(places[0].value, torch.Tensor)
    owned = [False] if alone else find_owned(places)
    _refuse_hidden_tensors(places, owned, segment, where)
    layout, containers = [*map(Layout.of, places)], _containers(places)
    bridging = _Bridging(places, owned, memory)
    try:
        bridging.let_go()
        bridging.restore(given, segment, where)
        root = bridging.refill(0)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise CaptureFailedError(
            f"{where} returned a container that does not take a new tensor in the place of its own "
            f"({error}). Return a plain dict, list or object.",
            segment=segment,
        ) from error
    bridging.keep()
    fields = [_field(i, places, owned) for i, place in enumerate(layout) if place.is_plain]
    leaves = [*bridging.leaves.values()]
    return root, WriteBack(segment, where, layout, containers, leaves, fields, memory)


def _refuse_hidden_tensors(places: list[Place], owned: list[bool], segment: int, where: str) -> None:
    for place, mine in zip(places, owned, strict=True):
        if mine and (what := hidden_tensor(place)) is not None:
            raise CaptureFailedError(
                f"{where} returned a {type(place.value).__qualname__} at `{place.path}`, and {what} holds "
                f"a tensor, which cannot be written back there. Return it in a tuple, list, dict, or a field "
                f"of the outer class (of a Hugging Face output: pass use_cache=False, or return `.logits`).",
                segment=segment,
                path=place.path,
                found=type(place.value),
            )


def _containers(places: list[Place]) -> Containers | None:
    """Of an output that is tuples, lists, and dicts of strings, each once: it is read without a walk."""
    found = []
    for i, place in enumerate(places):
        if place.inside is not None:
            kind, keys = type(place.value), [places[item].key for item in place.inside]
            by_string = kind is dict and all(type(key) is str for key in keys)
            if not (by_string or kind is list or issubclass(kind, tuple)):
                return None
            found.append((i, kind, keys))
        elif place.same_as >= 0:
            return None
    return found


def _field(i: int, places: list[Place], owned: list[bool]) -> Field:
    place = places[i]
    above = places[place.parent].value if place.parent >= 0 else ()
    if isinstance(above, tuple):
        return Field(i, place)
    return Field(i, place, above, owned[place.parent], len(above) if isinstance(above, list) else 0)


class _Bridging:
    """Takes the tensors out of an output, and puts bridges in the places of those that died."""

    def __init__(self, places: list[Place], owned: list[bool], memory: Memory) -> None:
        self._places, self._owned, self._memory = places, owned, memory
        self.leaves: dict[int, Leaf] = {}
        """By the index of the place."""
        self._blocks: dict[int, Block] = {}
        """By the identity of the storage."""
        self._shells: dict[int, tuple[Any, Any]] = {}
        """Of owned tuples, which are let go too: their class and attributes."""
        self._made: dict[int, torch.Tensor] = {}
        """What the model receives, by the identity that the tensor had."""
        self._attributes: dict[int, dict[str, Any]] = {}
        """Of tensor objects that have some, likewise."""

    def let_go(self) -> None:
        """Drop all tensors of the output; keep their views and storages."""
        for i, place in enumerate(self._places):
            if isinstance(place.value, torch.Tensor):
                self.leaves[i] = self._leaf(place)
            elif isinstance(place.value, tuple) and place.inside is not None and self._owned[i]:
                self._shells[i] = type(place.value), dict(getattr(place.value, "__dict__", ()))
        for i, place in enumerate(self._places):
            if i in self.leaves or i in self._shells or place.same_as in self._shells:
                if place.parent >= 0 and self._owned[place.parent] and place.parent not in self._shells:
                    set_item(self._places[place.parent].value, place.key, None)
                place.value = None

    def _leaf(self, place: Place) -> Leaf:
        tensor: torch.Tensor = place.value
        kind, block, view = cannot_be_copied(tensor), None, None
        if not kind:
            storage = tensor.untyped_storage()
            block = self._blocks.setdefault(storage._cdata, Block(storage))
            block.leaves.append(len(self.leaves))
            view = View.of(tensor)
        reference = weakref.ref(tensor)
        if vars(tensor):
            self._attributes[id(tensor)] = dict(vars(tensor))
        return Leaf(place.path, block, view, id(tensor), reference, kind, tensor.is_inference())

    def restore(self, given: Collection[int], segment: int, where: str) -> None:
        """Bridge what is fresh: whoever else owns a tensor, its storage or its memory shows now."""
        storages = [block.storage for block in self._blocks.values()]
        # One reference is that of the block: torch gives out one Python object for a storage.
        for key, storage, count in zip(self._blocks, storages, references(storages), strict=True):
            owner, block = storage.resizable(), self._blocks[key]
            block.fresh = owner and count == 1 and torch._C._storage_Use_Count(key) == 1
            block.movable = owner and not block.fresh and not has_own_aliases(storage)
        if any(storage.device != self._memory.device for storage in storages):
            self._memory.wait_for_host_copies()
        # A container with plain values is kept, so its tensors are aliases: it must not count as an owner.
        kept = {p.parent for i, p in enumerate(self._places) if i not in self.leaves and not p.is_container}
        aliased = {leaf.identity for i, leaf in self.leaves.items() if self._places[i].parent in kept}
        with torch.no_grad():
            for block in self._blocks.values():
                if block.fresh:
                    self._fill_bridge(block, [leaf for leaf in self.leaves.values() if leaf.block is block])
            for i, leaf in self.leaves.items():
                made = self._made.get(leaf.identity)
                if made is None:
                    made = leaf.captured()
                    if made is None and leaf.kind:
                        raise CaptureFailedError(
                            f"{where} returned a {leaf.kind} at `{leaf.path}`, which cannot be carried to "
                            f"later segments. Return a plain dense torch.Tensor, such as its parts.",
                            segment=segment,
                            path=leaf.path,
                        )
                    if made is None and leaf.block is not None:  # only its storage lives
                        with torch.inference_mode(leaf.inference):
                            made = leaf.view.on(leaf.block.storage)
                    assert made is not None
                    if leaf.identity in aliased and shows_memory_alone(made):
                        made = own_alias(made)
                attributes = self._attributes.get(leaf.identity, {})
                if attributes and made is not leaf.captured():
                    if holds_tensor(attributes):
                        raise CaptureFailedError(
                            f"{where} returned a tensor at `{leaf.path}` with another one in an attribute "
                            f"({', '.join(attributes)}), which is not written back. Return both.",
                            segment=segment,
                            path=leaf.path,
                        )
                    vars(made).update(attributes)
                self._places[i].value = self._made[leaf.identity] = made
                if leaf.block is not None:
                    leaf.block.movable &= leaf.identity not in given

    def _fill_bridge(self, block: Block, leaves: list[Leaf]) -> None:
        """Allocate a bridge over the bytes that the leaves of a storage cover, and copy them."""
        views = {leaf.identity: leaf.view for leaf in leaves}
        ranges = [view.byte_range() for view in views.values()]
        first = min(low for low, _ in ranges)
        low = first // _ALIGNMENT * _ALIGNMENT
        block.nbytes = max(high for _, high in ranges) - low
        memory = self._memory.allocate(block.nbytes, block.storage.device)
        block.address = memory.data_ptr()
        for identity, view in views.items():
            at = view.offset * view.dtype.itemsize - low if view.shape.numel() else 0
            self._made[identity] = view.on(memory, at)
        (identity, view), *others = views.items()
        if others or view.has_repeats():
            block.memory = on_bytes(memory, first - low, block.nbytes)
            block.memory.copy_(on_bytes(block.storage, first, low + block.nbytes))
        elif block.nbytes:
            self._made[identity].copy_(view.on(block.storage))

    def refill(self, i: int) -> Any:
        """The value of a place, with everything below it put back."""
        place = self._places[i]
        if place.same_as >= 0:
            value = self.refill(place.same_as)
            if value is _OPEN:
                raise TypeError(f"the tuple at `{self._places[place.same_as].path}` is in itself")
            return value
        if place.inside is None or not self._owned[i]:
            return place.value
        inside, place.inside = place.inside, None  # once for each container
        if i in self._shells:
            place.value = _OPEN
            place.value = tuple_like(*self._shells[i], [self.refill(item) for item in inside])
            return place.value
        for item in inside:
            value, key = self.refill(item), self._places[item].key
            if get_item(place.value, key) is not value:
                set_item(place.value, key, value)
                if get_item(place.value, key) is not value:
                    raise TypeError(f"`{self._places[item].path}` is not what was put there")
        return place.value

    def keep(self) -> None:
        """Keep aliases for write-back, so that a bridge is free when the model drops it."""
        targets: dict[int, torch.Tensor] = {}
        for leaf in self.leaves.values():
            block, tensor = leaf.block, self._made[leaf.identity]
            if block is not None and leaf.identity not in targets:
                alias = self._memory.alias(tensor)
                # Neither an argument, nor memory that captured code may write to unseen.
                block.movable &= alias is None and not tensor.is_inference()
                block.version = tensor._version if block.movable else 0
                targets[leaf.identity] = own_alias(tensor) if alias is None else alias
            leaf.target = targets.get(leaf.identity, tensor)
            leaf.view = None if block is None else View.of(tensor)
        for block in self._blocks.values():
            block.storage = None
            if block.memory is not None:
                alias = self._memory.alias(block.memory)
                block.memory = own_alias(block.memory) if alias is None else alias


# At replay


class WriteBack:
    """The compiled plan of one eager segment's output."""

    def __init__(
        self,
        segment: int,
        where: str,
        layout: list[Layout],
        containers: Containers | None,
        leaves: list[Leaf],
        fields: list[Field],
        memory: Memory,
    ) -> None:
        self.leaves = leaves
        self.blocks = list(dict.fromkeys(leaf.block for leaf in leaves if leaf.block is not None))
        self._segment, self._where, self._layout = segment, where, layout
        self._fields, self._memory = fields, memory
        self._kind = layout[0].kind
        self._containers = containers
        self._places = [i for i, place in enumerate(layout) if place.kind is torch.Tensor]
        if leaves:
            self._look_at(leaves)

    def _look_at(self, leaves: list[Leaf]) -> None:
        self._targets = [leaf.target for leaf in leaves]
        self._at = [leaf.view.address if leaf.view else 0 for leaf in leaves]
        bridges = self.bridges
        self._low = min((block.address for block in bridges), default=0)
        self._high = max((block.address + block.nbytes for block in bridges), default=0)
        blocks = [leaf.block for leaf in leaves]
        # Where strides are part of what is fixed.
        self._exact = [b is not None and (len(b.leaves) > 1 or b.memory is not None) for b in blocks]
        self._sharing = self._sharing_of(self._targets, self._at, [id(leaf.block or leaf) for leaf in leaves])
        self._simple = len(bridges) == len(leaves) and not any(self._exact)
        on_host = any(target.device != self._memory.device for target in self._targets)
        self._one_by_one = on_host or not all(b is not None and b.fresh for b in blocks)
        self._fit: Callable[..., bool] = _unsure

    @property
    def store(self) -> Callable[[Any], None]:
        """Brings the values of a new output to where later segments read them.

        Raises:
            OutputMismatchError: it is built in another way than at capture, has a leaf of another shape,
                dtype or device, or leaves that share memory in another way, or memory owned elsewhere has
                moved.
        """
        return self._store_tensor if self._kind is torch.Tensor else self._store

    @property
    def expects_none(self) -> bool:
        """Whether the function returned None, so that there is nothing to store."""
        return self._kind is None and self._fields[0].place.value is None

    @property
    def bridges(self) -> list[Block]:
        """The storages that are bridges."""
        return [block for block in self.blocks if block.fresh]

    def plain(self) -> list[tuple[str, Any, Any]]:
        """Path of each plain value in the output, its value at capture, and the one that stands there now."""
        return [(field.place.path, field.place.value, field.now()) for field in self._fields]

    def seal(self) -> None:
        """The capture is complete: memory owned elsewhere that it wrote to must not move any more."""
        for leaf in self.leaves:
            if leaf.block is not None and leaf.block.movable:
                leaf.block.movable = leaf.target._version == leaf.block.version

    def _store_tensor(self, out: Any) -> None:
        self._write([out])

    def _store(self, out: Any) -> None:
        values = self._read(out)
        if self._places:
            self._write([values[i] for i in self._places])
        for field in self._fields:
            if field.container is None or field.container is not values[field.place.parent]:
                self._put(field, values[field.index])

    def _read(self, out: Any) -> Sequence[Any]:
        """The value in each place of an output that is built as the captured one."""
        if self._containers is not None:
            values = self._read_quickly(out)
            if values is not None:
                return values
        places = flatten(out)
        found = [*map(Layout.of, places)]
        if found == self._layout:
            return [place.value for place in places]
        before, now = next(pair for pair in zip_longest(self._layout, found) if pair[0] != pair[1])
        path, other = (before or now).path, str(now or "nothing")
        if before and now and (before.path, before.key) != (now.path, now.key):
            other += f" at `{now.path}`, with the key {now.key[-1]!r}"
        raise self._mismatch(
            path,
            f"another structure: later segments read {before or 'nothing'} at `{path}`, found {other}. The "
            f"structure of an output is fixed at capture: return the same one each time (pad a list to one "
            f"length), or capture again.",
            before and before.kind,
            now and now.kind,
        )

    def _read_quickly(self, out: Any) -> list[Any] | None:
        values = [out]
        for i, kind, keys in self._containers or ():
            value = values[i]
            if type(value) is not kind or len(value) != len(keys):
                return None
            if kind is not dict:
                values += value
            elif list(value) == keys:
                values += value.values()
            else:
                return None
        if len(self._containers or ()) > 1 and self._met_twice(values):
            return None
        for field in self._fields:
            value = values[field.index]
            if value is not field.place.value and not _is_leaf(value):
                return None
        return values

    def _met_twice(self, values: list[Any]) -> bool:
        containers = self._containers or ()
        return len({id(values[i]) for i, *_ in containers}) < len(containers)

    def _write(self, new: Sequence[Any]) -> None:
        if not self._fit(*new):
            for leaf, tensor in zip(self.leaves, new, strict=True):
                self._check(leaf, tensor)
            # Made here and not at capture, since it compares the thread's dispatch state too.
            self._fit = _guard(new) if all(leaf.view for leaf in self.leaves) else _unsure
        if self._simple:
            pointers = [*map(_data_ptr, new)]
            # Each at the start of a storage, and no two at one address: the common case, in 1 us.
            if len(new) > 1 and (len({*pointers}) < len(new) or any(map(_storage_offset, new))):
                self._check_sharing(new, pointers)
        else:
            pointers = [t.data_ptr() if leaf.view else 0 for t, leaf in zip(new, self.leaves, strict=True)]
            self._check_sharing(new, pointers)
        if self._one_by_one:
            self._memory.wait_for_host_copies()
        if torch.is_grad_enabled():  # entering no_grad costs as much as ten checks
            with torch.no_grad():
                self._copy(new, pointers)
        else:
            self._copy(new, pointers)

    def _copy(self, new: Sequence[torch.Tensor], pointers: Sequence[int]) -> None:
        """Copy the values of checked leaves to where they are read."""
        targets: Sequence[torch.Tensor] = self._targets
        low, high = self._low, self._high
        on_bridges = [at for at in pointers if low <= at < high]
        if on_bridges or not self._simple:
            pairs = [pair for block in self.blocks for pair in self._moved(block, new, pointers)]
            targets = [target for target, _ in pairs]
            new = [source.clone() if on_bridges else source for _, source in pairs]
        if self._one_by_one:
            for target, tensor in zip(targets, new, strict=True):
                copy_into(target, tensor)
        elif len(targets) > 1:
            torch._foreach_copy_(targets, new)  # type: ignore[arg-type]
        elif targets:
            targets[0].copy_(new[0])

    def _moved(
        self, block: Block, new: Sequence[torch.Tensor], pointers: Sequence[int]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Targets and values of the leaves of a storage that are not where they are read already."""
        moved = [i for i in block.leaves if not self._is_there(i, new[i], pointers[i])]
        if not moved or (block.fresh and block.memory is None):
            return [(self._targets[i], new[i]) for i in moved[:1]]
        first, target = new[moved[0]], self._targets[moved[0]]
        if block.memory is not None:
            low = int(first.storage_offset()) * first.element_size()
            low -= target.data_ptr() - block.memory.data_ptr()
            return [(block.memory, on_bytes(first.untyped_storage(), low, low + block.memory.numel()))]
        if block.movable and (_is_ours_alone(target) or gc.collect() < 0 or _is_ours_alone(target)):
            return [(self._targets[i], new[i]) for i in moved]
        path, expected, found = self.leaves[moved[0]].path, View.of(target), View.of(first)
        raise self._mismatch(
            path,
            f"other memory at `{path}`: later segments read memory that others own or that captured code "
            f"wrote to, 0x{expected.address:x} with strides {list(expected.stride)}, found "
            f"0x{found.address:x} with strides {list(found.stride)}. Copying would change its owner's data, "
            f"not copying would be stale: return a new tensor (`.clone()`), or the same one each time.",
            expected,
            found,
        )

    def _is_there(self, i: int, new: torch.Tensor, pointer: int) -> bool:
        """Whether a new leaf is the memory that later segments read, in the same view."""
        target = self._targets[i]
        # Tensors without memory of their own are not alike.
        same = pointer == self._at[i] and (pointer != 0 or not new.numel())
        return new is target or (same and _strides(target) == _strides(new))

    # Checks

    def _check(self, leaf: Leaf, new: Any) -> None:
        target, advice = leaf.target, "Shapes, dtypes and devices are fixed at capture"
        if leaf.view is None and new is target:
            return
        kind = cannot_be_copied(new) if isinstance(new, torch.Tensor) else type(new).__qualname__
        if kind or leaf.view is None:
            found = f"a {kind or 'Tensor'}"
        elif (new.shape, new.dtype, new.device) == (target.shape, target.dtype, target.device):
            return
        else:
            found = str(View.of(new))
            if new.shape == target.shape:
                advice += ": convert it (`.to(...)`), or capture again"
            elif new.dim() == target.dim() > 0:
                advice += f": pad to {list(target.shape)}, or capture again for {list(new.shape)}"
        expected = leaf.view or f"that one {type(target).__qualname__}"
        text = f"{found} at `{leaf.path}`; later segments read {expected}. {advice}."
        raise self._mismatch(leaf.path, text, expected, found if kind else View.of(new))

    def _sharing_of(
        self, tensors: Sequence[torch.Tensor], pointers: Sequence[int], storages: Sequence[int]
    ) -> list[tuple[int, int, Any]]:
        """Of each leaf the first one on its storage, how many bytes after it, and strides that count."""
        first: dict[int, int] = {}
        found = []
        for i, tensor in enumerate(tensors):
            # Leaves of no elements share nothing.
            other = first.setdefault(storages[i], i) if tensor.numel() else i
            strides = _strides(tensor) if self._exact[i] else ()
            found.append((other, pointers[i] - pointers[other], strides))
        return found

    def _check_sharing(self, new: Sequence[torch.Tensor], pointers: Sequence[int]) -> None:
        """Leaves that shared a storage still do, at the same distances, and no others."""
        ids = [storage_id(t) if leaf.view else id(leaf) for t, leaf in zip(new, self.leaves, strict=True)]
        there = [self._is_there(i, new[i], pointers[i]) for i in range(len(new))]
        for i, now in enumerate(self._sharing_of(new, pointers, ids)):
            before, path = self._sharing[i], self.leaves[i].path
            other = min(now[0], before[0])
            if now != before and not (there[i] and there[other]):
                raise self._mismatch(
                    path,
                    f"`{path}` {self._in_memory(i, now)}; later segments read it "
                    f"{self._in_memory(i, before)}. How outputs share memory is fixed at capture: return "
                    f"the same views, or clones.",
                    before,
                    now,
                )

    def _in_memory(self, i: int, sharing: tuple[int, int, Any]) -> str:
        first, distance, strides = sharing
        shared = (
            f"{distance} bytes after `{self.leaves[first].path}`" if first != i else "in memory of its own"
        )
        return f"{shared}, with strides {list(strides)}" if strides else shared

    def _mismatch(self, path: str, text: str, expected: Any, found: Any) -> OutputMismatchError:
        text = f"{self._where} returned {text}"
        return OutputMismatchError(text, segment=self._segment, path=path, expected=expected, found=found)

    # Values that are no tensors

    def _put(self, field: Field, new: Any) -> None:
        """Put a value into the captured container; where that cannot be done, warn once if it differs."""
        container, key, path, old = field.container, field.place.key, field.place.path, field.place.value
        if not field.owned:
            if not field.warned and not _equal(old, new):
                field.warned = True
                warn(
                    f"{self._where} returned {new!r} at `{path}`, and {old!r} at capture. Later segments "
                    f"were recorded for the old value. Return it as a tensor, or in a new list, dict or "
                    f"object that a later eager segment reads.",
                    FrozenValueWarning,
                )
            return
        try:
            now = get_item(container, key)
        except (KeyError, AttributeError):  # the captured code has taken it out
            return
        except IndexError:
            now = None
        same_length = not isinstance(container, list) or len(container) == field.length
        if not same_length or not _is_leaf(now, field.place.in_object):
            raise self._mismatch(
                path,
                f"{new!r} at `{path}`, where other code has put a {type(now).__qualname__} since, or has "
                f"made the list longer or shorter: it would be overwritten. Return a tuple, or put that "
                f"elsewhere.",
                type(old),
                type(now),
            )
        set_item(container, key, new)


def _is_leaf(value: Any, in_object: bool = False) -> bool:
    return not isinstance(value, torch.Tensor) and children(value, in_object) is None


def _equal(old: Any, new: Any) -> bool:
    if type(old) is not type(new):
        return False
    try:
        return bool(old is new or old == new or (old != old and new != new))  # nan
    except Exception:
        return False


_storage_offset, _data_ptr = torch.Tensor.storage_offset, torch.Tensor.data_ptr
# Of a storage with tensors on it; torch versions differ in whether those hold its Python object too.
_probe = torch.empty(1, device="cpu")
_HELD_BY_TENSORS = references([_probe.untyped_storage()])[0]


def _is_ours_alone(alias: torch.Tensor) -> bool:
    """Whether nothing but our own aliases keeps the memory of one of them."""
    storage = [alias.untyped_storage()]
    tensors = torch._C._storage_Use_Count(storage[0]._cdata) - 1
    return tensors <= len(own_aliases(alias)) and references(storage)[0] <= _HELD_BY_TENSORS


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides that matter: a dimension of one element has none."""
    return tuple(
        [stride if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
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
        check: Callable[..., bool] = TensorGuards(
            *seen, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
        ).check
    except (ImportError, TypeError, RuntimeError):
        return _unsure
    return check
