"""What the tests of served functions share."""

from dataclasses import dataclass

import torch

from segcapture import (
    GraphedCallable,
    eager_break_during_capture,
)


@eager_break_during_capture
def rescale(h):
    """Cannot be captured: reads on the host."""
    return h / max(1.0, h.abs().max().item())


def graphed(backend, fn=None, **options):
    """On the backend under test."""
    return GraphedCallable(fn, **{"device": backend.device, "mode": backend.mode, **options})


def state_of(g):
    """How many calls went which way, with the counters that are zero left out."""
    stats = g.stats()
    names = ("warmups", "captures", "replays", "eager", "failures", "evictions")
    return {name: getattr(stats, name) for name in names if getattr(stats, name)}


@dataclass
class Record:
    """A dataclass that is an argument."""

    first: object
    rest: object


class Settings:
    """A class of the user's, passed as an argument."""

    def __init__(self, device):
        self.scale = 2
        self.bias = torch.ones(3, device=device)


class Nested:
    """An object that may hold another."""

    def __init__(self, **attributes):
        vars(self).update(attributes)


class Listed(list):
    """A list that may have attributes."""


def with_attribute(value, name, content):
    setattr(value, name, content)
    return value


@dataclass
class Counts:
    """A record with a decorated method."""

    by: torch.Tensor

    @GraphedCallable(warmup=0)
    def times(self, x):
        return x * self.by
