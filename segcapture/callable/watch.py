"""The watch: judges what the warm-up calls of a signature change that a replay does not change again."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch

from segcapture.callable.held import HeldTensors
from segcapture.callable.observation import Moved, Observation, is_ignored, leaves_of_tuples
from segcapture.capture import BreakableCUDAGraphCapture
from segcapture.errors import CaptureFailedError
from segcapture.inspect.snapshot import Search
from segcapture.operators.intercept import Use


class Watch:
    """What the observed warm-up calls of one signature have found."""

    def __init__(self, name: str, warmup: int, ignored: Sequence[str]) -> None:
        self._name, self._warmup, self.ignored = name, warmup, ignored
        self._settled = warmup == 0
        self._plain = self._compiled = False
        self._last: tuple[dict[str, Moved], Observation, bool] | None = None
        self._reads: dict[str, Use] | None = None

    def next_call(self, warmups: int) -> str:
        """What the next call is: `warm-up`, `observed` or `capture`."""
        if warmups + 1 < self._warmup or (self._settled and self._compiled and not self._plain):
            self._plain = True  # it compiles what is to be compiled
            return "warm-up"
        return "capture" if self._settled else "observed"

    def has_moved(self, captured: Observation) -> bool:
        """Whether a call that was captured has moved what it must not. Then the next one is observed again.

        That is what captured code reads; if no call was observed, so that nobody knows it, all.
        """
        moved = captured.finish(self.ignored, whoever_reads=True)
        if self._reads is not None:
            moved = {path: place for path, place in moved.items() if place.is_tensor and path in self._reads}
        if moved:
            self._settled = False
        return bool(moved)

    def hold(self, reach: Search, others: Iterable[Any], capture: BreakableCUDAGraphCapture) -> "HeldTensors":
        """Hold what the graphs read of all that can be reached now, but for what others look after."""
        known = {id(value) for value in others}
        calls = capture.eager_calls()
        passed = [leaf for call in calls for leaf in leaves_of_tuples((*call.args, *call.kwargs.values()))]
        held = HeldTensors({id(leaf) for leaf in passed if isinstance(leaf, torch.Tensor)})
        for slot in reach.slots:
            if slot.value is None or id(slot.value) in known or is_ignored(slot.path, self.ignored):
                continue
            if self._reads is None or slot.path in self._reads:
                held.add(slot, None if self._reads is None else self._reads[slot.path])
        return held

    def judge(self, seen: Observation, first: bool) -> None:
        """Compare an observed call with the one observed before it.

        One call that moves something may set up what stays: the next one decides.

        Raises:
            CaptureFailedError: captured code reads what each call moves by Python alone.
        """
        moved = seen.finish(self.ignored)
        self._reads = seen.reads()
        self._compiled |= seen.compiled
        seen.let_go()
        last, self._last = self._last, (moved, seen, first)
        if not moved or self._settled:
            self._settle()
            return
        if last is None:
            return
        before, old, was_first = last
        between = seen.moved_between
        for path, place in moved.items():
            again = path in before and before[path].is_tensor
            if not (place.is_tensor and again):
                continue
            # A place that both move goes, in a replay, from break to break alone.
            by_hand = place.break_use is not None or path in seen.moved_in_breaks or not place.was_tensor
            if place.use is not None or (path in between and by_hand):
                raise self._refused([place])
        read = [
            place
            for path, place in moved.items()
            if path in between and self._in_breaks(place, moved, seen, before, old)
        ]
        if old.trace == seen.trace and not read:
            self._settle()
        elif not was_first:
            raise self._refused(read or self._suspects(list(moved.values()), old.trace, seen.trace))

    @staticmethod
    def _in_breaks(
        place: Moved,
        moved: Mapping[str, Moved],
        seen: Observation,
        before: Mapping[str, Moved],
        old: Observation,
    ) -> bool:
        """Whether breaks seem to read a plain value that captured code moves."""
        if place.is_tensor or place.path not in before:
            return False
        own = seen.moved_in_breaks - {place.path}
        if place.path in seen.moved_in_breaks:
            return True
        if any(moved[path].values == place.values for path in own if path in moved):
            return False  # it cannot be told which of the two
        pairs = zip(seen.breaks, old.breaks, strict=False)
        values = place.values, before[place.path].values
        return any(new.depends_on(values[0], last, values[1], own_state=bool(own)) for new, last in pairs)

    @property
    def suspects(self) -> Collection[str]:
        """Paths that have moved in the call that was observed last."""
        return self._last[0].keys() if self._last is not None else ()

    def _settle(self) -> None:
        self._settled, self._last = True, None

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
        use = place.use or place.break_use
        reads = f"{use} reads it" if use is not None else "what is computed with it moves"
        return CaptureFailedError(
            f"Each call of {self._name} changes `{place.path}`{others} by Python alone, from "
            f"{place.expected} to {place.found}, and {reads}: a replay does not change it again, so that the "
            f"result would be stale. {_advice(place)}",
            path=place.path,
            expected=place.expected,
            found=place.found,
            operator=use.operator if use is not None else "",
        )


def _numbers_in(part: Any) -> Iterable[Any]:
    if isinstance(part, tuple):
        for item in part:
            yield from _numbers_in(item)
    elif not isinstance(part, type):
        yield part


def _advice(place: Moved) -> str:
    kinds = [kind for above, kind in place.kinds.items() if place.path.startswith(above)]
    if any(kind in ("DynamicCache", "DynamicLayer", "EncoderDecoderCache") for kind in kinds):
        return "Use a `StaticCache` of transformers, which writes in place, for this one, which grows."
    if any("SlidingWindow" in kind for kind in kinds):
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
