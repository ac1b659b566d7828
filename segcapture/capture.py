"""`BreakableCUDAGraphCapture`: the states of a capture, the boundaries between its segments, replay."""

import enum
import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch

from segcapture.ambient import Ambient, capture_ambient
from segcapture.arguments import Call, resolve
from segcapture.backends import make_backend
from segcapture.backends.base import Replayer
from segcapture.errors import CaptureFailedError, CaptureStateError
from segcapture.inspection import table
from segcapture.operators import OperatorBreaks
from segcapture.segments import EagerSegment, GraphSegment, Segment
from segcapture.source import location, raised_at
from segcapture.state import state
from segcapture.structure import tensors_in, walk
from segcapture.writeback import plan

MODES = ("breakable", "full", "debug")

_GRAD_ADVICE = (
    "An eager break is opaque to autograd. Capture under `torch.no_grad()` or "
    "`torch.inference_mode()`; or, to train through it, call the function in the `forward` and "
    "`backward` of a `torch.autograd.Function`."
)


class _Status(enum.Enum):
    """NEW -> CAPTURING -> READY or FAILED; `reset()` leads back to NEW from all but CAPTURING."""

    NEW = "has captured nothing yet"
    CAPTURING = "is still capturing"
    READY = "is complete"
    FAILED = "failed"


class _Calls(list[Call]):
    """The calls of the eager segments, asked for the references that the capture itself holds."""

    def __call__(self, tensor: torch.Tensor, /) -> int:
        return sum(call.references_to(tensor) for call in self)


class BreakableCUDAGraphCapture:
    """Capture the operations of a `with` block as segments, and replay them.

    The block runs as usual: each graph segment is launched once as soon as it is closed, and eager
    breaks run on real values, so that all outputs are valid after it. Warm up the same code before.

    Args:
        pool: Memory to share with other captures: `other.pool`, a `torch.cuda.MemPool`, or a
            `torch.cuda.graph_pool_handle()`. Left out: a pool of its own.
        stream: `torch.cuda.Stream` to capture on. Left out: a private one.
        mode: `"breakable"`; `"full"` (breaks are ignored and captured: one graph); `"debug"` (no CUDA
            graph: each operator is recorded and re-run eagerly). Left out: `SEGCAPTURE_MODE`, or
            `"breakable"`.
        breaks: Which decorated functions break: names, or a predicate on the name. Left out: all.
        break_on: Operators that become eager segments though nobody decorated them: `torch.ops`
            packets and overloads, names (`"ns::op"`, `"ns.op.overload"`), or globs.
        execute: False launches nothing during capture; each break then needs a `capture_stub`.
        capture_error_mode: `"thread_local"`, `"global"` or `"relaxed"`, as `torch.cuda.graph` takes it.
        generators: `torch.Generator`s, besides the default one, that graph segments draw from.
        barrier: Called at capture between the end of a graph segment and the eager call, so that the
            ranks of a distributed program stay together.
        device: Where. Left out: the current CUDA device, or the CPU where there is none.
        name: For messages and tables.

    Raises:
        ValueError: an unknown mode or error mode; a stream or pool of another device; `execute=False`
            where segments are emulated.
        CaptureStateError: (`with`) this thread is capturing already, or this object has captured.
    """

    def __init__(
        self,
        *,
        pool: Any = None,
        stream: "torch.cuda.Stream | None" = None,
        mode: str | None = None,
        breaks: Collection[str] | Callable[[str], bool] | None = None,
        break_on: Sequence[Any] = (),
        execute: bool = True,
        capture_error_mode: str = "thread_local",
        generators: Sequence[torch.Generator] = (),
        barrier: Callable[[], object] | None = None,
        device: torch.device | str | int | None = None,
        name: str = "",
    ) -> None:
        self.mode = _checked_mode(mode)
        self.name = name
        if isinstance(breaks, str):
            raise ValueError(f"breaks takes a collection of names or a predicate, got the string {breaks!r}")
        self._breaks = breaks
        self._barrier = barrier
        self._execute = execute
        self._operator_breaks = OperatorBreaks(break_on) if self.mode != "full" else OperatorBreaks(())
        self._backend = make_backend(
            device,
            debug=self.mode == "debug",
            pool=pool,
            stream=stream,
            execute=execute,
            capture_error_mode=capture_error_mode,
            generators=tuple(generators),
        )
        self._status = _Status.NEW
        self._clear()

    def _clear(self) -> None:
        self._segments: list[Segment] = []
        self._calls = _Calls()
        self._replayer: Replayer | None = None
        self._failure: BaseException | None = None
        self._inside_eager = False
        self._thread = 0
        self._opened = ("start", "?")
        self._base: Ambient | None = None

    @classmethod
    def current(cls) -> "BreakableCUDAGraphCapture | None":
        """The capture that the calling thread is inside of, or None."""
        return state.capture

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments in the order of replay."""
        return tuple(self._segments)

    @property
    def num_graphs(self) -> int:
        """Number of graph segments."""
        return sum(isinstance(segment, GraphSegment) for segment in self._segments)

    @property
    def num_eager_breaks(self) -> int:
        """Number of eager segments."""
        return len(self._segments) - self.num_graphs

    @property
    def pool(self) -> Any:
        """The memory pool, to pass on as `pool=`; None where segments are emulated."""
        return self._backend.pool

    @property
    def device(self) -> torch.device:
        """The device that is captured on."""
        return self._backend.device

    def describe(self) -> str:
        """The segment table as text."""
        return table(self)

    __str__ = describe

    # Capture

    def __enter__(self) -> "BreakableCUDAGraphCapture":
        if state.capture is not None:
            raise CaptureStateError(
                f"This thread is already capturing ({state.capture._where()}). Captures do not nest: leave "
                f"the outer `with` block first."
            )
        if self._status is not _Status.NEW:
            raise CaptureStateError(f"{self._title()} {self._status.value}: call reset() to capture again.")
        self._clear()
        self._status = _Status.CAPTURING
        self._thread = threading.get_ident()
        self._stack = ExitStack()
        try:
            self._stack.enter_context(capture_ambient())
            self._stack.enter_context(self._backend.open())
            self._base = Ambient.current(self._backend.device)
            state.capture, state.keep_alive = self, []
            self._stack.enter_context(self._operator_breaks.active(self))
            self._open_segment("start", location())
        except BaseException as error:
            self._end(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread != threading.get_ident():
            raise CaptureStateError(
                f"{self._title()} was entered in another thread, and CUDA ties a capture to its thread: "
                f"leave the `with` block in the thread that entered it."
            )
        failure = error
        if failure is None and self._failure is not None:
            failure = CaptureFailedError(
                f"{self._title()} failed at {type(self._failure).__name__}, which the code in the `with` "
                f"block caught. What it would have captured after that is not known: let the exception "
                f"through, or catch it inside of the eager function."
            )
            failure.__cause__ = self._failure
        if failure is None:
            try:
                self._close_segment()
                self._operator_breaks.check_all_matched()
            except BaseException as at_end:
                failure = at_end
        self._end(failure)
        if failure is not None and failure is not error:
            raise failure

    def _end(self, failure: BaseException | None) -> None:
        """Leave the capture. Trouble on the way out becomes a note of `failure`, never replaces it."""
        trouble: list[str] = []
        if failure is not None:
            if failure is not self._failure:
                self._note(failure)
            trouble += self._backend.abort()
        dropped = state.keep_alive if state.capture is self else None
        if state.capture is self:
            state.capture, state.keep_alive = None, None
        try:
            self._stack.close()
        except BaseException as at_close:
            if failure is None:
                failure = at_close
                self._status = _Status.FAILED
                raise
            trouble.append(f"{type(at_close).__name__}: {at_close}")
        finally:
            del dropped
            if failure is not None:
                self._clear()
                self._status = _Status.FAILED
        if failure is not None:
            for text in trouble:
                failure.add_note(f"segcapture: while cleaning up: {text}")
            return
        self._replayer = self._backend.replayer(self._segments)
        self._status = _Status.READY

    def _note(self, failure: BaseException) -> None:
        name, place = self._opened
        came_from = raised_at(failure.__traceback__)
        at = f" at {came_from}" if came_from else ""
        failure.add_note(
            f"segcapture: graph segment {len(self._segments)} (opened by {name} at {place}) could not be "
            f"captured{at}. {self._backend.advice(failure)}"
        )

    def _open_segment(self, name: str, place: str) -> None:
        self._opened = (name, place)
        self._backend.begin()

    def _close_segment(self) -> None:
        graph = self._backend.end()
        if graph is not None:
            name, place = self._opened
            self._segments.append(
                GraphSegment(index=len(self._segments), name=name, location=place, graph=graph)
            )

    def add_eager(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run `fn(*args, **kwargs)` now as an eager segment, and again at each replay.

        Inside another eager segment and in `mode="full"` it is a plain call.

        Returns:
            The output of `fn`, in which fresh tensors are bridges that replay writes to.

        Raises:
            TypeError: `fn` is not callable.
            CaptureStateError: this thread is not inside of this capture.
            CaptureFailedError: an argument or output requires grad with grad enabled, an output cannot
                be bridged, or `execute=False`.
        """
        if not callable(fn):
            raise TypeError(f"add_eager takes a function, got {fn!r}")
        self._check_inside("add_eager")
        name = getattr(fn, "__name__", type(fn).__name__)
        return self.record_break(fn, args, kwargs, name)

    def breaks_at(self, name: str) -> bool:
        """Whether a decorated function of this name breaks this capture here."""
        if self._inside_eager or self.mode == "full":
            return False
        breaks = self._breaks
        if breaks is None:
            return True
        return breaks(name) if callable(breaks) else name in breaks

    @property
    def inside_eager(self) -> bool:
        """Whether an eager function is running right now, at capture."""
        return self._inside_eager

    def split(self, name: str) -> None:
        """End the graph segment here and begin another, with nothing in between."""
        if self._inside_eager or self.mode == "full":
            return
        self._check_inside("break_graph")
        try:
            self._close_segment()
            self._open_segment(name or "break_graph", location())
        except BaseException as error:
            self._fail_here(error, f"graph segment {len(self._segments)}")
            raise

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
        if self._inside_eager or self.mode == "full":
            args, kwargs = resolve(args, kwargs)
            return fn(*args, **kwargs)
        if self._failure is not None:
            raise CaptureFailedError(f"{self._title()} has failed already: leave the `with` block.")
        place = location()
        doing = f"graph segment {len(self._segments)} (opened by {self._opened[0]} at {self._opened[1]})"
        try:
            self._close_segment()
            doing = f"eager segment {len(self._segments)} ({name}, {place})"
            if self._barrier is not None:
                self._barrier()
            result = self._run_eager(fn, args, kwargs, name, stub, place, below_autograd)
            doing = f"graph segment {len(self._segments)}"
            self._open_segment(name, place)
        except BaseException as error:
            self._fail_here(error, doing)
            raise
        return result

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
        index = len(self._segments)
        where = f"Eager segment {index} (`{name}`, {place})"
        if stub is None and not self._execute:
            raise CaptureFailedError(
                f"{where} has no capture_stub, and with execute=False it would run on memory that no "
                f"segment has written. Give it one: `@eager_break_during_capture(capture_stub=...)`."
            )
        backend = self._backend
        ambient = Ambient.current(backend.device)
        if below_autograd:
            ambient = ambient.below_autograd()
        now_args, now_kwargs = resolve(args, kwargs)
        arguments = list(tensors_in(*now_args, *now_kwargs.values()))
        check_grad = ambient.grad and not below_autograd
        if check_grad and any(t.requires_grad for t in arguments):
            raise CaptureFailedError(f"{where} has an argument that requires grad. {_GRAD_ADVICE}")
        with backend.eager():
            call = Call.record(fn, args, kwargs, backend.alias)
            self._inside_eager = True
            try:
                # One expression: no variable may hold the output while its owners are counted.
                nodes = walk((stub or fn)(*now_args, **now_kwargs))
            finally:
                self._inside_eager = False
            if check_grad and any(
                isinstance(node.value, torch.Tensor) and node.value.requires_grad for node in nodes
            ):
                raise CaptureFailedError(f"{where} returned a tensor that requires grad. {_GRAD_ADVICE}")
            self._calls.append(call)
            result, writeback = plan(nodes, arguments, backend, where, self._calls)
            del nodes
        self._segments.append(
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

    def _fail_here(self, error: BaseException, doing: str) -> None:
        self._failure = error
        came_from = raised_at(error.__traceback__)
        error.add_note(
            f"segcapture: raised in {doing} during capture{f', at {came_from}' if came_from else ''}. "
            f"{self._backend.advice(error)}".rstrip()
        )

    def _check_inside(self, what: str) -> None:
        if state.capture is not self:
            raise CaptureStateError(
                f"{what} needs a running capture: {self._title()} {self._status.value}, or another thread "
                f"is inside of it. Call it inside of the `with` block."
            )

    # Replay

    def replay(self) -> None:
        """Run all segments in order on the current stream.

        Costs per graph segment about what `cuGraphLaunch` costs. The caller has copied new inputs into
        the static inputs; outputs are the tensors that the `with` block made.

        Raises:
            CaptureStateError: nothing is captured, the capture failed, or this thread is recording a
                graph segment.
            OutputMismatchError: an eager function returned another structure, shape, dtype, device or
                sharing of memory than at capture. Any exception of an eager function comes through with
                a note that names the segment; the capture can be replayed again.
        """
        if self._replayer is None:
            raise self._cannot_replay()
        if state.capture is not None and not state.capture._inside_eager:
            raise CaptureStateError(
                "replay() inside of a graph segment would be captured in part and run in part: call it in "
                "a function marked `@eager_break_during_capture`."
            )
        self._replayer()

    def steps(self) -> Iterator[Segment]:
        """Replay one segment at a time, synchronised: at each `yield` memory shows the state after it.

        Raises:
            CaptureStateError: as `replay`.
        """
        if self._replayer is None or self._base is None:
            raise self._cannot_replay()
        return self._steps(self._base)

    def _steps(self, base: Ambient) -> Iterator[Segment]:
        for segment in self.segments:
            ambient = segment.ambient if isinstance(segment, EagerSegment) else base
            with ambient.entered():
                self._backend.run(segment)
            yield segment

    def reset(self) -> None:
        """Free all segments together. The pool stays, and the object can capture again.

        Raises:
            CaptureStateError: it is capturing.
        """
        if self._status is _Status.CAPTURING:
            raise CaptureStateError(f"{self._title()} is capturing: leave the `with` block before reset().")
        self._clear()
        self._status = _Status.NEW

    def _cannot_replay(self) -> CaptureStateError:
        hint = {
            _Status.NEW: "Capture first: `with BreakableCUDAGraphCapture() as g: ...`.",
            _Status.CAPTURING: "Leave the `with` block first.",
            _Status.FAILED: "Call reset() and capture again, or make a new one.",
            _Status.READY: "",
        }[self._status]
        return CaptureStateError(
            f"{self._title()} {self._status.value}, so there is nothing to replay. {hint}"
        )

    def _title(self) -> str:
        return f"Capture {self.name!r}" if self.name else "This capture"

    def _where(self) -> str:
        return f"segment {len(self._segments)}, opened at {self._opened[1]}"


def _checked_mode(mode: str | None) -> str:
    source = "mode"
    if mode is None:
        source, mode = "SEGCAPTURE_MODE", os.environ.get("SEGCAPTURE_MODE") or MODES[0]
    if mode not in MODES:
        raise ValueError(f"{source}={mode!r} is unknown: choose one of {', '.join(map(repr, MODES))}")
    return mode
