"""Turns of served functions, which have locks of their own besides those of lanes."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_turns: dict[tuple[int, int | None], threading.RLock] = {}


def turns(
    device: torch.device | None, stream: torch.cuda.Stream | None, *, emulated: bool
) -> Callable[[], AbstractContextManager[Any]]:
    """What served functions enter before their own locks: those on one lane take turns anyway.

    Else two that call each other from two threads, one in an eager function of the other, would wait for each
    other for ever: one for the lane, and one for the other's lock.
    """
    if emulated or not torch.cuda.is_available() or (device is not None and device.type == "cpu"):
        return nullcontext

    def turn() -> AbstractContextManager[Any]:
        index = torch.cuda.current_device() if device is None or device.index is None else device.index
        key = (index, None if stream is None else stream.cuda_stream)
        return _turns.get(key) or _turns.setdefault(key, threading.RLock())

    return turn
