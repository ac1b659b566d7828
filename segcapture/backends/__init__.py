"""Where segments come from: CUDA graphs, or tapes where there is no GPU (and in debug mode)."""

import functools
from typing import Any

import torch

from segcapture.backends.base import Backend
from segcapture.thread import warn


def make_backend(
    device: torch.device | str | int | None,
    *,
    debug: bool,
    capture_error_mode: str,
    generators: tuple[torch.Generator, ...],
    **options: Any,
) -> Backend:
    """The backend for a device, or for the best one there is. `options`: `pool`, `stream`, `execute`."""
    chosen = _device(device)
    if capture_error_mode not in ("thread_local", "global", "relaxed"):
        raise ValueError(
            f"capture_error_mode={capture_error_mode!r} is unknown: choose one of 'thread_local', "
            f"'global', 'relaxed'"
        )
    for generator in generators:  # torch 2.11 crashes on one of another device
        if generator.device.type != chosen.type or generator.device.index not in (None, chosen.index):
            raise ValueError(f"generators: one is of {generator.device}, and the capture of {chosen}")
    if debug or chosen.type != "cuda":
        from segcapture.backends.emulated import EmulatedBackend

        return EmulatedBackend(chosen, **options)
    from segcapture.backends.cuda.backend import CudaBackend

    return CudaBackend(chosen, capture_error_mode=capture_error_mode, generators=generators, **options)


def _device(device: torch.device | str | int | None) -> torch.device:
    """The device asked for, with its index."""
    if device is None:
        if not torch.accelerator.is_available():
            _warn_once()
            return torch.device("cpu")
        device = torch.accelerator.current_accelerator() or torch.device("cpu")
    chosen = torch.device(device)
    if chosen.type == "cpu":
        return torch.device("cpu")
    if chosen.type != "cuda":
        raise ValueError(f"device must be a CUDA device or the CPU, got {chosen}")
    if not torch.accelerator.is_available():
        raise ValueError(
            f"device={str(device)!r}, and torch finds no GPU here: device='cpu' emulates segments"
        )
    if chosen.index is None:
        chosen = torch.device("cuda", torch.accelerator.current_device_index())
    return chosen


@functools.cache
def _warn_once() -> None:
    warn(
        "segcapture found no GPU: segments are emulated on the CPU, operator by operator. That is for tests "
        "and debugging; pass device='cpu' to say that it is meant."
    )
