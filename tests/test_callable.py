"""`GraphedCallable`: one capture for each signature, and never another result than the function's."""

import contextlib
import copy
import gc
import logging
import os
import pickle
import re
import threading
import weakref
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from segcapture import (
    BreakableCUDAGraphCapture,
    Bucket,
    CaptureFailedError,
    CaptureStateError,
    GraphedCallable,
    eager_break_during_capture,
)
from tests.conftest import assert_same

EXAMPLES = int(os.environ.get("SEGCAPTURE_EXAMPLES", "60"))


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


# Property: any signatures, in any order


class Pair(NamedTuple):
    """Arguments of a kind of their own."""

    left: object
    right: object


@dataclass
class Record:
    """And of another."""

    first: object
    rest: object


LEAVES = [
    "plain",
    "matrix",
    "int",
    "transposed",
    "expanded",
    "sliced",
    "empty",
    "again",
    "view",
    1,
    True,
    1.0,
    "s",
]
NESTS = ["flat", "tuple", "list", "dict", "pair", "record", "keywords"]


def leaf(kind, made, generator, device):
    """A value of the given kind; `made` are the tensors so far."""
    values = torch.randn(4, 4, generator=generator).to(device)
    if kind in ("again", "view"):
        known = made[-1] if made else values
        return known if kind == "again" or known.dim() == 0 else known[:1]
    made_of = {
        "plain": lambda: values[0].clone(),
        "matrix": lambda: values,
        "int": lambda: (values * 9).long(),
        "transposed": lambda: values.t(),
        "expanded": lambda: values[:1].expand(4, 4),
        "sliced": lambda: values[:, 1:3],
        "empty": lambda: values[:0],
    }
    return made_of[kind]() if isinstance(kind, str) and kind in made_of else kind


def arguments(spec, seed, device):
    """The arguments of one call: their nesting follows `spec`, their values `seed`."""
    kinds, nest = spec
    generator = torch.Generator().manual_seed(seed)
    values, made = [], []
    for kind in kinds:
        values.append(leaf(kind, made, generator, device))
        made += [v for v in values[-1:] if isinstance(v, torch.Tensor)]
    nested = {
        "flat": lambda: (tuple(values), {}),
        "tuple": lambda: ((tuple(values), 3), {}),
        "list": lambda: (([values[0], values[1:]],), {}),
        "dict": lambda: (({"a": values[0], 2: values[1:]},), {}),
        "pair": lambda: ((Pair(values[0], tuple(values[1:])),), {}),
        "record": lambda: ((Record(values[0], values[1:]),), {}),
        "keywords": lambda: ((), {f"k{i}": v for i, v in enumerate(values)}),
    }
    args, kwargs = nested[nest]()
    return args, dict(reversed(kwargs.items())) if seed % 2 else kwargs


def tensors_of(value):
    """In order of the names, as keyword order must not matter."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for key in sorted(value, key=str) for t in tensors_of(value[key])]
    if isinstance(value, Record):
        return tensors_of([value.first, value.rest])
    return [t for item in value for t in tensors_of(item)] if isinstance(value, tuple | list) else []


class World:
    """A function with a cache and a count, that draws, mutates its arguments and gives them back."""

    def __init__(self, device):
        self.cache = torch.zeros(4, device=device)
        self.runs = 0

    def run(self, *args, **kwargs):
        self.runs += 1
        given = tensors_of([args, kwargs])
        total = torch.zeros(4, device=self.cache.device)
        for t in given:
            total = total + t.sum() * 0.5
        total = rescale(total + torch.rand(4, device=total.device))
        self.cache.add_(total)
        writable = [t for t in given if 0 not in t.stride() and t.is_floating_point()]
        for t in writable[:2]:
            t.mul_(0.5).add_(total[0])
        views = [t[:2] for t in given if t.dim()]
        return {
            "total": (total, total),
            "given": given,
            "views": views,
            "none": None,
            "cache": self.cache * 1,
        }


GUARDS = [torch.no_grad, torch.inference_mode]
SPECS = st.tuples(st.lists(st.sampled_from(LEAVES), min_size=1, max_size=4), st.sampled_from(NESTS))


@pytest.mark.filterwarnings("ignore:.*new signatures in a row")
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    specs=st.lists(SPECS, min_size=1, max_size=3),
    order=st.lists(st.tuples(st.integers(0, 2), st.sampled_from([0, 0, 0, 1])), min_size=4, max_size=12),
    warmup=st.integers(0, 2),
    capacity=st.integers(1, 3),
)
def test_any_calls_in_any_order_equal_the_plain_function(backend, specs, order, warmup, capacity):
    """Outputs, what was written to the arguments, the cache and the draws; and it runs no more often."""
    plain, world = World(backend.device), World(backend.device)
    g = graphed(backend, world.run, warmup=warmup, max_captures=capacity)
    for step, (which, guard) in enumerate(order):
        spec = specs[which % len(specs)]
        with GUARDS[guard]():
            args, kwargs = arguments(spec, step, backend.device)
            torch.manual_seed(step)
            expected = plain.run(*args, **kwargs)
            wanted = tensors_of([args, kwargs])
            args, kwargs = arguments(spec, step, backend.device)
            torch.manual_seed(step)
            found = g(*args, **kwargs)
            own = tensors_of([args, kwargs])
        assert_same(found, expected, f"in call {step}")
        assert_same([*own, world.cache], [*wanted, plain.cache], f"after call {step}")
        assert found["total"][0] is found["total"][1]
        assert all(a is b for a, b in zip(found["given"], own, strict=True))
        views = [t for t in own if t.dim()]
        assert [v.data_ptr() for v in found["views"]] == [t[:2].data_ptr() for t in views]
        assert list(found) == list(expected)
    stats = g.stats()
    assert world.runs == stats.warmups + stats.captures
    assert stats.calls == len(order) == world.runs + stats.replays
    assert sum(s.state == "captured" for s in stats.signatures) <= capacity


# Calls


def test_warm_up_capture_and_replay_are_the_calls(backend):
    """Two calls warm up, the third captures, later ones replay; each returns the result."""
    runs = []

    def double(x):
        runs.append(1)
        return rescale(x) * 2

    g = graphed(backend, double)
    for i in range(6):
        x = backend.tensor(3, seed=i)
        assert torch.equal(g(x), rescale(x) * 2)
    assert len(runs) == 3
    assert state_of(g) == {"warmups": 2, "captures": 1, "replays": 3}


def test_random_draws_go_on_as_eagers(backend):
    """One seed for a whole sequence of calls: warm-up, capture and replays draw in turn."""

    def noisy(x):
        return x + torch.rand_like(x)

    g = graphed(backend, noisy)
    x = backend.tensor(5)
    torch.manual_seed(3)
    expected = [noisy(x) for _ in range(6)]
    torch.manual_seed(3)
    assert_same([g(x) for _ in range(6)], expected)


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


def test_static_arguments_are_not_copied(backend):
    """What was written into the static inputs is read from there, and written back to there alone."""

    def advance(position, table):
        position.add_(1)
        return table[position]

    g = graphed(backend, advance, warmup=0)
    position = torch.zeros(1, dtype=torch.long, device=backend.device)
    table = backend.tensor(8)
    with pytest.raises(CaptureStateError, match="not captured for these arguments"):
        g.static_arguments(position, table)
    g(position, table)
    (static, static_table), _ = g.static_arguments(position, table)
    static_table.copy_(table)
    static.fill_(4)
    assert torch.equal(g(static, static_table), table[5:6])
    assert (static.item(), position.item()) == (5, 1)


def test_only_what_is_elsewhere_is_copied(backend):
    """The version of a static input counts the writes to it."""
    g = graphed(backend, lambda x, y: x + y, warmup=0)
    x, y = backend.tensor(3), backend.tensor(3, seed=1)
    g(x, y)
    (static_x, static_y), _ = g.static_arguments(x, y)
    before = static_x._version, static_y._version
    g(static_x, y)
    assert (static_x._version, static_y._version) == (before[0], before[1] + 1)


@pytest.mark.parametrize("past_autograd", [False, True])
def test_writes_that_hardly_show(backend, past_autograd):
    """Of the values that were there, and through `.data`, which no version counts."""

    def scale(x, factor):
        (x.data if past_autograd else x).mul_(factor)

    g = graphed(backend, scale, warmup=0)
    for factor in (2.0 if past_autograd else 1.0, 2.0, 3.0):
        x = backend.tensor(3)
        g(x, torch.full((), factor, device=backend.device))
        assert torch.equal(x, backend.tensor(3) * factor)


@pytest.mark.parametrize("view", [torch.conj, lambda z: z.conj().imag, torch._neg_view])
def test_conjugate_and_negative_views_are_refused(backend, view):
    """With the way out; eagerly they are served."""

    def fn(z, other):
        return z * 2 + other.mul_(2)

    g, eager = graphed(backend, fn, warmup=0), graphed(backend, fn, warmup=0, on_error="eager")
    for seed in range(3):
        z = torch.complex(backend.tensor(3, seed=seed), backend.tensor(3, seed=seed + 9))
        with pytest.raises(CaptureFailedError, match=r"resolve_conj\(\)"):
            g(view(z), z.clone())
        resolved = view(z).resolve_conj().resolve_neg()
        assert_same(g(resolved, z.clone()), fn(resolved, z.clone()))
        assert_same(eager(view(z), z), fn(resolved, resolved * 0 + z / 2))


def test_an_argument_that_requires_grad_finds_no_capture_of_one_that_does_not(backend):
    """It would get no gradient."""
    g = graphed(backend, lambda x: x * 2, warmup=0)
    x = backend.tensor(3)
    g(x)
    with pytest.raises(CaptureFailedError, match="requires grad"):
        g(x.requires_grad_())


VALUES = [
    1,
    True,
    1.0,
    -1,
    0.0,
    -0.0,
    "a",
    b"a",
    None,
    torch.float32,
    (1,),
    [1],
    {"a": 1},
    {"a": 2},
    {"b": 1},
    slice(1),
]


@pytest.mark.filterwarnings("ignore:.*new signatures in a row")
def test_values_of_all_types_tell_signatures_apart(backend):
    """`1`, `True` and `1.0` are three, and each finds its own capture again."""
    g = graphed(backend, lambda x, value: x + len(repr(value)), warmup=0)
    x = backend.tensor(3)
    for _ in range(2):
        for value in VALUES:
            assert torch.equal(g(x, copy.copy(value)), x + len(repr(value))), value
    assert state_of(g) == {"captures": len(VALUES), "replays": len(VALUES)}


def test_nan_is_one_value(backend):
    """It differs from itself, and would be captured anew each time."""
    g = graphed(backend, lambda x, value: x * value, warmup=0)
    for _ in range(3):
        assert g(backend.tensor(2), float("nan")).isnan().all()
    assert state_of(g) == {"captures": 1, "replays": 2}


def test_ambient_state_belongs_to_the_signature(backend):
    """Grad mode, inference mode and autocast: one capture each, and what eager gives under it."""
    weight = backend.tensor(4, 4)
    g = graphed(backend, lambda x: (x @ weight, torch.tensor(torch.is_grad_enabled())), warmup=0)
    kind = backend.device.type
    for _ in range(2):
        for guard in (
            torch.no_grad,
            torch.enable_grad,
            torch.inference_mode,
            lambda: torch.autocast(kind, dtype=torch.bfloat16),
        ):
            x = backend.tensor(4, 4, seed=1)
            with guard():
                found, expected = g(x), (x @ weight, torch.tensor(torch.is_grad_enabled()))
            assert_same(found, expected)
            assert found[0].dtype is expected[0].dtype
            assert found[0].is_inference() is expected[0].is_inference()
    assert state_of(g) == {"captures": 4, "replays": 4}


def test_training_of_modules_belongs_to_the_signature(backend):
    """Of a submodule too, and of a module that a closure reads."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).to(backend.device)
    g = graphed(backend, lambda x: model(x), warmup=0)
    x = backend.tensor(64, 4)
    with torch.no_grad():
        for dropout in (True, False, True, False):
            model[1].train(dropout)
            assert bool((g(x) == 0).any()) is dropout
    assert state_of(g) == {"captures": 2, "replays": 2}


def test_the_users_key_belongs_to_the_signature(backend):
    """What the function reads from a global is named in `key`."""
    setting = {"scale": 2}
    g = graphed(backend, lambda x: x * setting["scale"], warmup=0, key=lambda x: setting["scale"])
    x = backend.tensor(3)
    for scale in (2, 3, 2, 3):
        setting["scale"] = scale
        assert torch.equal(g(x), x * scale)
    assert state_of(g) == {"captures": 2, "replays": 2}


class Settings:
    """A class of the user's, passed as an argument."""

    def __init__(self, device):
        self.scale = 2
        self.bias = torch.ones(3, device=device)


def test_objects_are_used_where_they_are_and_never_stale(backend):
    """In-place changes of their tensors are seen, new attributes are a new signature."""
    g = graphed(backend, lambda x, s: x * s.scale + s.bias, warmup=0)
    s = Settings(backend.device)
    x = backend.tensor(3)

    def check():
        assert torch.equal(g(x, s), x * s.scale + s.bias)

    check()
    s.bias.fill_(5)
    check()
    assert state_of(g) == {"captures": 1, "replays": 1}
    s.scale = 3
    check()
    first = s.bias  # alive, so that no later one is at its address
    s.bias = torch.full((3,), 9.0, device=backend.device)
    check()
    s.scale, s.bias = 3, s.bias.clone()
    check()
    assert state_of(g) == {"captures": 4, "replays": 1}
    assert first.data_ptr() != s.bias.data_ptr()


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


@pytest.mark.parametrize("warmup", [0, 1])
@pytest.mark.parametrize("change", ["object", "list", "dict"])
def test_what_python_does_to_arguments_is_refused(backend, warmup, change):
    """A replay would not do it again; the place is named, and `on_error="eager"` serves it all the same."""

    def fn(x, holder):
        if change == "object":
            holder.scale = 5
        elif change == "list":
            holder.append(x + 1)
        else:
            holder["new"] = x
        return x * 2

    def holder():
        return {"object": Settings(backend.device), "list": [1], "dict": {"a": x}}[change]

    x = backend.tensor(3)
    with pytest.raises(CaptureFailedError, match=r"put something else at `holder"):
        graphed(backend, fn, warmup=warmup)(x, holder())
    eager = graphed(backend, fn, warmup=warmup, on_error="eager")
    for _ in range(3):
        mine = holder()
        assert torch.equal(eager(x, mine), x * 2)
        assert mine.scale == 5 if change == "object" else len(mine) == 2


def test_an_argument_that_an_object_shares_is_refused(backend):
    """One would be copied and the other used where it is."""
    s = Settings(backend.device)
    g = graphed(backend, lambda x, s: x.add_(s.bias), warmup=0)
    with pytest.raises(CaptureFailedError, match="shares memory with a tensor in an object"):
        g(s.bias[:2], s)
    g(s.bias.clone(), s)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda: torch.eye(3).to_sparse(), "is a torch.sparse_coo"),
        (lambda: bytearray(b"a"), "bytearray, which has no hash"),
    ],
)
def test_arguments_without_a_signature_are_refused_by_name(backend, caplog, bad, message):
    """Or run eagerly, said once."""
    g = graphed(backend, lambda x, y: x + 1)
    with pytest.raises(CaptureFailedError, match=message):
        g(backend.tensor(2), bad())
    g = graphed(backend, lambda x, y: x + 1, on_error="eager")
    for _ in range(3):
        assert torch.equal(g(backend.tensor(2), bad()), backend.tensor(2) + 1)
    assert state_of(g) == {"eager": 3}
    assert len([r for r in caplog.records if "runs eagerly" in r.message]) == 1


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


def test_a_whole_training_step(backend):
    """Forward, backward and optimizer in one function, ten steps: losses and weights equal eager's."""

    def prepare():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(backend.device)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x, y):
            optimizer.zero_grad(set_to_none=False)
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return model, step

    data = [(backend.tensor(6, 4, seed=i), backend.tensor(6, 1, seed=i + 50)) for i in range(10)]
    model, step = prepare()
    expected = [step(*pair) for pair in data]
    other, step = prepare()
    g = graphed(backend, step)
    assert_same([g(*pair) for pair in data], expected)
    assert_same(list(other.parameters()), list(model.parameters()))
    assert state_of(g) == {"warmups": 2, "captures": 1, "replays": 7}


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


# Failure and capacity


def host_read(x):
    """Not capturable, and not marked."""
    return x * x.sum().item()


def test_a_capture_that_fails_is_reported(backend):
    """The error comes through each time, the calls before it had their results."""
    g = graphed(backend, host_read, warmup=1)
    x = backend.tensor(3)
    assert torch.equal(g(x), host_read(x))
    for failures in (1, 2):
        with pytest.raises(RuntimeError) as caught:
            g(x)
        assert any("segcapture" in note for note in caught.value.__notes__)
        assert state_of(g) == {"warmups": 1, "failures": failures}
    good = graphed(backend, rescale)
    for _ in range(4):
        assert torch.equal(good(x), rescale(x))


def test_a_capture_that_fails_runs_eagerly_from_then_on(backend, caplog):
    """Visibly, and for its signature alone."""
    g = graphed(backend, lambda x: host_read(x) if len(x) == 3 else x + 1, warmup=0, on_error="eager")
    for i in range(3):
        x = backend.tensor(3, seed=i)
        assert torch.equal(g(x), host_read(x))
    for i in range(2):
        x = backend.tensor(4, seed=i)
        assert torch.equal(g(x), x + 1)
    assert state_of(g) == {"captures": 1, "replays": 1, "eager": 3, "failures": 1}
    assert g.stats().signatures[0].state.startswith("eager: ")
    assert "runs eagerly for #1" in caplog.text


def test_an_error_of_the_function_is_no_failed_capture(backend):
    """With `on_error="eager"` it comes through, and the next call is captured."""
    bad = []

    def fn(x):
        if bad:
            raise ValueError("bad request")
        return x + 1

    g = graphed(backend, fn, warmup=0, on_error="eager")
    bad.append(1)
    with pytest.raises(ValueError, match="bad request"):
        g(backend.tensor(2))
    bad.clear()
    g(backend.tensor(2))
    assert state_of(g) == {"captures": 1, "failures": 1}


def test_the_least_recently_used_capture_goes_first(backend):
    """And is captured again when it is called again."""
    g = graphed(backend, lambda x: x + 1, warmup=0, max_captures=2)

    def call(n):
        x = backend.tensor(n, seed=n)
        assert torch.equal(g(x), x + 1)

    for n in (1, 2, 1, 3, 1):  # 3 evicts 2
        call(n)
    assert state_of(g) == {"captures": 3, "replays": 2, "evictions": 1}
    call(2)
    assert state_of(g) == {"captures": 4, "replays": 2, "evictions": 2}


def test_signatures_that_are_never_captured_do_not_pile_up(backend):
    """A new shape at each call: said once, with what is new each time."""
    g = graphed(backend, lambda x: x + 1, max_captures=2)
    for n in range(1, 8):
        g(backend.tensor(n))
    with pytest.warns(UserWarning, match=r"8 new signatures.*x: shape \[8\], not \[7\].*as a tensor.*Bucket"):
        g(backend.tensor(8))
    for n in range(9, 40):
        g(backend.tensor(n))
    assert len(g.stats().signatures) == 8
    assert g.stats().evictions == 31


def test_a_replay_that_fails_is_not_counted(backend):
    """The exception of an eager function comes through, and the next call is right."""

    @eager_break_during_capture
    def risky(x):
        if broken:
            raise ZeroDivisionError
        return x * 2

    broken = False
    g = graphed(backend, lambda x: risky(x) + 1, warmup=0)
    x = backend.tensor(3)
    g(x)
    broken = True
    with pytest.raises(ZeroDivisionError):
        g(x)
    assert state_of(g) == {"captures": 1}
    broken = False
    assert_same(g(x), x * 2 + 1)
    assert state_of(g) == {"captures": 1, "replays": 1}


def test_clear_frees_everything(backend):
    """And the function is captured again after it."""
    g = graphed(backend, lambda x: x + 1, warmup=0)
    g(backend.tensor(3))
    assert g.stats().pool_bytes > 0
    g.clear()
    assert g.stats().signatures == ()
    assert g.stats().pool_bytes == 0
    g(backend.tensor(3))
    assert state_of(g) == {"captures": 2}


# Explained misses


def test_a_miss_names_what_differs_from_the_nearest_capture(backend, caplog):
    """In the debug log and in `stats()`."""
    caplog.set_level(logging.DEBUG, "segcapture.callable")
    g = graphed(backend, lambda x, mask, n=0: x * mask + n, warmup=0)
    x, mask = backend.tensor(2, 3), backend.tensor(3)
    g(x, mask)
    g(x, mask, n=1)
    g(backend.tensor(4, 3), mask, n=1)
    with torch.inference_mode():
        g(x, mask)
    whys = [s.why for s in g.stats().signatures]
    assert whys[0] == "the first signature"
    assert whys[1] == "nearest to #1, which differs in n: present here"
    assert whys[2] == "nearest to #2, which differs in x: shape [4, 3], not [2, 3]"
    assert whys[3].startswith(
        "nearest to #1, which differs in (ambient): grad False, not True; inference True"
    )
    assert all(why in caplog.text for why in whys)
    assert "x float32 [4, 3]" in str(g.stats())


def test_a_miss_for_shared_memory_is_explained_too(backend):
    """By the arguments that share it."""
    g = graphed(backend, lambda x, y: x + y, warmup=0)
    x = backend.tensor(3)
    g(x, x.clone())
    assert torch.equal(g(x, x), x + x)
    assert g.stats().signatures[1].why == "nearest to #1, which differs in y: is x, not y"
    g(x, x[:])
    assert "memory shared by x, y, not none" in g.stats().signatures[2].why


# Weights


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


def test_invalidate_refuses_with_the_reason(backend):
    """Until the captures are cleared, or the capture is reset."""
    g = graphed(backend, lambda x: x + 1, warmup=0)
    x = backend.tensor(3)
    g(x)
    g.invalidate("the weights are offloaded")
    with pytest.raises(CaptureStateError, match=r"invalidated: the weights are offloaded\. Call clear"):
        g(x)
    g.clear()
    assert torch.equal(g(x), x + 1)
    with backend.capture() as capture:
        x + 1
    capture.invalidate("the pool sleeps")
    for replay in (capture.replay, lambda: next(capture.steps())):
        with pytest.raises(CaptureStateError, match=r"invalidated.*the pool sleeps.*reset"):
            replay()
    capture.reset()
    with capture:
        out = x + 1
    x.add_(1)
    capture.replay()
    assert torch.equal(out, x + 1)


def test_invalidating_what_has_not_captured_changes_nothing(backend):
    """There is nothing to refuse."""
    capture = backend.capture()
    capture.invalidate("too early")
    x = backend.tensor(2)
    with capture:
        capture.invalidate("while it captures")
        out = x + 1
    capture.replay()
    assert torch.equal(out, x + 1)


def test_storages_are_what_a_capture_owns(backend):
    """Intermediates and bridges, not the weights and static inputs."""
    x, weight = backend.tensor(64, 64), backend.tensor(64, 64)
    with backend.capture() as capture:
        middle = x @ weight
        out = rescale(middle) + 1
    owned = [(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in capture.storages()]

    def is_owned(tensor):
        return any(low <= tensor.data_ptr() < high for low, high in owned)

    assert is_owned(middle)
    assert is_owned(out)
    assert not is_owned(x)
    assert not is_owned(weight)
    capture.replay()
    assert torch.equal(out, rescale(x @ weight) + 1)


# Buckets


def masked_mean(ids, mask, scale=1):
    """Ids and mask are [batch, length]; returns [batch] and [batch, length]."""
    hidden = rescale((ids * mask).float())
    ids.add_(mask.long())
    return hidden.sum(dim=1) / mask.sum(dim=1), {"hidden": hidden * scale}


BUCKET = Bucket(sizes=(4, 16, 8), dims={"ids": 1, "mask": -1}, fill={"ids": 7}, out={"out[1]['hidden']": 1})


def batch(backend, length, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 9, (2, length), generator=generator).to(backend.device)
    return ids, torch.ones(2, length, device=backend.device)


def test_buckets_pad_and_cut(backend):
    """Any length is served by the capture of the next size; longer padding of an earlier call is gone."""
    g = graphed(backend, masked_mean, warmup=1, bucket=BUCKET)
    lengths = [3, 8, 4, 1, 5, 8, 7, 16, 2, 6, 9, 13, 4, 1]
    for seed, length in enumerate(lengths):
        ids, mask = batch(backend, length, seed)
        wanted = ids.clone()
        expected = masked_mean(wanted, mask)
        found = g(ids, mask=mask)
        assert_same(found, expected, f"at length {length}")
        assert torch.equal(ids, wanted)
    assert state_of(g) == {"warmups": 3, "captures": 3, "replays": len(lengths) - 6}


def test_above_the_largest_bucket_it_runs_eagerly_and_says_so_once(backend):
    """With the arguments as they are."""
    g = graphed(backend, masked_mean, bucket=BUCKET)
    ids, mask = batch(backend, 17, 0)
    with pytest.warns(UserWarning, match="17 is above the largest bucket, 16"):
        assert_same(g(ids.clone(), mask), masked_mean(ids.clone(), mask))
    for _ in range(2):
        assert_same(g(ids.clone(), mask), masked_mean(ids.clone(), mask))
    assert state_of(g) == {"eager": 3}


def test_one_dimension_of_all_outputs(backend):
    """`out` as a number; an output that has not the padded size there is an error."""
    bucket = Bucket(sizes=[8], dims={"x": 0}, out=0)
    g = graphed(backend, lambda x: (x + 1, x * 2), bucket=bucket, warmup=0)
    for n in (3, 5, 8):
        x = backend.tensor(n, 2, seed=n)
        assert_same(g(x), (x + 1, x * 2))
    g = graphed(backend, lambda x: x.sum(), bucket=bucket, warmup=0)
    with pytest.raises(CaptureFailedError, match=r"cuts dimension 0 of `out` back, but that is \[\]"):
        g(backend.tensor(3, 2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Bucket(sizes=[], dims={"x": 0}), "one or more sizes"),
        (lambda: Bucket(sizes=[0, 3], dims={"x": 0}), "sizes from 1"),
        (lambda: Bucket(sizes=[3], dims={}), "at least one argument"),
        (lambda: GraphedCallable(lambda x: x, bucket=Bucket(sizes=[3], dims={"y": 0})), "names 'y'.*are x"),
    ],
)
def test_a_bucket_that_cannot_work_says_why(make, message):
    """When it is made, not at a call."""
    with pytest.raises(ValueError, match=message):
        make()


def test_lengths_must_agree(backend):
    """And at least one of the named arguments must be there."""
    g = graphed(backend, lambda x=None, y=None: x, bucket=Bucket(sizes=[8], dims={"x": 0, "y": 0}))
    with pytest.raises(ValueError, match="x has 3, y has 4"):
        g(backend.tensor(3), backend.tensor(4))
    with pytest.raises(ValueError, match="none was given"):
        g()
    with pytest.raises(ValueError, match=r"names y, .* list: name the tensors in it, as in 'y\[0\]'"):
        g(backend.tensor(3), [backend.tensor(3)])


def test_a_padded_argument_that_is_shared_and_written_to_is_refused(backend):
    """Its padded copy is another one's no more."""
    bucket = Bucket(sizes=[8], dims={"x": 0}, out=0)
    g = graphed(backend, lambda x, y: x.add_(y.sum()), bucket=bucket, warmup=0)
    x = backend.tensor(3)
    with pytest.raises(CaptureFailedError, match="padded to a bucket"):
        g(x, x[:])
    assert torch.equal(g(x.clone(), x), x + x.sum())


def test_one_tensor_in_two_padded_places(backend):
    """Is another signature than two tensors, and stays one tensor in the function."""
    bucket = Bucket(sizes=[8], dims={"x": 0, "y": 0}, out=0)
    g = graphed(backend, lambda x, y: x.add_(1) * y, bucket=bucket, warmup=1)
    for i in range(4):
        for same in (True, False):
            x = backend.tensor(3, seed=i)
            y = x if same else backend.tensor(3, seed=i + 50)
            expected = (x + 1) * ((x + 1) if same else y)
            assert torch.equal(g(x, y), expected)
            assert torch.equal(x, backend.tensor(3, seed=i) + 1)
    assert state_of(g) == {"warmups": 2, "captures": 2, "replays": 4}


def test_one_tensor_that_is_padded_in_one_place_alone_is_refused(backend):
    """A view of it is served."""
    g = graphed(
        backend, lambda x, y: x * 1 + y.mean(), bucket=Bucket(sizes=[8], dims={"x": 0}, out=0), warmup=0
    )
    x = backend.tensor(3)
    with pytest.raises(CaptureFailedError, match="in another place too"):
        g(x, x)
    assert torch.equal(g(x, x[:]), x + x.mean())


def test_precapture_goes_from_the_largest_to_the_smallest(backend):
    """After it every call replays, and the pool of the small ones is the large one's."""
    seen = []

    def fn(x):
        seen.append(len(x))
        return x.sin().cos()

    g = graphed(backend, fn, warmup=1, bucket=Bucket(sizes=(2, 4, 8), dims={"x": 0}, out=0))
    g.precapture(inputs=lambda n: (backend.tensor(n),))
    assert seen == [8, 8, 4, 4, 2, 2]
    for n in range(1, 9):
        x = backend.tensor(n, seed=n)
        assert torch.equal(g(x), x.sin().cos())
    assert state_of(g) == {"warmups": 3, "captures": 3, "replays": 8}
    with pytest.raises(ValueError, match="no bucket"):
        graphed(backend, fn).precapture(inputs=lambda n: (n,))
    plain = graphed(backend, fn, warmup=0)
    plain.precapture([1, 3], inputs=lambda n: {"x": backend.tensor(n)})
    assert seen[-2:] == [3, 1]


# Where it is used


class Engine:
    """A class whose method is served."""

    def __init__(self, device):
        self.weight = torch.full((3,), 2.0, device=device)

    @GraphedCallable(warmup=0)
    def run(self, x):
        """Twice, or so."""
        return x * self.weight


class Net(nn.Module):
    """A module whose forward is served."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    @GraphedCallable(warmup=0)
    def forward(self, x):
        return self.linear(x).relu()


@pytest.mark.filterwarnings("ignore:segcapture found no GPU")
def test_decorated_methods_have_captures_of_their_instance(backend):
    """Which live no longer than the instance, and are not copied with it."""
    one, two = Engine(backend.device), Engine(backend.device)
    two.weight.fill_(5)
    x = backend.tensor(3)
    for _ in range(2):
        assert torch.equal(one.run(x), x * 2)
        assert torch.equal(two.run(x), x * 5)
    assert one.run is one.run
    assert one.run.stats().replays == two.run.stats().replays == 1
    assert one.run.__doc__ == "Twice, or so."
    for other in (copy.copy(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        other.weight = torch.full((3,), 7.0, device=backend.device)
        assert torch.equal(other.run(x), x * 7)
        assert other.run.stats().calls == 1
    assert torch.equal(one.run(x), x * 2)


@pytest.mark.filterwarnings("ignore:segcapture found no GPU")
@torch.no_grad()
def test_a_decorated_forward(backend):
    """Called through the module."""
    net = Net().to(backend.device)
    for i in range(3):
        x = backend.tensor(2, 3, seed=i)
        assert torch.equal(net(x), net.linear(x).relu())
    assert net.forward.stats().replays == 2
    copied = copy.deepcopy(net)
    copied.linear.weight.zero_()
    x = backend.tensor(2, 3)
    assert torch.equal(copied(x), copied.linear(x).relu())
    assert torch.equal(net(x), net.linear(x).relu())


def test_a_class_with_slots_says_what_to_do():
    """It has nowhere to hold captures."""

    class Slotted:
        __slots__ = ()

        @GraphedCallable
        def run(self):
            return 1

    with pytest.raises(TypeError, match=r"__slots__.*GraphedCallable\(instance.method\)"):
        Slotted().run()


def test_inside_of_another_capture_it_is_a_plain_call(backend):
    """In a graph segment; in an eager one at replay it replays by itself."""
    g = graphed(backend, lambda x: rescale(x) + 1, warmup=0)

    @eager_break_during_capture
    def served(x):
        return g(x)

    x = backend.tensor(3)
    with backend.capture() as outer:
        out = served(g(x))
    assert outer.num_eager_breaks == 2
    for i in range(3):
        x.copy_(backend.tensor(3, seed=i))
        outer.replay()
        first = rescale(x) + 1
        assert torch.equal(out, rescale(first) + 1)
    assert state_of(g) == {"captures": 1, "replays": 2}


def test_several_threads_get_their_own_results(backend):
    """The static inputs and outputs are used by one thread at a time."""
    g = graphed(backend, lambda x: rescale(x).sin(), warmup=1)
    barrier = threading.Barrier(4)
    wrong = []

    def work(n):
        barrier.wait()
        for i in range(20):
            x = backend.tensor(5, seed=n * 100 + i)
            if not torch.equal(g(x), rescale(x).sin()):
                wrong.append((n, i))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert state_of(g) == {"warmups": 1, "captures": 1, "replays": 78}


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: GraphedCallable(3), TypeError),
        (lambda: GraphedCallable(lambda x: (yield x)), TypeError),
        (lambda: GraphedCallable(abs, warmup=-1), ValueError),
        (lambda: GraphedCallable(abs, max_captures=0), ValueError),
        (lambda: GraphedCallable(abs, on_error="ignore"), ValueError),
        (lambda: GraphedCallable(abs, weights="copy"), ValueError),
        (lambda: GraphedCallable(abs, unknown=1), TypeError),
    ],
)
def test_bad_options_are_refused_at_once(make, error):
    """Not at the first call."""
    with pytest.raises(error):
        make()


def test_modes_are_passed_on(emulated):
    """`mode="full"` captures breaks too, which the host read in this one does not survive."""
    g = GraphedCallable(lambda x: rescale(x), device="cpu", mode="full", warmup=0)
    with pytest.raises(RuntimeError, match="reads a value on the host"):
        g(emulated.tensor(3))
    g = GraphedCallable(lambda x: rescale(x), device="cpu", breaks=[], warmup=0, on_error="eager")
    g(emulated.tensor(3))
    assert state_of(g) == {"eager": 1, "failures": 1}


# What reaches the caller, and what does not


def halved_until_small(x):
    """Calls itself from a break, through whatever serves it."""
    return descend(x * 1) + x


@eager_break_during_capture
def descend(h):
    return served_recursion[0](h / 100) if h[0] > 10 else h + 1


served_recursion = [halved_until_small]


def test_a_call_from_inside_of_the_function_is_a_plain_one(backend):
    """At warm-up, capture and replay, as the static inputs are in use; the outer result is right."""
    g = graphed(backend, halved_until_small, warmup=1)
    for value in (50.0, 60.0, 5.0, 5000.0, 70.0):
        x = torch.full((1,), value, device=backend.device)
        served_recursion[0] = halved_until_small
        expected = halved_until_small(x)
        served_recursion[0] = g
        assert torch.equal(g(x), expected)
    served_recursion[0] = halved_until_small
    assert state_of(g) == {"warmups": 1, "captures": 1, "replays": 3, "eager": 5}
    assert g.stats().calls == 10


def test_static_inputs_in_each_others_place(backend):
    """Are refused, since one is overwritten before it is read; eagerly the call is right."""

    def fn(a, b):
        a.mul_(2)
        return a - b

    x, other = backend.tensor(3), backend.tensor(3, seed=5)
    refuses = graphed(backend, fn, warmup=0)
    refuses(x.clone(), x.clone())
    (a, b), _ = refuses.static_arguments(x.clone(), x.clone())
    with pytest.raises(CaptureFailedError, match="static input of another"):
        refuses(b, a)
    g = graphed(backend, fn, warmup=0, on_error="eager")
    g(x.clone(), x.clone())
    (a, b), _ = g.static_arguments(x.clone(), x.clone())
    for first, second in ((b, a), (other, a), (b, other), (a, b)):
        a.fill_(1)
        b.fill_(5)
        plain = {id(t): t.clone() for t in (a, b, other)}
        expected = fn(plain[id(first)], plain[id(second)])
        assert torch.equal(g(first, second), expected)
        for t in (first, second):
            assert torch.equal(t, plain[id(t)])


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


@pytest.mark.parametrize("warmup", [0, 1])
@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.t_(),
        lambda x: x.unsqueeze_(0),
        lambda x: x.resize_(1, 2),
        lambda x: x.set_(torch.zeros_like(x)),
    ],
)
def test_arguments_that_change_their_shape_or_memory_are_refused(backend, warmup, change):
    """No replay would do that to the caller's tensor; what is undone again is served."""

    def fn(x):
        change(x)
        return torch.ones(2, device=x.device)

    with pytest.raises(CaptureFailedError, match=r"`x`.*(stride|shape|address)"):
        graphed(backend, fn, warmup=warmup)(backend.tensor(2, 2))
    g = graphed(backend, lambda x: (x.t_() * 1, x.t_())[0], warmup=warmup)
    for seed in range(3):
        x = backend.tensor(2, 3, seed=seed)
        assert torch.equal(g(x), x.t())


@pytest.mark.parametrize("on_error", ["raise", "eager"])
def test_an_argument_that_overlaps_a_padded_one_and_is_written_to_is_refused(backend, on_error):
    """Also where the call that was captured had separate ones."""

    def fn(x, y):
        y.add_(1)
        return x * 1

    bucket = Bucket(sizes=(8,), dims={"x": 0}, out=0)
    g = graphed(backend, fn, bucket=bucket, warmup=1, on_error=on_error)
    for seed in range(3):
        x, y = backend.tensor(3, seed=seed), backend.tensor(2, seed=9)
        assert torch.equal(g(x, y), x)
        assert torch.equal(y, backend.tensor(2, seed=9) + 1)
    for _ in range(2):
        x, mine = backend.tensor(3), backend.tensor(3)
        if on_error == "eager":
            assert torch.equal(g(x, x[:2]), fn(mine, mine[:2]))
            assert torch.equal(x, mine)
            continue
        with pytest.raises(CaptureFailedError, match="padded to a bucket"):
            g(x, x[:2])
        assert torch.equal(x, mine)


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("through", ["itself", "view", "foreach"])
def test_writes_that_only_some_calls_make_reach_the_caller(backend, guard, through):
    """A break that writes to an argument now and then, not at capture."""

    @eager_break_during_capture
    def count(h, total):
        if h[0] > 0:
            writes = {
                "itself": lambda: total.add_(1),
                "view": lambda: total[:1].add_(1),
                "foreach": lambda: torch._foreach_add_([total], 1.0),
            }
            writes[through]()

    def fn(x, total):
        count(x * 1, total)
        return x * 2, total

    g = graphed(backend, fn, warmup=1)
    with guard():
        total, expected = torch.zeros(2, device=backend.device), torch.zeros(2, device=backend.device)
        for value in (-1.0, -1.0, -1.0, 1.0, -1.0, 1.0):
            x = torch.full((2,), value, device=backend.device)
            found = g(x, total)
            assert_same(found, fn(x, expected))
            assert found[1] is total
    assert state_of(g) == {"warmups": 1, "captures": 1, "replays": 4}


class Nested:
    """An object that may hold another."""

    def __init__(self, **attributes):
        vars(self).update(attributes)


class Listed(list):
    """A list that may have attributes."""


class Coupled(tuple):
    """A tuple made from two values."""

    def __new__(cls, left, right):
        return super().__new__(cls, (left, right))


def with_attribute(value, name, content):
    setattr(value, name, content)
    return value


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


def test_names_of_keyword_arguments_keep_their_order(backend):
    """Where the function sees it, in `**kwargs`."""

    def fn(*, first, second, **rest):
        return torch.cat([first, second, *rest.values()])

    g = graphed(backend, fn, warmup=0)
    tensors = {name: backend.tensor(1, seed=i) for i, name in enumerate(("first", "second", "b", "a"))}
    for names in (
        ("first", "second", "b", "a"),
        ("first", "b", "second", "a"),
        ("second", "first", "a", "b"),
    ):
        given = {name: tensors[name] for name in names}
        for _ in range(2):
            assert torch.equal(g(**given), fn(**given))
    assert state_of(g) == {"captures": 3, "replays": 3}
    g = graphed(backend, lambda *, first, second: first - second, warmup=0)
    for names in (("first", "second"), ("second", "first")):
        assert_same(g(**{name: tensors[name] for name in names}), tensors["first"] - tensors["second"])
    assert state_of(g) == {"captures": 1, "replays": 1}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({2}, {2.0}),
        (frozenset((1,)), frozenset((True,))),
        ({(1,)}, {(1.0,)}),
        ({0.0}, {-0.0}),
        ({(1,): 0}, {(1.0,): 0}),
    ],
)
def test_items_of_sets_tell_signatures_apart(backend, one, other):
    """By type, though they are equal."""
    g = graphed(backend, lambda x, items: x + len(repr(items)), warmup=0)
    x = backend.tensor(2)
    for _ in range(2):
        for items in (one, other):
            assert torch.equal(g(x, copy.copy(items)), x + len(repr(items)))
    assert state_of(g) == {"captures": 2, "replays": 2}


@pytest.mark.parametrize("view", [torch.conj, lambda z: torch._neg_view(z)])
def test_objects_with_a_conjugated_view_are_another_signature(backend, view):
    """It has the same address, shape and strides."""
    base = torch.complex(backend.tensor(2), backend.tensor(2, seed=1))
    holder = Nested(t=base)
    g = graphed(backend, lambda holder: holder.t * 2, warmup=0)
    for t in (base, base, view(base), base):
        holder.t = t
        assert torch.equal(g(holder), t * 2)


def test_tuples_made_in_a_way_of_their_own(backend):
    """As arguments and outputs, with their attributes."""

    def fn(pair):
        return Coupled(pair[0] + pair[1], pair[1] * pair.scale)

    g = graphed(backend, fn, warmup=1)
    for scale in (2, 2, 2, 3, 3):
        pair = Coupled(backend.tensor(2, seed=scale), backend.tensor(2, seed=7))
        pair.scale = scale
        found = g(pair)
        assert type(found) is Coupled
        assert_same(tuple(found), tuple(fn(pair)))
    assert state_of(g) == {"warmups": 2, "captures": 2, "replays": 1}


def test_arguments_that_the_function_differentiates_by(backend):
    """Under no_grad, with enable_grad inside; of several none may have been computed."""

    def fn(x, y):
        with torch.enable_grad():
            return torch.autograd.grad((x * x * y).sum(), [x, y])

    g = graphed(backend, fn, warmup=1)
    for seed in range(4):
        x = backend.tensor(2, seed=seed).requires_grad_()
        y = backend.tensor(2, seed=seed + 9).requires_grad_()
        with torch.no_grad():
            assert_same(g(x, y), fn(x, y))
            assert x.grad is None
    assert state_of(g) == {"warmups": 1, "captures": 1, "replays": 2}
    single = graphed(backend, lambda x, y: x * y, warmup=0)
    for seed in range(3):
        made = backend.tensor(2, seed=seed).requires_grad_() * 2
        with torch.no_grad():
            assert_same(single(made, x.detach()), made * x)
    for y in (x * 2, (x * 2) + 1):
        with torch.no_grad(), pytest.raises(CaptureFailedError, match="no gradient flows between"):
            g(x, y)


@pytest.mark.parametrize("warmup", [0, 1])
def test_gradients_that_an_argument_accumulates_are_refused(backend, warmup):
    """A replay would leave them in the static input."""

    def fn(x):
        with torch.enable_grad():
            (x * x).sum().backward()
        return x * 1

    with torch.no_grad(), pytest.raises(CaptureFailedError, match=r"accumulated into `\.grad`"):
        graphed(backend, fn, warmup=warmup)(backend.tensor(2).requires_grad_())


def test_gradients_that_an_argument_has_are_added_to(backend):
    """In place, as they are copied in and out like any tensor."""

    def fn(x):
        with torch.enable_grad():
            (x * x).sum().backward()
        return x * 1

    g = graphed(backend, fn, warmup=1)
    ours, plain = (backend.tensor(2).requires_grad_() for _ in range(2))
    ours.grad, plain.grad = (torch.zeros(2, device=backend.device) for _ in range(2))
    with torch.no_grad():
        for _ in range(4):
            assert_same(g(ours), fn(plain))
            assert_same(ours.grad, plain.grad)
    assert state_of(g) == {"warmups": 1, "captures": 1, "replays": 2}


@eager_break_during_capture(name="prefill")
def prefill(h):
    return h + 1


@eager_break_during_capture(name="decode")
def decode(h):
    return h * 2


def test_names_of_breaks_that_one_signature_does_not_call(backend):
    """Are those of another; a string is no collection of names."""

    def fn(x):
        return prefill(x * 1) if len(x) > 1 else decode(x * 1)

    g = graphed(backend, fn, breaks=["prefill", "decode"], warmup=0)
    for n in (4, 1, 4, 1):
        x = backend.tensor(n)
        assert torch.equal(g(x), fn(x))
    assert [entry.capture.num_eager_breaks for entry in g._cache] == [1, 1]
    with pytest.raises(ValueError, match="string 'decode'"):
        graphed(backend, fn, breaks="decode", warmup=0)(backend.tensor(1))


@pytest.mark.parametrize(
    "make",
    [lambda t: Record(t, 1), lambda t: Listed([t]), lambda t: Coupled(t, 1), lambda t: Mapped(a=t)],
)
def test_attributes_of_containers_belong_to_the_signature(backend, make):
    """Plain values in them; tensors there are refused by name."""

    def fn(held):
        first = held["a"] if isinstance(held, dict) else getattr(held, "first", None)
        return (held[0] if first is None else first) * held.scale

    g = graphed(backend, fn, warmup=0)
    for seed, scale in enumerate((2, 3, 3, 2.0, 2)):
        held = with_attribute(make(backend.tensor(2, seed=seed)), "scale", scale)
        assert torch.equal(g(held), fn(held))
    assert state_of(g) == {"captures": 3, "replays": 2}
    with pytest.raises(CaptureFailedError, match=r"tensor at `\.scale\[0\]`"):
        g(with_attribute(make(backend.tensor(2)), "scale", [backend.tensor(2)]))


class Mapped(dict):
    """A dict that may have attributes."""


# CUDA alone


@pytest.mark.cuda
def test_warm_up_runs_on_the_capture_stream(cuda):
    """So that libraries set up there what the capture uses; results are ordered with the caller's stream."""
    streams = []

    def fn(x):
        streams.append(torch.cuda.current_stream().cuda_stream)
        return x + 1

    g = GraphedCallable(fn, device=cuda.device)
    for i in range(5):
        x = torch.full((1 << 20,), float(i), device=cuda.device)
        torch.cuda._sleep(10_000_000)
        x.add_(1)
        assert torch.equal(g(x), x + 1)
    assert len(streams) == 3
    assert len(set(streams)) == 1
    assert streams[0] != torch.cuda.current_stream().cuda_stream


@pytest.mark.cuda
def test_calls_from_several_streams_are_ordered(cuda):
    """The static inputs are not overwritten while a replay on another stream reads them."""

    def slow(x):
        torch.cuda._sleep(2_000_000)
        return x * 2

    g = GraphedCallable(slow, device=cuda.device)
    sides = [torch.cuda.Stream() for _ in range(3)]
    outs = []
    for i in range(30):
        with torch.cuda.stream(sides[i % 3]):
            outs.append(g(torch.full((1 << 16,), float(i), device=cuda.device)))
    torch.cuda.synchronize()
    assert [out[0].item() for out in outs] == [2.0 * i for i in range(30)]


@pytest.mark.cuda
def test_host_tensors_as_arguments(cuda):
    """A scalar is a value of the signature, a longer one is copied where the graph reads it."""
    g = GraphedCallable(lambda x, s: x * s, device=cuda.device, warmup=0)
    x = cuda.tensor(3)
    for value in (2.0, 3.0, 2.0):
        assert torch.equal(g(x, torch.tensor(value)), x * value)
    assert state_of(g) == {"captures": 2, "replays": 1}

    @eager_break_during_capture
    def take(x, lengths):
        return x[: int(lengths.sum())].sum()

    g = GraphedCallable(lambda x, lengths: take(x, lengths) + 1, device=cuda.device, warmup=0)
    x = cuda.tensor(100)
    for i in range(1, 6):
        lengths = torch.tensor([i, 2 * i])
        assert torch.equal(g(x, lengths), x[: 3 * i].sum() + 1)
    assert state_of(g) == {"captures": 1, "replays": 4}


@pytest.mark.cuda
def test_buckets_share_the_pool(cuda):
    """Captured from the largest, the smaller ones need hardly any memory of their own."""

    def deep(x):
        for _ in range(8):
            x = (x @ x.T @ x).tanh()
        return x.sum(dim=1)

    sizes = (256, 512, 1024, 2048)
    bucket = Bucket(sizes=sizes, dims={"x": 0}, out=0)

    def pool_bytes(chosen):
        g = GraphedCallable(deep, device=cuda.device, warmup=1, bucket=bucket)
        g.precapture(chosen, inputs=lambda n: (torch.zeros(n, 512, device=cuda.device),))
        return g.stats().pool_bytes

    assert pool_bytes(sizes) <= 1.1 * pool_bytes(sizes[-1:])


@pytest.mark.cuda
def test_evicted_captures_free_their_memory(cuda):
    """Shapes that come and go leave nothing behind."""
    g = GraphedCallable(lambda x: x.sin() + 1, device=cuda.device, warmup=0, max_captures=2)
    for n in range(1, 4):
        g(torch.zeros(n << 18, device=cuda.device))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for i in range(30):
        g(torch.zeros((1 + i % 3) << 18, device=cuda.device))
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + (8 << 20)


@pytest.mark.cuda
def test_the_device_is_found_where_it_is_not_named(cuda):
    """From the tensors, from the module; tensors on the host alone mean the host."""
    assert "on cuda" in str(_capture_of(GraphedCallable(lambda x: x + 1, warmup=0), cuda.tensor(2)))
    assert "on cpu" in str(_capture_of(GraphedCallable(lambda x: x + 1, warmup=0), torch.ones(2)))


def _capture_of(g, *args) -> BreakableCUDAGraphCapture:
    g(*args)
    (entry,) = g._cache
    return entry.capture


def test_names_of_breaks_that_nobody_calls_are_in_the_log(backend, caplog):
    """Once: another signature may call them."""
    half = eager_break_during_capture(lambda x: x / 2, name="half")
    g = graphed(backend, lambda x: half(x * 2), warmup=0, breaks=["hafl"])
    for n in (3, 3, 4):
        g(backend.tensor(n))
    told = [r.getMessage() for r in caplog.records if "hafl" in r.getMessage()]
    assert len(told) == 1
    assert "called were: ['half']" in told[0]


def test_a_dimension_that_no_argument_has(backend):
    """It is not taken modulo."""
    g = graphed(backend, lambda x: x * 2, bucket=Bucket(sizes=(4,), dims={"x": 7}))
    with pytest.raises(ValueError, match="dimension 7 of x, which has 2 dimensions"):
        g(backend.tensor(2, 3))


@pytest.mark.parametrize("cut", [{'out["h"]': 0}, {"h": 1}], ids=["wrong dimension", "wrong name"])
def test_outputs_that_fit_the_bucket_are_named(backend, cut):
    """By the place and dimension that the user would write."""
    bucket = Bucket(sizes=(4,), dims={"x": 1}, out=cut)
    g = graphed(backend, lambda x: {"h": x * 2, "n": x.sum(1)}, bucket=bucket, warmup=0)
    with pytest.raises(CaptureFailedError, match=re.escape("""out={'out["h"]': 1}""")):
        g(backend.tensor(2, 3))


def test_what_is_no_bucket_and_no_arguments(backend):
    """Said at once, by type."""
    with pytest.raises(TypeError, match="Bucket"):
        graphed(backend, lambda x: x, bucket=4)
    g = graphed(backend, lambda x: x * 2, warmup=0)
    with pytest.raises(TypeError, match="tuple or dict"):
        g.precapture([3], inputs=backend.tensor)
    with pytest.raises(CaptureStateError, match="1 calls do it"):
        g.static_arguments(backend.tensor(3))


# Faults that odd programs have shown


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
    g(x)
    results["z"] = 1
    assert list(g(x)) == ["y"]
    results.clear()
    assert_same(g(x)["y"], x * 2)


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


def test_modules_among_the_arguments_train_or_not(backend):
    """By themselves, in an object, and put into another module after the first call."""
    x = backend.tensor(64) + 10
    holder = type("Holder", (), {})()
    holder.net = torch.nn.Dropout(1.0)
    nested = torch.nn.Sequential(torch.nn.Identity())
    cases = [
        (lambda net, x: net(x), torch.nn.Dropout(1.0), lambda net: net),
        (lambda holder, x: holder.net(x), holder, lambda holder: holder.net),
    ]
    for f, argument, module in cases:
        g = graphed(backend, f, warmup=1)
        for _ in range(3):
            assert_same(g(argument, x), torch.zeros_like(x))
        module(argument).eval()
        assert_same(g(argument, x), x)
    g = graphed(backend, nested, warmup=2)
    g(x)
    nested[0] = torch.nn.Dropout(1.0)
    for _ in range(4):
        assert_same(g(x), torch.zeros_like(x))
    nested.eval()
    assert_same(g(x), x)


def test_the_gradient_of_an_argument_is_copied_too(backend):
    """The function finds it at the static input; with none it is another signature."""

    def f(p):
        if p.grad is not None:
            p.sub_(p.grad)
        return p.sum()

    g = graphed(backend, f, warmup=1)
    ours, plain = (torch.nn.Parameter(backend.tensor(3)) for _ in range(2))
    with torch.no_grad():
        for seed in range(8):
            if seed > 3:
                ours.grad, plain.grad = (backend.tensor(3, seed=seed) for _ in range(2))
            assert_same(g(ours), f(plain))
            assert_same(ours, plain)
    assert g.stats().captures == 2


class Rounded(float):
    """Shows less than it is."""

    def __repr__(self):
        return f"{float(self):.1f}"


def test_what_key_returns_is_compared_with_its_type(backend):
    """1, 1.0 and True are three, as arguments are; and it needs a hash."""
    scale = 1
    g = graphed(backend, lambda x: x * scale, warmup=0, key=lambda x: scale)
    x = torch.ones(2, dtype=torch.int64, device=backend.device)
    for scale in (1, 1.0, True, 0.0, -0.0, 1):
        assert_same(g(x), x * scale)
    g = graphed(backend, lambda x, by: x * float(by), warmup=0)
    for value in (1.01, 1.02, 1.01):
        assert_same(g(x, Rounded(value)), x * value)
    g = graphed(backend, lambda x: x, key=lambda x: [x.shape])
    with pytest.raises(TypeError, match="key= returned .*no hash"):
        g(x)


def test_one_tensor_padded_in_two_ways_is_refused(backend):
    """By the name of the second place."""
    bucket = Bucket(sizes=(4,), dims={"q": 0, "k": 0}, fill={"q": 0, "k": 1})
    g = graphed(backend, lambda q, k: (q.sum(0), k.prod(0)), bucket=bucket, warmup=0)
    x = backend.tensor(3)
    assert_same(g(x, x.clone())[0], x.sum(0))
    with pytest.raises(ValueError, match="k is a tensor that .* another way"):
        g(x, x)
    bucket = Bucket(sizes=(8,), dims={"a": 0, "b": 0}, fill=float("nan"))
    g = graphed(
        backend, lambda a, b=None: (a + (a if b is None or b is False else b)).nansum(), bucket=bucket
    )
    for other in (x, None, False):
        assert_same(g(x, other), x.sum() * 2)


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


def test_the_identity_of_arguments_is_seen(backend):
    """One tensor twice is not two views of one memory, and a Parameter is one in the function too."""
    g = graphed(backend, lambda a, b: a * (1 if a is b else 0), warmup=0)
    t = backend.tensor(3)
    for other in (t[:], t[:], t, t):
        assert_same(g(t, other), t * (1 if t is other else 0))
    g = graphed(backend, lambda x: x * (2 if isinstance(x, torch.nn.Parameter) else 3), warmup=1)
    p = torch.nn.Parameter(backend.tensor(3), requires_grad=False)
    for _ in range(3):
        assert_same(g(p), p * 2)
        assert_same(g(t), t * 3)


def test_writes_before_an_exception_arrive(backend):
    """As in eager code."""
    broken = [False]

    @eager_break_during_capture
    def risky(x):
        if broken[0]:
            raise ZeroDivisionError
        return x * 1

    def f(x):
        x.add_(1)
        return risky(x)

    g = graphed(backend, f, warmup=0)
    for broken[0] in (False, True, False):
        x = torch.zeros(2, device=backend.device)
        with contextlib.suppress(ZeroDivisionError):
            g(x)
        assert x.tolist() == [1, 1]


def test_a_failed_signature_keeps_nothing_of_its_call(backend):
    """Not even the tensors that the traceback refers to."""
    made = []

    def f(x):
        large = x * 2
        made.append(weakref.ref(large))
        if x.sum().item() > 1e9:
            return x
        return large + 1

    g = graphed(backend, f, warmup=0, on_error="eager")
    for _ in range(4):
        g(backend.tensor(3))
    gc.collect()
    assert [ref() for ref in made] == [None] * len(made)


@torch.no_grad()
def test_copies_and_pickles_are_uncaptured(backend):
    """Of a module that has one in an attribute, and of one by itself."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3, 3)
            self.step = GraphedCallable(self._step, warmup=0, device=backend.device, mode=backend.mode)

        def _step(self, x):
            return self.layer(x)

    model = Model().to(backend.device)
    x = backend.tensor(3)
    model.step(x)
    other = copy.deepcopy(model)
    assert other.step.stats().captures == 0
    other.layer.weight.zero_()
    for _ in range(3):
        assert_same(other.step(x), other.layer(x))
        assert_same(model.step(x), model.layer(x))
    again = pickle.loads(pickle.dumps(GraphedCallable(torch.relu, warmup=1, device=backend.device)))
    assert again(x).tolist() == x.relu().tolist()
    assert pickle.loads(pickle.dumps(decorated)) is decorated
    assert copy.deepcopy(decorated) is decorated
    with backend.capture() as g:
        x * 2
    shared = GraphedCallable(torch.relu, warmup=0, pool=g.pool, device=backend.device, mode=backend.mode)
    if backend.mode is None:
        assert_same(copy.deepcopy(shared)(x), x.relu())


@GraphedCallable(device="cpu")
def decorated(x):
    """As functions are, it is pickled by its name."""
    return x * 2


@dataclass
class Counts:
    """A record with a decorated method."""

    by: torch.Tensor

    @GraphedCallable(warmup=0)
    def times(self, x):
        return x * self.by


class HasStep:
    """A decorated function that Python does not bind, and an object whose method is decorated."""

    relu = GraphedCallable(torch.relu, warmup=0)

    @GraphedCallable(warmup=0)
    def double(self, x):
        return x * 2


@pytest.mark.filterwarnings("ignore:segcapture found no GPU")
def test_decorated_attributes(backend):
    """A builtin stays unbound; an object's captures are no part of it as an argument."""
    thing, x = HasStep(), backend.tensor(3)
    assert_same(thing.relu(x), x.relu())
    g = graphed(backend, lambda thing, x: thing.double(x) + 1, warmup=0)
    for _ in range(3):
        assert_same(g(thing, x), x * 2 + 1)
    record = Counts(torch.full_like(x, 3))
    g = graphed(backend, lambda record, x: record.times(x) + 1, warmup=0)
    for _ in range(3):
        assert_same(g(record, x), x * 3 + 1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)]),
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_tensors_that_cannot_be_copied_run_eagerly(make):
    """With on_error='eager'; else they are named."""
    t = make()
    g = GraphedCallable(lambda t: t, device="cpu")
    with pytest.raises(CaptureFailedError, match="nested tensor|quantized tensor"):
        g(t)
    assert GraphedCallable(lambda t: t, device="cpu", on_error="eager")(t) is t


@pytest.mark.cuda
def test_inside_of_torchs_capture_it_is_a_plain_call(cuda):
    """What it does becomes a part of the other graph."""
    g = GraphedCallable(lambda x: x * 2, warmup=0)
    x = torch.ones(4, device="cuda")
    g(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = g(x) + 1
    x.fill_(4)
    graph.replay()
    assert y.tolist() == [9.0] * 4
    assert g.stats().captures == 1


def test_statistics_show_the_sizes_of_buckets(backend):
    """Not those of the calls that came first."""
    g = graphed(
        backend, lambda x: x * 2, warmup=0, bucket=Bucket(sizes=(4, 8), dims={"x": 0}, out={"out": 0})
    )
    for length in (3, 4, 7):
        x = backend.tensor(length, 2)
        assert torch.equal(g(x), x * 2)
    text = str(g.stats())
    assert "[4, 2]" in text
    assert "shape [8, 2], not [4, 2]" in text
    assert "[3, 2]" not in text
    assert "[7, 2]" not in text
