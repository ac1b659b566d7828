"""One thread at a time: a lock that raises where waiting would never end."""

import threading
from types import TracebackType

from segcapture.errors import CaptureStateError

_waiting: "dict[int, Exclusive]" = {}
"""What each thread that waits is waiting for."""
_waiting_lock = threading.Lock()


class Exclusive:
    """A re-entrant lock of what cannot be used by two threads at once: a pool, a served function.

    An eager function may replay another capture, so that a thread waits for one lock while it holds another.
    Two threads that do so crosswise would wait for each other forever: the second one gets an error.
    """

    def __init__(self) -> None:
        lock = threading.RLock()
        self.acquire_at_once = lock.acquire
        """`acquire_at_once(False)`: whether this thread has it now, to `release` it later. For hot paths."""
        self.release = lock.release
        self.owner: int | None = None
        """The thread that has it. A hot path under which nothing else is waited for need not set it."""
        self._depth = 0

    def wait(self) -> None:
        """Acquire it, after the thread that has it now.

        Raises:
            CaptureStateError: that thread waits, directly or not, for something that this thread has.
        """
        me = threading.get_ident()
        with _waiting_lock:
            after, seen = self.owner, set[int]()
            while after is not None and after not in seen:
                if after == me:
                    raise CaptureStateError(
                        "Two threads wait for each other: each replays, in an eager function, a capture that "
                        "the other one is replaying. Replay both in one thread, or take them in one order."
                    )
                seen.add(after)
                waited = _waiting.get(after)
                after = None if waited is None else waited.owner
            _waiting[me] = self
        try:
            self.acquire_at_once(True)
        finally:
            del _waiting[me]

    def __enter__(self) -> None:
        if not self.acquire_at_once(False):
            self.wait()
        self.owner = threading.get_ident()
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.owner = None
        self.release()
