"""`break_on`: operators that become eager segments though nobody decorated them."""

import difflib
import fnmatch
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from typing import Any, Protocol

import torch
from torch._ops import OpOverload, OpOverloadPacket

from segcapture.errors import CaptureFailedError
from segcapture.operators.collectives import is_collective, is_mark, record_collective
from segcapture.operators.compiled import inside_compiled_region
from segcapture.operators.composites import as_called, is_composite, names_of, tensor_leaves
from segcapture.operators.intercept import Invoke, watching
from segcapture.thread import location, warn


class Breaking(Protocol):
    """A run of the user's code in which a call can become an eager segment."""

    inside_eager: bool
    """Whether an eager function is running right now, so that nothing breaks."""

    def record_break(
        self, fn: Any, args: Any, kwargs: Any, name: str, /, *, below_autograd: bool = False
    ) -> Any:
        """Make a call an eager segment; `below_autograd` if autograd and autocast have done their part."""


class OperatorBreaks:
    """The entries of `break_on`, and which of them matched."""

    def __init__(self, entries: Sequence[Any]) -> None:
        # A packet is iterable: over the names of its overloads.
        if isinstance(entries, str | OpOverloadPacket) or not isinstance(entries, Iterable):
            raise ValueError(f"break_on takes a sequence of operators, got {entries!r}")
        self._patterns = {_pattern(entry) for entry in entries}
        self._unmatched: set[str] = set()
        self._seen: set[str] = set()
        self._warned = False

    def active(self, run: Breaking) -> AbstractContextManager[None]:
        """Watch the calls of this thread for the block."""
        self._unmatched, self._seen, self._warned = set(self._patterns), set(), False
        if not self._patterns:
            return nullcontext()
        return watching(partial(self._operator, run), partial(self._function, run))

    def check_all_matched(self) -> None:
        """Raise CaptureFailedError if an entry matched no call, with the near names that were seen."""
        parts = []
        for pattern in sorted(self._unmatched):
            wanted = pattern.split("::")[-1].split(".")[0].strip("*_")
            names = {name.split("::")[-1]: name for name in sorted(self._seen)} if wanted else {}
            near = [names[n] for n in difflib.get_close_matches(wanted, names, n=5, cutoff=0.5)]
            near += [name for n, name in names.items() if wanted in n and name not in near]
            parts.append(f"{pattern!r} (near names: {', '.join(near) or 'none'})")
        if parts:
            raise CaptureFailedError(
                f"break_on matched no call for {'; '.join(parts)}. It was captured under another name, "
                f"called in an eager break alone, or not called: correct the entry, or take it out."
            )

    def _match(self, func: OpOverload) -> str | None:
        """The name to break under, or None."""
        packet, overload = names_of(func)
        self._seen.add(packet)
        names = [packet, f"{packet}.{overload}"]
        matched = {pattern for pattern in self._patterns if fnmatch.filter(names, pattern)}
        self._unmatched -= matched
        return packet if matched else None

    def _operator(self, run: Breaking, func: Any, args: Any, kwargs: Any, call: Invoke) -> Any:
        name = None
        if not run.inside_eager:
            self._warn_if_compiled()
            name = self._match(func)
        if name is None or is_mark(func):
            return call()
        if is_composite(func):
            with as_called(func):  # not below autocast: that sees the parts
                return run.record_break(func, args, kwargs, name)
        if is_collective(func):
            return record_collective(run.record_break, func, args, kwargs, name)
        return run.record_break(func, args, kwargs, name, below_autograd=True)

    def _function(self, run: Breaking, func: Any, args: Any, kwargs: Any, call: Invoke) -> Any:
        """Keep autograd from opening composite operators before `_operator` has seen them."""
        if run.inside_eager or func is torch.Tensor.backward:
            return call()
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensor_leaves(args, kwargs)):
            self._refuse_composite(func)
            return call()
        with torch._C._AutoDispatchBelowAutograd():
            return call()

    def _refuse_composite(self, func: Any) -> None:
        """An eager segment is opaque to autograd, and below it the operator would be in parts."""
        composite = _composite(func)
        name = self._match(composite) if composite is not None else None
        if name is not None:
            raise CaptureFailedError(
                f"`{name}`, called at {location()}, is named in break_on and has an argument that requires "
                f"grad, and an eager break is opaque to autograd. Capture under `torch.no_grad()` or "
                f"`torch.inference_mode()`; or name the operators that it consists of, which lie below "
                f"autograd; or call it in the `forward` and `backward` of a `torch.autograd.Function`.",
                operator=name,
            )

    def _warn_if_compiled(self) -> None:
        """Say once that compiled regions run operator by operator under `break_on`."""
        if not self._warned and inside_compiled_region():
            self._warned = True
            warn(
                f"break_on watches each operator, and torch.compile does not compile meanwhile: the region "
                f"that was called at {location()} runs operator by operator in this capture. Mark a function "
                f"with @eager_break_during_capture instead, to keep it compiled."
            )


@lru_cache(maxsize=4096)
def _composite(func: Any) -> OpOverload | None:
    """The composite operator that a function of torch calls, if it calls one."""
    if isinstance(func, OpOverload):
        return func if is_composite(func) else None
    name = getattr(func, "__name__", "").strip("_") or "?"
    packet = func if isinstance(func, OpOverloadPacket) else getattr(torch.ops.aten, name, None)
    overloads = [getattr(packet, overload) for overload in packet.overloads()] if packet is not None else []
    return next(filter(is_composite, overloads), None)


def _pattern(entry: Any) -> str:
    """`ns::op`, `ns::op.overload` or a glob, from anything that names an operator."""
    if isinstance(entry, OpOverload):
        return ".".join(names_of(entry))
    if isinstance(entry, OpOverloadPacket):
        return str(entry._qualified_op_name)
    if not isinstance(entry, str) or not entry:
        raise ValueError(
            f"break_on takes operators (torch.ops.ns.op) or names ('ns::op', 'ns.op.overload', globs), "
            f"got {entry!r}"
        )
    if "::" in entry:
        return entry
    namespace, dot, rest = entry.partition(".")
    return f"{namespace}::{rest}" if dot else f"*::{entry}"
