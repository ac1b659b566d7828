"""The ambient state of a thread: grad mode, inference mode, autocast and device (contract C7)."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import attrs
import torch

_any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
_device_index: Callable[[], int] = torch._C._accelerator_getDeviceIndex


@attrs.frozen
class Ambient:
    """What the caller of an operation has set around it. Compared by value."""

    grad: bool
    inference: bool
    autocast: tuple[bool, torch.dtype]
    autocast_cpu: tuple[bool, torch.dtype]
    device: int | None
    device_type: str

    @classmethod
    def current(cls, device: torch.device) -> "Ambient":
        """The ambient state of the calling thread, as far as it matters on `device`."""
        kind = device.type
        on_cpu = (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            on_cpu if kind == "cpu" else (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)),
            on_cpu,
            None if kind == "cpu" else torch.accelerator.current_device_index(),
            kind,
        )

    def is_current(self) -> bool:
        """Whether the calling thread's state is this one, but for the dtype of an autocast that is off."""
        if (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) != (self.grad, self.inference):
            return False
        if self.device is not None and _device_index() != self.device:
            return False
        if not _any_autocast():  # one question for four: each replay asks
            return not (self.autocast[0] or self.autocast_cpu[0])
        kind = self.device_type
        return (
            torch.is_autocast_enabled(kind) is self.autocast[0]
            and torch.is_autocast_enabled("cpu") is self.autocast_cpu[0]
            and (not self.autocast[0] or torch.get_autocast_dtype(kind) is self.autocast[1])
            and (not self.autocast_cpu[0] or torch.get_autocast_dtype("cpu") is self.autocast_cpu[1])
        )

    def has_autocast(self) -> bool:
        """Whether autocast is on."""
        return self.autocast[0] or self.autocast_cpu[0]

    def below_autograd(self) -> "Ambient":
        """The state that an operator sees after autograd and autocast have done their part."""
        return attrs.evolve(
            self,
            grad=False,
            autocast=(False, self.autocast[1]),
            autocast_cpu=(False, self.autocast_cpu[1]),
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Set this state for the block, whatever the caller's is, and restore it after."""
        with ExitStack() as stack:
            for context in self._contexts():
                stack.enter_context(context)
            yield

    def _contexts(self) -> Iterator[AbstractContextManager[object]]:
        """What must be entered, in this order; nothing for what is set already."""
        if self.device is not None and torch.accelerator.current_device_index() != self.device:
            yield torch.accelerator.device_index(self.device)
        if torch.is_inference_mode_enabled() is not self.inference:
            yield torch.inference_mode(self.inference)  # sets the grad mode too
        if torch.is_grad_enabled() is not self.grad:
            yield torch.set_grad_enabled(self.grad)
        for device_type, wanted in {self.device_type: self.autocast, "cpu": self.autocast_cpu}.items():
            if wanted[0] or torch.is_autocast_enabled(device_type):
                yield torch.autocast(device_type, dtype=wanted[1], enabled=wanted[0])


@contextmanager
def capture_ambient() -> Iterator[None]:
    """What holds during a capture: backward on the capturing thread (C12), and no weight cast from outside.

    The autocast cache stays as it is, since torch.compile guards on it; it is cleared here and around each
    break, so that no cast crosses a boundary between eager and captured code.
    """
    torch.clear_autocast_cache()
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        torch.clear_autocast_cache()
