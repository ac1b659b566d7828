"""An eager function leaves a tensor at an attribute, and a graph segment reads it there."""

import torch

from segcapture import eager_break_during_capture


class Model(torch.nn.Module):
    @eager_break_during_capture
    def plan(self, x):
        self.offsets = x.cumsum(0)
        return x + 1

    def forward(self, x):
        y = self.plan(x)
        return y + self.offsets


def run(backend):
    model, x = Model(), backend.tensor(4)
    with torch.no_grad(), backend.capture(check=True):
        model(x)
