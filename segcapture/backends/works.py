"""Collectives on a tape: each is waited for where the captured code waited for it."""

import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

from segcapture.operators.collectives import handle, works_of
from segcapture.source import location

_LONGEST, _LOOK_EVERY = 0.05, 0.0005  # seconds for a thread to drop what it is done with


def let_threads_finish() -> None:
    """Before what may be the last reference to a process group dies.

    torch then joins the threads of gloo while it holds the GIL, for which one of them may be waiting, to drop
    a tensor: neither would go on.
    """
    time.sleep(2 * _LOOK_EVERY)


class Pending:
    """The Work of one collective on a tape, which is another one each time the tape runs."""

    def __init__(self) -> None:
        self._works: list[Any] = []

    def start(self, out: Any) -> None:
        """Take the Work out of what the operator returned."""
        self._works = works_of(out)

    def handle(self, out: Any, wait: Callable[[], None]) -> Any:
        """The output, with a Work for the captured code that calls `wait`."""
        return handle(out, wait)

    def wait(self) -> None:
        """Wait for it once: gloo would take a second time for another transfer."""
        works, self._works = self._works, []
        for work in works:
            work.wait()


class Wait:
    """The entry of a tape that waits for a collective before it."""

    name = "c10d::wait"

    def __init__(self, pending: Pending) -> None:
        self.place = location()
        self.run = pending.wait

    def results(self) -> list[torch.Tensor]:
        """It makes none."""
        return []


class Borrowed:
    """Tensors that were given to collectives in an eager function.

    A thread of gloo still holds them for a moment after the wait has ended, and would count as an owner of
    an output that nobody else has.
    """

    def __init__(self) -> None:
        self._tensors: list[weakref.ref[torch.Tensor]] = []

    def note(self, leaves: list[Any]) -> None:
        """These went to a collective."""
        self._tensors += [weakref.ref(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def wait_until_returned(self) -> None:
        """Wait for the threads; not long, since somebody else may hold a tensor for good."""
        borrowed, self._tensors = self._tensors, []
        if not borrowed:
            return
        deadline = time.monotonic() + _LONGEST
        before, now = [(0, 0)], _owners(borrowed)
        # A thread that has dropped a tensor still waits for the GIL, to drop the Python object.
        while time.monotonic() < deadline and (now != before or any(owners > 1 for owners, _ in now)):
            time.sleep(_LOOK_EVERY)
            before, now = now, _owners(borrowed)


def _owners(borrowed: "list[weakref.ref[torch.Tensor]]") -> list[tuple[int, int]]:
    """How many owners each tensor that still exists has in C++, and how many its Python object has."""
    found = []
    for reference in borrowed:
        tensor = reference()
        if tensor is not None:
            use_count = getattr(tensor, "_use_count")  # noqa: B009  (unknown to the stubs)
            found.append((use_count(), sys.getrefcount(tensor)))
    return found
