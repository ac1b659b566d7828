"""Work goes to another device than the one that is captured."""

import torch


def run(backend):
    elsewhere = torch.device("cuda", (backend.device.index + 1) % torch.cuda.device_count())
    x = torch.ones(4, device=elsewhere)
    with torch.no_grad(), backend.capture(check=True):
        x * 2
