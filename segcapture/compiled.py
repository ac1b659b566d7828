"""torch.compile while something watches operators: Dynamo does not compile then, and says so in errors.

Told before that nothing is to be compiled, it runs the code as it is written, `fullgraph=True` too.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_lock = threading.Lock()
_watchers = 0
_stance: Any = None


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


def inside_compiled_region() -> bool:
    """Whether the caller was called from a function that torch.compile has wrapped."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "compile_wrapper" and code.co_filename.endswith("eval_frame.py"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
