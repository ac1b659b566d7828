"""torch.compile while something watches operators: Dynamo does not compile then, and says so in errors.

Told before that nothing is to be compiled, it runs the code as it is written, `fullgraph=True` too.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from segcapture.errors import CaptureFailedError
from segcapture.thread import location


class _Shared:
    """A change to the whole process: the first one in makes it, and the last one out takes it back."""

    def __init__(self, change: Callable[[], AbstractContextManager[Any]]) -> None:
        self._change, self._users, self._lock = change, 0, threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            if self._users == 0:
                self._changed = self._change()
                self._changed.__enter__()
            self._users += 1

    def __exit__(self, *failure: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._changed.__exit__(None, None, None)


_no_compiling = _Shared(lambda: torch.compiler.set_stance("force_eager"))


def uncompiled() -> AbstractContextManager[None]:
    """Run compiled regions as plain Python for the block. The user's stance comes back after it."""
    # Not imported: nothing is compiled, and the import takes seconds.
    return _no_compiling if "torch._dynamo" in sys.modules else nullcontext()


_refusing: dict[int, Callable[[], bool]] = {}


@contextmanager
def kernels_refused(unseen: Callable[[], bool]) -> Iterator[None]:
    """For the block, code that Inductor compiled is an error in this thread if `unseen()`.

    `uncompiled` keeps it from running, but for the backward of a forward that ran compiled before: its
    kernels are no operators. Inductor has no hook, so the call of its graphs is replaced meanwhile.
    """
    thread = threading.get_ident()
    with _asked_before if "torch._inductor.output_code" in sys.modules else nullcontext():
        _refusing[thread] = unseen
        try:
            yield
        finally:
            del _refusing[thread]


@contextmanager
def _calls_replaced() -> Iterator[None]:
    code: Any = sys.modules["torch._inductor.output_code"].CompiledFxGraph
    original = code.__call__

    def call(graph: Any, inputs: Any) -> Any:
        unseen = _refusing.get(threading.get_ident())
        if unseen is not None and unseen():
            raise CaptureFailedError(
                f"Kernels that torch.compile made ran at {location()}: the backward of a forward that ran "
                f"before the capture, most likely. They are no operators, and the tape would miss them at "
                f"replay. Capture the forward too, or call it in a function marked "
                f"`@eager_break_during_capture`."
            )
        return original(graph, inputs)

    code.__call__ = call
    try:
        yield
    finally:
        code.__call__ = original


_asked_before = _Shared(_calls_replaced)


def inside_compiled_region() -> bool:
    """Whether the caller was called from a function that torch.compile has wrapped."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "compile_wrapper" and code.co_filename.endswith("eval_frame.py"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
