"""Helpers of the tests that need CUDA: slow kernels, and the state of a process to compare."""

import gc
from typing import Any

import torch

from segcapture.thread import state

SPIN_CYCLES = 20_000_000  # about 10 ms on an H200: long enough to lose every race


def spin(cycles: int = SPIN_CYCLES) -> None:
    """Keep the current stream busy."""
    torch.cuda._sleep(cycles)


def process_state() -> dict[str, Any]:
    """What a capture must leave as it was."""
    return {
        "gc": gc.isenabled(),
        "callbacks": list(gc.callbacks),
        "stream": torch.cuda.current_stream(),
        "device": torch.cuda.current_device(),
        "recording": state.run,
        "keep_alive": state.keep_alive,
        "grad": torch.is_grad_enabled(),
        "autocast_cache": torch.is_autocast_cache_enabled(),
        "seed": torch.cuda.initial_seed(),
    }


def assert_process_is_well(before: dict[str, Any], capture: Any) -> None:
    """The state is as before, and everything that a failed capture may break works."""
    assert process_state() == before
    torch.randn(4, device="cuda")
    torch.cuda.synchronize()
    reserved = torch.cuda.memory_reserved()
    large = torch.empty(1 << 28, device="cuda")
    del large
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= reserved
    x = torch.ones(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + torch.rand_like(x) * 0
    x.fill_(3)
    graph.replay()
    assert y.tolist() == [3.0] * 8
    with torch.no_grad(), capture() as g:
        z = x * 2
        w = g.add_eager(lambda t: t + 1, z)
        out = w * 1
    x.fill_(5)
    g.replay()
    assert out.tolist() == [11.0] * 8
