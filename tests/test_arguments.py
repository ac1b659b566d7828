"""Arguments of eager segments: what a recorded call keeps, and what it sees at replay (contract C3)."""

import dataclasses
import functools
import weakref
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from segcapture import CaptureFailedError, FrozenValueWarning, Live, eager_break_during_capture


class Pair(NamedTuple):
    first: object
    second: object


class Tagged(tuple):
    """A tuple of a user's own class."""


def watched(look):
    """An eager break that logs `look(*args, **kwargs)` at each call, and its log."""
    log = []
    return eager_break_during_capture(lambda *a, **k: log.append(look(*a, **k)), name="watched"), log


def replayed(backend, model, times=2):
    """Capture a model of one static input under no_grad, and replay it."""
    x = backend.tensor(4)
    with torch.no_grad():
        with backend.capture() as g:
            model(x)
        for seed in range(1, times + 1):
            x.copy_(backend.tensor(4, seed=seed))
            g.replay()
    return g


@pytest.mark.parametrize("make", [lambda x: x, lambda x: x * 2])
def test_one_object_for_one_tensor(backend, make):
    """A tensor given several times, also in tuples and as a keyword, is one object at each call."""
    fn, log = watched(lambda a, b, c, *, key: a is b and b is c[0] and c[1].first is a and key is a)

    def model(x):
        t = make(x)
        fn(t, t, (t, Pair(t, 1)), key=t)

    replayed(backend, model)
    assert log == [True] * 3


@pytest.mark.parametrize(
    "views",
    [
        lambda t: (t, t[0]),
        lambda t: (t[1:], t[:3]),
        lambda t: (t, (t.view(2, 2).t(),)),
        lambda t: (t.detach(), t),
        lambda t: (t[2:], t.view(torch.int32)),
    ],
)
@pytest.mark.parametrize("make", [lambda x: x, lambda x: x * 2])
def test_arguments_that_share_memory_still_do(backend, make, views):
    """What the function writes to one shows in the other, and in the tensor itself."""

    @eager_break_during_capture
    def fn(a, b):
        b = b[0] if isinstance(b, tuple) else b
        a.add_(1)
        return b.clone()

    def model(x):
        t = make(x) + 0
        return [fn(*views(t)) * 2, t + 0]

    backend.check(model, [backend.tensor(4)], "geg")


@pytest.mark.parametrize(
    "pack",
    [
        lambda a, b: (a, b),
        lambda a, b: Pair(a, b),
        lambda a, b: (a, (1, Pair("s", (b,)))),
        lambda a, b: Tagged((a, b)),
        lambda a, b: torch.stack([a, b]).sort(),
        lambda a, b: [a, b],
        lambda a, b: {"a": a, "b": (b,)},
        lambda a, b: SimpleNamespace(a=a, b=[b]),
        lambda a, b: (a, [b], {"a": a}),
    ],
)
@pytest.mark.parametrize("keyword", [False, True])
def test_tensors_in_containers(backend, pack, keyword):
    """Whatever carries them, the function sees the values of this replay, in the same classes."""
    classes = []

    @eager_break_during_capture
    def fn(*args, **kwargs):
        packed = args[0] if args else kwargs["packed"]
        classes.append(shape_of(packed))
        return sum(leaf.float() * (i + 1) for i, leaf in enumerate(leaves_of(packed)))

    def model(x):
        packed = pack(x * 2, x + 1)
        return (fn(packed=packed) if keyword else fn(packed)) * 2

    backend.check(model, [backend.tensor(4)], "geg")
    assert len(classes) == 9
    assert all(each == classes[0] for each in classes)


def parts_of(value):
    if isinstance(value, dict | SimpleNamespace):
        return list((value if isinstance(value, dict) else vars(value)).values())
    return list(value) if isinstance(value, tuple | list) else []


def shape_of(value):
    return type(value), [shape_of(part) for part in parts_of(value)]


def leaves_of(value):
    here = [value] if isinstance(value, torch.Tensor) else []
    return here + [leaf for part in parts_of(value) for leaf in leaves_of(part)]


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x[:0],
        lambda x: x.sum(),
        lambda x: x.view(2, 2).t(),
        lambda x: x[::2],
        lambda x: x.expand(3, 4),
        lambda x: x > 0,
        lambda x: x.bfloat16(),
        lambda x: (x * 10).long(),
        lambda x: torch.complex(x, x + 1),
        lambda x: torch.complex(x, x + 1).conj(),
        lambda x: torch.complex(x, x + 1).conj().imag,
    ],
)
def test_kinds_of_tensors(backend, make):
    """Layouts, dtypes and lazy bits arrive as they are."""
    seen = []

    @eager_break_during_capture
    def fn(t):
        seen.append((t.dtype, t.shape, t.stride(), t.is_conj(), t.is_neg()))
        return t.clone()

    backend.check(lambda x: fn(make(x * 2)) * 2, [backend.tensor(4)])
    assert len(seen) == 9
    assert all(each == seen[0] for each in seen)


def test_tensors_that_no_alias_can_stand_for(backend):
    """Subclasses, sparse tensors and parameters from before the capture are kept as themselves."""
    given = [
        TwoTensor(backend.tensor(4), backend.tensor(4, seed=1)),
        backend.tensor(4).to_sparse(),
        torch.nn.Parameter(backend.tensor(4)),
    ]
    fn, log = watched(lambda *args: [a is b for a, b in zip(args, given, strict=True)])
    replayed(backend, lambda x: fn(*given))
    assert log == [[True] * 3] * 3


def test_mutable_containers_go_by_identity(backend):
    """What the user changes in an object, list or dict between replays is seen."""
    meta, items, table = SimpleNamespace(max_len=8), [1], {"k": 1}
    fn, log = watched(
        lambda m, i, t, nested, *, also: (
            m is meta and i is items and t is table and nested[0] is meta and also is meta,
            (m.max_len, list(i), dict(t)),
        )
    )
    x = backend.tensor(4)
    with torch.no_grad(), backend.capture() as g:
        fn(meta, items, table, (meta, x * 2), also=meta)
    g.replay()
    meta.max_len = 17
    items.append(2)
    table["k"] = 2
    g.replay()
    same, values = zip(*log, strict=True)
    assert same == (True, True, True)
    assert values == ((8, [1], {"k": 1}), (8, [1], {"k": 1}), (17, [1, 2], {"k": 2}))


def test_a_tensor_that_the_user_puts_into_an_object(backend):
    """An object's tensor may be replaced between replays, also by one of another shape."""
    meta = SimpleNamespace(lengths=torch.ones(2, device=backend.device))
    fn = eager_break_during_capture(lambda t, m: t * m.lengths.sum(), name="fn")
    x = torch.ones(4, device=backend.device)
    with torch.no_grad(), backend.capture() as g:
        out = fn(x * 2, meta) + 1
    assert out.tolist() == [5] * 4
    meta.lengths = torch.ones(5, device=backend.device)
    g.replay()
    assert out.tolist() == [11] * 4


def test_fields_that_a_writeback_replaced(backend):
    """An object made by one break and given to the next carries this replay's tensors and numbers."""
    calls = []

    @eager_break_during_capture
    def prepare(t):
        calls.append(1)
        return SimpleNamespace(scaled=t * 3, n=len(calls), names=[f"call {len(calls)}"])

    use, log = watched(lambda meta: (meta.scaled.tolist(), meta.n, meta.names[0]))
    x = torch.ones(2, device=backend.device)
    with torch.no_grad(), backend.capture() as g:
        use(prepare(x + 1))
    for value in (2, 3):
        x.fill_(value)
        g.replay()
    assert log == [([6, 6], 1, "call 1"), ([9, 9], 2, "call 2"), ([12, 12], 3, "call 3")]


@pytest.mark.parametrize(
    ("call", "read", "shown"),
    [
        (lambda fn, t, n: fn(t, n), lambda t, n: n, "a[1]=3"),
        (lambda fn, t, n: fn((t, (n, 1))), lambda pair: pair[1][0], "a[0][1][0]=3, a[0][1][1]=1"),
        (lambda fn, t, n: fn(Pair(t, n)), lambda pair: pair.second, "a[0].second=3"),
        (lambda fn, t, n: fn(t, scale=n), lambda t, scale: scale, "scale=3"),
        (lambda fn, t, n: fn(t, pair=(n, t)), lambda t, pair: pair[0], "pair[0]=3"),
        (lambda fn, t, n: fn(t, f"at {n}"), lambda t, name: int(name[3:]), "a[1]='at 3'"),
    ],
)
def test_plain_values_are_frozen_and_shown(backend, call, read, shown):
    """They are those of the capture at each replay, and the table names them, and nothing else."""
    fn, log = watched(read)
    box = SimpleNamespace(n=3)

    def model(x):
        call(fn, x * 2, box.n)
        box.n += 1

    g = replayed(backend, model)
    assert log == [3] * 3
    (row,) = [line for line in g.describe().splitlines() if "watched" in line and "eager" in line]
    assert row.endswith(f"  {shown}")


def test_frozen_values_have_the_names_of_the_function(backend):
    """Parameters, the rest of the arguments, and keywords; `args[0]` where a callable hides its names."""

    def fn(t, n, /, pair, *rest, scale, **options):
        pass

    x = backend.tensor(4)
    with torch.no_grad(), backend.capture() as g:
        g.add_eager(fn, x, 1, (x, 2), 3, scale=4, other=5)
        g.add_eager(range, 6)
    shown = [line.split("0 B")[1].strip() for line in g.describe().splitlines() if line[0].isdigit()]
    assert shown == ["n=1, pair[1]=2, rest[0]=3, scale=4, other=5", "args[0]=6"]


def test_mutable_containers_are_not_shown_as_frozen(backend):
    """Their values are those of the replay."""
    fn, log = watched(lambda m, i, t: m.n + i[0] + t["k"])
    g = replayed(backend, lambda x: fn(SimpleNamespace(n=97), [98], {"k": 99}))
    assert log == [294] * 3
    assert not any(
        str(n) in line for n in (97, 98, 99) for line in g.describe().splitlines() if "watched" in line
    )


class TestLive:
    """`Live` arguments are asked anew at each call."""

    PLACES = (
        (lambda fn, live, t: fn(live, t), lambda a, t: a),
        (lambda fn, live, t: fn(t, n=live), lambda t, n: n),
        (lambda fn, live, t: fn((t, live)), lambda a: a[1]),
        (lambda fn, live, t: fn(Pair(t, (live,))), lambda a: a.second[0]),
        (lambda fn, live, t: fn(t, pair=Pair(live, t)), lambda t, pair: pair.first),
    )

    @pytest.mark.parametrize(("call", "read"), PLACES)
    @pytest.mark.parametrize("mode", [None, "full"])
    def test_asked_at_each_call(self, backend, call, read, mode):
        """At capture, at each replay, and in a plain call, in every place."""
        ctx = SimpleNamespace(step=0)
        live = Live(lambda: ctx.step)
        fn, log = watched(read)
        x = backend.tensor(4)
        call(fn, live, x)
        options = {} if mode is None else {"mode": mode}
        if mode == "full" and backend.mode == "debug":
            backend = type(backend)("cuda", backend.device, emulated=False)
        with torch.no_grad(), backend.capture(**options) as g:
            ctx.step = 1
            call(fn, live, x * 2)
        for ctx.step in (2, 3):
            g.replay()
        assert log == ([0, 1] if mode == "full" else [0, 1, 2, 3])

    def test_inside_of_another_break(self, backend):
        """There the inner break is a plain call, and asks too."""
        ctx = SimpleNamespace(step=0)
        inner, log = watched(lambda n: n)
        outer = eager_break_during_capture(lambda: inner(Live(lambda: ctx.step)), name="outer")
        with backend.capture() as g:
            outer()
        ctx.step = 5
        g.replay()
        assert log == [0, 5]

    def test_a_live_tensor(self, backend):
        """Each call gets the tensor of now, and its value is not taken for frozen."""
        ctx = SimpleNamespace(mask=torch.ones(4, device=backend.device))
        fn = eager_break_during_capture(lambda t, mask: t * mask, name="fn")
        x = torch.ones(4, device=backend.device)
        with torch.no_grad(), backend.capture() as g:
            out = fn(x + 1, Live(lambda: ctx.mask)) + 1
        assert out.tolist() == [3] * 4
        ctx.mask = torch.full((4,), 5.0, device=backend.device)
        g.replay()
        assert out.tolist() == [11] * 4
        assert "args[1]" not in g.describe()

    def test_errors_of_the_function_come_through(self, backend):
        """What `Live` asks may fail at replay, and the capture can be replayed again."""
        ctx = SimpleNamespace(step=0)
        fn, log = watched(lambda n: n)
        with backend.capture() as g:
            fn(Live(lambda: ctx.step))
        del ctx.step
        with pytest.raises(AttributeError, match="step"):
            g.replay()
        ctx.step = 2
        g.replay()
        assert log == [0, 2]


def test_signatures(backend):
    """Defaults, keywords, and names that the library uses itself."""

    def fn(t, self, fn=2, /, *args, recording=3, **kwargs):
        return t * self + fn + sum(args) + recording + kwargs["args"] + kwargs["name"]

    marked = eager_break_during_capture(fn)

    def model(x):
        y = marked(x + 1, 2, args=5, name=6)
        return marked(y * 2, 3, 4, 5, 6, recording=x.sum(), args=8, name=9) + 1

    backend.check(model, [backend.tensor(4)], "gegeg")


@pytest.mark.parametrize(
    "call",
    [
        lambda fn, t: fn(t),
        lambda fn, t: fn(t=t),
        lambda fn, t: fn((1, Pair(t, 2))),
        lambda fn, t: fn([t]),
        lambda fn, t: fn(SimpleNamespace(t=t)),
    ],
)
def test_temporaries_from_before_the_capture_are_kept(backend, call):
    """The user drops the tensor and its container; the capture holds it until it goes itself."""
    fn = eager_break_during_capture(
        lambda *args, **kwargs: leaves_of((*args, *kwargs.values()))[0] + 1, name="fn"
    )
    before = backend.tensor(4) * 5
    expected, alive = before + 1, weakref.ref(before)
    with torch.no_grad(), backend.capture() as g:
        out = call(fn, before) * 1
    del before
    assert alive() is not None
    junk = [torch.full((4,), -1.0, device=backend.device) for _ in range(64)]
    g.replay()
    assert torch.equal(out, expected)
    del g, junk
    assert alive() is None


@pytest.mark.cuda
def test_tensors_of_the_capture_are_not_kept(cuda):
    """An alias stands for them, so that later segments can reuse their blocks."""
    fn = eager_break_during_capture(lambda t, pair: None, name="fn")
    x = cuda.tensor(4)
    with torch.no_grad(), cuda.capture():
        t = x * 2
        alive = weakref.ref(t)
        fn(t, (t, 1))
        del t
        assert alive() is None


def test_writes_to_an_argument_are_seen(backend):
    """By later graph segments, by later breaks, and by the user."""
    state = torch.zeros(4, device=backend.device)

    @eager_break_during_capture
    def fn(t, state):
        t.mul_(2)
        state.copy_(t)

    read = eager_break_during_capture(lambda t: t + t.sum(), name="read")

    def model(x):
        t = x + 1
        fn(t, state)
        return [t * 3, read(t) + state, state + 0]

    backend.check(model, [backend.tensor(4)], "gegeg")
    x = backend.tensor(4)
    with torch.no_grad():
        with backend.capture() as g:
            model(x)
        x.fill_(4)
        g.replay()
    assert state.tolist() == [10] * 4


def test_writes_to_a_static_input_are_seen(backend):
    """The user's own tensor is the argument, not a copy of it."""
    fn = eager_break_during_capture(lambda t: t.add_(1), name="fn")
    x = torch.zeros(4, device=backend.device)
    with torch.no_grad(), backend.capture() as g:
        out = fn(x) * 2
    for n in (2, 3, 4):
        g.replay()
        assert x.tolist() == [n] * 4
        assert out.tolist() == [2 * n] * 4


@pytest.mark.parametrize("box", [lambda live: [1, live], lambda live: {"n": live}], ids=["list", "dict"])
def test_live_in_a_list_or_dict_is_refused(backend, box):
    """Those go by identity, so nobody would ask it."""
    f = eager_break_during_capture(lambda t, box: t * 2)
    x = backend.tensor(3)
    with pytest.raises(TypeError, match="A Live is in a"), torch.no_grad(), backend.capture():
        f(x, box(Live(lambda: 1)))
    backend.check(lambda t: f(t, [1]), [x], "e")


def test_warnings_name_the_users_line(backend):
    """The call of `replay`, and not a line of ours."""
    n = iter(range(9))
    f = eager_break_during_capture(lambda t: (t + 1, next(n)))
    x = backend.tensor(3)
    with torch.no_grad(), backend.capture() as g:
        f(x)
    with pytest.warns(FrozenValueWarning) as caught:
        g.replay()
    assert caught[0].filename == __file__


@dataclasses.dataclass
class Record:
    """With an attribute that is no field."""

    h: torch.Tensor

    @functools.cached_property
    def twice(self):
        return self.h * 2


CHANGES = {
    "replaces": (lambda t: {"h": t}, lambda c: c.update(h=c["h"] * 2), 'args["c"]["h"]'),
    "adds": (lambda t: {"h": t}, lambda c: c.setdefault("k", c["h"] * 2), 'args["c"]["k"]'),
    "removes": (lambda t: [t, t * 2], lambda c: c.pop(), 'args["c"][1]'),
    "appends": (lambda t: [t], lambda c: c.append(c[0]), 'args["c"][1]'),
    "deeper": (lambda t: {"l": [(t,)]}, lambda c: c["l"].append((c["l"][0][0] + 1,)), 'args["c"]["l"][1]'),
    "object": (lambda t: SimpleNamespace(h=t), lambda c: setattr(c, "k", c.h * 2), 'args["c"].k'),
    "cached property": (Record, lambda c: c.twice, 'args["c"].twice'),
}


@pytest.mark.parametrize("made", ["by a break", "by captured code"])
@pytest.mark.parametrize(("make", "change", "path"), CHANGES.values(), ids=CHANGES.keys())
def test_a_container_of_this_capture_that_a_break_changes(backend, make, change, path, made):
    """Refused: the next replay would begin with what the last one left."""
    make_it = make if made == "by captured code" else eager_break_during_capture(make, name="make")

    @eager_break_during_capture(name="changer")
    def changer(t, c):
        change(c)

    with torch.no_grad(), pytest.raises(CaptureFailedError) as info, backend.capture():
        changer(None, c=make_it(backend.tensor(3) * 2))
    assert info.value.path.startswith(path)
    assert "changer" in str(info.value)


def test_a_container_that_was_there_before_is_the_functions_own(backend):
    """A cache that grows, or that takes what it was given; and captured code may change an output."""
    make = eager_break_during_capture(lambda t: {"h": t + 1}, name="make")

    def model():
        cache = SimpleNamespace(last=torch.zeros(3, device=backend.device), all=[])

        @eager_break_during_capture
        def remember(t, cache):
            before, cache.last = cache.last, t
            cache.all.append(t.clone())
            return t + before + sum(cache.all)

        def run(x):
            out = make(x * 2)
            out["h"] = out["h"] + 1
            out["k"] = out["h"] * 2
            return remember(out["k"], cache) + remember(out["h"] * 3, cache)

        return run

    eager, captured, x = model(), model(), backend.tensor(3)
    with torch.no_grad():
        expected = [eager(backend.tensor(3, seed=i)).clone() for i in range(4)]
        with backend.capture() as g:
            out = captured(x)
        for i in range(4):
            if i:
                x.copy_(backend.tensor(3, seed=i))
                g.replay()
            torch.testing.assert_close(out, expected[i])
