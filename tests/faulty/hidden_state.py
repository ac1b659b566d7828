"""A break reads Python state that is no argument and is another one by the time of the replay."""

import torch

from segcapture import eager_break_during_capture


class Schedule:
    scale = 1.0

    @eager_break_during_capture
    def apply(self, x):
        return x * self.scale


def run(backend):
    schedule, x = Schedule(), backend.tensor(4)
    with torch.no_grad(), backend.capture() as g:
        out = schedule.apply(x + 1) - 1
    scales = iter((1.0, 1.0, 3.0))  # of two eager runs and of the replay

    def before():
        schedule.scale = next(scales)

    return g.verify(lambda: schedule.apply(x + 1) - 1, outputs=out, before=before)
