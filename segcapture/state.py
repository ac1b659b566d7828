"""The thread-local state: which capture this thread is inside of.

`threading.local` and not a ContextVar: CUDA ties a capture to its thread, and a
thread started inside a `with` block may inherit the context of its parent.
"""

import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from segcapture.recording import Recording


class _State(threading.local):
    recording: "Recording | None" = None
    keep_alive: list[Any] | None = None
    """While this thread captures: dropped graphs whose destruction must wait."""


state = _State()
