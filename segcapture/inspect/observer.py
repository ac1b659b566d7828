"""An eager run in which breaks are seen: what stands in for a recording while nothing is captured."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from segcapture.ambient import capture_ambient
from segcapture.arguments import Call, resolve
from segcapture.errors import CaptureStateError
from segcapture.thread import location, state


class Listener(Protocol):
    """What is told of each break of an eager run. Its own operators are not watched."""

    def called(self, name: str, place: str, call: Call, /) -> None:
        """The function of a break is about to run."""

    def returned(self, output: Any) -> None:
        """It has returned."""


class Observer:
    """Takes the place of a `Recording`: a break runs its function, and a listener is told."""

    place = "an eager run that is observed"

    def __init__(
        self, owner: Any, breaks_at: Callable[[str], bool], listener: Listener, *, full: bool = False
    ) -> None:
        self.owner = owner
        """The capture, for `BreakableCUDAGraphCapture.current()`; None if there is none."""
        self.inside_eager = False
        """Whether the function of a break is running right now."""
        self._breaks_at = breaks_at
        self._listener = listener
        self._full = full
        """Whether nothing breaks at all."""

    @contextmanager
    def active(self) -> Iterator[None]:
        """See the breaks of this thread for the block, those in backward too.

        Raises:
            CaptureStateError: this thread is inside of a capture.
        """
        if state.recording is not None:
            raise CaptureStateError(
                f"This thread is inside of a capture ({state.recording.place}), and what is to be observed "
                f"must run eagerly: leave the `with` block first."
            )
        stand_in: Any = self
        with capture_ambient():
            state.recording = stand_in
            try:
                yield
            finally:
                state.recording = None

    def breaks_at(self, name: str) -> bool:
        """Whether a decorated function of this name breaks here."""
        return not self.inside_eager and self._breaks_at(name)

    def split(self, name: str) -> None:
        """Nothing to end here."""

    def record_break(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str,
        stub: Callable[..., Any] | None = None,
        *,
        below_autograd: bool = False,
    ) -> Any:
        """Run the function of a break as it is."""
        args, kwargs = resolve(args, kwargs)
        if self.inside_eager or self._full:
            return fn(*args, **kwargs)
        self.inside_eager = True
        try:
            self._listener.called(name, location(), Call(fn, args, kwargs, live=False))
            out = fn(*args, **kwargs)
            self._listener.returned(out)
        finally:
            self.inside_eager = False
        return out
