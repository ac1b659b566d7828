"""`break_on`: operators that become eager segments though nobody decorated them."""

import difflib
import fnmatch
import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from segcapture.errors import CaptureFailedError
from segcapture.operators.collectives import is_collective, is_mark, record_collective
from segcapture.operators.compiled import inside_compiled_region, uncompiled
from segcapture.operators.composites import as_called, has_own_dispatch, is_composite, names_of, run_in_parts
from segcapture.source import location, warn

if TYPE_CHECKING:
    from segcapture.recording import Recording


class OperatorBreaks:
    """The entries of `break_on`, and which of them matched."""

    def __init__(self, entries: Sequence[Any]) -> None:
        # A packet is iterable: over the names of its overloads.
        if isinstance(entries, str | torch._ops.OpOverloadPacket) or not isinstance(entries, Iterable):
            raise ValueError(f"break_on takes a sequence of operators, got {entries!r}")
        self._patterns = [_pattern(entry) for entry in entries]
        self._reset()

    def _reset(self) -> None:
        self._unmatched = set(self._patterns)
        self._seen: set[str] = set()
        self._warned = False

    @contextmanager
    def active(self, recording: "Recording") -> Iterator[None]:
        """Watch the calls of this thread for the block."""
        self._reset()
        if not self._patterns:
            yield
            return
        with uncompiled(), _FunctionBreaks(self, recording), _DispatchBreaks(self, recording):
            yield

    def match(self, packet: str, overload: str) -> str | None:
        """The name to break under, or None."""
        self._seen.add(packet)
        found = None
        for pattern in self._patterns:
            if any(fnmatch.fnmatchcase(name, pattern) for name in (packet, f"{packet}.{overload}")):
                self._unmatched.discard(pattern)
                found = packet
        return found

    def check_all_matched(self) -> None:
        """Raise CaptureFailedError if an entry matched no call, with the near names that were seen."""
        if not self._unmatched:
            return
        parts = []
        for pattern in sorted(self._unmatched):
            wanted = pattern.split("::")[-1].split(".")[0].strip("*_")
            names = {name.split("::")[-1]: name for name in sorted(self._seen)} if wanted else {}
            near = [names[n] for n in difflib.get_close_matches(wanted, names, n=5, cutoff=0.5)]
            near += [name for n, name in names.items() if wanted in n and name not in near]
            parts.append(f"{pattern!r} (near names: {', '.join(near) or 'none'})")
        raise CaptureFailedError(
            f"break_on matched no call for {'; '.join(parts)}. The operator was captured under another "
            f"name, called in an eager break alone, or not called at all: correct the entry, or take it out."
        )

    def warn_if_compiled(self) -> None:
        """Say once that compiled regions run operator by operator under `break_on`."""
        if not self._warned and inside_compiled_region():
            self._warned = True
            warn(
                f"break_on watches each operator, and torch.compile does not compile while something does: "
                f"the compiled region that was called at {location()} runs operator by operator in this "
                f"capture. Mark a function with @eager_break_during_capture instead of break_on to keep it "
                f"compiled.",
                UserWarning,
            )


class _DispatchBreaks(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, breaks: OperatorBreaks, recording: "Recording") -> None:
        super().__init__()
        self._break_on, self._recording = breaks, recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if has_own_dispatch(types):
            return NotImplemented  # The operators that the subclass makes of this one come here.
        kwargs = kwargs or {}
        name = None
        if not self._recording.inside_eager:
            self._break_on.warn_if_compiled()
            name = self._break_on.match(*names_of(func))
        if not is_composite(func):
            if name is None or is_mark(func):
                return func(*args, **kwargs)
            if is_collective(func):
                return record_collective(self._recording, func, tuple(args), kwargs, name)
            return self._recording.record_break(func, tuple(args), kwargs, name, below_autograd=True)
        if name is None:
            return run_in_parts(self, func, args, kwargs)
        with as_called(func):  # not below autocast: that sees the parts
            return self._recording.record_break(func, tuple(args), kwargs, name)


class _FunctionBreaks(TorchFunctionMode):
    """Keeps autograd from opening composite operators before the dispatch mode has seen them."""

    def __init__(self, breaks: OperatorBreaks, recording: "Recording") -> None:
        super().__init__()
        self._break_on, self._recording = breaks, recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._recording.inside_eager or func is torch.Tensor.backward:
            return func(*args, **kwargs)
        if torch.is_grad_enabled() and _require_grad(args, kwargs):
            self._refuse_composite(func)
            return func(*args, **kwargs)
        with torch._C._AutoDispatchBelowAutograd():
            return func(*args, **kwargs)

    def _refuse_composite(self, func: Any) -> None:
        """An eager segment is opaque to autograd, and below it the operator would be in parts."""
        packet, overload = _composite_names(func)
        name = self._break_on.match(packet, overload) if packet else None
        if name is not None:
            raise CaptureFailedError(
                f"`{name}`, called at {location()}, is named in break_on and has an argument that requires "
                f"grad. An eager break is opaque to autograd. Capture under `torch.no_grad()` or "
                f"`torch.inference_mode()`; or name the operators that `{name}` consists of, which lie "
                f"below autograd; or call it in the `forward` and `backward` of a "
                f"`torch.autograd.Function`."
            )


def _require_grad(args: Any, kwargs: Any) -> bool:
    return any(t.requires_grad for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))


@functools.lru_cache(maxsize=4096)
def _composite_names(func: Any) -> tuple[str, str]:
    """Names of the composite operator that a torch function calls; empty if it calls none."""
    if isinstance(func, torch._ops.OpOverload):
        overloads = [func]
    else:
        packet = func
        if not isinstance(func, torch._ops.OpOverloadPacket):
            packet = getattr(torch.ops.aten, getattr(func, "__name__", "").strip("_") or "?", None)
        if packet is None:
            return "", ""
        overloads = [getattr(packet, name) for name in packet.overloads()]
    composite = [names_of(overload) for overload in overloads if is_composite(overload)]
    return composite[0] if composite else ("", "")


def _pattern(entry: Any) -> str:
    """`ns::op`, `ns::op.overload` or a glob, from anything that names an operator."""
    if isinstance(entry, torch._ops.OpOverload):
        return f"{entry._schema.name}.{entry._schema.overload_name or 'default'}"
    if isinstance(entry, torch._ops.OpOverloadPacket):
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
