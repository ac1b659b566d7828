"""The watch: what a call changes that a replay does not change again, and what captured code reads of it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase
from itertools import zip_longest
from typing import Any

import attrs
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from segcapture.errors import CaptureFailedError
from segcapture.inspect.snapshot import Search, brief, is_dense
from segcapture.listener import Listener
from segcapture.operators.compiled import inside_compiled_region
from segcapture.operators.composites import names_of, tensor_leaves
from segcapture.operators.intercept import Invoke, Use, watching
from segcapture.tensors import View, storage_id
from segcapture.thread import state
from segcapture.trees import PLAIN, Place


@attrs.frozen(eq=False)
class Moved:
    """A place where something else stands after a call than before it."""

    path: str
    expected: str
    found: str
    use: Use | None
    """The operator of captured code that reads what stood there, or what stands there now."""
    is_tensor: bool
    values: tuple[Any, ...]
    """The numbers, of those that are plain values."""
    kinds: frozenset[str]
    """Classes of the objects that it is in."""


class Observation(Listener):
    """One warm-up call: what its captured code calls and reads, and what has moved when it ends.

    Args:
        reach: Searches all that the function can reach.
        arguments: The tensors that a replay copies.
    """

    def __init__(self, reach: Callable[[], Search], arguments: Iterable[torch.Tensor]) -> None:
        self._reach = reach
        self._arguments = {id(tensor): tensor for tensor in arguments}
        # It holds the tensors, so that no other one has their identity.
        self._before = reach()
        self._known: dict[int, str] = {}
        for path, value in self._before.values.items():
            if isinstance(value, torch.Tensor) and (storage := _storage(value)) is not None:
                self._known.setdefault(storage, path)
        self._made: dict[int, StorageWeakRef] = {}
        self._reads: dict[int, tuple[Use, StorageWeakRef]] = {}
        self.trace: list[tuple[Any, ...]] = []
        """Of each operator of captured code: its name, its plain arguments, its tensors from outside."""
        self.compiled = False
        """Whether it went through code that torch.compile would compile."""

    def intercepting(self) -> AbstractContextManager[None]:
        """Watch the operators of this thread, composite ones whole."""
        return watching(self._operator, in_parts=False)

    def break_ends(self, index: int, places: list[Place]) -> None:
        """What it returned is carried on by a replay."""
        for place in places:
            if isinstance(place.value, torch.Tensor):
                self._note_made(place.value)

    def _note_made(self, tensor: torch.Tensor) -> None:
        storage = _storage(tensor)
        if storage is not None and storage not in self._known:
            self._made[storage] = StorageWeakRef(tensor.untyped_storage())

    def _operator(self, func: Any, args: Any, kwargs: Any, call: Invoke) -> Any:
        if state.run.inside_eager:
            return call()
        self.compiled = self.compiled or inside_compiled_region()
        name = names_of(func)[0]
        given = tensor_leaves(args, kwargs)
        entry: list[Any] = [name, *_plain_leaves(args, kwargs)]
        for tensor in given:
            storage = _storage(tensor)
            entry.append(tuple(tensor.shape))
            if storage is not None and storage not in self._made and name != "aten::lift_fresh":
                entry.append(self._known.get(storage, "?"))
                if storage not in self._reads:
                    self._reads[storage] = Use(name), StorageWeakRef(tensor.untyped_storage())
        self.trace.append(tuple(entry))
        out = call()
        passed = {_storage(tensor) for tensor in given} if name != "aten::lift_fresh" else set()
        for tensor in tensor_leaves(out):
            if _storage(tensor) not in passed:
                self._note_made(tensor)
        return out

    def has_moved(self, ignored: Sequence[str]) -> bool:
        """Whether anything has moved, whoever reads it."""
        return bool(self.finish(ignored, whoever_reads=True))

    def finish(self, ignored: Sequence[str], *, whoever_reads: bool = False) -> dict[str, Moved]:
        """What has moved, by path; of tensors those that captured code reads."""
        before, after = self._before, self._reach()
        kinds = before.kinds | after.kinds
        found = {}
        for path, length in after.lengths.items():
            old_length = before.lengths.get(path, length)
            if old_length != length and not _is_ignored(path, ignored):
                words, both = f"{old_length} items", (old_length, length)
                found[path] = Moved(path, words, f"{length} items", None, False, both, _above(path, kinds))
        grown = tuple(f"{path}[" for path in found)
        for path in {**before.values, **after.values}:
            old, new = before.values.get(path), after.values.get(path)
            if old is new or _is_ignored(path, ignored):
                continue
            if isinstance(old, torch.Tensor) or isinstance(new, torch.Tensor) or not path.startswith(grown):
                moved = self._moved(path, old, new, kinds, whoever_reads)
                if moved is not None:
                    found[path] = moved
        return found

    def _moved(
        self, path: str, old: Any, new: Any, kinds: Mapping[str, str], whoever_reads: bool
    ) -> Moved | None:
        tensors = [value for value in (old, new) if isinstance(value, torch.Tensor)]
        use = None
        if not tensors:
            if type(old) is type(new) and (old == new or old != old):
                return None
        elif len(tensors) == 2 and _same_memory(old, new):
            return None
        elif isinstance(old, torch.Tensor):
            uses = [self._use_of(old), None if id(new) in self._arguments else self._use_of(new)]
            use = uses[0] or uses[1]
            if use is None and not whoever_reads:
                return None
        expected, shown = ("a tensor, " + str(View.of(v)) if is_dense(v) else brief(v) for v in (old, new))
        values = () if tensors else (old, new)
        return Moved(path, expected, shown, use, bool(tensors), values, _above(path, kinds))

    def _use_of(self, value: Any) -> Use | None:
        """By which operator captured code reads a tensor that a replay does not make."""
        if not isinstance(value, torch.Tensor):
            return None
        storage = _storage(value)
        if storage is None:
            return Use("unknown")  # of what is no strided memory nothing can be told
        return self._reads[storage][0] if storage in self._reads else None


def _storage(tensor: torch.Tensor) -> int | None:
    try:
        return storage_id(tensor)
    except (RuntimeError, NotImplementedError):  # sparse, say
        return None


def _same_memory(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Whether two tensors that are alive are one to a graph: what it reads of one, it reads of the other."""
    return is_dense(old) and is_dense(new) and old.numel() > 0 and View.of(old) == View.of(new)


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


def _is_ignored(path: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern matches a path, or what it is in."""
    return any(
        path == pattern or any(fnmatchcase(path, pattern + inside) for inside in ("", ".*", "[[]*"))
        for pattern in patterns
    )


def _above(path: str, kinds: Mapping[str, str]) -> frozenset[str]:
    return frozenset(kind for above, kind in kinds.items() if path.startswith(above))


class Watch:
    """What the observed warm-up calls of one signature have found."""

    def __init__(self, name: str, warmup: int, ignored: Sequence[str]) -> None:
        self._name, self._warmup, self.ignored = name, warmup, ignored
        self._settled = warmup == 0
        self._plain = self._compiled = False
        self._last: tuple[dict[str, Moved], list[tuple[Any, ...]], bool] | None = None
        self._calls = 0

    def next_call(self, warmups: int) -> str:
        """What the next call is: `warm-up`, `observed` or `capture`."""
        if warmups + 1 < self._warmup or (self._settled and self._compiled and not self._plain):
            self._plain = True  # it compiles what is to be compiled
            return "warm-up"
        return "capture" if self._settled else "observed"

    def unsettle(self) -> None:
        """Something moved in a call that nobody observed: the next one is."""
        self._settled = False

    def judge(self, seen: Observation, first: bool) -> None:
        """Compare an observed call with the one observed before it.

        One call that moves something may set up what stays: the next one decides.

        Raises:
            CaptureFailedError: captured code reads what each call moves by Python alone.
        """
        moved, trace = seen.finish(self.ignored), seen.trace
        self._compiled |= seen.compiled
        last, self._last = self._last, (moved, trace, first)
        if not moved or self._settled:
            self._settled = True
            return
        if last is None:
            return
        before, old, was_first = last
        for path, place in moved.items():
            if place.is_tensor and path in before and before[path].is_tensor:
                raise self._refused([place])
        if old == trace:
            self._settled = True
        elif not was_first:
            raise self._refused(self._suspects(list(moved.values()), old, trace))

    @staticmethod
    def _suspects(moved: list[Moved], old: list[tuple[Any, ...]], new: list[tuple[Any, ...]]) -> list[Moved]:
        """Those of the places, the likeliest first, that may be why two calls differ."""
        differ = next((pair for pair in zip_longest(old, new, fillvalue=()) if pair[0] != pair[1]), ((), ()))
        taken = {str(v) for entry in differ for part in entry for v in _numbers_in(part)}
        return sorted(
            moved, key=lambda place: (place.is_tensor, not any(str(value) in taken for value in place.values))
        )

    def _refused(self, places: list[Moved]) -> CaptureFailedError:
        place = places[0]
        if place.expected == "None":
            return CaptureFailedError(
                f"Each call of {self._name} puts {place.found} at `{place.path}`, where there was none "
                f"again, and a replay writes into the one that the capture has put there. {_advice(place)}",
                path=place.path,
                expected=place.expected,
                found=place.found,
            )
        others = f" (or one of {', '.join(f'`{p.path}`' for p in places[1:4])})" if places[1:] else ""
        reads = f"{place.use} reads it" if place.use is not None else "what captured code computes with moves"
        return CaptureFailedError(
            f"Each call of {self._name} changes `{place.path}`{others} by Python alone, from "
            f"{place.expected} to {place.found}, and {reads}: a replay does not change it again, so that the "
            f"result would be stale. {_advice(place)}",
            path=place.path,
            expected=place.expected,
            found=place.found,
            operator=place.use.operator if place.use is not None else "",
        )


def _numbers_in(part: Any) -> Iterable[Any]:
    if isinstance(part, tuple):
        for item in part:
            yield from _numbers_in(item)
    elif not isinstance(part, type):
        yield part


def _advice(place: Moved) -> str:
    if any(kind in ("DynamicCache", "DynamicLayer", "EncoderDecoderCache") for kind in place.kinds):
        return "Use a `StaticCache` of transformers, which writes in place, for this one, which grows."
    if any("SlidingWindow" in kind for kind in place.kinds):
        return (
            "A sliding-window layer of transformers counts in Python: use layers of full attention "
            "(`layer_types` or `sliding_window=None` in the configuration), or read it in a break."
        )
    if place.path.endswith(".grad"):
        return (
            "Keep gradients where they are: `zero_grad(set_to_none=False)`; or do the whole step, "
            "zero_grad() and the optimizer's step() too, in the function."
        )
    if place.is_tensor:
        return (
            "Write in place (`copy_`, `add_`), pass it in and return it, or change and read it in a function "
            "marked `@eager_break_during_capture`."
        )
    return (
        "Make it a tensor that is written in place, pass it in, read it in a function marked "
        "`@eager_break_during_capture`, or put it into `key=`. If no result depends on it: "
        f'`ignore_state=("*.{place.path.rpartition(".")[2]}",)`.'
    )
