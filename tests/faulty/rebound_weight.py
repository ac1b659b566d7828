"""A weight is replaced by a new one after the capture."""

import torch


def run(backend):
    layer = torch.nn.Linear(4, 4, device=backend.device)
    x = backend.tensor(2, 4)
    with torch.no_grad(), backend.capture(check=True) as g:
        out = layer(x)
    g.replay()
    layer.weight = torch.nn.Parameter(torch.ones(4, 4, device=backend.device))
    g.replay()
    return out
