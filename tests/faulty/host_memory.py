"""A graph segment copies from pinned host memory that is freed after the capture."""

import torch


def run(backend):
    x = backend.tensor(4)
    hosts = [torch.ones(4, pin_memory=True)]
    with torch.no_grad(), backend.capture(check=True) as g:
        x.copy_(hosts[0], non_blocking=True)
    hosts.clear()
    g.replay()
