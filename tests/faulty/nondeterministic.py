"""The function itself gives something else in each run."""

import itertools

import torch

from segcapture import eager_break_during_capture

COUNTER = itertools.count()


@eager_break_during_capture
def noise(x):
    return x + next(COUNTER)


def run(backend):
    x = backend.tensor(4)

    def model(x):
        return noise(x * 2) + 1

    with torch.no_grad(), backend.capture() as g:
        out = model(x)
    return g.verify(model, x, outputs=out)
