"""What to do about a line that cannot be captured, by the functions that it was reached through."""

import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType, TracebackType
from weakref import WeakSet

import torch

from segcapture.thread import IN_MARKED, IN_OPTIMIZERS, is_users, state

BREAK = (
    "Move it, with what uses its value, into a function marked `@eager_break_during_capture` that returns "
    "tensors of fixed shapes."
)
disabled: WeakSet[CodeType] = WeakSet()
"""Of functions that are marked with `enable=False`."""


def advice_here() -> str:
    """For the line that runs now."""
    return _advice(_outwards(sys._getframe(1)))


def advice_at(traceback: TracebackType | None) -> str:
    """For the line that an exception came from."""
    frames = []
    while traceback is not None:
        frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
    return _advice(reversed(frames))


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _advice(frames: Iterable[FrameType]) -> str:
    """Name the function that contains the line, and its caller: which returns tensors alone is not known."""
    functions: list[FrameType] = []
    optimizer = ""
    for frame in frames:
        code = frame.f_code
        if state.run is not None and code is state.run.entered:
            break
        if (code.co_filename, code.co_name) == IN_MARKED:
            return _why_no_break(frame.f_locals["break_name"])
        if code in disabled:
            return f"`{_name(code)}` is marked with `enable=False`, and so captured: enable it."
        if is_users(code.co_filename) and not code.co_name.startswith("<"):
            functions.append(frame)
        elif not functions and not optimizer and code.co_filename.startswith(IN_OPTIMIZERS):
            optimizer = _of_optimizer(frame.f_locals.get("self"))
    if optimizer:
        return optimizer
    text = BREAK
    if state.run is not None and state.run.full:
        text += " With mode='full' marked functions are captured too: leave it out."
    if functions:
        name = _name(functions[0].f_code)
        text += f" `{name}` is one if it returns no bool or None for its caller to branch on."
    if len(functions) > 1:
        caller = functions[1]
        place = f"{caller.f_code.co_filename}:{caller.f_lineno}"
        text = f"{text[:-1]}; else mark the caller, `{_name(caller.f_code)}` ({place})."
    return text


def _why_no_break(name: str) -> str:
    cause = "`breaks=` does not name it: add it there"
    if state.run is not None and state.run.full:
        cause = "mode='full' captures marked functions too: leave the mode out"
    return f"`{name}` is marked, but {cause}."


def _of_optimizer(optimizer: object) -> str:
    """What lets torch capture it: `capturable`. The CPU takes that with `fused` alone."""
    if not isinstance(optimizer, torch.optim.Optimizer) or "capturable" not in optimizer.defaults:
        return ""
    options = "fused=True, capturable=True" if "fused" in optimizer.defaults else "capturable=True"
    name = type(optimizer).__name__
    return f"{name} counts its steps on the host: make it with `{options}`, or call `step()` in a break."


def _name(code: CodeType) -> str:
    return code.co_qualname.rpartition("<locals>.")[2]
