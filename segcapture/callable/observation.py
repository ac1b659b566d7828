"""One warm-up call, observed: what moves in it by Python alone, and what captured code reads of it."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase
from typing import Any

import attrs
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from segcapture.arguments import Call
from segcapture.inspect.snapshot import Search, brief, is_dense
from segcapture.listener import Listener
from segcapture.operators.compiled import inside_compiled_region
from segcapture.operators.composites import names_of, tensor_leaves
from segcapture.operators.intercept import Invoke, Use, watching
from segcapture.tensors import View, storage_id
from segcapture.thread import state
from segcapture.trees import PLAIN, Place, map_tuples

_MOST_WALKED = 20_000  # objects, in walks at breaks: about a quarter of a second
# Under inference mode composite operators come whole: `item`, `to`.
_HOST_READS = {
    f"aten::{name}"
    for name in (
        *("_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "nonzero", "masked_select"),
        *("_unique2", "unique_dim", "repeat_interleave", "_to_copy", "copy_", "to"),
    )
}


class BreakTrace:
    """What a break calls: operators, where the tensors stand that they are given, and plain arguments."""

    def __init__(self) -> None:
        self._entries: list[tuple[str, list[str], list[Any]]] = []
        self._reads_values = False

    def add(self, name: str, places: list[str], plain: list[Any]) -> None:
        """An operator that is called."""
        self._reads_values |= name in _HOST_READS
        self._entries.append((name, places, plain))

    def depends_on(
        self, values: Sequence[Any], last: "BreakTrace", last_values: Sequence[Any], *, own_state: bool
    ) -> bool:
        """Whether it may differ from the one of the last call because a number was another one then.

        Where breaks read values of tensors, or have state of their own (`own_state`), calls may differ for
        the sake of that: then only the number itself tells.
        """
        from_tensors = own_state or self._reads_values or last._reads_values
        for (name, places, plain), (old_name, old_places, old_plain) in zip(
            self._entries, last._entries, strict=False
        ):
            if name != old_name:
                return not from_tensors
            if (places != old_places or plain != old_plain) and not from_tensors:
                return True
            for new, old in zip(plain, old_plain, strict=False):
                if new != old and _is_one_of(new, values) and _is_one_of(old, last_values):
                    return True
        return len(self._entries) != len(last._entries) and not from_tensors


def _is_one_of(leaf: Any, values: Sequence[Any]) -> bool:
    return isinstance(leaf, tuple) and any(str(value) == str(leaf[1]) for value in values)


@attrs.frozen(eq=False)
class Moved:
    """A place where something else stands after a call than before it."""

    path: str
    expected: str
    found: str
    use: Use | None
    """The operator of captured code that reads what stood there, or what stands there now."""
    break_use: Use | None
    """The operator of a break that does, where a replay does not make what stands there now."""
    is_tensor: bool
    was_tensor: bool
    values: tuple[Any, ...]
    """The numbers, of those that are plain values."""
    kinds: Mapping[str, str]
    """Names of the classes of all objects, by path."""


class Observation(Listener):
    """One warm-up call: what its captured code calls and reads, and what has moved when it ends.

    Args:
        reach: Searches all that the function can reach.
        arguments: The tensors that a replay copies.
        suspects: Paths of which it is told whether captured code moves them, or breaks. Left out: all, for
            as long as that takes no more than `_MOST_WALKED` steps.
    """

    def __init__(
        self,
        reach: Callable[[], Search],
        arguments: Iterable[torch.Tensor],
        suspects: Collection[str] = (),
    ) -> None:
        self._reach, self._suspects = reach, suspects
        self._arguments = {id(tensor): tensor for tensor in arguments}
        # It holds the tensors, so that no other one has their identity.
        self._before = reach()
        self._known: dict[int, str] = {}
        tensors = {path: t for path, t in self._before.values.items() if isinstance(t, torch.Tensor)}
        for path, tensor in tensors.items():
            if (storage := _storage(tensor)) is not None:
                self._known.setdefault(storage, path)
        self._objects = {id(tensor) for tensor in tensors.values()}
        self._made: dict[int, StorageWeakRef] = {}
        self._reads: dict[int, Use] = {}
        """By the identity of a tensor."""
        self._reads_of_views: dict[int, tuple[Use, StorageWeakRef]] = {}
        """By storage, through other tensors than stood anywhere before."""
        self.trace: list[tuple[Any, ...]] = []
        """Of each operator of captured code: its name, its plain arguments, its tensors from outside."""
        self.breaks: list[BreakTrace] = []
        self.moved_between: set[str] = set()
        """The suspects that captured code has moved."""
        self.moved_in_breaks: set[str] = set()
        self._at, self._walked = self._before, 0
        self._made_in_breaks: dict[int, StorageWeakRef] = {}
        self._escaped: dict[int, Use] = {}
        """What a break has made and not returned, and captured code reads."""
        self._reads_in_breaks: dict[int, Use] = {}
        self.compiled = False
        """Whether it went through code that torch.compile would compile."""

    def intercepting(self) -> AbstractContextManager[None]:
        """Watch the operators of this thread, composite ones whole."""
        return watching(self._operator, in_parts=False)

    def break_begins(self, index: int, name: str, place: str, call: Call) -> None:
        """What is passed by itself or in tuples is read: a replay passes it again."""
        entry: list[Any] = [name]
        for value in (*call.args, *call.kwargs.values()):
            for leaf in leaves_of_tuples(value):
                if isinstance(leaf, torch.Tensor):
                    entry.append(self._note_read(leaf, name))
                elif not call.live:
                    entry.extend(_plain_leaves(leaf) if isinstance(leaf, PLAIN) else ())
        self.trace.append(tuple(entry))
        self.breaks.append(BreakTrace())
        self._look(self.moved_between)

    def _look(self, moved: set[str]) -> None:
        """Note which suspects have moved since this was called before."""
        if not self._suspects and self._walked > _MOST_WALKED:
            return
        before, self._at = self._at, self._reach()
        self._walked += len(self._at.kinds)
        for path in self._suspects or {**before.values, **self._at.values, **self._at.lengths}:
            values = before.values.get(path), self._at.values.get(path)
            if not _same(*values) or before.lengths.get(path) != self._at.lengths.get(path):
                moved.add(path)

    def break_ends(self, index: int, places: list[Place]) -> None:
        """What it returned is carried on by a replay."""
        self._look(self.moved_in_breaks)
        for place in places:
            if isinstance(place.value, torch.Tensor):
                self._note_made(place.value)

    def _note_made(self, tensor: torch.Tensor) -> None:
        storage = _storage(tensor)
        if storage is not None and storage not in self._known:
            self._made[storage] = StorageWeakRef(tensor.untyped_storage())

    def _note_read(self, tensor: torch.Tensor, name: str) -> str:
        """Note what is read that a replay does not make; return where it stood, or an empty string."""
        storage = _storage(tensor)
        if storage is None or storage in self._made:
            return ""
        if id(tensor) not in self._reads:
            self._reads[id(tensor)] = Use(name)
        if storage in self._made_in_breaks:
            self._escaped.setdefault(storage, self._reads[id(tensor)])
        if id(tensor) not in self._objects and storage not in self._reads_of_views:
            self._reads_of_views[storage] = Use(name), StorageWeakRef(tensor.untyped_storage())
        return self._known.get(storage, "?")

    def _operator(self, func: Any, args: Any, kwargs: Any, call: Invoke) -> Any:
        if state.run.inside_eager:
            return self._operator_of_break(func, args, kwargs, call)
        self.compiled = self.compiled or inside_compiled_region()
        name = names_of(func)[0]
        given = tensor_leaves(args, kwargs)
        entry: list[Any] = [name, *_plain_leaves(args, kwargs)]
        for tensor in given:
            entry.append(tuple(tensor.shape))
            if name != "aten::lift_fresh":  # a number that becomes a tensor comes with its memory
                entry.append(self._note_read(tensor, name))
        self.trace.append(tuple(entry))
        out = call()
        passed = {_storage(tensor) for tensor in given} if name != "aten::lift_fresh" else set()
        for tensor in tensor_leaves(out):
            if _storage(tensor) not in passed:
                self._note_made(tensor)
        return out

    def _operator_of_break(self, func: Any, args: Any, kwargs: Any, call: Invoke) -> Any:
        name, given = names_of(func)[0], tensor_leaves(args, kwargs)
        storages = [_storage(tensor) for tensor in given]
        known = [storage for storage in storages if storage is not None and storage in self._known]
        for storage in known:
            if storage not in self._reads_in_breaks:
                self._reads_in_breaks[storage] = Use(name)
        if self.breaks:
            places = [self._known[storage] for storage in known]
            self.breaks[-1].add(name, places, [*_plain_leaves(args, kwargs)])
        out = call()
        for tensor in tensor_leaves(out):
            made = _storage(tensor)
            if made is not None and made not in storages and made not in self._known:
                self._made_in_breaks[made] = StorageWeakRef(tensor.untyped_storage())
        return out

    def let_go(self) -> None:
        """Keep no tensor: what it has found is words and numbers."""
        self._before = self._at = Search(None, (), {})
        self._arguments = {}
        self._made, self._made_in_breaks, self._reads_of_views = {}, {}, {}

    def finish(self, ignored: Sequence[str], *, whoever_reads: bool = False) -> dict[str, Moved]:
        """What has moved, by path; of tensors those that captured code reads."""
        self._look(self.moved_between)
        before, after = self._before, self._reach()
        kinds = before.kinds | after.kinds
        found = {}
        for path, length in after.lengths.items():
            old_length = before.lengths.get(path, length)
            if old_length != length and not is_ignored(path, ignored):
                words, both = f"{old_length} items", (old_length, length)
                found[path] = Moved(path, words, f"{length} items", None, None, False, False, both, kinds)
        grown = tuple(f"{path}[" for path in found)
        for path in {**before.values, **after.values}:
            old, new = before.values.get(path), after.values.get(path)
            if old is new or is_ignored(path, ignored):
                continue
            if isinstance(old, torch.Tensor) or isinstance(new, torch.Tensor) or not path.startswith(grown):
                moved = self._moved(path, old, new, kinds, whoever_reads)
                if moved is not None:
                    found[path] = moved
        for path in self.moved_between & self.moved_in_breaks - found.keys():
            # It may stand again where it stood; each of the two has seen what the other did.
            value = after.values.get(path)
            if not is_ignored(path, ignored) and not path.startswith(grown):
                tensor, text = isinstance(value, torch.Tensor), f"{brief(value)}, in breaks and between them"
                found[path] = Moved(path, brief(value), text, None, None, tensor, tensor, (value,), kinds)
        for storage, use in self._escaped.items():
            made = f"a tensor that a break has made ({self._place_of(storage, after)})"
            found[made] = Moved(made, "another one", "this one", use, None, True, True, (), kinds)
        return found

    @staticmethod
    def _place_of(storage: int, reach: Search) -> str:
        for path, value in reach.values.items():
            if isinstance(value, torch.Tensor) and _storage(value) == storage:
                return path
        return "and not returned"

    def _moved(
        self, path: str, old: Any, new: Any, kinds: Mapping[str, str], whoever_reads: bool
    ) -> Moved | None:
        if _same(old, new):
            return None
        tensors = [value for value in (old, new) if isinstance(value, torch.Tensor)]
        use = break_use = None
        if isinstance(old, torch.Tensor):
            uses = [self._use_of(old), None if id(new) in self._arguments else self._use_of(new)]
            use = uses[0] or uses[1]
            storages = [_storage(tensor) for tensor in tensors]
            found = (self._reads_in_breaks.get(storage) for storage in storages if storage is not None)
            read_in_break = next(filter(None, found), None)
            if storages[-1] not in self._made:  # what captured code makes, a replay makes there again
                break_use = read_in_break
            if use is None and read_in_break is None and not whoever_reads:
                return None
        expected, shown = ("a tensor, " + str(View.of(v)) if is_dense(v) else brief(v) for v in (old, new))
        values = () if tensors else (old, new)
        return Moved(
            path, expected, shown, use, break_use, bool(tensors), isinstance(old, torch.Tensor), values, kinds
        )

    def _use_of(self, value: Any) -> Use | None:
        """By which operator captured code reads a tensor that a replay does not make."""
        if not isinstance(value, torch.Tensor):
            return None
        storage = _storage(value)
        if storage is None:
            return Use("unknown")  # of what is no strided memory nothing can be told
        if storage in self._made:
            return None
        view = self._reads_of_views.get(storage)
        return self._reads.get(id(value)) or (view and view[0])

    def reads(self) -> dict[str, Use]:
        """Where the tensors stood that captured code reads."""
        uses = {path: self._use_of(value) for path, value in self._before.values.items()}
        return {path: use for path, use in uses.items() if use is not None}


def _storage(tensor: torch.Tensor) -> int | None:
    try:
        return storage_id(tensor)
    except (RuntimeError, NotImplementedError):  # sparse, say
        return None


def _same_memory(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Whether two tensors that are alive are one to a graph: what it reads of one, it reads of the other."""
    return is_dense(old) and is_dense(new) and old.numel() > 0 and View.of(old) == View.of(new)


def _same(old: Any, new: Any) -> bool:
    """Whether a place holds to a graph what it held before."""
    if old is new:
        return True
    if isinstance(old, torch.Tensor) or isinstance(new, torch.Tensor):
        return isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor) and _same_memory(old, new)
    return type(old) is type(new) and bool(old == new or old != old)


def leaves_of_tuples(value: Any) -> list[Any]:
    """What is in nested tuples, in order."""
    leaves: list[Any] = []
    map_tuples(value, leaves.append)
    return leaves


def _plain_leaves(*trees: Any) -> Iterable[Any]:
    """Plain arguments of an operator, in order; of other objects their classes."""
    for tree in trees:
        if isinstance(tree, tuple | list):
            yield from _plain_leaves(*tree)
        elif isinstance(tree, dict):
            yield from _plain_leaves(*tree.values())
        elif not isinstance(tree, torch.Tensor):
            yield (
                (type(tree), repr(tree) if isinstance(tree, float) else tree)
                if isinstance(tree, PLAIN)
                else type(tree)
            )


def is_ignored(path: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern matches a path, or what it is in."""
    return any(
        path == pattern or any(fnmatchcase(path, pattern + inside) for inside in ("", ".*", "[[]*"))
        for pattern in patterns
    )
