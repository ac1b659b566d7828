"""A weight of the second layer is re-bound, and the capture goes on with the old one."""

import torch

from segcapture import eager_break_during_capture


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    @eager_break_during_capture
    def norm(self, x):
        return x / (1 + x.abs().max().item())

    @eager_break_during_capture
    def gate(self, x):
        return x * (x.sum().item() > 0)

    def forward(self, x):
        return self.gate(self.second(self.norm(self.first(x)))) + 1


def run(backend):
    model, x = Model().to(backend.device), backend.tensor(2, 4)
    with torch.no_grad(), backend.capture() as g:
        out = model(x)
    kept = model.second.weight  # the old memory stays valid
    model.second.weight = torch.nn.Parameter(kept.detach() + 1)
    return g.verify(model, x, outputs=out)
