"""The CUDA backend: graph segments are CUDA graphs of one pool, launched by the driver."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import attrs
import torch

from segcapture.backends.base import Backend
from segcapture.backends.cuda.driver import get_driver
from segcapture.backends.cuda.graph import ADVICE, BREAK, REGISTERS_GENERATORS, CudaGraph
from segcapture.backends.cuda.nvtx import nvtx_ranges
from segcapture.backends.cuda.order import across, in_order
from segcapture.backends.cuda.pool import (
    Pool,
    PoolState,
    collections_relaxed,
    open_pool,
    pool_id_of,
    undo_begin,
)
from segcapture.backends.cuda.pool_memory import PoolMemory, bytes_of, is_borrowed, make_room
from segcapture.backends.cuda.streams import Forks, ordered, wait_for_all
from segcapture.errors import CaptureFailedError, CaptureStateError
from segcapture.replay import Program, Watch, base_ambient, under
from segcapture.segments import Segment


@attrs.frozen
class _Running:
    """What a capture uses while it records."""

    pool: PoolState
    stream: torch.cuda.Stream
    memory: PoolMemory
    forks: Forks

    @contextmanager
    def on_stream(self) -> Iterator[int]:
        """For the block, the capture stream is current; its raw handle."""
        raw = self.stream.cuda_stream
        index = self.stream.device_index
        # `torch.cuda.current_stream()` costs 20 times as much.
        here = torch._C._cuda_getDevice() == index and torch._C._cuda_getCurrentRawStream(index) == raw
        with nullcontext() if here else torch.cuda.stream(self.stream):
            yield raw


class CudaBackend(Backend):
    """One capture on one CUDA device."""

    _now: _Running
    """While it records."""

    def __init__(
        self,
        device: torch.device,
        *,
        pool: Any,
        stream: Any,
        execute: bool,
        capture_error_mode: str,
        generators: tuple[torch.Generator, ...],
    ) -> None:
        if stream is not None and stream.device != device:
            raise ValueError(f"stream is of {stream.device}, and the capture of {device}")
        if stream is not None and stream == torch.cuda.default_stream(device):
            raise ValueError("stream is the default stream, which CUDA cannot capture: leave it out")
        self.device = device
        if pool is not None:
            pool_id_of(pool, device)  # raises for what is none
        self._given_pool = pool
        self._state: PoolState | None = getattr(pool, "state", None)
        self._given_stream: torch.cuda.Stream | None = stream
        self._execute = execute
        self._generators = generators
        self._driver = get_driver()
        self._error_mode = self._driver.error_mode(capture_error_mode)
        self._graph: CudaGraph | None = None

    @property
    def pool(self) -> Any:
        """The pool, which stays open as long as the returned object lives."""
        return Pool(self._state) if self._state is not None else self._given_pool

    def _opened(self) -> PoolState:
        if self._state is None:
            self._state = open_pool(self._given_pool, self.device, self._given_stream)
        return self._state

    def exclusive(self) -> AbstractContextManager[None]:
        """The current stream comes after all that was captured or replayed on the same lane."""
        return self._opened().lane.turn(torch._C._cuda_getCurrentRawStream(self.device.index))

    def warm_up(self) -> AbstractContextManager[None]:
        """On the capture stream, so that libraries set up there what the capture will use."""
        lane = self._opened().lane
        return lane.beside(self._given_stream or lane.stream)

    def storages(self, segments: Sequence[Segment]) -> list[torch.UntypedStorage]:
        """The pool's memory."""
        return [] if self._state is None else self._state.storages()

    # Capture

    @contextmanager
    def open(self) -> Iterator[None]:
        """Take a lane, order its stream after the current one, and the current one after it."""
        with torch.cuda.device(self.device):
            if torch.cuda.is_current_stream_capturing():
                raise CaptureStateError(
                    "The current stream is being captured already, by torch.cuda.graph or another library. "
                    "Captures do not nest: leave the outer one first."
                )
            opened = self._opened()
            stream = self._given_stream or opened.lane.stream
            with opened.lane.capturing(stream), opened.used(), collections_relaxed(self._error_mode):
                make_room(self.device)
                memory = PoolMemory(opened.id, self.device, keeper=opened)
                self._now = _Running(opened, stream, memory, Forks(stream))
                try:
                    yield
                finally:
                    del self._now
                    self.forks, self.side_stream = (), None

    def begin(self) -> None:
        """Begin the capture of a CUDA graph, and fork the side streams into it again."""
        pool, opened = self._now.pool, CudaGraph()
        with self._now.on_stream() as raw:
            pool.lane.workspace.prepare_handle()  # an eager function may have had it freed
            try:
                opened.begin(pool.id, self._error_mode, self._generators)
            except BaseException:
                if self._driver.is_valid(raw):  # it has begun: an interrupt came as the call returned
                    self._graph = opened
                else:
                    undo_begin(self.device, pool.id)
                raise
            self._graph = opened
            self._now.forks.fork()

    def end(self) -> CudaGraph | None:
        """Join all forks, end the capture, and launch the graph once."""
        captured, raw = self._graph, self._now.stream.cuda_stream
        assert captured is not None
        if not self._driver.is_valid(raw):
            raise CaptureFailedError(
                "A CUDA call in this segment was not allowed and made the capture invalid, and its exception "
                f"was caught in the `with` block. {BREAK}"
            )
        forks = self._now.forks
        operations = forks.join()
        self.forks, self.side_stream = forks.crossing(), forks.current
        with self._now.on_stream():
            if operations <= 0:
                self._driver.add_empty_node(raw)
            captured.call("capture_end")
            self._graph = None
            self._now.memory.forget_break()
            if operations == 0:
                return None
            captured.call("instantiate")
            captured.operations = operations
            direct = self._driver.launcher(captured.graph)
            if self._execute and not self._draws_in_launch(captured) and direct is not None:
                captured.launch = direct
            return captured

    def _draws_in_launch(self, captured: CudaGraph) -> bool:
        """Launch once. Whether the graph draws random numbers shows in the generators' offsets.

        Where others than those that are known may be drawn from, it counts as drawing.
        """
        generators = (torch.cuda.default_generators[self.device.index], *self._generators)
        before = [generator.get_offset() for generator in generators]
        captured.call("replay")
        return REGISTERS_GENERATORS or before != [generator.get_offset() for generator in generators]

    def eager(self) -> AbstractContextManager[None]:
        """Order side streams around the eager function."""
        return ordered(self._now.stream, self.forks)

    def returned(self) -> None:
        """The output may have been made on any of the streams, and is read on the current one."""
        wait_for_all((*self.forks, self._now.stream), self.device)

    def abort(self) -> list[str]:
        """End the open capture, however broken, so that torch's state is as after any other."""
        trouble: list[str] = []
        broken, self._graph = self._graph, None
        if broken is None:
            return trouble
        for _ in range(2):
            try:
                with self._now.on_stream() as raw:
                    if not self._driver.is_valid(raw):
                        self._driver.restart(raw)
                    if self._driver.join(raw, self._now.forks.crossing()) <= 0:
                        self._driver.add_empty_node(raw)
                    broken.call("capture_end")
                return trouble
            except BaseException as error:
                trouble.append(f"{type(error).__name__}: {error}")
        pool = self._now.pool
        pool.lane.on_offer = False
        with suppress(Exception), self._now.on_stream():
            broken.call("capture_end")  # an invalid capture ends with an error, and torch is left in it
        with suppress(Exception):
            undo_begin(self.device, pool.id)
        return trouble

    def advice(self, error: BaseException) -> str:
        """By CUDA's error code, not by the words of the message."""
        code = getattr(error, "error_code", 0)
        if isinstance(error, torch.OutOfMemoryError):
            return "The pool of the capture could not grow: capture smaller sizes, or free memory first."
        return ADVICE.get(code, "") if isinstance(code, int) else ""

    # Memory

    def allocate(self, nbytes: int, device: torch.device) -> torch.UntypedStorage:
        """From the pool; plain memory on another device, pinned on the host."""
        if device == self.device:
            return self._now.memory.allocate(nbytes)
        pinned = device.type == "cpu"
        return torch.empty(nbytes, dtype=torch.uint8, device=device, pin_memory=pinned).untyped_storage()

    def alias(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A non-owning alias of memory of this capture."""
        return self._now.memory.alias(tensor)

    argument = alias

    def is_recording(self) -> bool:
        """Whether the current stream is one of the capture."""
        return torch.cuda.is_current_stream_capturing()

    def pool_bytes(self) -> tuple[int, int] | None:
        """Of the whole pool, with all captures that share it."""
        return None if self._state is None else bytes_of(self._state.id)

    def is_alias(self, tensor: torch.Tensor) -> bool:
        """Its storage is one that `alias` made."""
        return is_borrowed(tensor.untyped_storage())

    def wait_for_host_copies(self) -> None:
        """Wait for the current stream."""
        torch.cuda.current_stream(self.device).synchronize()

    # Replay

    def replayer(self, segments: Sequence[Segment], watch: Watch | None = None) -> Callable[[], None]:
        """The replay loop. Eager segments run in the ambient state of the first one's capture."""
        assert self._state is not None
        base = base_ambient(segments)
        on_device = None if base is None else attrs.evolve(base, device=self.device.index)
        program = Program(segments, on_device, watch or nvtx_ranges(), across)
        replay = in_order(self._state, program, calls=base is not None)
        # The device is seen to already.
        return under(None if base is None else attrs.evolve(base, device=None), replay)
