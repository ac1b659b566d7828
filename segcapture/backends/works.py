"""Collectives on a tape: each is waited for where the captured code waited for it."""

import sys
import time
import weakref
from typing import Any

import torch

from segcapture.operators.collectives import works_of

LOOK_EVERY, _LONGEST = 0.0005, 0.05
"""Seconds for a thread to drop what it is done with."""


class Started:
    """A collective on a tape, whose Work is another one each time the tape runs."""

    def __init__(self, func: Any) -> None:
        self.func = func
        self.works: list[Any] = []
        """What nobody has waited for yet. None where NCCL ran on the current stream."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Start it; returns what the operator returns."""
        out = self.func(*args, **kwargs)
        self.works = works_of(out)
        return out

    def wait(self) -> None:
        """Wait for it once: gloo would take a second time for another transfer."""
        works, self.works = self.works, []
        for work in works:
            work.wait()


def wait_until_returned(borrowed: "list[weakref.ref[torch.Tensor]]") -> None:
    """Wait until threads have let go of what an eager function gave to collectives.

    A thread of gloo still holds the tensors for a moment after the wait has ended, and would count as an
    owner of an output that nobody else has. Not for long, since somebody else may hold one for good.
    """
    deadline = time.monotonic() + _LONGEST
    before: list[tuple[int, int]] = []
    now = _owners(borrowed)
    # A thread that has dropped a tensor still waits for the GIL, to drop the Python object.
    while time.monotonic() < deadline and (now != before or any(owners > 1 for owners, _ in now)):
        time.sleep(LOOK_EVERY)
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
