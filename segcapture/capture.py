"""`BreakableCUDAGraphCapture`: the object that users hold, its states, and replay."""

import enum
import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from segcapture.ambient import Ambient
from segcapture.arguments import Call
from segcapture.backends import make_backend
from segcapture.errors import CaptureFailedError, CaptureStateError
from segcapture.listener import Listener
from segcapture.operators.break_on import OperatorBreaks
from segcapture.recorder import Options, Recorder, Run
from segcapture.replay import OperatorStep, Watch
from segcapture.segments import EagerSegment, GraphSegment, Segment
from segcapture.thread import state

if TYPE_CHECKING:
    from segcapture.inspect.check import Checks
    from segcapture.inspect.memory import MemoryReport
    from segcapture.inspect.profile import ProfileReport
    from segcapture.inspect.verify import VerifyReport

MODES = ("breakable", "full", "debug")


class _Status(enum.Enum):
    """NEW -> CAPTURING -> READY or FAILED, READY -> INVALID; `reset()` leads to NEW, save from CAPTURING."""

    NEW = "has captured nothing yet"
    CAPTURING = "is still capturing"
    READY = "is complete"
    FAILED = "failed"
    INVALID = "was invalidated"


class BreakableCUDAGraphCapture:
    """Capture the operations of a `with` block as segments, and replay them.

    The block runs as usual: each graph segment is launched once as soon as it is closed, and eager
    breaks run on real values, so that all outputs are valid after it. Warm up the same code before.

    The contract, by the numbers that sources and tests use:

    C1. Capture is a real run. State (a cache, a counter, a random generator) advances, so capture and one
        replay are two steps. With `torch.cuda.graph` they are one.
    C2. A marked function is a plain call outside of a capture, inside of another break and in `mode="full"`.
        Under `torch.compile` it is a graph break.
    C3. Arguments of breaks are kept for replay. See `eager_break_during_capture`.
    C4. Outputs of breaks are written back, or it is an error. See there too.
    C5. All segments share one pool, with other captures too if they pass `pool=other.pool`. It lives as long
        as one of its captures, the `pool` object, or a tensor in it. A replay overwrites outputs of other
        captures in the same pool.
    C6. Replay runs on the current stream. Replays that share a pool or a capture stream take turns, on all
        streams and threads: a thread waits until the replay of another one has returned. Two pools never
        wait for each other, without `stream=`. Inside of a break nothing may capture or replay in the pool
        of that break. Side streams are joined before a break and forked again after it.
    C7. Breaks run under the grad mode, inference mode, autocast state and device of the capture. The autocast
        cache is cleared around them.
    C8. Random numbers are drawn as eager code draws them; `generators` registers more generators.
    C9. After a failure the exception of your code comes first, with a note that names the segment, and the
        process is as before. A replay that failed in a break can be replayed again.
    C10. Neither the garbage collector nor a capture that is dropped makes a running capture invalid.
    C11. There are no empty segments.
    C12. A training step with backward and optimizer is captured as with `torch.cuda.graph`. Breaks may stand
         between its parts, and in `forward` and `backward` of a `torch.autograd.Function`.

    Limits:

    * Python between the breaks runs at capture alone. What the first call of a model makes (lazy parameters,
      caches) would be made at each replay: warm up first.
    * A container that the block makes or a break returns, and that a later break changes, goes on from its
      last state at each replay; eager code would have a new one.
    * Memory: a graph that reads pinned memory keeps its address, so keep that memory. Freeing pinned memory
      inside of a capture disturbs torch 2.11's allocator. What torch does not own (`from_numpy`, DLPack) must
      live as long as the capture.
    * A random generator must not be seeded in a graph segment, nor the default dtype differ at replay.
    * Streams that are not torch's own are joined; they are forked again only if one was current at a break.
    * Threads: two threads must not replay at once what shares a static input on purpose. Before torch 2.12
      captures of one device take turns, and no other thread may draw from the default CUDA generator
      meanwhile. Two threads whose breaks replay each other's captures would wait forever: one gets a
      CaptureStateError.
    * A `graph_pool_handle()` whose last graph has died works again only when its tensors have died too, and,
      with torch 2.11, if no pinned memory was allocated in it. Share `capture.pool` instead.
    * torch frees the cuBLAS workspaces of all streams when `torch.compile(mode="reduce-overhead")` records.
      Private capture streams are safe; a `stream=` on which cuBLAS had worked before is not.
    * Emulated segments know nothing of streams, of memory that is used again and of kernels past torch's
      dispatcher. `.to("cpu")` and `torch.tensor(..., device=...)` pass on the CPU, and CUDA refuses them.
      Compiled code runs there as plain Python; a backward that Inductor compiled before is refused. A gloo
      process group whose collectives were emulated is kept by torch, and may abort the process at its exit.
    * ROCm (never run): captures are made in the error mode `relaxed`, empty segments are kept, and a failed
      capture leaves the memory of its segments in the pool.

    Args:
        pool: Memory to share with other captures: `other.pool`, a `torch.cuda.MemPool`, or a
            `torch.cuda.graph_pool_handle()`. Left out: a pool of its own.
        stream: `torch.cuda.Stream` to capture on. Left out: a private one.
        mode: `"breakable"`; `"full"` (breaks are ignored and captured: one graph); `"debug"` (no CUDA
            graph: each operator is recorded and re-run eagerly). Left out: `SEGCAPTURE_MODE`, or
            `"breakable"`.
        breaks: Which decorated functions break: names, each of a function that is called, or a predicate
            on the name. Left out: all.
        break_on: Operators that become eager segments though nobody decorated them: `torch.ops`
            packets and overloads, names (`"ns::op"`, `"ns.op.overload"`), or globs.
        execute: False launches nothing during capture; each break then needs a `capture_stub`.
        capture_error_mode: `"thread_local"`, `"global"` or `"relaxed"`, as `torch.cuda.graph` takes it.
        generators: `torch.Generator`s, besides the default one, that graph segments draw from.
        barrier: Called at capture between the end of a graph segment and the eager call, so that the
            ranks of a distributed program stay together.
        device: Where. Left out: the current CUDA device, or the CPU where there is none.
        name: For messages and tables.
        check: Watch each operator at capture, and at replay whether what graph segments read is still
            there, to name faults that are silent otherwise. torch.compile does not compile meanwhile.

    Raises:
        ValueError: an unknown mode or error mode; a stream or pool of another device; `execute=False`
            where segments are emulated.
        CaptureStateError: (`with`) this thread or the current stream is capturing already, this object has
            captured, or (CUDA) it is entered in an eager function of its own pool.
        CaptureFailedError: (`with`) a name in `breaks` or an entry of `break_on` matched nothing. Whatever
            else fails while capturing comes through as it is, with a note that names the segment.
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
        check: bool = False,
    ) -> None:
        self.mode = _checked_mode(mode)
        self.name = name
        if isinstance(breaks, str):
            raise ValueError(f"breaks takes a collection of names or a predicate, got the string {breaks!r}")
        if breaks is not None and not callable(breaks):
            breaks = frozenset(breaks)
        full = self.mode == "full"
        self._options = Options(breaks, OperatorBreaks(() if full else break_on), barrier, execute, full)
        self._check = check
        self._backend = make_backend(
            device,
            debug=self.mode == "debug",
            pool=pool,
            stream=stream,
            execute=execute,
            capture_error_mode=capture_error_mode,
            generators=tuple(generators),
        )
        self._recorder: Recorder | None = None
        self._reason = ""
        self._clear()

    def _clear(self) -> None:
        self._status = _Status.NEW
        self._segments: tuple[Segment, ...] = ()
        self._replayer: Callable[[], None] | None = None
        self._watch: Watch | None = None

    @classmethod
    def current(cls) -> "BreakableCUDAGraphCapture | None":
        """The capture that the calling thread is inside of, or None."""
        if state.run is None:
            return None
        owner: BreakableCUDAGraphCapture = state.run.owner
        return owner

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments in the order of replay."""
        return tuple(self._recorder.segments) if self._recorder is not None else self._segments

    @property
    def num_graphs(self) -> int:
        """Number of graph segments."""
        return sum(isinstance(segment, GraphSegment) for segment in self.segments)

    @property
    def num_eager_breaks(self) -> int:
        """Number of eager segments."""
        return len(self.segments) - self.num_graphs

    @property
    def pool(self) -> Any:
        """The memory pool, to pass on as `pool=`; None where segments are emulated."""
        return self._backend.pool

    @property
    def device(self) -> torch.device:
        """The device that is captured on."""
        return self._backend.device

    # Capture

    def __enter__(self) -> "BreakableCUDAGraphCapture":
        if self._status is not _Status.NEW and state.run is None:
            raise CaptureStateError(f"{self._title()} {self._status.value}: call reset() to capture again.")
        self._ambient = Ambient.current(self.device)
        self._checks = self._new_checks() if self._check else None
        recorder = Recorder(self, self._backend, self._options, [self._checks] if self._checks else [])
        recorder.enter()
        self._recorder, self._status = recorder, _Status.CAPTURING
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        recorder = self._recorder
        if recorder is None or recorder.thread != threading.get_ident():
            raise CaptureStateError(
                f"{self._title()} was entered in another thread, or not at all, and CUDA ties a capture to "
                f"its thread: leave the `with` block in the thread that entered it."
            )
        failure = error
        if failure is None and recorder.failure is not None:
            failure = self._swallowed(recorder.failure)
        if failure is None:
            try:
                recorder.finish()
            except BaseException as at_end:
                failure = at_end
        self._recorder = None
        self._status = _Status.FAILED
        recorder.leave(failure)
        if failure is None:
            self._segments = tuple(recorder.segments)
            self._watch = None if self._checks is None else self._checks.guard
            self._replayer = self._backend.replayer(self._segments, self._watch)
            self._status = _Status.READY
        elif failure is not error:
            try:
                raise failure
            finally:
                del failure, error  # this frame is in its traceback: no cycle

    def _new_checks(self) -> "Checks":
        from segcapture.inspect.check import Checks

        return Checks(self._backend)

    def _swallowed(self, caught: BaseException) -> CaptureFailedError:
        failure = CaptureFailedError(
            f"{self._title()} failed at {type(caught).__name__}, which the code in the `with` block caught. "
            f"What it would have captured after that is not known: let the exception through, or catch it "
            f"inside of the eager function."
        )
        failure.__cause__ = caught
        return failure

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
        run = state.run
        if run is None or run.owner is not self:
            raise CaptureStateError(
                f"add_eager needs a running capture: {self._title()} {self._status.value}, or another thread "
                f"is inside of it. Call it inside of the `with` block."
            )
        return run.record_break(fn, args, kwargs, getattr(fn, "__name__", type(fn).__name__))

    # Replay

    def replay(self) -> None:
        """Run all segments in order on the current stream.

        Costs per graph segment about what `cuGraphLaunch` costs. The caller has copied new inputs into
        the static inputs; outputs are the tensors that the `with` block made.

        Raises:
            CaptureStateError: nothing is captured, the capture failed, this thread is recording a graph
                segment, or (CUDA) the current stream is being captured, or this is an eager function of the
                same pool.
            OutputMismatchError: an eager function returned another structure, shape, dtype, device or
                sharing of memory than at capture. Any exception of an eager function comes through with
                a note that names the segment; the capture can be replayed again.
        """
        if self._replayer is None:
            raise self._cannot_replay()
        if state.run is not None and not state.run.inside_eager:
            raise CaptureStateError(
                "replay() inside of a graph segment would be captured in part and run in part: call it in "
                "a function marked `@eager_break_during_capture`."
            )
        self._replayer()

    def reset(self) -> None:
        """Free all segments together. The pool stays, and the object can capture again.

        Raises:
            CaptureStateError: it is capturing.
        """
        if self._status is _Status.CAPTURING:
            raise CaptureStateError(f"{self._title()} is capturing: leave the `with` block before reset().")
        self._clear()

    def invalidate(self, reason: str) -> None:
        """Let `replay` refuse with this reason until `reset()`: what was captured has been moved, say."""
        if self._status is _Status.READY:
            self._status, self._reason, self._replayer = _Status.INVALID, reason, None

    def storages(self) -> list[torch.UntypedStorage]:
        """The memory that this capture owns: of its pool, with all captures that share it."""
        return self._backend.storages(self._segments)

    def eager_calls(self) -> list[Call]:
        """The calls of eager segments, with the arguments that a replay passes."""
        return [segment.call for segment in self.segments if isinstance(segment, EagerSegment)]

    def warm_up(self) -> AbstractContextManager[None]:
        """Run the block eagerly where a capture would: on the capture stream, ordered both ways."""
        return self._backend.warm_up()

    @contextmanager
    def observed(self, listener: Listener) -> Iterator[None]:
        """Run the block eagerly; the listener is told of its breaks, and may watch what it calls."""
        run = Run(self, self._options, [listener])
        run.enter()
        try:
            yield
        finally:
            run.leave()

    def exclusive(self) -> AbstractContextManager[None]:
        """For the block: the current stream comes after all replays in this pool, and no thread replays."""
        return self._backend.exclusive()

    # Inspection. What it needs is loaded when it is called.

    def __repr__(self) -> str:
        name = f" {self.name!r}" if self.name else ""
        return f"<{type(self).__name__}{name}: {self._status.name.lower()}, {self._counts()}>"

    def __str__(self) -> str:
        return self.describe()

    def describe(self) -> str:
        """The segment table as text: kind, name, file:line, kernels, frozen arguments, bridges, totals."""
        from segcapture.inspect.table import text

        return text(self._headline(), self.segments)

    def __rich__(self) -> Any:
        from segcapture.inspect.table import rich_table

        return rich_table(self._headline(), self.segments)

    def _repr_html_(self) -> str:
        from segcapture.inspect.table import html

        return html(self._headline(), self.segments)

    def to_dot(self, path: str | Path) -> None:
        """Write the segments, and the bytes that bridges carry between them, as a Graphviz file."""
        from segcapture.inspect.table import dot

        Path(path).write_text(dot(self.name, self.segments))

    def steps(self) -> Iterator[Segment | OperatorStep]:
        """Replay one segment at a time, synchronised: at each `yield` memory shows the state after it.

        In `mode="debug"` it stops after each operator of a graph segment too, and yields an `OperatorStep`
        (whose `kind` is `"operator"`) before the segment itself.

        Raises:
            CaptureStateError: as `replay`.
        """
        self._check_ready()
        return self._steps()

    def _steps(self) -> Iterator[Segment | OperatorStep]:
        for segment in self._segments:
            if self._watch is not None:
                self._watch(segment)
            if isinstance(segment, GraphSegment) and self.mode == "debug":
                tape: Any = segment.graph
                for entry in tape.launch_stepwise():
                    self._backend.wait_for_host_copies()
                    yield OperatorStep(entry.name, entry.place, segment, tuple(entry.results()))
            else:
                self._backend.run(segment)
            yield segment

    def verify(
        self,
        fn: Callable[..., Any],
        /,
        *args: Any,
        outputs: Any = None,
        state: Any = (),
        before: Callable[[], object] | None = None,
        rtol: float | None = None,
        atol: float | None = None,
        **kwargs: Any,
    ) -> "VerifyReport":
        """Compare the capture with `fn(*args, **kwargs)`, and name the first segment that differs.

        The function runs eagerly twice, then the capture runs segment by segment, all three from the same
        inputs and state; arguments and outputs are compared at each break, then `outputs`, then what the
        runs leave in the tensors of the caller, gradients included. Afterwards tensors, which of them
        stands where, and random states are as before.

        Restored between runs are the tensors that the arguments and `fn` refer to (parameters, buffers
        and tensor attributes of modules, gradients, what a function closes over, the globals that it
        names), and the random states. A function that puts other tensors into such places runs a third
        time: if its result depends on what it put there, that is a difference. Needs memory for a copy of
        them, and of what passes each break; of tensors above 64 MiB that pass a break an even sample is
        compared.

        Args:
            fn: The function that was captured.
            args: Its arguments: the static inputs of the capture, holding the values to try.
            outputs: What the function returned in the `with` block. Left out: compared are breaks alone.
            state: Further tensors, modules, optimizers and generators that a run changes.
            before: Called before each run, to put back what is no tensor.
            rtol: Relative tolerance. Left out: as `torch.testing.assert_close`, by dtype.
            atol: Absolute tolerance, likewise.
            kwargs: Keyword arguments of `fn`.

        Returns:
            A report that is true if all agrees; print it.

        Raises:
            CaptureStateError: as `replay`, or this thread is inside of a capture.
            Exception: what the function or a segment raises.
        """
        from segcapture.inspect.verify import verify

        self._check_ready()
        return verify(
            fn,
            args,
            kwargs,
            owner=self,
            options=self._options,
            ambient=self._ambient,
            backend=self._backend,
            segments=self._segments,
            outputs=outputs,
            state=state,
            before=before,
            rtol=rtol,
            atol=atol,
        )

    def profile(self, n: int = 20) -> "ProfileReport":
        """Replay `2 n` times and measure each segment on the host and on the GPU.

        Half of the replays run as usual, for the total. The other half runs with a clock around each
        segment and, on CUDA, an event before and after it. State advances as in any replay.

        Returns:
            A report; print it, or `report.plot(path)` draws the timeline of one replay.

        Raises:
            ValueError: `n` is not positive.
            CaptureStateError: as `replay`.
        """
        from segcapture.inspect.profile import profile

        self._check_ready()
        return profile(self._headline(), self._segments, self._backend, self.replay, n)

    def memory_report(self) -> "MemoryReport":
        """Bytes of the pool, and of bridges and kept arguments by segment."""
        from segcapture.inspect.memory import memory_report

        return memory_report(self._headline(), self.segments, self._backend)

    def _headline(self) -> str:
        name = f"capture {self.name!r}" if self.name else "capture"
        return f"{name} on {self.device}, mode {self.mode}: {self._counts()}"

    def _counts(self) -> str:
        graphs, eager = self.num_graphs, self.num_eager_breaks
        return (
            f"{graphs} graph segment{'' if graphs == 1 else 's'}, "
            f"{eager} eager segment{'' if eager == 1 else 's'}"
        )

    # What it cannot do

    def _check_ready(self) -> None:
        if self._replayer is None:
            raise self._cannot_replay()

    def _cannot_replay(self) -> CaptureStateError:
        hint = {
            _Status.NEW: "Capture first: `with BreakableCUDAGraphCapture() as g: ...`.",
            _Status.CAPTURING: "Leave the `with` block first.",
            _Status.FAILED: "Call reset() and capture again, or make a new one.",
            _Status.INVALID: f"The reason: {self._reason}. Call reset() and capture again.",
        }[self._status]
        return CaptureStateError(
            f"{self._title()} {self._status.value}, so there is nothing to replay. {hint}"
        )

    def _title(self) -> str:
        return f"Capture {self.name!r}" if self.name else "This capture"


def _checked_mode(mode: str | None) -> str:
    source = "mode"
    if mode is None:
        source, mode = "SEGCAPTURE_MODE", os.environ.get("SEGCAPTURE_MODE") or MODES[0]
    if mode not in MODES:
        raise ValueError(f"{source}={mode!r} is unknown: choose one of {', '.join(map(repr, MODES))}")
    return mode
