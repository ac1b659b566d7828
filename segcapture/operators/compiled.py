"""torch.compile while something watches operators: Dynamo does not compile then, and says so in errors.

Told before that nothing is to be compiled, it runs the code as it is written, `fullgraph=True` too.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from segcapture.errors import CaptureFailedError
from segcapture.source import location

_lock = threading.Lock()
_watchers = 0
_stance: Any = None
_refusing: dict[int, Callable[[], bool]] = {}
_original_call: Any = None


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled regions as plain Python for the block.

    The stance is one for the process, so captures of several threads count, and the last one out puts
    the user's back.
    """
    global _stance, _watchers
    # Not imported: nothing is compiled, and the import takes seconds.
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with _lock:
        if _watchers == 0:
            _stance = torch.compiler.set_stance("force_eager")
        _watchers += 1
    try:
        yield
    finally:
        with _lock:
            _watchers -= 1
            if _watchers == 0:
                _stance.__exit__(None, None, None)
                _stance = None


@contextmanager
def kernels_refused(unseen: Callable[[], bool]) -> Iterator[None]:
    """For the block, code that Inductor compiled is an error in this thread if `unseen()`.

    `uncompiled` keeps it from running, but for the backward of a forward that ran compiled before: its
    kernels are no operators. Inductor has no hook, so the call of its graphs is replaced meanwhile.
    """
    global _original_call
    code: Any = getattr(sys.modules.get("torch._inductor.output_code"), "CompiledFxGraph", None)
    if code is None:
        yield
        return
    thread = threading.get_ident()
    with _lock:
        if not _refusing:
            _original_call = code.__call__
            code.__call__ = _call_or_refuse
        _refusing[thread] = unseen
    try:
        yield
    finally:
        with _lock:
            del _refusing[thread]
            if not _refusing:
                code.__call__ = _original_call


def _call_or_refuse(graph: Any, inputs: Any) -> Any:
    unseen = _refusing.get(threading.get_ident())
    if unseen is not None and unseen():
        raise CaptureFailedError(
            f"Kernels that torch.compile made ran at {location()}: the backward of a forward that ran before "
            f"the capture, most likely. They are no operators, and the tape would miss them at replay. "
            f"Capture the forward too, or call it in a function marked `@eager_break_during_capture`."
        )
    return _original_call(graph, inputs)


def inside_compiled_region() -> bool:
    """Whether the caller was called from a function that torch.compile has wrapped."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "compile_wrapper" and code.co_filename.endswith("eval_frame.py"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
