"""Work goes to a side stream that is not forked into the capture."""

import torch


def run(backend):
    x = backend.tensor(4)
    side = torch.cuda.Stream()
    with torch.no_grad(), backend.capture(check=True), torch.cuda.stream(side):
        x.mul_(2)
