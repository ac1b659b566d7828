"""What is told about a run of the user's code: checks, `find_breaks`, `verify`."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from segcapture.arguments import Call
from segcapture.segments import Segment
from segcapture.trees import Place


class Listener:
    """Is told of each boundary of a run. Here it does nothing.

    What a method raises fails the capture. Operators that it calls are not part of the run.
    """

    def intercepting(self) -> AbstractContextManager[None]:
        """Around the whole run."""
        return nullcontext()

    def graph_begins(self, index: int) -> None:
        """A graph segment begins: what is called from now on belongs to it."""

    def graph_ending(self, index: int) -> None:
        """The backend is about to end it: operators that are called from now on are ours."""

    def graph_ends(self, index: int, empty: bool) -> None:
        """A graph segment has ended; `empty` says that it recorded nothing and is dropped."""

    def break_begins(self, index: int, name: str, place: str, call: Call) -> None:
        """The function of a break is about to be called. `call` has its arguments of now."""

    def break_ends(self, index: int, places: list[Place]) -> None:
        """It has returned an output of these places, of which nothing may be kept."""

    def finished(self, segments: Sequence[Segment]) -> None:
        """The capture is complete."""
