"""`check=True` at capture: what a capture cannot see by itself, watched operator by operator.

Tensors that leave an eager function by a side door, work on the wrong device or stream, and memory that
is gone when the capture ends. What is left to check at replay becomes a `Guard`.
"""

import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import attrs
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from segcapture.errors import CaptureFailedError
from segcapture.inspect.guard import Guard, Read, Use
from segcapture.operators.composites import names_of
from segcapture.operators.intercept import Invoke, watching
from segcapture.segments import Segment
from segcapture.tensors import storage_id
from segcapture.thread import location
from segcapture.trees import Place as Node

_ADVICE = "Return it from the function, or make it before the capture and write to it in place."
_COPIES = {"aten::copy_", "aten::_to_copy"}
_NO_WORK = {"aten::empty", "aten::empty_like", "aten::empty_permuted", "aten::empty_strided", "aten::resize_"}


class Place(Protocol):
    """What the checks ask of a backend."""

    device: torch.device

    def is_recording(self) -> bool:
        """Whether an operator that runs now would be part of the graph segment."""

    def tensors_kept(self, segments: Sequence[Segment]) -> Counter[int]:
        """How many tensors on each storage, by its identity, the segments themselves keep alive."""


@attrs.define(eq=False)
class _Made:
    """A storage that came up during the capture, and who made it."""

    use: Use
    by: str
    """`eager`, `graph` or `capture`."""
    segment: int
    name: str
    weak: StorageWeakRef
    """As long as it is held, no other storage can have the same identity."""


from segcapture.listener import Listener


class Checks(Listener):
    guard = None
    """The checks of one running capture."""

    def __init__(self, backend: Place) -> None:
        self._backend = backend
        self._made: dict[int, _Made] = {}
        self._reads: dict[tuple[int, int, int], Read] = {}
        self._now = ("capture", 0, "")
        self._launched: list[Use] = []

    def active(self) -> AbstractContextManager[None]:
        """Watch the operators of this thread, composite ones whole."""
        return watching(self._operator, in_parts=False)

    def enter(self, by: str, segment: int = 0, name: str = "") -> None:
        """From now on operators belong to a graph segment, an eager function, or to the capture itself."""
        self._now = (by, segment, name)

    def begin(self, segment: int) -> None:
        """A graph segment begins."""
        self._launched = []
        self.enter("graph", segment)

    def end(self, segment: int, recorded: bool) -> None:
        """It has ended. Raise CaptureFailedError if operators ran and nothing was recorded."""
        if self._launched and not recorded:
            raise CaptureFailedError(
                f"Graph segment {segment} is empty though {len(self._launched)} operators ran in it, the "
                f"first {self._launched[0]}: they were launched on another stream or device and would not "
                f"be replayed. Let the stream wait for the capture's first (`side.wait_stream(...)`)."
            )

    def _operator(self, func: Any, args: Any, kwargs: Any, call: Invoke) -> Any:
        given = self._before(func, args, kwargs)
        out = call()
        self._after(func, given, (args, kwargs), out)
        return out

    def _before(self, func: Any, args: Any, kwargs: Any) -> set[int]:
        """An operator is about to run. Returns the identities of the storages that it is given."""
        # A number or a list that becomes a tensor comes with its memory: to us there was none before.
        if names_of(func)[0] == "aten::lift_fresh":
            return set()
        given = [t for t in tree_leaves((args, kwargs)) if _is_strided(t)]
        if self._now[0] == "graph" and given:
            name = names_of(func)[0]
            for tensor in given:
                self._check_read(tensor, name, given)
        return {storage_id(t) for t in given}

    def _after(self, func: Any, given: set[int], args: Any, out: Any) -> None:
        """It has run."""
        leaves = [t for t in tree_leaves(out) if _is_strided(t)]
        fresh = [t for t in leaves if storage_id(t) not in given]
        use = Use(names_of(func)[0], location()) if fresh or self._now[0] == "graph" else None
        for tensor in fresh:
            assert use is not None
            weak = StorageWeakRef(tensor.untyped_storage())
            self._made[storage_id(tensor)] = _Made(use, *self._now, weak)
        if use is not None and self._now[0] == "graph":
            self._check_launch(func, use, fresh, [*leaves, *(t for t in tree_leaves(args) if _is_strided(t))])

    def _check_read(self, tensor: torch.Tensor, operator: str, given: list[torch.Tensor]) -> None:
        device = self._backend.device
        made = self._made.get(storage_id(tensor))
        if made is not None and made.by == "eager":
            raise _escape(f"`{operator}` at {location()} in graph segment {self._now[1]} reads", made)
        on_host = tensor.device.type == "cpu" and device.type != "cpu"
        if on_host:
            # A kernel takes a single number from the host by value, and keeps it.
            by_value = tensor.dim() == 0 and operator not in _COPIES
            internal = made is not None and made.by == "capture"
            if by_value or internal or not any(t.device == device for t in given):
                return
        elif made is not None or tensor.device != device:
            return
        key = (storage_id(tensor), id(tensor), self._now[1])
        if key not in self._reads:
            self._reads[key] = Read(
                Use(operator, location()),
                self._now[1],
                StorageWeakRef(tensor.untyped_storage()),
                weakref.ref(tensor),
                tensor.data_ptr(),
                _layout(tensor),
            )

    def _check_launch(
        self, func: Any, use: Use, fresh: list[torch.Tensor], touched: list[torch.Tensor]
    ) -> None:
        device = self._backend.device
        elsewhere = [t.device for t in touched if t.device.type == device.type and t.device != device]
        mine = [t for t in touched if t.device == device]
        if elsewhere and not mine:
            raise CaptureFailedError(
                f"{use} runs on {elsewhere[0]}, and graph segment {self._now[1]} is captured on {device}: it "
                f"would not be replayed. Move the tensors, or put it into a function marked "
                f"`@eager_break_during_capture`."
            )
        schema = getattr(func, "_schema", None)
        works = any(t.numel() for t in fresh) or (schema is not None and schema.is_mutable)
        quiet = use.operator in _NO_WORK or torch.Tag.inplace_view in getattr(func, "tags", ())
        if not works or quiet or not any(t.numel() for t in mine):
            return
        if not self._backend.is_recording():
            raise CaptureFailedError(
                f"{use} runs on a stream that is not part of the capture, so graph segment {self._now[1]} "
                f"does not contain it: it would not be replayed. Let the stream wait for the capture's first "
                f"(`side.wait_stream(torch.cuda.current_stream())`)."
            )
        self._launched.append(use)

    def given(self, where: str, arguments: Sequence[torch.Tensor]) -> None:
        """An eager function is called. Raise CaptureFailedError if another one let an argument escape."""
        for tensor in arguments:
            made = self._made.get(storage_id(tensor)) if _is_strided(tensor) else None
            if made is not None and made.by == "eager":
                raise _escape(f"{where} is given", made)

    def returned(self, nodes: list[Node]) -> None:
        """An eager function has returned these, which therefore do not escape."""
        for node in nodes:
            if _is_strided(node.value):
                made = self._made.get(storage_id(node.value))
                if made is not None:
                    made.by = "capture"
        self.enter("capture")

    def finish(self, segments: Sequence[Segment]) -> "Guard":
        """The capture is complete. Returns what its replays must check.

        Raises:
            CaptureFailedError: a replay would find something now.
        """
        self._made.clear()
        guard = Guard(list(self._reads.values()), segments, self._backend.tensors_kept(segments))
        for read in guard.reads:
            trouble = guard.trouble(read)
            if trouble:
                raise CaptureFailedError(
                    f"{read.use} in graph segment {read.segment} reads {read.layout}, which {trouble} "
                    f"began: each replay would read freed memory. Keep the tensor as long as the capture."
                )
        return guard


def _escape(reader: str, made: _Made) -> CaptureFailedError:
    return CaptureFailedError(
        f"{reader} a tensor that eager segment {made.segment} (`{made.name}`) made ({made.use}) and did not "
        f"return: a replay would read the one that the capture made, not a new one. {_ADVICE}"
    )


def _is_strided(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _layout(tensor: torch.Tensor) -> str:
    kind = "a parameter" if isinstance(tensor, torch.nn.Parameter) else "a tensor"
    if torch.nn.parameter.is_lazy(tensor):
        return f"{kind} that is not initialised: warm up before the capture"
    return f"{kind} ({str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device})"
