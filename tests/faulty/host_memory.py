"""A graph segment copies from pinned host memory that is freed at once."""

import torch


def run(backend):
    x = backend.tensor(4)
    hosts = [torch.ones(4, pin_memory=True)]
    with torch.no_grad(), backend.capture(check=True):
        x.copy_(hosts.pop(), non_blocking=True)
