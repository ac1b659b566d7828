"""What the calls of a served function get back."""

from collections import OrderedDict, deque

import pytest
import torch
from torch import nn

from segcapture import (
    Bucket,
    CaptureFailedError,
    eager_break_during_capture,
)
from tests.conftest import assert_same
from tests.served import Counts, Listed, Nested, Record, Settings, graphed, with_attribute


@pytest.mark.parametrize("clone", [True, False])
def test_outputs_are_clones_unless_told_not_to(backend, clone):
    """Without clones an output lives until the next call, which overwrites it."""
    g = graphed(backend, lambda x: (x + 1, x * 2), warmup=0, clone_outputs=clone)
    g(backend.tensor(3))
    one, two = torch.ones(3, device=backend.device), torch.full((3,), 2.0, device=backend.device)
    first = g(one)
    second = g(two)
    assert second[0].tolist() == [3.0] * 3
    assert first[0].tolist() == ([2.0] if clone else [3.0]) * 3
    assert (first[0].data_ptr() == second[0].data_ptr()) is not clone


class Result:
    """A class of the user's, made anew for each call."""

    def __init__(self, value, state):
        self.value, self.parts, self.state = value, [value + 1], state


def test_objects_as_outputs(backend):
    """A result is a new object with its own tensors, an argument comes back as itself."""
    g = graphed(backend, lambda x, s: (Result(x * s.scale, s), s), warmup=0)
    s = Settings(backend.device)
    kept = [g(backend.tensor(3, seed=seed), s) for seed in range(3)]
    for seed, (result, same) in enumerate(kept):
        x = backend.tensor(3, seed=seed)
        assert torch.equal(result.value, x * 2)
        assert torch.equal(result.parts[0], x * 2 + 1)
        assert same is result.state is s


def test_autograd_graphs_are_refused(backend):
    """Of outputs and of arguments, with the ways out."""
    model = nn.Linear(3, 3).to(backend.device)
    g = graphed(backend, model)
    with pytest.raises(CaptureFailedError, match=r"requires grad at `out`.*no_grad"):
        g(backend.tensor(2, 3))
    with pytest.raises(CaptureFailedError, match="requires grad"):
        graphed(backend, lambda x: x.detach())(backend.tensor(2).requires_grad_())
    with torch.no_grad():
        for i in range(4):
            x = backend.tensor(2, 3, seed=i)
            assert torch.equal(g(x), model(x))


def test_values_that_an_eager_segment_returns_are_fresh(backend):
    """A number in a container that a break fills is the replay's, not the capture's."""

    @eager_break_during_capture
    def measure(x):
        return {"max": x.max().item(), "x": x * 1}

    g = graphed(backend, lambda x: measure(x + 1), warmup=0)
    for i in range(4):
        x = backend.tensor(3, seed=i)
        assert g(x)["max"] == (x + 1).max().item()


@pytest.mark.parametrize(
    "wrap", [lambda t: [t], lambda t: (t, 1), lambda t: {"t": t}], ids=["list", "tuple", "dict"]
)
def test_a_value_that_becomes_a_container_of_tensors(backend, wrap):
    """In a dict that the function returns each time, and that an eager segment fills."""

    def filling():
        d, calls = {"x": None}, []

        @eager_break_during_capture
        def fill(x):
            calls.append(1)
            if len(calls) > 2:
                d["x"] = wrap(x + len(calls))

        def f(x):
            y = x * 2
            fill(y)
            return d, y

        return f

    g, f = graphed(backend, filling(), warmup=0), filling()
    for i in range(5):
        x = backend.tensor(3, seed=i)
        assert str(g(x)) == str(f(x))


@pytest.mark.parametrize(
    "view",
    [torch.conj, lambda x: x.mH, lambda x: torch._neg_view(x), lambda x: torch._neg_view(x[:1]).conj()],
)
def test_conjugated_views_of_an_argument_come_back_as_such(backend, view):
    """And still share memory with the argument."""
    g = graphed(backend, view, warmup=0)
    for seed in range(3):
        x = torch.complex(backend.tensor(2, 2, seed=seed), backend.tensor(2, 2, seed=seed + 9))
        found, expected = g(x), view(x)
        assert torch.equal(found, expected)
        assert found.data_ptr() == expected.data_ptr()
        assert found.is_conj() is expected.is_conj()


def test_an_output_that_is_passed_back_without_clones(backend):
    """Read, it is served; written to or returned, it would be overwritten, and a clone is asked for."""
    x = backend.tensor(2)
    reads = graphed(backend, lambda x: x * 2, warmup=0, clone_outputs=False)
    out, expected = x, x
    for _ in range(4):
        out, expected = reads(out), expected * 2
        assert torch.equal(out, expected)
    for fn in (lambda x: (x * 2, x.add_(1) * 1)[0], lambda x: (x * 2, x), lambda x: (x * 2, x[:1])):
        g = graphed(backend, fn, warmup=0, clone_outputs=False)
        first = g(x.clone())
        out = first if isinstance(first, torch.Tensor) else first[0]
        before = out.clone()
        with pytest.raises(CaptureFailedError, match="an output of an earlier call.*clone of it"):
            g(out)
        assert torch.equal(out, before)
        assert_same(g(out.clone()), fn(before.clone()))


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda t: deque([t]), "deque at `out`"),
        (lambda t: [1, {t}], r"set at `out\[1\]`"),
        (lambda t: Nested(a=Nested(b=[t])), r"Nested at `out\.a`"),
        (lambda t: (t, with_attribute(Record(1, 2), "extra", t)), r"Record at `out\[1\]`"),
        (lambda t: {"k": with_attribute(Listed([1]), "extra", t)}, r"Listed at `out\[\"k\"\]`"),
        (lambda t: {1: t}.values(), "dict_values at `out`"),
    ],
)
def test_outputs_that_hide_a_tensor_are_refused(backend, make, path):
    """It would be the captured tensor itself; without clones it is what was asked for."""
    with pytest.raises(CaptureFailedError, match=path):
        graphed(backend, lambda x: make(x * 2), warmup=0)(backend.tensor(2))
    graphed(backend, lambda x: make(x * 2), warmup=0, clone_outputs=False)(backend.tensor(2))
    with pytest.raises(CaptureFailedError, match=path):  # the caller's tensor, as which it cannot come back
        graphed(backend, lambda x: make(x), warmup=0, clone_outputs=False)(backend.tensor(2))


def test_outputs_that_hold_tensors_of_others_are_handed_out(backend):
    """A table that was there before is nobody's copy."""
    table = Nested(weights=deque([backend.tensor(2)]))
    g = graphed(backend, lambda x: Nested(value=x * 2, source=table), warmup=0)
    for seed in range(3):
        out = g(backend.tensor(2, seed=seed))
        assert torch.equal(out.value, backend.tensor(2, seed=seed) * 2)
        assert out.source is table


def test_a_container_that_an_eager_function_fills(backend):
    """What it puts there is new at each replay, in plain containers and in others."""

    @eager_break_during_capture
    def put(d, x):
        d["h"] = x * 2

    def alone(x):
        d = {}
        put(d, x + 1)
        return d

    def beside(x):
        d = alone(x)
        return d, x, [d["h"]]

    for f in (alone, beside):
        g = graphed(backend, f, warmup=1)
        for seed in range(5):
            x = backend.tensor(3, seed=seed)
            found, expected = g(x), f(x)
            if f is beside:
                assert found[1] is x
                found, expected = found[0], expected[0]
            assert list(found) == ["h"]
            assert_same(found["h"], expected["h"])


def test_a_filled_container_is_cut_and_its_own_tensors_given_back(backend):
    """As the capture itself does it, at each replay."""

    @eager_break_during_capture
    def put(d, x):
        d["h"], d["x"] = x * 2, x[:1]

    def f(x):
        d = {}
        put(d, x)
        return d

    g = graphed(backend, f, warmup=0, bucket=Bucket(sizes=(8,), dims={"x": 0}, out={'out["h"]': 0}))
    for seed in range(4):
        x = backend.tensor(3, seed=seed)
        assert_same(g(x)["h"], f(x)["h"])
    g = graphed(backend, f, warmup=0)
    for seed in range(4):
        x = backend.tensor(3, seed=seed)
        out = g(x)
        assert_same(out, f(x))
        assert out["x"].data_ptr() == x.data_ptr()


def test_a_list_in_a_record_that_an_eager_function_fills_at_times(backend):
    """Another number of items each time."""

    @eager_break_during_capture
    def collect(hits, x):
        hits.clear()
        hits.extend(x[i] * 2 for i in range(int(x[0])))

    def f(x):
        out = Counts(x.sum())
        out.hits = []
        collect(out.hits, x + 0)
        return out.by, [out.hits]

    for build in (f, lambda x: OrderedDict(by=f(x)[0], hits=f(x)[1])):
        g = graphed(backend, build, warmup=1)
        for n in (0, 0, 0, 1, 3, 2):
            x = torch.full((3,), float(n), device=backend.device)
            found, expected = g(x), f(x)
            hits = found["hits"] if isinstance(found, dict) else found[1]
            assert [t.tolist() for t in hits[0]] == [t.tolist() for t in expected[1][0]]


def test_a_dict_of_the_functions_own_that_others_change(backend):
    """Without eager breaks, a replay gives the keys of the capture."""
    results = {}

    def f(x):
        results["y"] = x * 2
        return results

    g = graphed(backend, f, warmup=0)
    x = backend.tensor(3)
    for _ in range(3):  # the first puts it there, the second is observed
        g(x)
    results["z"] = 1
    assert list(g(x)) == ["y"]
    results.clear()
    assert_same(g(x)["y"], x * 2)
