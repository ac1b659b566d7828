"""The signatures of one `GraphedCallable`: what is kept for each, which are kept, and why new ones come."""

import functools
import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import attrs
import torch

from segcapture.callable.held import HeldTensors
from segcapture.callable.inputs import StaticInputs
from segcapture.callable.observation import Observation
from segcapture.callable.outputs import CallOutputs, with_tensors
from segcapture.callable.signature import Arguments, Request, Words, difference, explain, named, summary, weak
from segcapture.callable.state import StateBefore, Weights
from segcapture.callable.watch import Watch
from segcapture.capture import BreakableCUDAGraphCapture
from segcapture.errors import CaptureFailedError
from segcapture.inspect.snapshot import Search
from segcapture.thread import warn
from segcapture.trees import flatten, tensors_in

logger = logging.getLogger("segcapture.callable")

_SIGNATURES_PER_CAPTURE = 4  # that are kept for each capture that may be
_COMPARED = 8  # signatures, those used last, with which a new one is compared
_A_FEW = 8  # new signatures in a row, none of them called again, that are worth a warning

_MOST_OBJECTS = 20_000  # that the watch walks: about a quarter of a second

_OF_A_CAPTURE = ("mode", "stream", "breaks", "break_on", "capture_error_mode", "generators", "barrier")

Function = Callable[..., Any]
Around = Callable[..., AbstractContextManager[Any]]
"""Takes the arguments of a call and the tensors that a replay copies, and gives what the call runs in."""


@attrs.frozen
class SignatureStats:
    """One signature that was called."""

    name: str
    """`#3`, as messages call it."""
    arguments: str
    """Its tensors and values, in words."""
    state: str
    """`warming up`, `captured`, or `eager: ...` with the reason."""
    calls: int
    nbytes: int
    """Bytes of its static inputs and outputs."""
    why: str
    """What differed from the nearest signature when it first came."""


@attrs.define(eq=False)
class CacheEntry:
    """What is kept for one signature: its warm-up, its capture, its replays."""

    name: str
    words: Words
    why: Callable[[], str]
    capture: BreakableCUDAGraphCapture
    watch: Watch
    calls: int = 0
    warmups: int = 0
    failure: BaseException | None = None
    """Why it runs eagerly from now on."""
    weights: Weights | None = None
    """As they were at capture."""
    objects: Sequence[Any] = ()
    """Weak references to the objects of the signature."""
    held: HeldTensors | None = None
    """What its graphs read besides; None where nobody looks."""
    _static: tuple[StaticInputs, CallOutputs] | None = None
    _moved: bool = False
    """Whether the call that was captured has moved state that nobody has observed."""

    @property
    def captured(self) -> bool:
        """Whether calls are replayed."""
        return self._static is not None

    def warm_up(
        self, fn: Function, request: Request, weights: Weights | None, observed: bool
    ) -> tuple[Any, Exception | None]:
        """Run the function eagerly where the capture will; also what would make the capture fail.

        `weights` are those of its modules, which it must leave as they are; None if it need not.
        """
        self.warmups += 1
        problem: Exception | None = None
        found: list[Exception] = []
        with self.capture.warm_up():
            if request.padded:
                around = self._observing(fn, request, found, observed)
                inputs, outputs = self._run(fn, request, weights, around, False)
                inputs.copy_back(request)
                out = outputs.collect(request)
            else:
                args, kwargs = request.arguments
                state = StateBefore(named(args, kwargs, request.names), request.tensors, weights)
                with self._observing(fn, request, found, observed)(args, kwargs, request.tensors):
                    out = fn(*args, **kwargs)
                try:
                    state.check(flatten(out), request.ambient.grad)
                except CaptureFailedError as error:
                    problem = error
        for tensor in tensors_in(out):
            _used_here(tensor)  # made on the capture stream
        return out, problem or next(iter(found), None)

    def _observing(self, fn: Function, request: Request, found: list[Exception], observed: bool) -> Around:
        """What a warm-up call runs in: the watch, which adds to `found` what it refuses."""

        @contextmanager
        def around(
            args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]
        ) -> Iterator[None]:
            if not observed:
                yield
                return
            arguments = dict(named(args, kwargs, request.names))
            reach = functools.partial(Search, fn, (), arguments, most=_MOST_OBJECTS)
            seen = Observation(reach, tensors, self.watch.suspects)
            with self.capture.observed(seen):
                yield
            try:
                self.watch.judge(seen, first=self.warmups == 1)
            except CaptureFailedError as error:
                found.append(error)

        return around

    def capture_call(self, fn: Function, request: Request, weights: Weights | None, clone: bool) -> Any:
        """Capture the function while it serves a call.

        If there was no warm-up and state has moved, the capture is dropped, and the next call warms up.

        Raises:
            CaptureFailedError: it changed what no replay changes again, or what it returned cannot be handed
                out; and all that a capture raises. It can be tried again.
        """
        self.capture.reset()
        try:
            inputs, outputs = self._run(fn, request, weights, self._capturing(fn, request), clone)
        except BaseException:
            self.capture.reset()
            raise
        inputs.copy_back(request)
        inputs.watched = self.capture.num_eager_breaks > 0
        self._static = inputs, outputs
        out = outputs.collect(request)
        if self._moved:
            self.warmups += 1
            self.release()
        elif weights is not None:
            # Arguments and what objects among them hold themselves are part of the signature.
            args, kwargs = with_tensors(request, inputs.tensors)
            others = [*weights.values, *request.tensors, *tensors_in(args, kwargs)]
            reach = Search(fn, (), dict(named(args, kwargs, request.names)), most=_MOST_OBJECTS)
            self.held = self.watch.hold(reach, others, self.capture)
        return out

    def _capturing(self, fn: Function, request: Request) -> Around:
        """What a call runs in that is captured: without a mode of ours, so that what it reads is not seen."""

        @contextmanager
        def around(
            args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]
        ) -> Iterator[None]:
            arguments = dict(named(args, kwargs, request.names))
            seen = Observation(lambda: Search(fn, (), arguments, most=_MOST_OBJECTS), tensors)
            with self.capture:
                yield
            self._moved = self.watch.has_moved(seen)

        return around

    def _run(
        self, fn: Function, request: Request, weights: Weights | None, around: Around, clone: bool
    ) -> tuple[StaticInputs, CallOutputs]:
        """Run the function on static inputs, in the context that `around` makes for the call."""
        inputs = StaticInputs(request)
        args, kwargs = with_tensors(request, inputs.tensors)
        state = StateBefore(named(args, kwargs, request.names), inputs.tensors, weights)
        with around(args, kwargs, inputs.tensors):
            out = fn(*args, **kwargs)
        state.check(flatten(out), request.ambient.grad)
        inputs.find_written(request)
        return inputs, CallOutputs(out, inputs, request, self.capture, clone or self._moved)

    def check_free(self, request: Request) -> None:
        """Raise CaptureFailedError if an argument is memory that a replay overwrites."""
        assert self._static is not None
        inputs, outputs = self._static
        inputs.check_places(request)
        outputs.check_free(request, inputs.written)

    def replay(self, request: Request) -> Any:
        """Serve a call by replaying."""
        assert self._static is not None
        inputs, outputs = self._static
        if inputs.on_host and self.capture.device.type != "cpu":  # the last replay may still read them
            torch.accelerator.current_stream(self.capture.device).synchronize()
        inputs.fill(request)
        held = self.held
        if held is not None:
            held.replaying = True
        try:
            self.capture.replay()
        except BaseException as error:
            try:
                inputs.copy_back(request)  # as far as it came
            except Exception as trouble:
                error.add_note(f"segcapture: and then, copying back: {trouble}")
            raise
        finally:
            if held is not None:
                held.replaying = False
        if inputs.watched and (new := inputs.find_newly_written()):
            outputs.check_free(request, new)
        inputs.copy_back(request)
        if not outputs.is_current():
            outputs = CallOutputs(outputs.out, inputs, request, self.capture, outputs.clone)
            self._static = inputs, outputs
        return outputs.collect(request)

    def static_arguments(self, request: Request) -> Arguments:
        """The call with the static inputs as its tensors."""
        assert self._static is not None
        return with_tensors(request, self._static[0].tensors)

    def release(self) -> None:
        """Free the capture, its inputs and outputs, after the work that uses them."""
        if self._static is not None:
            with self.capture.exclusive():
                for tensor in self._static[0].tensors:
                    _used_here(tensor)
                self._static = self.held = None
                self.capture.reset()

    def stats(self) -> SignatureStats:
        """For people."""
        state = "captured" if self.captured else f"warming up ({self.warmups})"
        if self.failure is not None:
            state = f"eager: {type(self.failure).__name__}: {self.failure}"
        nbytes = sum(part.nbytes for part in self._static or ())
        return SignatureStats(self.name, summary(self.words), state, self.calls, nbytes, self.why())


def _used_here(tensor: torch.Tensor) -> None:
    """Tell the allocator that the current stream uses a tensor."""
    if tensor.device.type != "cpu":
        tensor.record_stream(torch.accelerator.current_stream(tensor.device))


class Cache:
    """Entries by signature, the least recently used first, on one pool for each device."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self._name, self._options, self._limit = name, options, options["max_captures"]
        self._for_captures = {option: options[option] for option in _OF_A_CAPTURE}
        breaks = options["breaks"]
        self._missing, self._called = frozenset[str](), set[str]()
        if breaks is not None and not callable(breaks) and not isinstance(breaks, str):
            # A capture refuses names that it does not meet; here others may.
            self._missing = frozenset(breaks)
            self._for_captures["breaks"] = functools.partial(_is_one_of, self._missing, self._called)
        self._entries: OrderedDict[Hashable, CacheEntry] = OrderedDict()
        self._pools: dict[torch.device, Any] = {}
        self._names = (f"#{i}" for i in itertools.count(1))
        self._dead: list[Hashable] = []
        """Signatures with an object that has died."""
        self.latest: CacheEntry | None = None
        """The newest. Without it a new one is no reason to warn."""
        self._in_a_row = 0
        self._warned = False
        self.evictions = 0

    def __iter__(self) -> Iterator[CacheEntry]:
        return iter(self._entries.values())

    def is_done(self) -> bool:
        """Whether the signature that was called last is captured, or is never to be."""
        last = next(reversed(self._entries.values()), None)
        return last is None or last.captured or last.failure is not None

    def find(self, key: Hashable) -> CacheEntry | None:
        """The entry of a signature, which counts as used now."""
        self.drop_dead()
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def add(self, request: Request, words: Words) -> CacheEntry:
        """An entry for a signature that was not seen before; it says why no other one fits."""
        name = next(self._names)
        latest = list(self)[::-1]
        others = [e for e in latest if e.captured][:_COMPARED] or latest[:_COMPARED]
        why = functools.partial(explain, words, [(other.name, other.words) for other in others])
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("%s: signature %s, %s", self._name, name, why())
        capture = BreakableCUDAGraphCapture(
            **self._for_captures,
            pool=self._pools.get(request.device, self._options["pool"]),
            # Without a GPU the capture itself says that it is emulated.
            device=self._options["device"] or (request.device if torch.accelerator.is_available() else None),
            name=f"{self._name} {name}",
        )
        watch = Watch(self._name, self._options["warmup"], self._options["ignore_state"])
        entry = CacheEntry(name, words, why, capture, watch)
        self._entries[request.key] = entry
        died = functools.partial(_append, self._dead, request.key)
        entry.objects = [weak(value, died) for value in request.objects]
        self._warn_of_many(entry)
        while len(self._entries) > _SIGNATURES_PER_CAPTURE * self._limit:
            self._evict(next(iter(self._entries)))
        return entry

    def _warn_of_many(self, entry: CacheEntry) -> None:
        """Say once that each call brings a new signature, and what the two last ones differ in."""
        before, self.latest = self.latest, entry
        self._in_a_row = 1 if before is None or before.calls > 1 else self._in_a_row + 1
        if before is not None and self._in_a_row >= _A_FEW and not self._warned:
            self._warned = True
            what = "; ".join(difference(entry.words, before.words)[:3]) or entry.why()
            warn(
                f"{self._name} was called with {self._in_a_row} new signatures in a row, each once, and "
                f"captures them all. The newest differs from the one before in {what}. Pass a value that "
                f"changes as a tensor, and pad sizes that change, with `bucket=Bucket(...)`."
            )

    def ran(self, entry: CacheEntry, request: Request) -> None:
        """An entry has warmed up or captured: others share its pool, and there may be too many captures."""
        self._pools.setdefault(request.device, entry.capture.pool)
        if entry.captured and (missing := self._missing - self._called):
            self._missing = frozenset()  # said once
            text = "%s: breaks names %s, and no function of that name was called yet; called were: %s"
            logger.warning(text, self._name, sorted(missing), sorted(self._called) or "none")
        captured = [key for key, other in self._entries.items() if other.captured]
        for key in captured[: max(0, len(captured) - self._limit)]:
            self._evict(key)

    def drop(self, key: Hashable) -> None:
        """Free what is kept for a signature."""
        if (entry := self._entries.pop(key, None)) is not None:
            entry.release()

    def drop_dead(self) -> None:
        """Free what is kept for signatures with an object that has died: no call can have it again."""
        while self._dead:
            self.drop(self._dead.pop())

    def clear(self) -> None:
        """Free everything, the pools too."""
        self._dead += self._entries
        self.drop_dead()
        self._pools.clear()

    def pool_bytes(self) -> int:
        """Bytes of the memory of all captures."""
        owned = {s.data_ptr(): s.nbytes() for entry in self for s in entry.capture.storages()}
        return sum(owned.values())

    def _evict(self, key: Hashable) -> None:
        self.evictions += 1
        logger.debug("%s: %s is dropped, the least recently used", self._name, self._entries[key].name)
        self.drop(key)


def _is_one_of(names: frozenset[str], called: set[str], name: str) -> bool:
    called.add(name)
    return name in names


def _append(keys: list[Hashable], key: Hashable, dead: object) -> None:
    keys.append(key)
