"""An eager function leaves a tensor at an attribute, and another one is given it."""

import torch

from segcapture import eager_break_during_capture


class Model(torch.nn.Module):
    @eager_break_during_capture
    def plan(self, x):
        self.offsets = x.cumsum(0)

    @eager_break_during_capture
    def attend(self, x, offsets):
        return x + offsets

    def forward(self, x):
        self.plan(x)
        return self.attend(x * 2, self.offsets)


def run(backend):
    model, x = Model(), backend.tensor(4)
    with torch.no_grad(), backend.capture(check=True):
        model(x)
