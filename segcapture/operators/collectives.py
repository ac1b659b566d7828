"""Collectives of torch.distributed as operators: what to wait for before others may read their results.

A collective returns before it is done. Each has its own way to wait: the `Work` that a `c10d` operator
returns, and `wait_tensor` for the results of a functional collective.
"""

import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from segcapture.operators.composites import names_of, tensor_leaves

# They move no data. The first makes a tensor that waits when it is first used, the second waits.
_MARKS = {"_c10d_functional::_wrap_tensor_autograd", "_c10d_functional::wait_tensor"}
LOOK_EVERY, _LONGEST = 0.0005, 0.05
"""Seconds for a thread to drop what it is done with."""


def is_collective(func: Any) -> bool:
    """Whether an operator talks to other ranks. The schemas of these do not say what they write."""
    return func.namespace in ("c10d", "_c10d_functional") and not is_mark(func)


def is_mark(func: Any) -> bool:
    """Whether an operator says that a functional collective is to be waited for."""
    return names_of(func)[0] in _MARKS


def works_of(out: Any) -> list[Any]:
    """Each Work that a collective returned: none where NCCL ran on the current stream."""
    works = [_unboxed(leaf) for leaf in tree_leaves(out) if isinstance(leaf, torch.ScriptObject)]
    return [work for work in works if work is not None]


class Collective:
    """A collective that is called, and waited for; then it can be called again."""

    def __init__(self, func: Any) -> None:
        self.func = func
        self.has_work = func.namespace == "c10d"
        """Whether it returns a Work, for which the caller waits, and writes to the caller's tensors."""
        self._works: list[Any] = []
        """What nobody has waited for yet."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it, and wait for it if nobody else can; returns what the operator returns."""
        out = self.func(*args, **kwargs)
        self._works = works_of(out)
        if not self.has_work:
            for tensor in tensor_leaves(out):
                torch.ops._c10d_functional.wait_tensor(tensor)
        return out

    def wait(self) -> bool:
        """Let the current stream, or the host where there is none, wait for it; whether anybody had to.

        Once: gloo would take a second time for another transfer.
        """
        works, self._works = self._works, []
        for work in works:
            work.wait()
        return bool(works)


def handle(out: Any, wait: Callable[[], object]) -> Any:
    """What a collective returned, with a Work for its caller that calls `wait` instead of waiting.

    The original is waited for by others. Waiting for it a second time is no repetition: gloo's `send` then
    waits for another send, and NCCL waits for an event, which in a capture must be one of that capture.
    """
    from torch._C._distributed_c10d import PythonCallbackWork

    def call(timeout: Any) -> bool:
        wait()
        return True

    def replaced(leaf: torch.ScriptObject) -> Any:
        return leaf if _unboxed(leaf) is None else PythonCallbackWork(call).boxed()

    return tree_map_only(torch.ScriptObject, replaced, out)


def record_collective(record: Callable[..., Any], func: Any, args: Any, kwargs: Any, name: str) -> Any:
    """Make a collective an eager segment, which ends when the collective does.

    Returns:
        What the operator returned. The segment itself returns nothing where results are the caller's
        tensors: a Work is another one each time.
    """
    outputs: list[Any] | None = []

    def call(*args: Any, **kwargs: Any) -> Any:
        collective = Collective(func)
        out = collective(*args, **kwargs)
        collective.wait()
        if not collective.has_work:
            return out
        if outputs is not None:
            outputs.append(handle(out, lambda: None))
            for work in works_of(outputs):
                work.wait()  # so that is_completed() says so: the segment has waited
        return None

    result = record(call, args, kwargs, name, below_autograd=True)
    done, outputs = outputs, None
    return done[0] if done else result


def wait_until_returned(tensors_of: "list[weakref.ref[torch.Tensor]]") -> None:
    """Wait until threads have let go of what an eager function gave to collectives.

    A thread of gloo still holds the tensors for a moment after the wait has ended, and would count as an
    owner of an output that nobody else has. Not for long, since somebody else may hold one for good.
    """
    deadline = time.monotonic() + _LONGEST
    before: list[tuple[int, int]] = []
    while time.monotonic() < deadline:
        tensors = [tensor for reference in tensors_of if (tensor := reference()) is not None]
        # Owners in C++, and of the Python object, for which such a thread may still wait for the GIL.
        now = [(int(getattr(t, "_use_count")()), sys.getrefcount(t)) for t in tensors]  # noqa: B009
        if now == before and all(owners == 1 for owners, _ in now):
            return
        del tensors
        time.sleep(LOOK_EVERY)
        before = now


def _unboxed(leaf: torch.ScriptObject) -> Any:
    """The Work; None where NCCL made none, since the call itself ran on the current stream."""
    from torch._C._distributed_c10d import Work

    return Work.unbox(leaf)
