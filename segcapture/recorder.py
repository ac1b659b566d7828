"""A running capture: the boundaries between its segments, and what happens when something fails."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from segcapture.ambient import Ambient, capture_ambient
from segcapture.arguments import Call, check_views, resolve
from segcapture.backends.base import Backend
from segcapture.errors import CaptureFailedError
from segcapture.options import Options
from segcapture.segments import EagerSegment, GraphSegment, Segment
from segcapture.thread import location, raised_at, state
from segcapture.writeback.plan import plan
from segcapture.writeback.structure import walk

if TYPE_CHECKING:
    from segcapture.inspect.check import Checks
    from segcapture.inspect.guard import Guard


class _Calls(list[Call]):
    """The calls of the eager segments, asked for the references that the capture itself holds."""

    def __call__(self, tensor: torch.Tensor, /) -> int:
        return sum(call.references_to(tensor) for call in self)


class Recording:
    """Everything between `__enter__` and `__exit__` of one capture, in the thread that entered it."""

    def __init__(
        self, owner: Any, backend: Backend, options: Options, checks: "Checks | None" = None
    ) -> None:
        self.owner = owner
        """The capture, for `BreakableCUDAGraphCapture.current()`."""
        self.segments: list[Segment] = []
        self.failure: BaseException | None = None
        """What a break raised. The `with` block may have caught it."""
        self.inside_eager = False
        """Whether an eager function is running right now."""
        self.thread = threading.get_ident()
        self._calls = _Calls()
        self._called: set[str] = set()
        self._ambient = Ambient.current(backend.device)
        self._backend = backend
        self._options = options
        self._checks = checks
        self.guard: Guard | None = None
        """What replays must check, under `check=True`."""
        self._opened = ("start", "?")
        self._doing = "the first segment"
        """The segment that is being captured, in words; empty when the last one has ended."""
        self._stack = ExitStack()

    @property
    def place(self) -> str:
        """Where in the capture the thread is, for messages."""
        return f"segment {len(self.segments)}, opened at {self._opened[1]}"

    def enter(self) -> None:
        """Set everything up and begin the first segment."""
        try:
            self._stack.enter_context(capture_ambient())
            self._stack.enter_context(self._backend.open())
            self._stack.enter_context(self._current())
            if self._checks is not None:
                self._stack.enter_context(self._checks.active())
            self._stack.enter_context(self._options.operator_breaks.active(self))
            self._open_segment("start", location())
        except BaseException as error:
            self.leave(error)
            raise

    @contextmanager
    def _current(self) -> Iterator[None]:
        state.recording, state.keep_alive = self, []
        try:
            yield
        finally:
            # What died meanwhile may go now: no graph is being captured any more.
            state.recording = state.keep_alive = None

    def finish(self) -> None:
        """End the last segment, and compare with what was asked for."""
        self._close_segment()
        self._doing = ""
        self._options.operator_breaks.check_all_matched()
        self._options.check_all_called(self._called)
        if self._checks is not None:
            self.guard = self._checks.finish(self.segments)

    def leave(self, failure: BaseException | None) -> None:
        """Leave the capture. Trouble on the way out becomes a note of `failure`, never replaces it."""
        trouble: list[str] = []
        if failure is not None:
            trouble = self._backend.abort()
            self.segments.clear()
        try:
            self._stack.close()
        except BaseException as at_close:
            if failure is None:
                raise
            trouble.append(f"{type(at_close).__name__}: {at_close}")
        if failure is not None:
            if failure is not self.failure and self._doing:
                self._note(failure, f"{self._doing} could not be captured")
            for text in trouble:
                failure.add_note(f"segcapture: while cleaning up: {text}")
            # Its traceback holds our frames, and so this object: no cycle that keeps the pool.
            self.failure = None
            self._calls.clear()

    def _open_segment(self, name: str, place: str) -> None:
        self._opened = (name, place)
        self._doing = f"graph segment {len(self.segments)} (opened by {name} at {place})"
        self._backend.begin()
        if self._checks is not None:
            self._checks.begin(len(self.segments))

    def _close_segment(self) -> None:
        if self._checks is not None:
            self._checks.enter("capture")
        graph = self._backend.end()
        if self._checks is not None:
            self._checks.end(len(self.segments), graph is not None)
        if graph is not None:
            name, place = self._opened
            self.segments.append(
                GraphSegment(index=len(self.segments), name=name, location=place, graph=graph)
            )

    def breaks_at(self, name: str) -> bool:
        """Whether a decorated function of this name breaks here."""
        self._called.add(name)
        return not self.inside_eager and self._options.breaks_at(name)

    def split(self, name: str) -> None:
        """End the graph segment here and begin another, with nothing in between."""
        if self.inside_eager or self._options.full:
            return
        place = location()
        with self._boundary():
            self._open_segment(name or "break_graph", place)

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
        """The boundary: end the graph segment, run the function, write back, begin the next one."""
        if self.inside_eager or self._options.full:
            args, kwargs = resolve(args, kwargs)
            return fn(*args, **kwargs)
        place = location()
        with self._boundary():
            self._doing = f"eager segment {len(self.segments)} ({name}, {place})"
            if self._options.barrier is not None:
                with self._eagerly():  # a barrier is a collective: `break_on` must not see it
                    self._options.barrier()
            result = self._run_eager(fn, args, kwargs, name, stub, place, below_autograd)
            self._open_segment(name, place)
        return result

    @contextmanager
    def _boundary(self) -> Iterator[None]:
        """After the end of a graph segment. What fails at a boundary is the failure of the capture."""
        if self.failure is not None:
            raise CaptureFailedError(
                f"The capture has failed already, with {type(self.failure).__name__}: leave the `with` block."
            )
        try:
            self._close_segment()
            yield
        except BaseException as error:
            self.failure = error
            self._note(error, f"raised in {self._doing} during capture")
            raise

    @contextmanager
    def _eagerly(self) -> Iterator[None]:
        """For the block, nothing breaks."""
        self.inside_eager = True
        try:
            yield
        finally:
            self.inside_eager = False

    def _run_eager(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str,
        stub: Callable[..., Any] | None,
        place: str,
        below_autograd: bool,
    ) -> Any:
        index = len(self.segments)
        where = f"Eager segment {index} (`{name}`, {place})"
        if stub is None and not self._options.execute:
            raise CaptureFailedError(
                f"{where} has no capture_stub, and with execute=False it would run on memory that no "
                f"segment has written. Give it one: `@eager_break_during_capture(capture_stub=...)`."
            )
        backend = self._backend
        if not self._ambient.is_current():
            self._ambient = Ambient.current(backend.device)
        ambient = self._ambient.below_autograd() if below_autograd else self._ambient
        now_args, now_kwargs = resolve(args, kwargs)
        given = [node for value in (*now_args, *now_kwargs.values()) for node in walk(value)]
        given = [node for node in given if isinstance(node.value, torch.Tensor)]  # holds no containers
        arguments = [node.value for node in given]
        check_grad = ambient.grad and not below_autograd
        if check_grad:
            # An object, an optimizer say, is passed as itself.
            _refuse_grad((node.value for node in given if not node.in_object), f"{where} has an argument")
        kept: dict[int, torch.Tensor] = {}
        call = Call.record(fn, args, kwargs, backend.argument, kept)
        self._calls.append(call)
        if self._checks is not None:
            self._checks.given(where, arguments)
            self._checks.enter("eager", index, name)
        # The output is carried to its bridges inside too: on a side stream, if that is current.
        with self._eagerly(), backend.eager():
            # One expression: no variable may hold the output while its owners are counted.
            nodes = walk((stub or fn)(*now_args, **now_kwargs))
            backend.returned()
            check_views(where, arguments, kept)
            if self._checks is not None:
                self._checks.returned(nodes)
            if check_grad:
                _refuse_grad((node.value for node in nodes), f"{where} returned a tensor")
            result, writeback = plan(nodes, arguments, backend, where, self._calls)
            del nodes
        self.segments.append(
            EagerSegment(
                index=index,
                name=name,
                location=place,
                call=call,
                writeback=writeback,
                ambient=ambient,
                forks=backend.forks,
                stream=backend.side_stream,
            )
        )
        return result

    def _note(self, error: BaseException, what: str) -> None:
        came_from = raised_at(error.__traceback__)
        at = f", at {came_from}" if came_from else ""
        error.add_note(f"segcapture: {what}{at}. {self._backend.advice(error)}".rstrip())


def _refuse_grad(values: Iterable[Any], what: str) -> None:
    if any(isinstance(value, torch.Tensor) and value.requires_grad for value in values):
        raise CaptureFailedError(
            f"{what} that requires grad. An eager break is opaque to autograd. Capture under "
            f"`torch.no_grad()` or `torch.inference_mode()`; or, to train through it, call the function in "
            f"the `forward` and `backward` of a `torch.autograd.Function`."
        )
