"""The methods of a capture that look into it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from segcapture.segments import Segment

if TYPE_CHECKING:
    from segcapture.capture import BreakableCUDAGraphCapture
    from segcapture.inspect.memory import MemoryReport
    from segcapture.inspect.profile import ProfileReport
    from segcapture.inspect.report import VerifyReport
    from segcapture.inspect.steps import Operator


class Inspection:
    """Mixed into `BreakableCUDAGraphCapture`. Nothing here is loaded before it is called."""

    def describe(self) -> str:
        """The segment table as text: kind, name, file:line, kernels, frozen arguments, bridges, totals."""
        from segcapture.inspect.table import text

        return text(_capture(self))

    __str__ = describe

    def __rich__(self) -> Any:
        from segcapture.inspect.table import rich_table

        return rich_table(_capture(self))

    def _repr_html_(self) -> str:
        from segcapture.inspect.table import html

        return html(_capture(self))

    def to_dot(self, path: str | Path) -> None:
        """Write the segments, and the bytes that bridges carry between them, as a Graphviz file."""
        from segcapture.inspect.table import dot

        Path(path).write_text(dot(_capture(self)))

    def steps(self) -> "Iterator[Segment | Operator]":
        """Replay one segment at a time, synchronised: at each `yield` memory shows the state after it.

        In `mode="debug"` it stops after each operator of a graph segment too, and yields an `Operator`
        (whose `kind` is `"operator"`) before the segment itself.

        Raises:
            CaptureStateError: as `replay`.
        """
        from segcapture.inspect.steps import steps

        capture = _capture(self)
        capture._check_ready()
        return steps(capture)

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
        runs leave in the tensors of the caller. Afterwards tensors and random states are as before.

        Restored between runs are the tensors that the arguments and `fn` refer to (parameters, buffers
        and tensor attributes of modules, gradients, what a function closes over, the globals that it
        names), and the random states. Needs memory for a copy of them, and of what passes each break; of
        tensors above 64 MiB that pass a break an even sample is compared.

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

        capture = _capture(self)
        capture._check_ready()
        return verify(
            capture, fn, args, kwargs, outputs=outputs, state=state, before=before, rtol=rtol, atol=atol
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

        capture = _capture(self)
        capture._check_ready()
        return profile(capture, n)

    def memory_report(self) -> "MemoryReport":
        """Bytes of the pool, and of bridges and kept arguments by segment."""
        from segcapture.inspect.memory import memory_report

        return memory_report(_capture(self))


def _capture(self: Inspection) -> "BreakableCUDAGraphCapture":
    return cast("BreakableCUDAGraphCapture", self)
