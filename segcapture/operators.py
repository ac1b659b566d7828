"""`break_on`: operators that become eager segments though nobody decorated them."""

import difflib
import fnmatch
import functools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from segcapture.errors import CaptureFailedError

if TYPE_CHECKING:
    from segcapture.recording import Recording


class OperatorBreaks:
    """The entries of `break_on`, and which of them matched."""

    def __init__(self, entries: Sequence[Any]) -> None:
        if isinstance(entries, str):
            raise ValueError(f"break_on takes a sequence of operators, got the string {entries!r}")
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
        # The function mode sees composite operators before they decompose, the dispatch mode the rest.
        with _FunctionBreaks(self, recording), _DispatchBreaks(self, recording):
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
            wanted = pattern.split("::")[-1].split(".")[0]
            names = {name.split("::")[-1]: name for name in sorted(self._seen)}
            near = [names[n] for n in difflib.get_close_matches(wanted, names, n=5, cutoff=0.5)]
            near += [name for n, name in names.items() if wanted.strip("*_") in n and name not in near]
            parts.append(f"{pattern!r} (near names: {', '.join(near) or 'none'})")
        raise CaptureFailedError(
            f"break_on matched no call for {'; '.join(parts)}. The operator was captured under another "
            f"name or not called at all: correct the entry, or take it out."
        )

    def warn_if_compiled(self) -> None:
        """Say once that compiled regions run operator by operator under `break_on`."""
        from torch._C._dynamo import eval_frame

        if not self._warned and callable(eval_frame.get_eval_frame_callback()):
            self._warned = True
            warnings.warn(
                "break_on watches each operator, and torch.compile does not compile while something does: "
                "the compiled region runs operator by operator in this capture. Mark a function with "
                "@eager_break_during_capture instead of break_on to keep it compiled.",
                UserWarning,
                stacklevel=4,
            )


class _DispatchBreaks(TorchDispatchMode):
    def __init__(self, breaks: OperatorBreaks, recording: "Recording") -> None:
        super().__init__()
        self._break_on, self._recording = breaks, recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._recording.inside_eager:
            return func(*args, **kwargs)
        self._break_on.warn_if_compiled()
        schema = func._schema
        name = self._break_on.match(schema.name, schema.overload_name or "default")
        if name is None:
            return func(*args, **kwargs)
        return self._recording.record_break(func, tuple(args), kwargs, name, below_autograd=True)


class _FunctionBreaks(TorchFunctionMode):
    def __init__(self, breaks: OperatorBreaks, recording: "Recording") -> None:
        super().__init__()
        self._break_on, self._recording = breaks, recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = None if self._recording.inside_eager else _composite_packet(func)
        if packet is not None:
            name = self._break_on.match(packet, "default")
            if name is not None:
                return self._recording.record_break(func, tuple(args), kwargs, name)
        return func(*args, **kwargs)


@functools.lru_cache(maxsize=4096)
def _composite_packet(func: Any) -> str | None:
    """Qualified name of the operator that a torch function calls, if it decomposes on its way down."""
    if isinstance(func, torch._ops.OpOverload):
        packet: Any = func.overloadpacket
    elif isinstance(func, torch._ops.OpOverloadPacket):
        packet = func
    else:
        packet = getattr(torch.ops.aten, getattr(func, "__name__", "").strip("_") or "?", None)
    if packet is None:
        return None
    name: str = packet._qualified_op_name
    composite = any(
        torch._C._dispatch_has_kernel_for_dispatch_key(
            name if overload == "default" else f"{name}.{overload}", "CompositeImplicitAutograd"
        )
        for overload in packet.overloads()
    )
    return name if composite else None


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
