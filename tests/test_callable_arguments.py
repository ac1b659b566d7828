"""What tells the calls of a served function apart, and what reaches its arguments."""

import contextlib
import copy
import gc
import logging
import weakref

import pytest
import torch
from torch import nn

from segcapture import (
    CaptureFailedError,
    CaptureStateError,
    GraphedCallable,
    eager_break_during_capture,
)
from tests.conftest import assert_same
from tests.served import Listed, Nested, Record, Settings, graphed, state_of, with_attribute


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


class Coupled(tuple):
    """A tuple made from two values."""

    def __new__(cls, left, right):
        return super().__new__(cls, (left, right))


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


@pytest.mark.parametrize("batch", [1, 3])
def test_the_newest_part_of_a_tensor_that_grows_is_one_signature(backend, batch):
    """Its strides differ in each call, and no kernel asks for those."""
    g = graphed(backend, lambda i: i * 2)
    ours = plain = torch.ones(batch, 4, device=backend.device)
    for _ in range(30):
        ours = torch.cat([ours, g(ours[:, -1:])], 1)
        plain = torch.cat([plain, plain[:, -1:] * 2], 1)
    assert torch.equal(ours, plain)
    assert state_of(g) == {"warmups": 2, "captures": 1, "replays": 27}


def strides(t):
    """Of the dimensions that have more than one element."""
    return [stride for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1]


CUTS = {
    "rows": lambda base: base[:, :4],
    "columns": lambda base: base[:, ::2],
    "turned": lambda base: base[:, :4].t(),
    "newest": lambda base: base[:, -1:],
    "first": lambda base: base[:1, :4],
    "inner": lambda base: base[:, :4][:, None],
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_views_of_arguments_with_other_gaps(backend, cut):
    """What comes back is the call's own memory, and what is written arrives there."""

    def fn(x):
        x[..., -1].mul_(2)
        return x[..., :1], x[0], x.t() if x.dim() == 2 else x[:, 0], x.sin() + x.exp()

    g = graphed(backend, fn, warmup=0)
    for width in (12, 8, 16, 20, 9, 11):
        ours, plain = backend.tensor(3, width, seed=width), backend.tensor(3, width, seed=width)
        x, expected = cut(ours)[..., :4], fn(cut(plain)[..., :4])
        found = g(x)
        assert_same(found, expected)
        assert torch.equal(ours, plain)
        assert list(map(strides, found[:3])) == list(map(strides, expected[:3]))
        assert [t.data_ptr() - ours.data_ptr() for t in found[:3]] == [
            t.data_ptr() - plain.data_ptr() for t in expected[:3]
        ]
    assert g.stats().replays > 0


def test_layouts_that_kernels_tell_apart_are_several_signatures(backend):
    """Dense ones, others with gaps, turned ones, and rows that are not aligned."""
    g = graphed(backend, lambda x: x @ x.t(), warmup=0)
    wide, odd = backend.tensor(8, 16), backend.tensor(8, 15)
    for x in (
        wide[:, :8],
        wide[:, :8].contiguous(),
        wide[:, :8].t(),
        odd[:, :8],
        backend.tensor(8, 32)[:, :8],
    ):
        assert_same(g(x), x @ x.t())
    assert state_of(g) == {"captures": 4, "replays": 1}


def test_a_write_to_elements_that_repeat_is_refused(backend):
    """One is several; reading is served."""
    g = graphed(backend, lambda x: x * 2, warmup=0)
    for seed in range(3):
        x = backend.tensor(3, seed=seed).expand(4, 3)
        assert torch.equal(g(x), x * 2)
    assert state_of(g) == {"captures": 1, "replays": 2}
    with pytest.raises(CaptureFailedError, match="elements repeat"):
        graphed(backend, lambda x: x[0].add_(1), warmup=0)(backend.tensor(3).expand(4, 3))


def test_an_argument_by_keyword_or_by_position(backend):
    """Two signatures, and `stats()` says which."""
    g = graphed(backend, lambda x, scale: x * scale, warmup=0)
    g(backend.tensor(3), scale=2.0)
    g(backend.tensor(3), 2.0)
    assert g.stats().signatures[1].why == (
        "nearest to #1, which differs in scale: passed by position, not by keyword"
    )


class Session:
    """A request's own state."""

    def __init__(self, scale, device):
        self.scale = scale
        self.held = torch.full((3,), float(scale), device=device)


def test_captures_go_with_the_objects_that_they_are_for(backend):
    """An object that was an argument lives no longer than its owners let it; others keep their captures."""
    g = graphed(backend, lambda x, s: (x * s.scale + s.held, s), warmup=1)
    kept, gone = Session(7, backend.device), []
    for scale in range(8):
        session = Session(scale, backend.device)
        gone.append(weakref.ref(session))
        for _ in range(4):
            for s in (session, kept):
                x = backend.tensor(3, seed=scale)
                out, same = g(x, s)
                assert_same(out, x * s.scale + s.held)
                assert same is s
    del session, s, same
    gc.collect()
    assert [ref() for ref in gone] == [None] * 8
    assert [s.state for s in g.stats().signatures] == ["captured"]
    assert g(x, kept)[1] is kept
    assert state_of(g) == {"warmups": 9, "captures": 9, "replays": 47}
