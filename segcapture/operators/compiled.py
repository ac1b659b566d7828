"""What compiled code does past the dispatcher: kernels that no mode sees, refused where they can be seen."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from segcapture.errors import CaptureFailedError
from segcapture.operators.intercept import replaced
from segcapture.thread import location


@contextmanager
def kernels_refused(unseen: Callable[[], bool], *, triton: bool) -> Iterator[None]:
    """For the block, a launch of compiled kernels in this thread is an error if `unseen()`.

    A launch inside of an operator is seen: the tape runs the operator again. Compiled regions run as plain
    code under a mode, but for the backward of a forward that ran compiled before, so what calls Inductor's
    graphs is replaced. `triton` kernels are seen by Triton's hook before each launch
    (`triton.knobs.runtime.launch_enter_hook`, a chain from Triton 3.5 on).
    """
    thread = threading.get_ident()

    def check(kernel: str, way: str) -> None:
        if threading.get_ident() == thread and unseen():
            raise CaptureFailedError(
                f"{kernel} was launched at {location()} past the dispatcher, and the tape records what the "
                f"dispatcher sees: it would be missing at replay. {way}, or put the call into a function "
                f"marked `@eager_break_during_capture`."
            )

    def run_graph(original: Any, *args: Any) -> Any:
        check("A kernel of torch.compile, of a backward most likely,", "Capture the forward too")
        return original(*args)

    def launch(metadata: Any) -> None:
        check(f"The Triton kernel {_name_of(metadata)}", "Wrap it in a `torch.library.triton_op`")

    inductor = sys.modules.get("torch._inductor.output_code")
    hooks = _triton_hooks() if triton else None
    with ExitStack() as stack:
        if inductor is not None:
            stack.enter_context(replaced(inductor.CompiledFxGraph, "__call__", run_graph))
        if hooks is not None:
            hooks.add(launch)
            stack.callback(hooks.remove, launch)
        yield


def inside_compiled_region() -> bool:
    """Whether the caller was called from a function that torch.compile has wrapped."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "compile_wrapper" and code.co_filename.endswith("eval_frame.py"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _triton_hooks() -> Any:
    """What Triton calls before each launch, if there is a Triton."""
    try:
        from triton import knobs
    except ImportError:
        return None
    hooks = knobs.runtime.launch_enter_hook
    return hooks if hasattr(hooks, "add") else None


def _name_of(metadata: Any) -> str:
    try:
        return f"`{metadata.get()['name']}`"
    except Exception:
        return "(of unknown name)"
