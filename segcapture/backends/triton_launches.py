"""Triton kernels on a tape: they bypass the dispatcher, so a launch is an error where it can be seen."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from segcapture.errors import CaptureFailedError
from segcapture.thread import location


@contextmanager
def launches_refused(unseen: Callable[[], bool]) -> Iterator[None]:
    """For the block, a Triton launch of this thread is an error if `unseen()`.

    Uses Triton's hook before each launch (`triton.knobs.runtime.launch_enter_hook`, Triton 3.4 and later;
    without it, or without Triton, this does nothing). A launch inside of an operator is seen: the tape runs
    the operator again.
    """
    runtime = _runtime()
    if runtime is None:
        yield
        return
    thread = threading.get_ident()

    def refuse(metadata: Any) -> None:
        if threading.get_ident() == thread and unseen():
            raise CaptureFailedError(
                f"The Triton kernel {_name_of(metadata)} was launched at {location()} past the dispatcher, "
                f"and debug mode records what the dispatcher sees: it would be missing at replay. Wrap the "
                f"launch in a `torch.library.triton_op` or `torch.library.custom_op`, or put it into a "
                f"function marked `@eager_break_during_capture`."
            )

        if alone is not None:
            alone(metadata)

    hook = runtime.launch_enter_hook
    is_chain = hasattr(hook, "add") and hasattr(hook, "remove")
    alone = None if is_chain else hook
    with ExitStack() as stack:
        if is_chain:
            hook.add(refuse)
            stack.callback(hook.remove, refuse)
        else:
            runtime.launch_enter_hook = refuse
            stack.callback(setattr, runtime, "launch_enter_hook", hook)
        yield


def _runtime() -> Any:
    """Triton's knobs, if there are any."""
    try:
        from triton import knobs

        return knobs.runtime if hasattr(knobs.runtime, "launch_enter_hook") else None
    except (ImportError, AttributeError):
        return None


def _name_of(metadata: Any) -> str:
    try:
        return f"`{metadata.get()['name']}`"
    except Exception:
        return "(of unknown name)"
