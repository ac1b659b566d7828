"""A break reads Python state that is no argument and is another one by the time of the replay."""

import torch

from segcapture import eager_break_during_capture

SETTINGS = {"scale": 1.0}


@eager_break_during_capture
def scaled(x):
    return x * SETTINGS["scale"]


def run(backend):
    x = backend.tensor(4)

    def model(x):
        return scaled(x + 1) - 1

    with torch.no_grad(), backend.capture() as g:
        out = model(x)
    scales = iter((1.0, 1.0, 3.0))  # of two eager runs and of the replay
    return g.verify(model, x, outputs=out, before=lambda: SETTINGS.update(scale=next(scales)))
