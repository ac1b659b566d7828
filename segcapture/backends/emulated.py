"""The emulated backend: the same program on tapes, without CUDA graphs.

It is for tests, CI and debugging, on the CPU, and on CUDA tensors in `mode="debug"`. It does not model
streams and the reuse of pool memory, and it cannot see kernels that bypass the dispatcher.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from segcapture.backends.base import Backend
from segcapture.backends.tape import Recorder, Tape
from segcapture.backends.triton_launches import launches_refused
from segcapture.backends.works import wait_until_returned
from segcapture.replay import Program, Watch, base_ambient, under
from segcapture.segments import EagerSegment, GraphSegment, Segment
from segcapture.writeback.ownership import own_alias, shows_memory_alone, storage_id


class EmulatedBackend(Backend):
    """One capture as tapes."""

    def __init__(self, device: torch.device, *, pool: Any, stream: Any, execute: bool) -> None:
        if not execute:
            raise ValueError(
                "execute=False is for CUDA graphs: the emulated backend records operators by running them. "
                "Leave it out where there is no GPU and in mode='debug'."
            )
        if device.type == "cpu" and (stream is not None or pool is not None):
            raise ValueError(
                f"stream={stream!r}, pool={pool!r}: one is of another device than {device}, where there are "
                f"neither streams nor pools"
            )
        self.device = device
        self._recorder = Recorder(device)

    def storages(self, segments: Sequence[Segment]) -> list[torch.UntypedStorage]:
        """What the operators on the tapes made, and the bridges."""
        owned = [tensor for tape in _tapes(segments) for tensor in tape.results()]
        for segment in segments:
            if isinstance(segment, EagerSegment):
                owned += segment.writeback.bridges.targets
        return list({storage_id(tensor): tensor.untyped_storage() for tensor in owned}.values())

    @contextmanager
    def open(self) -> Iterator[None]:
        """Watch the operators of this thread."""
        recorder = self._recorder = Recorder(self.device)
        on_gpu = self.device.type != "cpu"
        with launches_refused(recorder.is_blind) if on_gpu else nullcontext(), recorder.active():
            yield

    def begin(self) -> None:
        """Begin a tape."""
        self._recorder.tape = Tape()

    def end(self) -> Tape | None:
        """End it. The operators have run already."""
        tape, self._recorder.tape = self._recorder.tape, None
        if tape is None:
            return None
        tape.close()
        return tape if tape.operations else None

    def returned(self) -> None:
        """Outputs of collectives have their owners alone once their Work has let go of them."""
        wait_until_returned(self._recorder.borrowed)
        self._recorder.borrowed.clear()

    def abort(self) -> list[str]:
        """Drop the open tape."""
        self._recorder.tape = None
        return []

    def allocate(self, nbytes: int, device: torch.device) -> torch.UntypedStorage:
        """Plain memory."""
        storage = torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()
        self._recorder.made.add(storage._cdata)
        return storage

    def argument(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Another object, since the captured code may change the shape of its own in place."""
        if not shows_memory_alone(tensor) or tensor.layout is not torch.strided:
            return None
        try:
            ours = storage_id(tensor) in self._recorder.made
        except NotImplementedError:  # of vmap
            return None
        return own_alias(tensor) if ours else None

    def is_recording(self) -> bool:
        """Whether there is a tape: all operators of this thread go on it."""
        return self._recorder.tape is not None

    def tensors_kept(self, segments: Sequence[Segment]) -> Counter[int]:
        """What the tapes keep; a CUDA graph would keep addresses."""
        return Counter(key for tape in _tapes(segments) for key in tape.storages_kept())

    def wait_for_host_copies(self) -> None:
        """Wait for the GPU, in debug mode."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def replayer(self, segments: Sequence[Segment], watch: Watch | None = None) -> Callable[[], None]:
        """A loop over tapes and calls."""
        base = base_ambient(segments)
        return under(base, functools.partial(Program(segments, base, watch).run, None))


def _tapes(segments: Sequence[Segment]) -> list[Tape]:
    graphs = [segment.graph for segment in segments if isinstance(segment, GraphSegment)]
    return [graph for graph in graphs if isinstance(graph, Tape)]
