"""`GraphedCallable`: one capture for each signature, and never another result than the function's."""

import copy
import gc
import os
import pickle
import threading
import weakref
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from segcapture import (
    BreakableCUDAGraphCapture,
    CaptureStateError,
    GraphedCallable,
    eager_break_during_capture,
)
from tests.conftest import assert_same
from tests.served import Counts, Record, graphed, rescale, state_of

EXAMPLES = int(os.environ.get("SEGCAPTURE_EXAMPLES", "60"))


class Pair(NamedTuple):
    """Arguments of a kind of their own."""

    left: object
    right: object


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


def test_warm_up_capture_and_replay_are_the_calls(backend):
    """Two calls warm up, the third captures, later ones replay; each returns the result."""
    runs = []

    def double(x):
        runs.append(1)
        return rescale(x) * 2

    g = graphed(backend, double, ignore_state=("*.runs",))
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
@pytest.mark.filterwarnings("ignore:.*new signatures in a row:UserWarning")
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


@pytest.mark.parametrize(
    ("new", "told"), [("value", "p: value 7, not 6"), ("size", r"x: shape \[8\], not \[7\]")]
)
def test_a_new_signature_in_each_call_is_warned_of_once(backend, new, told):
    """After a few; not where signatures are called again, nor in `precapture`."""

    def fn(x, p=0):
        return x + p

    g = graphed(backend, fn, warmup=0)
    g.precapture(range(100, 120), inputs=lambda n: (backend.tensor(n),))
    for p in range(9):
        for _ in range(2):
            g(backend.tensor(3), -p)

    def call(n):
        return g(backend.tensor(3), n) if new == "value" else g(backend.tensor(n + 1))

    g = graphed(backend, fn, warmup=0)
    for n in range(7):
        call(n)
    with pytest.warns(UserWarning, match=f"8 new signatures in a row.*{told}"):
        call(7)
    for n in range(8, 20):
        call(n)


def test_served_functions_that_call_each_other_from_two_threads(backend):
    """Each in an eager function of the other: neither waits for ever, and results are right."""
    meet = threading.Barrier(2)
    served = []

    @eager_break_during_capture
    def call_other(x, k):
        if armed and x[0] < 100:
            meet.wait(5)  # both are inside now, and each wants the other
            return served[1 - k](x)
        return x * 1

    def make(k):
        def fn(x):
            return call_other(x * 100, k) + k

        return graphed(backend, fn, warmup=0)

    armed = False
    served += [make(0), make(1)]
    x = torch.full((2,), 0.5, device=backend.device)
    for g in served:
        g(x)
    armed = True
    found = {}

    def work(k):
        found[k] = served[k](x)

    threads = [threading.Thread(target=work, args=(k,), daemon=True) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    for k in range(2):
        assert found[k].tolist() == [5000.0 + (1 - k) + k] * 2
    assert sum(g.stats().eager for g in served) >= 1
    armed = False
    assert [g(x)[0].item() for g in served] == [50.0, 51.0]
