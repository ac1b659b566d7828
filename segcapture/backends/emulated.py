"""The emulated backend: the same program on tapes, without CUDA graphs.

It is for tests, CI and debugging, on the CPU, and on CUDA tensors in `mode="debug"`. It does not model
streams and the reuse of pool memory, and it cannot see kernels that bypass the dispatcher.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from segcapture.ambient import Ambient
from segcapture.backends.tape import Recorder, Tape
from segcapture.replay import Program, Step, eager_step, graph_step
from segcapture.segments import EagerSegment, Segment


class EmulatedBackend:
    """One capture as tapes."""

    pool: Any = None
    forks: tuple[Any, ...] = ()
    side_stream: Any = None

    def __init__(self, device: torch.device, *, pool: Any, stream: Any, execute: bool) -> None:
        if not execute:
            raise ValueError(
                "execute=False is for CUDA graphs: the emulated backend records operators by running them. "
                "Leave it out where there is no GPU and in mode='debug'."
            )
        if device.type == "cpu" and stream is not None:
            raise ValueError(f"stream={stream!r} is of another device than {device}")
        if device.type == "cpu" and pool is not None:
            raise ValueError(f"pool={pool!r} is of another device than {device}: there is no pool here")
        self.device = device
        self._recorder = Recorder(device)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Watch the operators of this thread."""
        self._recorder = Recorder(self.device)
        with self._recorder.active():
            yield

    def begin(self) -> None:
        """Begin a tape."""
        self._recorder.tape = Tape()

    def end(self) -> Tape | None:
        """End it. The operators have run already."""
        tape, self._recorder.tape = self._recorder.tape, None
        return tape if tape is not None and tape.operations else None

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Nothing to prepare: operators outside of a tape just run."""
        yield

    def abort(self) -> list[str]:
        """Drop the open tape."""
        self._recorder.tape = None
        return []

    def advice(self, error: BaseException) -> str:
        """The refusals of the tape say themselves what to do."""
        return ""

    def allocate(self, nbytes: int, device: torch.device) -> torch.UntypedStorage:
        """Plain memory."""
        return torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()

    def alias(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Everything is kept strongly: no memory is reused here."""
        return None

    def wait_for_host_copies(self) -> None:
        """Wait for the GPU, in debug mode."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def run(self, segment: Segment) -> None:
        """Run one segment, synchronised."""
        Program([segment], [_step(segment)]).run(None)
        self.wait_for_host_copies()

    def replayer(self, segments: Sequence[Segment]) -> Callable[[], None]:
        """The replay loop. Eager segments run in the ambient state of the first one's capture."""
        base = next((s.ambient for s in segments if isinstance(s, EagerSegment)), None)
        program = Program(segments, [_step(segment, base) for segment in segments])

        def replay() -> None:
            if base is None or base.is_current():
                program.run(None)
            else:
                with base.entered():
                    program.run(None)

        return replay


def _step(segment: Segment, base: Ambient | None = None) -> Step:
    if isinstance(segment, EagerSegment):
        return eager_step(segment, base or segment.ambient)
    return graph_step(segment)
