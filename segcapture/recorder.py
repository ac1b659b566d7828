"""One running capture: its boundaries, and what happens when something fails."""

import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from types import CodeType
from typing import Any

import attrs
import torch

from segcapture.ambient import Ambient, capture_ambient
from segcapture.arguments import WAYS_AROUND_AUTOGRAD, Arguments, Call, has_live, resolve
from segcapture.backends.base import Backend
from segcapture.errors import CaptureFailedError, CaptureStateError
from segcapture.listener import Listener
from segcapture.operators.break_on import OperatorBreaks
from segcapture.operators.intercept import aside
from segcapture.outputs import bridge
from segcapture.segments import EagerSegment, GraphSegment, Segment
from segcapture.thread import location, raised_at, state, users_frame
from segcapture.trees import Place, flatten


@attrs.frozen
class Options:
    """What a capture was asked to do."""

    breaks: Collection[str] | Callable[[str], bool] | None
    operator_breaks: OperatorBreaks
    barrier: Callable[[], object] | None
    execute: bool
    full: bool

    def breaks_at(self, name: str) -> bool:
        """Whether a decorated function of this name breaks."""
        if self.full:
            return False
        if self.breaks is None:
            return True
        return self.breaks(name) if callable(self.breaks) else name in self.breaks

    def not_called(self, called: set[str]) -> list[str]:
        """The names in `breaks` of which no function was called."""
        if self.full or self.breaks is None or callable(self.breaks):
            return []
        return sorted(set(self.breaks) - called)

    def check_all_called(self, called: set[str]) -> None:
        """Raise CaptureFailedError if `breaks` names a function that was not called: it may be misspelt."""
        missing = self.not_called(called)
        if missing:
            raise CaptureFailedError(
                f"breaks names {', '.join(map(repr, missing))}, and no decorated function of that name was "
                f"called; called were: {', '.join(map(repr, sorted(called))) or 'none'}. What was meant has "
                f"been captured instead: correct the name, or pass a predicate for names that may be absent.",
                expected=missing,
                found=sorted(called),
            )


class Run:
    """A run of the user's code in which breaks are seen: they just run, and listeners are told.

    Args:
        owner: What `BreakableCUDAGraphCapture.current()` returns.
        options: Which functions and operators break.
        listeners: Who is told.
    """

    place = "an eager run that is observed"
    """Where the thread is, for messages."""

    def __init__(self, owner: Any, options: Options, listeners: Sequence[Listener] = ()) -> None:
        self.owner = owner
        self.inside_eager = False
        """Whether an eager function is running right now."""
        self.thread = threading.get_ident()
        self.full = options.full
        """Whether nothing breaks."""
        self.entered: CodeType | None = None
        """The user's code that entered it."""
        self._options = options
        self._listeners = listeners
        self._breaks = 0
        self._called: set[str] = set()
        self._stack = ExitStack()

    def enter(self) -> None:
        """Begin. Raise CaptureStateError if this thread is inside of a run already."""
        if state.run is not None:
            raise CaptureStateError(
                f"This thread is already capturing ({state.run.place}). Captures do not nest: leave the "
                f"outer `with` block first."
            )
        frame = users_frame()
        self.entered = None if frame is None else frame.f_code
        try:
            self._set_up()
        except BaseException as error:
            self.leave(error)
            raise

    def _set_up(self) -> None:
        self._stack.enter_context(capture_ambient())
        self._stack.callback(_forget_run)
        state.run, state.keep_alive = self, []
        for listener in self._listeners:
            self._stack.enter_context(listener.intercepting())
        self._stack.enter_context(self._options.operator_breaks.active(self))

    def leave(self, failure: BaseException | None = None) -> None:
        """End, after an exception or without."""
        self._stack.close()

    def breaks_at(self, name: str) -> bool:
        """Whether a decorated function of this name breaks here."""
        self._called.add(name)
        return not self.inside_eager and self._options.breaks_at(name)

    def split(self, name: str) -> None:
        """End the graph segment here and begin another, with nothing in between."""

    def record_break(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str,
        stub: Callable[..., Any] | None = None,
        *,
        below_autograd: bool = False,
    ) -> Any:
        """Call the function of a break, `stub` instead of it at capture.

        Inside of an eager function, and where nothing breaks, it is a plain call.
        """
        if self.inside_eager or self._options.full:
            args, kwargs = resolve(args, kwargs)
            return fn(*args, **kwargs)
        return self._break(Call(fn, args, kwargs), stub, name, below_autograd)

    def _break(self, call: Call, stub: Callable[..., Any] | None, name: str, below_autograd: bool) -> Any:
        live = has_live(call.args, call.kwargs)
        args, kwargs = resolve(call.args, call.kwargs)
        self.inside_eager = True
        try:
            for listener in self._listeners:
                listener.break_begins(self._breaks, name, location(), Call(call.fn, args, kwargs, live))
            out = call.fn(*args, **kwargs)
            for listener in self._listeners:
                listener.break_ends(self._breaks, flatten(out))
            self._breaks += 1
            return out
        finally:
            self.inside_eager = False


def _forget_run() -> None:
    # What died meanwhile may go now: no graph is being captured any more.
    state.run = state.keep_alive = None


class Recorder(Run):
    """Everything between `__enter__` and `__exit__` of one capture, in the thread that entered it."""

    def __init__(
        self, owner: Any, backend: Backend, options: Options, listeners: Sequence[Listener] = ()
    ) -> None:
        super().__init__(owner, options, listeners)
        self.segments: list[Segment] = []
        self.failure: BaseException | None = None
        """What a break raised. The `with` block may have caught it."""
        self._backend = backend
        self._ambient = Ambient.current(backend.device)
        self._opened = ("start", "?")
        self._doing = "the first segment"
        """The segment that is being captured, in words; empty when the last one has ended."""

    @property
    def place(self) -> str:  # type: ignore[override]
        """Where in the capture the thread is, for messages."""
        return f"segment {len(self.segments)}, opened at {self._opened[1]}"

    def _set_up(self) -> None:
        self._stack.enter_context(self._backend.open())
        super()._set_up()
        self._open_segment("start", location())

    def finish(self) -> None:
        """End the last segment, and compare with what was asked for."""
        self._close_segment()
        self._doing = ""
        self._options.operator_breaks.check_all_matched()
        self._options.check_all_called(self._called)
        for segment in self.segments:
            if isinstance(segment, EagerSegment):
                segment.writeback.seal()
        for listener in self._listeners:
            listener.finished(self.segments)

    def leave(self, failure: BaseException | None = None) -> None:
        """Leave the capture. Trouble on the way out becomes a note of `failure`, never replaces it."""
        trouble: list[str] = []
        if failure is not None:
            trouble = self._backend.abort()
            self.segments.clear()
            if self._doing:
                self._explain(failure)
        try:
            self._stack.close()
        except BaseException as at_close:
            if failure is None:
                raise
            trouble.append(f"{type(at_close).__name__}: {at_close}")
        if failure is not None:
            for text in trouble:
                failure.add_note(f"segcapture: while cleaning up: {text}")
            # Its traceback holds our frames, and so this object: no cycle that keeps the pool.
            self.failure = None

    def split(self, name: str) -> None:
        """End the graph segment here and begin another, with nothing in between."""
        if self.inside_eager or self._options.full:
            return
        place = location()
        self._refuse_after_failure()
        try:
            self._close_segment()
            self._open_segment(name or "break_graph", place)
        except BaseException as error:
            self._fail(error)
            raise

    def _break(self, call: Call, stub: Callable[..., Any] | None, name: str, below_autograd: bool) -> Any:
        """The boundary: end the graph segment, run the function, write back, begin the next one."""
        place = location()
        self._refuse_after_failure()
        try:
            self._close_segment()
            self._doing = f"eager segment {len(self.segments)} ({name}, {place})"
            if self._options.barrier is not None:
                self.inside_eager = True  # a barrier is a collective: `break_on` must not see it
                try:
                    self._options.barrier()
                finally:
                    self.inside_eager = False
            if stub is None and not self._options.execute:
                raise CaptureFailedError(
                    f"Eager segment {len(self.segments)} (`{name}`, {place}) has no capture_stub, and with "
                    f"execute=False it would run on memory that no segment has written. Give it one: "
                    f"`@eager_break_during_capture(capture_stub=...)`.",
                    segment=len(self.segments),
                )
            result = self._run_eager(call, stub or call.fn, name, place, below_autograd)
            self._open_segment(f"after {name}", place)
        except BaseException as error:
            self._fail(error)
            raise
        return result

    def _run_eager(
        self, call: Call, fn: Callable[..., Any], name: str, place: str, below_autograd: bool
    ) -> Any:
        backend, index = self._backend, len(self.segments)
        where = f"Eager segment {index} (`{name}`, {place})"
        if not self._ambient.is_current():
            self._ambient = Ambient.current(backend.device)
        ambient = self._ambient.below_autograd() if below_autograd else self._ambient
        with aside():
            arguments = Arguments(call, backend.argument, grad=ambient.grad)
        now = arguments.now
        for listener in self._listeners:
            listener.break_begins(index, name, place, now)
        casts = ambient.has_autocast()
        self.inside_eager = True
        try:
            if casts:
                torch.clear_autocast_cache()
            # The output is carried to its bridges inside too: on a side stream, if that is current.
            with backend.eager():
                # One expression: no variable may hold the output while its owners are counted.
                places = flatten(fn(*now.args, **now.kwargs))
                with aside():
                    backend.returned()
                    arguments.check_unchanged(index, where)
                    for listener in self._listeners:
                        listener.break_ends(index, places)
                    if ambient.grad:
                        _refuse_grad(places, index, where)
                    result, writeback = bridge(places, arguments.given, backend, index, where)
        finally:
            self.inside_eager = False
            if casts:  # a weight cast here would be read by later segments, and freed at autocast's exit
                torch.clear_autocast_cache()
        self.segments.append(
            EagerSegment(
                index=index,
                name=name,
                location=place,
                call=arguments.kept,
                writeback=writeback,
                ambient=ambient,
                forks=backend.forks,
                stream=backend.side_stream,
            )
        )
        return result

    def _open_segment(self, name: str, place: str) -> None:
        self._opened = (name, place)
        self._doing = f"graph segment {len(self.segments)} ({name}, {place})"
        self._backend.begin()
        for listener in self._listeners:
            listener.graph_begins(len(self.segments))

    def _close_segment(self) -> None:
        for listener in self._listeners:
            listener.graph_ending(len(self.segments))
        graph = self._backend.end()
        for listener in self._listeners:
            listener.graph_ends(len(self.segments), graph is None)
        if graph is not None:
            name, place = self._opened
            self.segments.append(
                GraphSegment(index=len(self.segments), name=name, location=place, graph=graph)
            )

    def _refuse_after_failure(self) -> None:
        if self.failure is not None:
            raise CaptureFailedError(
                f"The capture has failed already, with {type(self.failure).__name__}: leave the `with` block."
            )

    def _fail(self, error: BaseException) -> None:
        """What fails at a boundary is the failure of the capture."""
        self.failure = error
        self._note(error, f"raised in {self._doing} during capture")

    def _explain(self, failure: BaseException) -> None:
        """Say where a failure came from, and which names in `breaks` it may be due to."""
        if failure is not self.failure:
            self._note(failure, f"{self._doing} could not be captured")
        missing = self._options.not_called(self._called)
        if missing:
            failure.add_note(
                f"segcapture: breaks names {', '.join(map(repr, missing))}, and until then no decorated "
                f"function of that name was called; called were: "
                f"{', '.join(map(repr, sorted(self._called))) or 'none'}."
            )

    def _note(self, error: BaseException, what: str) -> None:
        came_from = raised_at(error.__traceback__)
        at = f", at {came_from}" if came_from else ""
        error.add_note(f"segcapture: {what}{at}. {self._backend.advice(error)}".rstrip())


def _refuse_grad(places: list[Place], index: int, where: str) -> None:
    for place in places:
        if isinstance(place.value, torch.Tensor) and place.value.requires_grad:
            raise CaptureFailedError(
                f"{where} returned a tensor that requires grad at `{place.path}`. An eager break is opaque "
                f"to autograd. {WAYS_AROUND_AUTOGRAD}",
                segment=index,
                path=place.path,
            )
