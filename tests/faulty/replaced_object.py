"""Metadata is replaced by a new object, and the eager call keeps the old one."""

import attrs
import torch

from segcapture import eager_break_during_capture


@attrs.define
class Meta:
    max_len: int


class Model(torch.nn.Module):
    meta = Meta(2)

    @eager_break_during_capture
    def attend(self, x, meta):
        return x[: meta.max_len].sum() + x

    def forward(self, x):
        return self.attend(x * 2, self.meta)


def run(backend):
    model, x = Model(), backend.tensor(4)
    with torch.no_grad(), backend.capture() as g:
        out = model(x)
    model.meta = Meta(3)
    return g.verify(model, x, outputs=out)
