"""Which operators of a function a capture would refuse, all at once."""

import linecache
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import attrs
import torch

from segcapture.arguments import Call
from segcapture.backends.refusals import check_function, check_operator, is_stricter_on_cpu
from segcapture.backends.tape import Draws, Tape
from segcapture.errors import CaptureFailedError
from segcapture.inspect.snapshot import Search
from segcapture.listener import Listener
from segcapture.operators.break_on import OperatorBreaks
from segcapture.operators.composites import is_composite, tensor_leaves
from segcapture.operators.intercept import Invoke, aside, capture_reported, watching
from segcapture.recorder import Options, Run
from segcapture.thread import location, state
from segcapture.trees import Place


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
    finder = _Finder(_device_of(fn, args, kwargs))
    run = Run(None, Options(None, OperatorBreaks(()), None, execute=True, full=False), [finder])
    run.enter()
    try:
        with capture_reported(lambda: not run.inside_eager):
            fn(*args, **kwargs)
        finder.check_seed()
    except Exception as error:
        if finder.found:
            error.add_note(f"segcapture: find_breaks had found until then: {finder.report()}")
        raise
    finally:
        run.leave()
    return finder.report()


def _device_of(fn: Any, args: Any, kwargs: Any) -> torch.device:
    """The accelerator where a tensor of the call is on one, or where there is one and no tensor is known."""
    slots = Search(fn, args, kwargs).slots
    devices = {slot.value.device for slot in slots if slot.value is not None}
    for device in devices:
        if device.type not in ("cpu", "meta"):
            return device
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if devices or accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


class _Finder(Listener):
    """Collects refusals instead of raising them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.found: dict[tuple[str, str, str], int] = {}
        self._breaks = 0
        self._trusted = 0
        self._draws = Draws(device)
        self._draws.begin()

    @property
    def off(self) -> bool:
        """Whether what runs now is in an eager break, or part of what has been judged already."""
        return self._trusted > 0 or state.run is None or state.run.inside_eager

    def intercepting(self) -> AbstractContextManager[None]:
        """Watch the operators of this thread, and the conversions to Python, which no operator shows."""
        return watching(self._operator, self._function, bodies=True)

    def break_begins(self, index: int, name: str, place: str, call: Call) -> None:
        """Count it."""
        self._breaks += 1

    def break_ends(self, index: int, places: list[Place]) -> None:
        """It may have seeded."""
        self._draws.begin()

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

    def _operator(self, func: Any, args: Any, kwargs: Any, call: Invoke) -> Any:
        judged = not is_composite(func) and not self.off
        if judged and any(tensor.device == self.device for tensor in tensor_leaves(args, kwargs)):
            self.refused(check_operator, func, args, kwargs)
        if judged and torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            self.check_seed()
            return self._draws.add(Tape(), func)(*args, **kwargs)
        return call()

    def check_seed(self) -> None:
        """Judge what the code has done to the generator since the last draw."""
        with aside():
            if self.refused(self._draws.follow, Tape()):
                self._draws.begin()

    def _function(self, func: Any, args: Any, kwargs: Any, call: Invoke) -> Any:
        if self.off:
            return call()
        known = self.refused(check_function, func, args, kwargs, self.device)
        with self.trusting() if known or is_stricter_on_cpu(func, args, kwargs) else nullcontext():
            return call()

    def report(self) -> MissingBreaks:
        """What was found."""
        made = MissingBreaks(
            RefusedOperator(operator, reason, place, calls)
            for (operator, reason, place), calls in self.found.items()
        )
        made.breaks = self._breaks
        return made
