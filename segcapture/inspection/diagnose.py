"""Which operators of a function a capture would refuse, all at once."""

import linecache
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import attrs
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from segcapture.backends.refusals import check_function, check_operator
from segcapture.errors import CaptureFailedError
from segcapture.inspection.observer import Observer
from segcapture.inspection.snapshot import tensors_of
from segcapture.operators.compiled import uncompiled
from segcapture.operators.composites import has_own_dispatch, is_composite, run_in_parts
from segcapture.source import location


@attrs.frozen
class RefusedOperator:
    """An operator that a capture would refuse at one line."""

    operator: str
    """`aten::nonzero`, or `Tensor.item` for a conversion to Python."""
    reason: str
    location: str
    """`file:line` of the user's code."""
    calls: int
    """How often it was called there."""

    @property
    def line(self) -> str:
        """The text of that line."""
        filename, _, number = self.location.rpartition(":")
        return linecache.getline(filename, int(number)).strip() if number.isdigit() else ""

    def __str__(self) -> str:
        times = f" ({self.calls} calls)" if self.calls > 1 else ""
        return f"{self.location}: `{self.operator}` {self.reason}{times}\n    {self.line}".rstrip()


class MissingBreaks(tuple[RefusedOperator, ...]):
    """What `find_breaks` found, in the order of first calls. Its text is the list for people."""

    breaks: int
    """Number of eager breaks that the run passed; what runs in them is not listed."""

    def __str__(self) -> str:
        passed = f"{self.breaks} eager break{'' if self.breaks == 1 else 's'} passed"
        if not self:
            return f"No operator needs an eager break ({passed})."
        places = len({found.location for found in self})
        head = (
            f"{len(self)} operator{'s' if len(self) > 1 else ''} at {places} line{'s' if places > 1 else ''} "
            f"cannot be captured ({passed}):"
        )
        advice = (
            "Move each into a function marked `@eager_break_during_capture` that returns tensors of fixed "
            "shapes, or keep the value on the device."
        )
        return "\n".join([head, *map(str, self), advice])

    __repr__ = __str__


def find_breaks(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> MissingBreaks:
    """Run `fn(*args, **kwargs)` without capturing, and list all that a capture would refuse.

    The run is an ordinary eager one, on CUDA or on the CPU: state advances once. Only the branches that
    it takes are seen. What runs inside of functions marked `@eager_break_during_capture` needs no break
    and is not listed.

    Returns:
        A tuple of `RefusedOperator`, in the order of first calls; `print` it.

    Raises:
        CaptureStateError: this thread is inside of a capture.
        Exception: what `fn` raises, with a note that lists what was found until then.
    """
    device = _device_of(fn, args, kwargs)
    finder = _Finder(device)
    observer = Observer(None, lambda name: True, finder)
    finder.observer = observer
    try:
        with observer.active(), finder.active():
            fn(*args, **kwargs)
    except Exception as error:
        if finder.found:
            error.add_note(f"segcapture: find_breaks had found until then: {finder.report()}")
        raise
    return finder.report()


def _device_of(fn: Any, args: Any, kwargs: Any) -> torch.device:
    """The accelerator where a tensor of the call is on one, or where there is one and no tensor is known."""
    devices = {t.device for _, t in tensors_of(fn, args, kwargs)}
    for device in devices:
        if device.type not in ("cpu", "meta"):
            return device
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if devices or accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


class _Finder:
    """Collects refusals instead of raising them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.found: dict[tuple[str, str, str], int] = {}
        self.observer: Any = None
        self._breaks = 0
        self._trusted = 0

    @property
    def off(self) -> bool:
        """Whether what runs now is in an eager break, or part of what has been judged already."""
        return self._trusted > 0 or bool(self.observer.inside_eager)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Watch the operators of this thread."""
        with ExitStack() as stack:
            for context in (uncompiled(), _Functions(self), _Operators(self)):
                stack.enter_context(context)
            yield

    @contextmanager
    def trusting(self) -> Iterator[None]:
        """Judge nothing in the block."""
        self._trusted += 1
        try:
            yield
        finally:
            self._trusted -= 1

    def refused(self, check: Callable[..., None], *given: Any) -> bool:
        """Run one of the tape's checks; whether it refused."""
        try:
            with self.trusting():
                check(*given)
        except CaptureFailedError as error:
            key = (error.operator, error.reason or str(error), location())
            self.found[key] = self.found.get(key, 0) + 1
            return True
        return False

    def report(self) -> MissingBreaks:
        """What was found."""
        made = MissingBreaks(
            RefusedOperator(operator, reason, place, calls)
            for (operator, reason, place), calls in self.found.items()
        )
        made.breaks = self._breaks
        return made

    def called(self, name: str, place: str, call: Any) -> None:
        """Count a break."""
        self._breaks += 1

    def returned(self, output: Any) -> None:
        """Nothing to see."""


class _Operators(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, finder: _Finder) -> None:
        super().__init__()
        self._finder = finder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if has_own_dispatch(types):
            return NotImplemented  # The operators that the subclass makes of this one come here.
        kwargs = kwargs or {}
        if is_composite(func):
            return run_in_parts(self, func, args, kwargs)
        if not self._finder.off and _touches(self._finder.device, args, kwargs):
            self._finder.refused(check_operator, func, args, kwargs)
        return func(*args, **kwargs)


class _Functions(TorchFunctionMode):
    """Sees the conversions to Python, which no operator shows."""

    def __init__(self, finder: _Finder) -> None:
        super().__init__()
        self._finder = finder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        finder = self._finder
        if finder.off:
            return func(*args, **kwargs)
        known = finder.refused(check_function, func, args, kwargs, finder.device)
        # The CPU kernel of one_hot checks the range of the classes on the host, the CUDA kernel does not.
        if known or (getattr(func, "__name__", "") == "one_hot" and _classes(args, kwargs) != -1):
            with finder.trusting():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _classes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[1] if len(args) > 1 else kwargs.get("num_classes", -1)


def _touches(device: torch.device, args: Any, kwargs: Any) -> bool:
    return any(
        leaf.device == device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
    )
