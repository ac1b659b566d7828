"""The CUDA backend: graph segments are CUDA graphs of one pool, launched by the driver."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import attrs
import torch

from segcapture.advice import advice_at
from segcapture.backends.base import Backend
from segcapture.backends.cuda.driver import bind_context, get_driver
from segcapture.backends.cuda.graph import (
    ADVICE,
    BY_TORCH,
    INVALID,
    CudaGraph,
    collections_relaxed,
    undo_begin,
)
from segcapture.backends.cuda.pool import (
    CaptureStream,
    Pool,
    PoolHandle,
    PoolMemory,
    capture_stream,
    in_order,
    is_non_owning,
    open_pool,
    pool_id_of,
)
from segcapture.backends.cuda.streams import Forks, across, ordered, wait_for_all
from segcapture.errors import CaptureFailedError, CaptureStateError
from segcapture.replay import Watch, base_ambient, replay_loop, under
from segcapture.segments import Segment

_NOTHING = nullcontext()


class CudaBackend(Backend):
    """One capture on one CUDA device."""

    _pool: Pool | None = None
    _on: CaptureStream
    """Once there is a pool: where it captures."""
    _memory: PoolMemory
    _forks: Forks
    """While it captures."""
    _graph: CudaGraph | None = None
    """While it records a segment."""

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
        self._given_pool, self._given_stream = pool, stream
        if pool is not None:
            pool_id_of(pool, device)  # raises for what is none
        self._execute = execute
        self._generators = generators
        self._driver = get_driver()
        self._error_mode = self._driver.error_mode(capture_error_mode)

    @property
    def pool(self) -> Any:
        """The pool, which stays open as long as the returned object lives."""
        return self._given_pool if self._pool is None else PoolHandle(self._pool)

    def _opened(self) -> Pool:
        if self._pool is None:
            pool = open_pool(self._given_pool, self.device, self._given_stream)
            self._on = pool.stream if self._given_stream is None else capture_stream(self._given_stream)
            self._pool = pool
        return self._pool

    def exclusive(self) -> AbstractContextManager[None]:
        """The current stream comes after all that was captured or replayed in the same pool."""
        return self._opened().exclusive(self._on)

    def warm_up(self) -> AbstractContextManager[None]:
        """On the capture stream, so that libraries set up there what the capture will use."""
        self._opened()
        return self._on.current()

    def storages(self, segments: Sequence[Segment]) -> list[torch.UntypedStorage]:
        """The pool's memory."""
        return [] if self._pool is None else self._pool.storages()

    # Capture

    @contextmanager
    def open(self) -> Iterator[None]:
        """Take the pool, order its stream after the current one, and the current one after it."""
        with torch.cuda.device(self.device):
            if torch.cuda.is_current_stream_capturing():
                raise CaptureStateError(
                    "The current stream is being captured already, by torch.cuda.graph or another library. "
                    "Captures do not nest: leave the outer one first."
                )
            pool = self._opened()
            with pool.capturing(self._on), collections_relaxed(self._error_mode):
                self._memory, self._forks = PoolMemory(pool), Forks(self._on.stream)
                try:
                    yield
                finally:
                    del self._memory, self._forks
                    self.forks, self.side_stream = (), None

    def _on_stream(self) -> AbstractContextManager[Any]:
        """For the block, the capture stream is current."""
        index, current = self.device.index, torch._C._cuda_getCurrentRawStream
        # `torch.cuda.current_stream()` costs 20 times as much.
        here = torch._C._cuda_getDevice() == index and current(index) == self._on.raw
        return _NOTHING if here else torch.cuda.stream(self._on.stream)

    def begin(self) -> None:
        """Begin the capture of a CUDA graph, and fork the side streams into it again."""
        pool_id, begun = self._opened().id, CudaGraph()
        with self._on_stream():
            self._on.prepare_handle()  # an eager function may have had it freed
            try:
                begun.begin(pool_id, self._error_mode, self._generators)
            except BaseException:
                if self._driver.is_valid(self._on.raw):  # an interrupt came as the call returned
                    self._graph = begun
                else:
                    undo_begin(pool_id, self.device)
                raise
            self._graph = begun
            self._forks.fork()

    def end(self) -> CudaGraph | None:
        """Join all forks, end the capture, and launch the graph once."""
        graph, raw, forks = self._graph, self._on.raw, self._forks
        assert graph is not None
        forks.find()
        operations = self._driver.join(raw, forks.streams)
        if operations is None:
            raise CaptureFailedError(
                "A CUDA call in this segment was not allowed and made the capture invalid, and its exception "
                f"was caught in the `with` block. {INVALID}"
            )
        self.forks, self.side_stream = forks.crossing(), forks.current
        with self._on_stream():
            if operations <= 0:
                self._driver.add_empty_node(raw)
            graph.end()
            self._graph = None
            self._memory.forget_break()
            if operations == 0:
                return None
            graph.instantiate(operations)
            if self._execute:
                graph.first_launch((torch.cuda.default_generators[self.device.index], *self._generators))
            return graph

    def eager(self) -> AbstractContextManager[None]:
        """Order side streams around the eager function."""
        return ordered(self._on.stream, self.forks) if self.forks else _NOTHING

    def returned(self) -> None:
        """The output may have been made on any of the streams, and is read on the current one."""
        if self.forks or torch._C._cuda_getCurrentRawStream(self.device.index) != self._on.raw:
            wait_for_all((*self.forks, self._on.stream), self.device)

    def abort(self) -> list[str]:
        """End the open capture, however broken, so that torch's state is as after any other."""
        trouble: list[str] = []
        broken, self._graph = self._graph, None
        if broken is None:
            return trouble
        pool, forks = self._opened(), self._forks.crossing()
        for _ in range(2):
            try:
                with self._on_stream():
                    self._driver.discard(self._on.raw, forks)
                    broken.end()
                return trouble
            except BaseException as error:
                trouble.append(f"{type(error).__name__}: {error}")
        pool.free = None
        with suppress(Exception), self._on_stream():
            broken.end()  # an invalid capture ends with an error, and torch is left in it
        with suppress(Exception):
            undo_begin(pool.id, self.device)
        return trouble

    def advice(self, error: BaseException) -> str:
        """By CUDA's error code, and not by the words of the message, but for two of torch's own."""
        code = getattr(error, "error_code", 0)
        if isinstance(error, torch.OutOfMemoryError):
            return "The pool of the capture could not grow: capture smaller sizes, or free memory first."
        text = ADVICE.get(code, "") if isinstance(code, int) else ""
        words = next((w for w in BY_TORCH if type(error) is RuntimeError and str(error).startswith(w)), "")
        if code == 900 or words:
            text = f"{text or BY_TORCH[words]} {advice_at(error.__traceback__)}".lstrip()
        return text

    # Memory

    def allocate(self, nbytes: int, device: torch.device) -> torch.UntypedStorage:
        """From the pool; plain memory on another device, pinned on the host."""
        if device == self.device:
            return self._memory.allocate(nbytes)
        pinned = device.type == "cpu"
        return torch.empty(nbytes, dtype=torch.uint8, device=device, pin_memory=pinned).untyped_storage()

    def alias(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A non-owning alias of memory of this capture."""
        return self._memory.alias(tensor)

    argument = alias

    def is_recording(self) -> bool:
        """Whether the current stream is one of the capture."""
        return torch.cuda.is_current_stream_capturing()

    def pool_bytes(self) -> tuple[int, int] | None:
        """Of the whole pool, with all captures that share it."""
        return None if self._pool is None else self._pool.nbytes()

    def is_alias(self, tensor: torch.Tensor) -> bool:
        """Its storage is one that `alias` made."""
        return is_non_owning(tensor.untyped_storage())

    def wait_for_host_copies(self) -> None:
        """Wait for the current stream."""
        torch.cuda.current_stream(self.device).synchronize()

    # Replay

    def replayer(self, segments: Sequence[Segment], watch: Watch | None = None) -> Callable[[], None]:
        """The replay loop. Eager segments run in the ambient state of the first one's capture."""
        pool = self._opened()
        base = base_ambient(segments)
        on_device = None if base is None else attrs.evolve(base, device=self.device.index)
        run = replay_loop(segments, on_device, watch or _nvtx_ranges(), across, bind_context)
        replay = in_order(pool, self._on, run, calls=base is not None)
        # The device is seen to already.
        return under(None if base is None else attrs.evolve(base, device=None), replay)


def _nvtx_ranges() -> Watch | None:
    """A range with the name of each segment if `SEGCAPTURE_NVTX=1`, or if a tool that shows them runs us.

    Nsight tools set `NVTX_INJECTION64_PATH` (https://nvidia.github.io/NVTX, "Tool injection").
    `SEGCAPTURE_NVTX=0` switches them off there too.
    """
    flag = os.environ.get("SEGCAPTURE_NVTX", "")
    wanted = flag not in ("", "0") or (not flag and "NVTX_INJECTION64_PATH" in os.environ)
    return (lambda segment: torch.cuda.nvtx.range("{}", str(segment))) if wanted else None
