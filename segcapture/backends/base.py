"""What a capture asks of a backend."""

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from segcapture.bridges import Memory
from segcapture.replay import Watch
from segcapture.segments import Graph, Segment


class Replayer(Protocol):
    """The replay loop over the segments of one capture."""

    def __call__(self) -> None:
        """Run all segments in order."""


class Backend(Memory, Protocol):
    """One capture on one device. Methods are called in the order in which they stand here."""

    @property
    def pool(self) -> Any:
        """What `pool=` of another capture takes; None where there is none."""

    @property
    def forks(self) -> tuple[Any, ...]:
        """Side streams whose order with the main one crosses a break that comes now."""

    @property
    def side_stream(self) -> Any:
        """The side stream that is current in the user's code, if it is not the capture's."""

    def turn(self) -> AbstractContextManager[None]:
        """For the block: the current stream after all work on this memory, and no other thread's on it."""

    def warm_up(self) -> AbstractContextManager[None]:
        """Around eager code: run it where a capture would, ordered with the current stream both ways."""

    def storages(self, segments: Sequence[Segment]) -> list[torch.UntypedStorage]:
        """The memory that a capture with these segments owns, or its whole pool."""

    def open(self) -> AbstractContextManager[None]:
        """Everything around a capture: stream, locks, device, collector. Left on any exit."""

    def begin(self) -> None:
        """Begin a graph segment."""

    def end(self) -> Graph | None:
        """End it, run it once if the capture executes, and return it; None if it was empty."""

    def argument(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """What a recorded call keeps instead of a tensor that is memory of this capture; None: itself."""

    def eager(self) -> AbstractContextManager[None]:
        """Around the eager function at capture, and the carrying of its output."""

    def returned(self) -> None:
        """The function has returned: wait for whoever still borrows its output, before owners are counted."""

    def abort(self) -> list[str]:
        """End whatever is open after a failure; returns what went wrong while doing so."""

    def replayer(self, segments: Sequence[Segment], watch: Watch | None = None) -> Replayer:
        """Compile the replay loop, in which `watch` is told of each segment."""

    def is_recording(self) -> bool:
        """Whether an operator that runs now would be part of the graph segment."""

    def tensors_kept(self, segments: Sequence[Segment]) -> Counter[int]:
        """How many tensors on each storage, by its identity, graph segments themselves keep alive."""

    def pool_bytes(self) -> tuple[int, int] | None:
        """Bytes of the pool that are reserved, and those in use; None where there is no pool."""

    def is_alias(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor came from `alias`, and keeps no memory."""

    def advice(self, error: BaseException) -> str:
        """What a user can do about an exception that came up while recording."""

    def run(self, segment: Segment) -> None:
        """Run one segment alone and wait until it is done."""
