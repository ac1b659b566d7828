"""Modules that a served function reads, and what becomes of them."""

import pytest
import torch
from torch import nn

from segcapture import (
    CaptureFailedError,
)
from tests.conftest import assert_same
from tests.served import graphed, state_of


def replace_object(model):
    model.weight = nn.Parameter(model.weight.detach() * 2)


def replace_data(model):
    model.weight.data = model.weight.data * 2


def ways_to(model):
    """Functions that read a module."""
    return {
        "module": model,
        "method": model.forward,
        "closure": lambda x: model(x),
        "argument": lambda x, m=None: m(x),
    }


@pytest.mark.parametrize("replace", [replace_object, replace_data])
@pytest.mark.parametrize("through", ["module", "method", "closure", "argument"])
@torch.no_grad()
def test_replaced_weights_are_noticed(backend, replace, through):
    """They raise, or are captured again; updates in place are served."""
    for asked in ("raise", "recapture"):
        model = nn.Linear(3, 3).to(backend.device)
        fn = ways_to(model)[through]
        options = {"m": model} if through == "argument" else {}
        g = graphed(backend, fn, warmup=0, weights=asked)
        x = backend.tensor(2, 3)
        g(x, **options)
        model.weight.mul_(3)
        assert torch.equal(g(x, **options), model(x))
        replace(model)
        if asked == "raise":
            with pytest.raises(CaptureFailedError, match="Linear.weight was replaced"):
                g(x, **options)
            g.clear()
        for _ in range(2):
            assert torch.equal(g(x, **options), model(x))
        assert state_of(g) == {"captures": 2, "replays": 2}


@torch.no_grad()
def test_replaced_submodules_are_noticed(backend):
    """As when an adapter is put in."""
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU()).to(backend.device)
    g = graphed(backend, model, warmup=0, weights="recapture")
    x = backend.tensor(2, 3)
    g(x)
    model[1] = nn.Sigmoid()
    assert torch.equal(g(x), model(x))


@torch.no_grad()
def test_weights_that_nobody_looks_at(backend):
    """`weights="ignore"` replays with the old ones: the price of not looking."""
    model = nn.Linear(3, 3).to(backend.device)
    g = graphed(backend, model, warmup=0, weights="ignore")
    x = backend.tensor(2, 3)
    old = g(x)
    replace_object(model)
    assert torch.equal(g(x), old)


class Replaces(torch.nn.Module):
    """A running mean that is re-bound in each call."""

    def __init__(self, device):
        super().__init__()
        self.register_buffer("mean", torch.zeros(1, device=device))

    def forward(self, x):
        self.mean = 0.5 * self.mean + x.mean()
        return self.mean * 1


@pytest.mark.parametrize("warmup", [0, 2])
def test_a_function_that_replaces_a_buffer_is_refused(backend, warmup):
    """No replay would: at the second call, or at the capture."""
    g = graphed(backend, Replaces(backend.device), warmup=warmup)
    x = backend.tensor(3)
    with pytest.raises(CaptureFailedError, match=r"Replaces\.mean was replaced by the function.*copy_"):
        for _ in range(3):
            g(x)
    model, plain = Replaces(backend.device), Replaces(backend.device)
    g = graphed(backend, model, warmup=warmup, on_error="eager")
    if warmup:
        for _ in range(6):
            assert_same(g(x), plain(x))
        assert state_of(g)["eager"] == 4


def test_a_buffer_that_another_signature_makes_is_no_change(backend):
    """A mask, say, at the first causal call."""

    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("later", None)

        def forward(self, x, causal=False):
            if causal and self.later is None:
                self.later = torch.ones_like(x).tril()
                self.register_buffer("mask", self.later * 2, persistent=False)
            return x * self.mask if causal else x + 1

    g, plain = graphed(backend, Attention(), warmup=1), Attention()
    x = backend.tensor(3, 3)
    for causal in (False, False, False, True, True, True, False, True):
        assert_same(g(x, causal=causal), plain(x, causal=causal))


@torch.no_grad()
def test_weights_that_appear_are_noticed(backend):
    """A bias where there was none, and a module more."""
    x = backend.tensor(2)
    linear = torch.nn.Linear(2, 2, bias=False, device=backend.device)
    layers = torch.nn.Sequential(torch.nn.ReLU())
    for module in (linear, layers):
        g = graphed(backend, module, warmup=0, weights="recapture")
        for _ in range(2):
            assert_same(g(x), module(x))
        if module is linear:
            linear.bias = torch.nn.Parameter(torch.full((2,), 100.0, device=backend.device))
        else:
            layers.append(torch.nn.Threshold(5.0, 7.0))
        for _ in range(2):
            assert_same(g(x), module(x))


@torch.no_grad()
def test_hooks_that_are_added_or_taken_out_are_noticed(backend):
    """After the capture; those that are there are captured."""
    model = nn.Sequential(nn.Linear(3, 3)).to(backend.device)
    g = graphed(backend, model, warmup=0, weights="recapture")
    x = backend.tensor(2, 3)
    for _ in range(2):
        assert torch.equal(g(x), model(x))
    hook = model[0].register_forward_hook(lambda module, args, out: out + 10)
    for _ in range(2):
        assert torch.equal(g(x), model(x))
    hook.remove()
    assert torch.equal(g(x), model(x))
    assert state_of(g) == {"captures": 3, "replays": 2}
