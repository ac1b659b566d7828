"""What can go wrong, by name: one tree of errors and one warning."""

from typing import Any


class SegcaptureError(RuntimeError):
    """Base of every error that segcapture raises itself. What the message says is in attributes too."""

    def __init__(
        self,
        message: str,
        *,
        segment: int | None = None,
        path: str = "",
        expected: Any = None,
        found: Any = None,
    ) -> None:
        super().__init__(message)
        self.segment = segment
        """Index of the segment, where it concerns one."""
        self.path = path
        """Of the leaf of an output (`out["k"][0]`), of an argument or attribute, where it concerns one."""
        self.expected = expected
        self.found = found


class CaptureStateError(SegcaptureError):
    """A call that the state of the capture, or of this thread, does not allow."""


class CaptureFailedError(SegcaptureError):
    """Something in the `with` block cannot be captured."""

    def __init__(self, message: str, *, operator: str = "", reason: str = "", **attributes: Any) -> None:
        super().__init__(message, **attributes)
        self.operator = operator
        """Name of the operator that was refused, if one was."""
        self.reason = reason
        """Why it was."""


class OutputMismatchError(SegcaptureError):
    """An eager function returned, at replay, something else than at capture."""


class FrozenValueWarning(UserWarning):
    """A Python value that later segments were recorded for has changed at replay."""
