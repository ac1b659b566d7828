"""Metadata with tensors in it is made anew for each step; the eager call keeps the first."""

import torch

from segcapture import eager_break_during_capture


class Context:
    meta: dict


@eager_break_during_capture
def attend(x, meta):
    return x + meta["lengths"]


def run(backend):
    context = Context()
    context.meta = {"lengths": backend.tensor(4, seed=1)}
    x = backend.tensor(4)
    with torch.no_grad(), backend.capture(check=True) as g:
        out = attend(x, context.meta)
    g.replay()
    context.meta = {"lengths": backend.tensor(4, seed=2)}
    g.replay()
    return out
