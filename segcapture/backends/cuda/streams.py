"""Side streams: those that are forked into a capture, and their order around a break (contract C6)."""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from segcapture.backends.cuda.driver import Question, get_driver
from segcapture.replay import Around
from segcapture.segments import EagerSegment

_PRIORITIES = (0, -1, -2, -3)
_PER_PRIORITY = 32

_lock = threading.Lock()


def torch_streams(device: torch.device) -> dict[int, torch.cuda.Stream]:
    """Every stream that torch hands out on a device, by raw handle: it takes them from a fixed set."""
    with _lock:
        return _torch_streams(device)


@functools.cache
def _torch_streams(device: torch.device) -> dict[int, torch.cuda.Stream]:
    found: dict[int, torch.cuda.Stream] = {}
    for priority in _PRIORITIES:
        before = len(found)
        # torch hands them out in turn: more rounds than one, since another thread may take some meanwhile.
        for _ in range(8 * _PER_PRIORITY):
            stream = torch.cuda.Stream(device, priority=priority)
            found[stream.cuda_stream] = stream
            if len(found) - before == _PER_PRIORITY:
                break
    return found


@functools.cache
def _question(main: torch.cuda.Stream) -> Question:
    """Which of torch's streams are capturing: one a capture stream, as one thread asks it at a time."""
    return get_driver().question(list(torch_streams(main.device).values()))


class Forks:
    """The side streams that are forked into one capture."""

    streams: tuple[torch.cuda.Stream, ...] = ()
    current: torch.cuda.Stream | None = None
    """The stream that is current in the user's code, if it is not the capture's own."""

    def __init__(self, main: torch.cuda.Stream) -> None:
        self._main = main
        self._driver = get_driver()
        self._known = torch_streams(main.device)
        self._ask = _question(main)

    def find(self) -> None:
        """Find those that are forked now, before a segment ends: they end with it."""
        raw, self.current = self._main.cuda_stream, None
        if torch._C._cuda_getCurrentRawStream(self._main.device_index) != raw:
            self.current = torch.cuda.current_stream(self._main.device)
        forked = self._ask()
        # Streams from outside of torch are found while they are current, and remembered while forked.
        external = [s for s in self.crossing() if s.cuda_stream not in self._known]
        if external:
            forked = forked + self._driver.question(external)()
        mine = self._driver.capture_id(raw) if forked else 0
        self.streams = tuple(
            stream
            for stream in forked
            if stream.cuda_stream != raw and self._driver.capture_id(stream.cuda_stream) == mine
        )

    def fork(self) -> None:
        """Fork them into the capture again: after a segment began."""
        for stream in self.streams:
            stream.wait_stream(self._main)

    def crossing(self) -> tuple[torch.cuda.Stream, ...]:
        """The streams whose order with the main one an eager function may rely on."""
        if self.current is None:
            return self.streams
        return (*(stream for stream in self.streams if stream != self.current), self.current)


@contextmanager
def ordered(main: torch.cuda.Stream, sides: Sequence[torch.cuda.Stream]) -> Iterator[None]:
    """For the block: work on the sides comes after `main`'s, and `main` goes on after theirs."""
    for stream in sides:
        stream.wait_stream(main)
    try:
        yield
    finally:
        for stream in sides:
            main.wait_stream(stream)


def wait_for_all(streams: Sequence[torch.cuda.Stream], device: torch.device) -> None:
    """Let the current stream of a device come after the others."""
    current = torch.cuda.current_stream(device)
    for stream in streams:
        if stream != current:
            current.wait_stream(stream)


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
