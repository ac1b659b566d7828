"""The ambient state of a thread: grad mode, inference mode, autocast and device (contract C7)."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import attrs
import torch


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
        if self.device is not None:
            yield torch.accelerator.device_index(self.device)
        yield torch.inference_mode(self.inference)
        yield torch.set_grad_enabled(self.grad)
        # The cache stays off: a cast made in one segment would be freed under the next one's feet.
        if self.device_type != "cpu":
            yield _autocast(self.device_type, self.autocast)
        yield _autocast("cpu", self.autocast_cpu)


def _autocast(device_type: str, setting: tuple[bool, torch.dtype]) -> torch.autocast:
    enabled, dtype = setting
    return torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=False)


@contextmanager
def capture_ambient() -> Iterator[None]:
    """What holds during a capture: no autocast cache, and backward on the capturing thread (C12)."""
    cached = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(cached)
