"""What an eager function returns: bridged at capture, checked and written back at replay (contract C4).

Fresh means: it dies when we let go of it. At capture the tensors are taken out of the output, and only
their storages are kept. A storage that then has no other owner is fresh: later segments read a bridge, memory
of the pool at a fixed address. Any other is memory owned elsewhere (an argument, a cache), and stays itself.
"""

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
    references,
    set_item,
    tuple_like,
)

Layout = tuple[str, Any, int, tuple[Any, ...]]
"""What is fixed about a place: its path, the class of a container or `Tensor` (None: a plain value), the
index of the place where the same container stands first, and the key."""
_OPEN = object()
"""Stands for a tuple while its items are put back."""
_ALIGNMENT = 256  # bytes; what the CUDA allocator's blocks have, and vectorised kernels may ask for


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
    """A storage under leaves of an output, as later segments read it."""

    fresh: bool
    leaves: list[int] = attrs.field(factory=list)
    """Positions among the tensors of the output."""
    address: int = 0
    nbytes: int = 0
    """Address and size of a bridge."""
    memory: torch.Tensor | None = None
    """uint8 [bytes]: where several leaves are on a bridge, or elements repeat: it is copied as bytes."""
    movable: bool = False
    """Memory owned elsewhere: whether new values may be copied to it once nobody else owns it."""
    version: int = 0
    """Of a movable one: how often it had been written to when the break returned."""


@attrs.frozen(eq=False)
class Leaf:
    """A tensor of an output."""

    path: str
    target: torch.Tensor
    """An alias of the memory that later segments read; of a tensor that cannot be copied, itself."""
    view: View | None
    """How the target shows it; None for one that cannot be copied."""
    block: int


@attrs.define(eq=False)
class Field:
    """A value of an output that is no tensor."""

    place: int
    parent: int
    path: str
    value: Any
    """That of the capture."""
    container: Any = None
    """The captured one; None for a tuple's and the root."""
    owned: bool = False
    """Whether values can be put into the container."""
    key: Any = None
    in_object: bool = False
    length: int = 0
    """Of a list, at capture."""
    warned: bool = False


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
        return None, WriteBack(
            segment, where, [_layout_of(places[0])], [], [], [Field(0, -1, places[0].path, None)], memory
        )
    owned = find_owned(places)
    _refuse_hidden_tensors(places, owned, segment, where)
    layout = [_layout_of(place) for place in places]
    bridging = _Bridging(places, owned, given, memory)
    try:
        bridging.let_go()
        bridging.bridge_what_is_fresh()
        root = bridging.refill(0)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise CaptureFailedError(
            f"{where} returned a container that does not take a new tensor in the place of its own "
            f"({error}). Return a plain dict, list or object.",
            segment=segment,
        ) from error
    if bridging.lost is not None:
        raise CaptureFailedError(
            f"{where} returned a {bridging.kinds[id(bridging.lost)]} at `{bridging.lost.path}`, which cannot "
            f"be carried to later segments. Return a plain dense torch.Tensor, for example the parts that it "
            f"is made of.",
            segment=segment,
            path=bridging.lost.path,
        )
    leaves = bridging.keep()
    fields = [
        _field(i, places, owned) for i, (_, kind, same, _) in enumerate(layout) if kind is None and same < 0
    ]
    return root, WriteBack(segment, where, layout, leaves, [*bridging.blocks.values()], fields, memory)


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


def _layout_of(place: Place) -> Layout:
    kind = torch.Tensor if isinstance(place.value, torch.Tensor) else None
    # Equal keys have equal hashes; tensors are compared no further.
    key = (hash(place.key), type(place.key), place.key)
    return place.path, type(place.value) if place.is_container else kind, place.same_as, key


def _field(i: int, places: list[Place], owned: list[bool]) -> Field:
    place = places[i]
    above = places[place.parent].value if place.parent >= 0 else ()
    if isinstance(above, tuple):
        return Field(i, place.parent, place.path, place.value)
    length = len(above) if isinstance(above, list) else 0
    mine = owned[place.parent]
    return Field(i, place.parent, place.path, place.value, above, mine, place.key, place.in_object, length)


@attrs.frozen
class _Seen:
    """A tensor of an output, after it was let go."""

    identity: int
    tensor: "weakref.ref[torch.Tensor]"
    view: View | None
    """None for one whose memory does not hold all that it is."""
    storage: int
    """Identity of its storage."""
    inference: bool
    """Whether it was made in inference mode: a view of a weight was not, even there."""


class _Bridging:
    """Takes the tensors out of an output, and puts bridges in the places of those that died."""

    def __init__(
        self, places: list[Place], owned: list[bool], given: Collection[int], memory: Memory
    ) -> None:
        self._places, self._owned, self._given, self._memory = places, owned, given, memory
        self._seen: dict[int, _Seen] = {}
        """By the index of the place."""
        self._shells: dict[int, tuple[Any, Any]] = {}
        """Of owned tuples, which were let go too: their class and attributes."""
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._made: dict[int, torch.Tensor] = {}
        """What the model receives, by the identity that the tensor had."""
        self.blocks: dict[int, Block] = {}
        """By the identity of the storage."""
        self._in_kept: set[int] = set()
        """Identities of the tensors in containers that are kept."""
        self.kinds: dict[int, str] = {}
        """Of places whose tensor cannot be bridged: why."""
        self.lost: Place | None = None
        """A tensor that died though it cannot be bridged."""

    def let_go(self) -> None:
        """Drop all tensors of the output; keep their views and storages."""
        # Containers with plain values are kept, to put new ones into them.
        kept = {p.parent for p in self._places if not (p.is_container or isinstance(p.value, torch.Tensor))}
        for i, place in enumerate(self._places):
            if isinstance(place.value, torch.Tensor):
                view, key = None, 0
                if place.parent in kept and self._owned[place.parent]:
                    self._in_kept.add(id(place.value))
                if kind := cannot_be_copied(place.value):
                    self.kinds[id(place)] = kind
                else:
                    storage = place.value.untyped_storage()
                    view, key = View.of(place.value), storage._cdata
                    self._storages[key] = storage
                self._seen[i] = _Seen(
                    id(place.value), weakref.ref(place.value), view, key, place.value.is_inference()
                )
            elif isinstance(place.value, tuple) and place.inside is not None and self._owned[i]:
                self._shells[i] = type(place.value), dict(getattr(place.value, "__dict__", ()))
        dropped = [
            i for i, p in enumerate(self._places) if i in self._seen or {i, p.same_as} & {*self._shells}
        ]
        for i in dropped:
            above = self._places[i].parent
            if above >= 0 and self._owned[above] and above not in self._shells:
                set_item(self._places[above].value, self._places[i].key, None)
            self._places[i].value = None

    def bridge_what_is_fresh(self) -> None:
        """Whoever else owns a tensor, its storage or its memory shows now."""
        storages = list(self._storages.values())
        # One reference is that of our dict: torch gives out one Python object for a storage.
        for storage, count in zip(storages, references(storages), strict=True):
            key, owner = storage._cdata, storage.resizable()
            alone = owner and count == 1 and torch._C._storage_Use_Count(key) == 1
            self.blocks[key] = Block(fresh=alone, movable=owner and not has_own_aliases(storage))
        for position, seen in enumerate(self._seen.values()):
            if seen.view is not None:
                self.blocks[seen.storage].leaves.append(position)
                self.blocks[seen.storage].movable &= seen.identity not in self._given
        if any(storage.device != self._memory.device for storage in storages):
            self._memory.wait_for_host_copies()
        with torch.no_grad():
            for key, block in self.blocks.items():
                if block.fresh:
                    self._fill_bridge(key, block)
            for i, seen in self._seen.items():
                self._places[i].value = self._received(seen)
                if self._places[i].value is None:
                    self.lost = self._places[i]

    def _fill_bridge(self, key: int, block: Block) -> None:
        """Allocate a bridge over the bytes that the leaves of a storage cover, and copy them."""
        storage = self._storages[key]
        views = {s.identity: s.view for s in self._seen.values() if s.storage == key and s.view is not None}
        ranges = [view.byte_range() for view in views.values()]
        first = min(low for low, _ in ranges)
        low = first // _ALIGNMENT * _ALIGNMENT
        block.nbytes = max(high for _, high in ranges) - low
        memory = self._memory.allocate(block.nbytes, storage.device)
        block.address = memory.data_ptr()
        for identity, view in views.items():
            at = view.offset * view.dtype.itemsize - low if view.shape.numel() else 0
            self._made[identity] = view.on(memory, at)
        (identity, view), *others = views.items()
        if others or view.has_repeats():
            block.memory = on_bytes(memory, first - low, block.nbytes)
            block.memory.copy_(on_bytes(storage, first, low + block.nbytes))
        elif block.nbytes:
            self._made[identity].copy_(view.on(storage))

    def _received(self, seen: _Seen) -> torch.Tensor | None:
        """A view of the bridge; else the tensor itself, made again if only its storage lives.

        A container that is kept gets an alias of it, so that the container does not count as an owner.
        """
        made = self._made.get(seen.identity)
        if made is not None:
            return made
        made = seen.tensor()
        if made is None and seen.view is not None:
            with torch.inference_mode(seen.inference):
                made = seen.view.on(self._storages[seen.storage])
        if made is not None and seen.identity in self._in_kept and shows_memory_alone(made):
            made = own_alias(made)
        if made is not None:
            self._made[seen.identity] = made
        return made

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

    def keep(self) -> list[Leaf]:
        """What write-back needs of each tensor: aliases, so that a bridge is free when the model drops it."""
        numbers = {key: number for number, key in enumerate(self.blocks)}
        aliases: dict[int, torch.Tensor] = {}
        leaves = []
        for i, seen in self._seen.items():
            tensor, path = self._made[seen.identity], self._places[i].path
            if seen.view is None:
                leaves.append(Leaf(path, tensor, None, -1))
                continue
            block = self.blocks[seen.storage]
            alias = aliases.get(seen.identity)
            if alias is None:
                alias = self._memory.alias(tensor)
                if block.movable:  # neither an argument, nor memory that captured code may write to unseen
                    block.movable = not block.fresh and alias is None and not tensor.is_inference()
                    block.version = tensor._version if block.movable else 0
                aliases[seen.identity] = alias = own_alias(tensor) if alias is None else alias
            leaves.append(Leaf(path, alias, View.of(tensor), numbers[seen.storage]))
        for block in self.blocks.values():
            if block.memory is not None:
                alias = self._memory.alias(block.memory)
                block.memory = own_alias(block.memory) if alias is None else alias
        return leaves


# At replay


class WriteBack:
    """The compiled plan of one eager segment's output."""

    def __init__(
        self,
        segment: int,
        where: str,
        layout: list[Layout],
        leaves: list[Leaf],
        blocks: list[Block],
        fields: list[Field],
        memory: Memory,
    ) -> None:
        self.leaves, self.blocks = leaves, blocks
        self._segment, self._where, self._layout = segment, where, layout
        self._fields, self._memory = fields, memory
        self._places = [i for i, place in enumerate(layout) if place[1] is torch.Tensor]
        self._targets = [leaf.target for leaf in leaves]
        self._at = [leaf.view.address if leaf.view else 0 for leaf in leaves]
        self._first = _groups([leaf.block for leaf in leaves], self._targets)
        self._separate = self._first == [*range(len(leaves))] and all(b.memory is None for b in blocks)
        self._all_fresh = all(leaf.block >= 0 and blocks[leaf.block].fresh for leaf in leaves)
        self._spans = [(b.address, b.address + b.nbytes) for b in blocks if b.fresh]
        self._low = min((low for low, _ in self._spans), default=0)
        self._high = max((high for _, high in self._spans), default=0)
        self._on_host = any(target.device != memory.device for target in self._targets)
        self._fit: Callable[..., bool] = _unsure
        root, items = layout[0][1], [place[1] for place in layout[1:]]
        flat = root is not None and root is not torch.Tensor and not {*items} - {torch.Tensor, None}
        self._flat = root if flat and issubclass(root, tuple | list | dict) else None
        self._keys = [place[3] for place in layout[1:]]

    @property
    def store(self) -> Callable[[Any], None]:
        """Brings the values of a new output to where later segments read them.

        Raises:
            OutputMismatchError: it is built in another way than at capture, has a leaf of another shape,
                dtype or device, or leaves that share memory in another way, or memory owned elsewhere has
                moved.
        """
        return self._store_tensor if self._layout[0][1] is torch.Tensor else self._store

    @property
    def expects_none(self) -> bool:
        """Whether the function returned None, so that there is nothing to store."""
        return self._layout[0][1] is None and self._fields[0].value is None

    @property
    def nbytes(self) -> int:
        """Bytes of all bridges."""
        return sum(block.nbytes for block in self.blocks)

    def frozen(self) -> list[tuple[str, Any]]:
        """Path of each plain value in the output that cannot be replaced, and the value at capture."""
        return [(field.path, field.value) for field in self._fields if not field.owned]

    def seal(self) -> None:
        """The capture is complete: memory owned elsewhere that it wrote to must not move any more."""
        for leaf in self.leaves:
            block = self.blocks[leaf.block]
            if leaf.block >= 0 and block.movable:
                block.movable = leaf.target._version == block.version

    def _store_tensor(self, out: Any) -> None:
        self._write([out])

    def _store(self, out: Any) -> None:
        values = self._read(out)
        if self._places:
            self._write([values[i] for i in self._places])
        for field in self._fields:
            if field.container is None or field.container is not values[field.parent]:
                self._put(field, values[field.place])

    def _read(self, out: Any) -> Sequence[Any]:
        """The value in each place of an output that is built as the captured one."""
        if type(out) is self._flat and len(out) == len(self._layout) - 1:
            is_dict = isinstance(out, dict)
            if not is_dict or [(hash(key), type(key), key) for key in out] == self._keys:
                values = [out, *(out.values() if is_dict else out)]
                if all(values[f.place] is f.value or _is_leaf(values[f.place]) for f in self._fields):
                    return values
        places = flatten(out)
        found = [_layout_of(place) for place in places]
        if found != self._layout:
            raise self._other_structure(found)
        return [place.value for place in places]

    def _write(self, new: Sequence[Any]) -> None:
        pointers = self._check(new)
        if self._on_host:
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
        if not (self._separate and self._all_fresh) or [at for at in pointers if low <= at < high]:
            targets, new = self._moved(new, pointers)
        if self._on_host or not self._all_fresh:
            for target, tensor in zip(targets, new, strict=True):
                copy_into(target, tensor)
        elif len(targets) > 1:
            torch._foreach_copy_(targets, new)  # type: ignore[arg-type]
        elif targets:
            targets[0].copy_(new[0])

    def _moved(
        self, new: Sequence[torch.Tensor], pointers: Sequence[int]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What is not where it is read already, and its values: cloned where a bridge holds them."""
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for block in self.blocks:
            moved = [i for i in block.leaves if not self._is_there(i, new[i], pointers[i])]
            if not moved:
                continue
            if not block.fresh:
                self._check_may_move(block, self.leaves[moved[0]], new[moved[0]])
            if block.memory is None:
                pairs = [(self._targets[i], new[i]) for i in (moved[:1] if block.fresh else moved)]
            else:
                pairs = [
                    (block.memory, self._bytes_like(block.memory, new[moved[0]], self._targets[moved[0]]))
                ]
            for target, source in pairs:
                within = any(low <= source.data_ptr() < high for low, high in self._spans)
                targets.append(target)
                sources.append(source.clone() if within else source)
        return targets, sources

    def _is_there(self, i: int, new: torch.Tensor, pointer: int) -> bool:
        """Whether a new leaf is the memory that later segments read, in the same view."""
        target = self._targets[i]
        if new is target:
            return True
        # Tensors without memory of their own are not alike.
        return pointer == self._at[i] and (pointer != 0 or not new.numel()) and _same_strides(target, new)

    @staticmethod
    def _bytes_like(memory: torch.Tensor, new: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """uint8 [bytes]: around a new leaf, what `memory` is around the captured one."""
        low = int(new.storage_offset()) * new.element_size() - (target.data_ptr() - memory.data_ptr())
        return on_bytes(new.untyped_storage(), low, low + memory.numel())

    def _check_may_move(self, block: Block, leaf: Leaf, new: torch.Tensor) -> None:
        """Raise OutputMismatchError for memory owned elsewhere, unless nobody but the capture owns it now."""
        if block.movable and (_is_ours_alone(leaf.target) or gc.collect() < 0 or _is_ours_alone(leaf.target)):
            return
        expected, found = View.of(leaf.target), View.of(new)
        raise OutputMismatchError(
            f"{self._where} returned other memory at `{leaf.path}`: later segments read memory that "
            f"others own or that captured code wrote to, 0x{expected.address:x} with strides "
            f"{list(expected.stride)}, found 0x{found.address:x} with strides {list(found.stride)}. Copying "
            f"would change its owner's data, not copying would be stale: return a new tensor (`.clone()`), "
            f"or the same one each time.",
            segment=self._segment,
            path=leaf.path,
            expected=expected,
            found=found,
        )

    # Checks

    def _check(self, new: Sequence[Any]) -> list[int]:
        """The addresses of new tensors that are laid out as the captured ones."""
        if not self._fit(*new):
            for leaf, tensor in zip(self.leaves, new, strict=True):
                self._check_one(leaf, tensor)
            # Made here and not at capture, since it compares the thread's dispatch state too.
            self._fit = _guard(new) if all(leaf.view for leaf in self.leaves) else _unsure
        if self._separate and len(new) == 1:
            return [new[0].data_ptr() if self.leaves[0].view else 0]
        pointers = [t.data_ptr() if leaf.view else 0 for t, leaf in zip(new, self.leaves, strict=True)]
        # Each at the start of a storage, and no two at one address: the common case, in 1 us.
        if not self._separate or len({*pointers}) < len(new) or any(map(_storage_offset, new)):
            self._check_sharing(new, pointers)
        return pointers

    def _check_one(self, leaf: Leaf, new: Any) -> None:
        target, advice = leaf.target, "Shapes, dtypes and devices are fixed at capture"
        if not isinstance(new, torch.Tensor):
            found = f"a {type(new).__qualname__}"
        elif leaf.view is None and new is not target:
            found = f"another {type(new).__qualname__}"
        elif leaf.view is not None and (kind := cannot_be_copied(new)):
            found = f"a {kind}"
        elif (new.shape, new.dtype, new.device) != (target.shape, target.dtype, target.device):
            found = str(View.of(new))
            if new.shape != target.shape and new.dim() == target.dim() > 0:
                advice += f": pad to {list(target.shape)}, or capture again for {list(new.shape)}"
            elif new.shape == target.shape:
                advice += ": convert it (`.to(...)`), or capture again"
        else:
            return
        expected = str(leaf.view) if leaf.view else f"one {type(target).__qualname__}"
        raise OutputMismatchError(
            f"{self._where} returned {found} at `{leaf.path}`; later segments read {expected}. {advice}.",
            segment=self._segment,
            path=leaf.path,
            expected=target.shape,
            found=new.shape if isinstance(new, torch.Tensor) else type(new),
        )

    def _check_sharing(self, new: Sequence[torch.Tensor], pointers: Sequence[int]) -> None:
        """Leaves that shared a storage still do, at the same distances, and no others."""
        there = [self._is_there(i, new[i], pointers[i]) for i in range(len(new))]
        ids = [
            storage_id(t) if leaf.view else -1 - i
            for i, (t, leaf) in enumerate(zip(new, self.leaves, strict=True))
        ]
        for i, now in enumerate(_groups(ids, new)):
            before = self._first[i]
            other = min(now, before)
            as_bytes = self.leaves[i].block >= 0 and self.blocks[self.leaves[i].block].memory is not None
            if (other == i and not as_bytes) or (there[i] and there[other]):
                continue
            distance, expected = pointers[i] - pointers[other], self._at[i] - self._at[other]
            if now == before and distance == expected and _same_strides(self._targets[i], new[i]):
                continue
            raise OutputMismatchError(
                f"{self._where} returned `{self.leaves[i].path}` with strides {list(new[i].stride())}, "
                f"{_how(now, i, self.leaves, distance)}; later segments read strides "
                f"{list(self._targets[i].stride())}, {_how(before, i, self.leaves, expected)}. How outputs "
                f"share memory is fixed at capture: return the same views, or clones.",
                segment=self._segment,
                path=self.leaves[i].path,
                expected=(self._targets[i].stride(), expected),
                found=(new[i].stride(), distance),
            )

    def _other_structure(self, found: list[Layout]) -> OutputMismatchError:
        before, now = next(pair for pair in zip_longest(self._layout, found) if pair[0] != pair[1])
        path = before[0] if before else now[0]
        expected = _in_words(before)
        other = _in_words(now)
        if before and now and (before[0] != now[0] or before[3] != now[3]):
            other += f" at `{now[0]}`, with the key {now[3][-1]!r}"
        return OutputMismatchError(
            f"{self._where} returned another structure: later segments read {expected} at `{path}`, "
            f"found {other}. The structure of an output is fixed at capture: return the same one each time "
            f"(pad a list to one length), or capture again.",
            segment=self._segment,
            path=path,
            expected=before[1] if before else None,
            found=now[1] if now else None,
        )

    # Values that are no tensors

    def _put(self, field: Field, new: Any) -> None:
        """Put a value into the captured container; where that cannot be done, warn once if it differs."""
        container, key = field.container, field.key
        if not field.owned:
            if not field.warned and not _equal(field.value, new):
                field.warned = True
                warn(
                    f"{self._where} returned {new!r} at `{field.path}`, and {field.value!r} at capture. "
                    f"Later segments were recorded for the old value. Return it as a tensor, or in a new "
                    f"list, dict or object that a later eager segment reads.",
                    FrozenValueWarning,
                )
            return
        if isinstance(container, list):
            stands = len(container) == field.length
            now = container[key] if stands else None
        else:
            missing = object()
            now = (
                container.get(key, missing)
                if isinstance(container, dict)
                else getattr(container, key, missing)
            )
            if now is missing:  # the captured code has taken it out
                return
            stands = True
        if not stands or not _is_leaf(now, field.in_object):
            raise OutputMismatchError(
                f"{self._where} returned {new!r} at `{field.path}`, where other code has put a "
                f"{type(now).__qualname__} since, or has made the list longer or shorter: it would be "
                f"overwritten. Return a tuple, or put that elsewhere.",
                segment=self._segment,
                path=field.path,
                expected=type(field.value),
                found=type(now),
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


_storage_offset = torch.Tensor.storage_offset
# Of a storage with tensors on it; torch versions differ in whether those hold its Python object too.
_probe = torch.empty(1, device="cpu")
_HELD_BY_TENSORS = references([_probe.untyped_storage()])[0]


def _is_ours_alone(alias: torch.Tensor) -> bool:
    """Whether nothing but our own aliases keeps the memory of one of them."""
    storage = [alias.untyped_storage()]
    tensors = torch._C._storage_Use_Count(storage[0]._cdata) - 1
    return tensors <= len(own_aliases(alias)) and references(storage)[0] <= _HELD_BY_TENSORS


def _groups(storages: Sequence[int], tensors: Sequence[torch.Tensor]) -> list[int]:
    """For each tensor the first one on the same storage. Those of no elements share nothing."""
    first: dict[int, int] = {}
    return [
        first.setdefault(storage, i) if storage >= 0 and tensor.numel() else i
        for i, (storage, tensor) in enumerate(zip(storages, tensors, strict=True))
    ]


def _same_strides(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether tensors of one shape show the same elements from the same address."""
    pairs = zip(tensor.shape, tensor.stride(), other.stride(), strict=True)
    return all(size < 2 or a == b for size, a, b in pairs)


def _how(first: int, i: int, leaves: Sequence[Leaf], distance: int) -> str:
    if first == i:
        return "separate from the others"
    return f"on the memory of `{leaves[first].path}` at a distance of {distance} bytes"


def _in_words(layout: Layout | None) -> str:
    if layout is None:
        return "nothing"
    kind = layout[1]
    what = (
        "a tensor" if kind is torch.Tensor else "a plain value" if kind is None else f"a {kind.__qualname__}"
    )
    return what if layout[2] < 0 else f"{what} that stands elsewhere too"


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
