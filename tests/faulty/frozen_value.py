"""A Python number that changes is passed to a break."""

import torch

from segcapture import eager_break_during_capture


class Model(torch.nn.Module):
    step = 0

    @eager_break_during_capture
    def rotate(self, x, step):
        return x.roll(step)

    def forward(self, x):
        return self.rotate(x + 1, self.step) * 2


def run(backend):
    model, x = Model(), backend.tensor(4)
    with torch.no_grad(), backend.capture() as g:
        out = model(x)
    model.step = 3
    return g.verify(model, x, outputs=out)
