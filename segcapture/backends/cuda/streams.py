"""Side streams: those that are forked into a capture, and their order around a break (contract C6)."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from segcapture.backends.cuda.driver import get_driver

_PRIORITIES = (0, -1, -2, -3)
_PER_PRIORITY = 32

_torch_streams: dict[torch.device, dict[int, torch.cuda.Stream]] = {}
_lock = threading.Lock()


def torch_streams(device: torch.device) -> dict[int, torch.cuda.Stream]:
    """Every stream that torch hands out on a device, by raw handle: it takes them from a fixed set."""
    with _lock:
        if device not in _torch_streams:
            found: dict[int, torch.cuda.Stream] = {}
            for priority in _PRIORITIES:
                found.update(_streams_of(device, priority))
            _torch_streams[device] = found
        return _torch_streams[device]


def _streams_of(device: torch.device, priority: int) -> dict[int, torch.cuda.Stream]:
    """torch hands them out in turn: more rounds than one, since another thread may take some meanwhile."""
    found: dict[int, torch.cuda.Stream] = {}
    for _ in range(8 * _PER_PRIORITY):
        stream = torch.cuda.Stream(device, priority=priority)
        found[stream.cuda_stream] = stream
        if len(found) == _PER_PRIORITY:
            break
    return found


class Forks:
    """The side streams that are forked into one capture."""

    def __init__(self, main: torch.cuda.Stream) -> None:
        self._main = main
        self._driver = get_driver()
        self._known = torch_streams(main.device)
        self._ask = self._driver.question(list(self._known))
        self.streams: tuple[torch.cuda.Stream, ...] = ()
        self.current: torch.cuda.Stream | None = None
        """The stream that is current in the user's code, if it is not the capture's own."""

    def join(self) -> int:
        """Find the forked streams and join them all, before a segment ends; returns its node count."""
        self.streams = self._find()
        return self._driver.join(self._main.cuda_stream, self.streams)

    def _find(self) -> tuple[torch.cuda.Stream, ...]:
        raw = self._main.cuda_stream
        self.current = None
        if torch._C._cuda_getCurrentRawStream(self._main.device_index) != raw:
            self.current = torch.cuda.current_stream(self._main.device)
        capturing = {other: self._known[other] for other in self._ask()}
        # Streams from outside of torch are found while they are current, and remembered while forked.
        strangers = {s.cuda_stream: s for s in self.crossing() if s.cuda_stream not in self._known}
        if strangers:
            capturing |= {other: strangers[other] for other in self._driver.question(list(strangers))()}
        capturing.pop(raw, None)
        mine = self._driver.capture_id(raw) if capturing else 0
        return tuple(s for other, s in capturing.items() if self._driver.capture_id(other) == mine)

    def fork(self) -> None:
        """Fork them into the capture again: after a segment began."""
        for stream in self.streams:
            stream.wait_stream(self._main)

    def crossing(self) -> tuple[torch.cuda.Stream, ...]:
        """The streams whose order with the main one an eager function may rely on."""
        known = {s.cuda_stream: s for s in self.streams}
        if self.current is not None:
            known[self.current.cuda_stream] = self.current
        return tuple(known.values())


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
