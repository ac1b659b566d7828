"""What can go wrong, by name: one tree of errors and one warning."""


class SegcaptureError(RuntimeError):
    """Base of every error that segcapture raises itself."""


class CaptureStateError(SegcaptureError):
    """A call that the state of the capture, or of this thread, does not allow."""


class CaptureFailedError(SegcaptureError):
    """Something in the `with` block cannot be captured."""

    def __init__(self, message: str, *, operator: str = "", reason: str = "") -> None:
        super().__init__(message)
        self.operator = operator
        """Name of the operator that was refused, if one was."""
        self.reason = reason
        """Why it was."""


class OutputMismatchError(SegcaptureError):
    """An eager function returned, at replay, something else than at capture."""


class FrozenValueWarning(UserWarning):
    """A Python value that later segments were recorded for has changed at replay."""
