"""An input dies in the `with` block."""

import torch


def run(backend):
    inputs = [backend.tensor(4)]
    with torch.no_grad(), backend.capture(check=True):
        return inputs.pop() + 1
