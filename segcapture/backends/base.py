"""What a capture asks of a backend."""

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from segcapture.outputs import Memory
from segcapture.replay import Watch
from segcapture.segments import Graph, Segment


class Backend(Memory):
    """One capture on one device.

    What is not abstract has nothing to do where there are neither streams nor a pool.
    """

    forks: tuple[Any, ...] = ()
    """Side streams whose order with the main one crosses a break that comes now, after `end`."""
    side_stream: Any = None
    """The side stream that is current in the user's code, if it is not the capture's."""

    @property
    def pool(self) -> Any:
        """What `pool=` of another capture takes; None where there is none."""
        return None

    def exclusive(self) -> AbstractContextManager[None]:
        """For the block: the current stream after all work on this memory, and no other thread's on it."""
        return nullcontext()

    def warm_up(self) -> AbstractContextManager[None]:
        """Around eager code: run it where a capture would, ordered with the current stream both ways."""
        return nullcontext()

    @abstractmethod
    def storages(self, segments: Sequence[Segment]) -> list[torch.UntypedStorage]:
        """The memory that a capture with these segments owns, or its whole pool."""

    @abstractmethod
    def open(self) -> AbstractContextManager[None]:
        """Everything around a capture: stream, locks, device, collector. Left on any exit."""

    @abstractmethod
    def begin(self) -> None:
        """Begin a graph segment."""

    @abstractmethod
    def end(self) -> Graph | None:
        """End it, run it once if the capture executes, and return it; None if it was empty."""

    @abstractmethod
    def argument(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """What a recorded call keeps instead of a tensor that is memory of this capture; None: itself."""

    def eager(self) -> AbstractContextManager[None]:
        """Around the eager function at capture, and the carrying of its output."""
        return nullcontext()

    @abstractmethod
    def returned(self) -> None:
        """The function has returned: wait for whoever still borrows its output, before owners are counted."""

    def is_alias(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor came from `alias`, and keeps no memory."""
        return False

    @abstractmethod
    def abort(self) -> list[str]:
        """End whatever is open after a failure; returns what went wrong while doing so."""

    def advice(self, error: BaseException) -> str:
        """What a user can do about an exception that came up while recording."""
        return ""

    @abstractmethod
    def replayer(self, segments: Sequence[Segment], watch: Watch | None = None) -> Callable[[], None]:
        """Compile the replay loop, in which `watch` is entered around each segment.

        It runs in the ambient state of the first eager segment's capture.
        """

    def run(self, segment: Segment) -> None:
        """Run one segment alone, and wait until it is done."""
        self.replayer([segment])()
        self.wait_for_host_copies()

    @abstractmethod
    def is_recording(self) -> bool:
        """Whether an operator that runs now would be part of the graph segment."""

    def tensors_kept(self, segments: Sequence[Segment]) -> Counter[int]:
        """How many tensors on each storage, by its identity, graph segments keep alive: CUDA graphs none."""
        return Counter()

    def pool_bytes(self) -> tuple[int, int] | None:
        """Bytes of the pool that are reserved, and those in use; None where there is no pool."""
        return None
