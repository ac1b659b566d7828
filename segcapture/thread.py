"""What belongs to the calling thread: the capture it is inside of, and the user's line it is at.

`threading.local` and not a ContextVar: CUDA ties a capture to its thread, and a
thread started inside a `with` block may inherit the context of its parent.
"""

import functools
import linecache
import os
import sys
import threading
import warnings
from types import FrameType, TracebackType
from typing import Any

import torch

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
IN_OPTIMIZERS = _TORCH + "optim" + os.sep
IN_MARKED = (_OURS + "breaks.py", "call")
"""File and name of what runs in place of a marked function."""
_STANDARD = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_TRITON = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(torch.__file__))), "triton") + os.sep
_INSTALLED = (_STANDARD + "site-packages" + os.sep, _STANDARD + "dist-packages" + os.sep)


@functools.cache
def is_users(filename: str) -> bool:
    """Whether code of this file is neither ours nor torch's, Triton's or the standard library's."""
    if filename.startswith(_STANDARD) and not filename.startswith(_INSTALLED):
        return False  # copy.deepcopy, contextlib
    if os.path.basename(filename) == "typing_extensions.py":
        return False  # torch deprecates with it
    return not filename.startswith((_OURS, _TORCH, _TRITON, "<"))


def users_frame() -> FrameType | None:
    """The innermost frame of the user's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def location() -> str:
    """`file:line` of the innermost frame outside of segcapture, torch, Triton and the standard library."""
    frame = users_frame()
    return "?" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the user's that `location` names."""
    frame = users_frame()
    if frame is None:
        warnings.warn(message, category, stacklevel=2)
        return
    names = frame.f_globals
    registry = names.setdefault("__warningregistry__", {})
    place = (frame.f_code.co_filename, frame.f_lineno)
    warnings.warn_explicit(message, category, *place, names.get("__name__"), registry)


def raised_at(traceback: TracebackType | None) -> str:
    """`file:line` and text of the user's line that an exception came from, or an empty string."""
    found = ""
    while traceback is not None:
        filename, line = traceback.tb_frame.f_code.co_filename, traceback.tb_lineno
        if is_users(filename):
            text = linecache.getline(filename, line).strip()
            found = f"{filename}:{line}" + (f" (`{text}`)" if text else "")
        traceback = traceback.tb_next
    return found


def short(place: str) -> str:
    """The location with the folders left out, for tables."""
    return os.path.basename(place)


class _State(threading.local):
    run: Any = None
    """The `recorder.Run` that this thread is inside of: a capture, or an eager run that is observed."""
    keep_alive: list[Any] | None = None
    """While this thread captures: dropped graphs whose destruction must wait."""


state = _State()
