"""Replays on CUDA: on the device's current stream, after all that shares memory with them (contract C6)."""

from collections.abc import Callable
from typing import Any

import torch

from segcapture.backends.cuda.driver import get_driver, in_thread, is_captured
from segcapture.backends.cuda.pool import PoolState
from segcapture.backends.cuda.streams import ordered, wait_for_all
from segcapture.errors import CaptureStateError
from segcapture.replay import Around, Program
from segcapture.segments import EagerSegment


def in_order(pool: PoolState, program: Program, *, calls: bool) -> Callable[[], None]:
    """A program as a replay: after what was captured or replayed on the same lane.

    `calls` says whether there are eager segments.
    """
    lane, run, handle = pool.lane, program.run, get_driver().handle
    lock, device, index = lane.lock, lane.stream.device, lane.stream.device.index
    current_device, current = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream

    def run_in_order() -> None:
        # On the right device already, the lock stands in for a context that does nothing, but cheaply.
        with lock if current_device() == index else torch.cuda.device(device), lock:
            raw = current(index)
            # Not asked without eager segments on the stream used last: that costs a fifth of a launch, and
            # CUDA says it (error 900).
            if (calls or raw != lane.last or not in_thread.bound) and is_captured():
                raise CaptureStateError(
                    "The current stream is being captured by torch.cuda.graph or another library, where CUDA "
                    "launches no graph and eager segments would run in part: replay outside of it."
                )
            if pool.in_use:
                raise pool.overwritten()
            if raw != lane.last:
                lane.move_to(raw)
            around, lane.running = lane.running, raw
            pool.in_use = calls
            try:
                run(handle(raw))
            finally:
                lane.running, pool.in_use = around, False
                if around is not None:  # the replay or capture around this one goes on after it
                    lane.move_to(around)

    return run_in_order


def across(segment: EagerSegment) -> Around | None:
    """Orders side streams around a function and its write-back, on whatever stream the replay is."""
    if not segment.forks:
        return None

    def around(call: Callable[[], Any], store: Callable[[Any], None]) -> Callable[[], None]:
        def ordered_call() -> None:
            main = torch.cuda.current_stream(segment.forks[0].device)  # the function's may be another one
            with ordered(main, segment.forks), torch.cuda.stream(segment.stream):
                out = call()
                wait_for_all((*segment.forks, main), main.device)
                store(out)

        return ordered_call

    return around
