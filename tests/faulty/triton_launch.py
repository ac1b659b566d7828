"""A Triton kernel is launched past the dispatcher in debug mode."""

import torch
import triton
import triton.language as tl


@triton.jit
def double(pointer, n, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(pointer + at, tl.load(pointer + at, mask=at < n) * 2, mask=at < n)


def run(backend):
    x = backend.tensor(128)
    double[(1,)](x, 128, block=128)  # warm-up
    with torch.no_grad(), backend.capture():
        double[(1,)](x, 128, block=128)
