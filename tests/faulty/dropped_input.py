"""The static input is dropped after the capture."""

import torch


def captured(backend):
    x = backend.tensor(4)
    with torch.no_grad(), backend.capture(check=True) as g:
        out = x + 1
    g.replay()
    return g, out


def run(backend):
    g, out = captured(backend)
    g.replay()
    return out
