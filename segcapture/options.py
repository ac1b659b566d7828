"""What a capture was asked to do."""

from collections.abc import Callable, Collection

import attrs

from segcapture.errors import CaptureFailedError
from segcapture.operators.break_on import OperatorBreaks


@attrs.frozen
class Options:
    """What a capture was asked to do, for as long as it records."""

    breaks: Collection[str] | Callable[[str], bool] | None
    operator_breaks: OperatorBreaks
    barrier: Callable[[], object] | None
    execute: bool
    full: bool

    def breaks_at(self, name: str) -> bool:
        """Whether a decorated function of this name breaks."""
        if self.full:
            return False
        if self.breaks is None:
            return True
        return self.breaks(name) if callable(self.breaks) else name in self.breaks

    def check_all_called(self, called: set[str]) -> None:
        """Raise CaptureFailedError if `breaks` names a function that was not called: it may be misspelt."""
        if self.full or self.breaks is None or callable(self.breaks):
            return
        missing = sorted(set(self.breaks) - called)
        if missing:
            raise CaptureFailedError(
                f"breaks names {', '.join(map(repr, missing))}, and no decorated function of that name was "
                f"called; called were: {', '.join(map(repr, sorted(called))) or 'none'}. What was meant has "
                f"been captured instead: correct the name, or pass a predicate for names that may be absent."
            )
