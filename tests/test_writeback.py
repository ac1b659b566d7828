"""Outputs of eager segments: bridged, written back, or refused with the leaf's path (contract C4)."""

import dataclasses
import warnings
from collections import OrderedDict, defaultdict
from types import SimpleNamespace
from typing import NamedTuple

import attrs
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.testing._internal.two_tensor import TwoTensor
from transformers.utils import ModelOutput

from segcapture import (
    CaptureFailedError,
    FrozenValueWarning,
    OutputMismatchError,
    eager_break_during_capture,
)


class Pair(NamedTuple):
    first: object
    second: object


@dataclasses.dataclass
class Data:
    value: object
    n: object = 0


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: object
    n: object = 0


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlots:
    value: object
    n: object = 0


@attrs.define
class Attrs:
    value: object
    n: object = 0


@attrs.frozen
class AttrsFrozen:
    value: object
    n: object = 0


class Plain:
    def __init__(self, value, n=0):
        self.value, self.n = value, n


class PlainSlots:
    __slots__ = ("n", "value")

    def __init__(self, value, n=0):
        self.value, self.n = value, n


class Tagged(tuple):
    """A tuple of a user's own class."""


@dataclasses.dataclass
class HfOutput(ModelOutput):
    logits: object = None
    hidden: object = None
    skipped: object = None


RECORDS = [Data, Frozen, FrozenSlots, Attrs, AttrsFrozen, Plain, PlainSlots]


def run_break(make, *, name="made"):
    """An eager break whose body can be exchanged: `step.make(t)`."""
    step = SimpleNamespace(make=make)
    step.fn = eager_break_during_capture(lambda t: step.make(t), name=name)
    return step


def check_output(backend, make, unpack, kinds="geg", **options):
    """The break's output, read and then changed in place by a graph segment, equals eager's.

    Types and strides of what the model receives are the same in a capture too.
    """
    made = eager_break_during_capture(make, name="made")
    if backend.name == "cuda" and not any(leaf.numel() for leaf in unpack(make(backend.tensor(4)))):
        kinds = kinds.rstrip("g")  # operators on no elements launch no kernel
    seen = []

    def model(x):
        out = made(x - 1)
        leaves = unpack(out)
        kind = None if isinstance(out, torch.Tensor) else type(out)  # a Parameter becomes a Tensor
        seen.append((kind, [(leaf.dtype, leaf.shape, leaf.stride()) for leaf in leaves]))
        read = [leaf.clone() for leaf in leaves]
        if options.get("mutate", True):
            for leaf in leaves:
                leaf.add_(1)
        return read + [leaf.clone() for leaf in leaves]

    g = backend.check(model, [backend.tensor(4)], kinds)
    assert len(seen) == 6
    assert all(each == seen[0] for each in seen)
    return g


CONTAINERS = {
    "tensor": (lambda a, b: a, lambda o: [o]),
    "tuple": (lambda a, b: (a, b), list),
    "list": (lambda a, b: [a, b], list),
    "nested": (lambda a, b: (a, [b, {"k": (a.clone(),)}]), lambda o: [o[0], o[1][0], o[1][1]["k"][0]]),
    "empty containers": (lambda a, b: [(), {}, [], a], lambda o: [o[3]]),
    "NamedTuple": (lambda a, b: Pair(a, Pair([b], None)), lambda o: [o.first, o.second.first[0]]),
    "tuple subclass": (lambda a, b: Tagged((a, b)), list),
    "struct sequence": (lambda a, b: a.sort(), lambda o: [o.values, o.indices]),
    "nested struct sequence": (lambda a, b: {"m": [b.topk(2)]}, lambda o: [o["m"][0].values, o["m"][0][1]]),
    "dict": (lambda a, b: {"a": a, 3: b}, lambda o: [o["a"], o[3]]),
    "OrderedDict": (lambda a, b: OrderedDict(a=a, b=(b,)), lambda o: [o["a"], o["b"][0]]),
    "defaultdict": (lambda a, b: defaultdict(list, a=[a], b=[b]), lambda o: [o["a"][0], o["b"][0]]),
    "ModelOutput": (lambda a, b: HfOutput(logits=a, hidden=(b, b + 1)), lambda o: [o.logits, o["hidden"][1]]),
    "inside an object": (lambda a, b: Plain({"a": [a]}, b), lambda o: [o.value["a"][0], o.n]),
    "record in a list": (lambda a, b: [FrozenSlots(a, Attrs(b))], lambda o: [o[0].value, o[0].n.value]),
    "SimpleNamespace": (lambda a, b: SimpleNamespace(x=a, y=(b,)), lambda o: [o.x, o.y[0]]),
    **{kind.__name__: (lambda a, b, kind=kind: kind(a, b), lambda o: [o.value, o.n]) for kind in RECORDS},
}


@pytest.mark.parametrize("case", CONTAINERS)
def test_containers(backend, case):
    """Every container arrives as what it is, with new values at each replay."""
    pack, unpack = CONTAINERS[case]
    check_output(backend, lambda t: pack(t * 2, t + 1), unpack)


def test_a_cycle_and_one_list_twice(backend):
    """Objects that refer to themselves, and shared containers, keep their shape."""

    def make(t):
        out = Plain([t + 1])
        out.n = out
        return {"o": out, "l": out.value}

    def unpack(out):
        assert out["o"].n is out["o"]
        assert out["l"] is out["o"].value
        return [out["o"].value[0]]

    check_output(backend, make, unpack)


LAYOUTS = {
    "no dimensions": lambda t: t.sum(),
    "no elements": lambda t: t[:0].view(0, 3),
    "transposed": lambda t: torch.stack([t, t + 1, t + 2]).t(),
    "channels_last": lambda t: t.repeat(6).view(2, 3, 2, 2).to(memory_format=torch.channels_last),
    "strided slice": lambda t: t.repeat(2)[1::2],
    "small part of much": lambda t: t.repeat(5000)[9001:9005],
    "complex64": lambda t: torch.complex(t, t + 1),
    "real part": lambda t: torch.complex(t, t + 1).real,
    "rotated": lambda t: torch.view_as_real(torch.view_as_complex(t.view(2, 2).clone()) * 1j),
    "int64": lambda t: (t * 10).long(),
    "uint8": lambda t: (t.abs() * 10).to(torch.uint8),
    "bfloat16": lambda t: t.bfloat16(),
    "float16": lambda t: t.half(),
    "float64": lambda t: t.double() / 3,
    "view of another dtype": lambda t: (t + 1).view(torch.int32)[1:],
    "of a parameter": lambda t: torch.nn.Parameter(t + 1, requires_grad=False),
}


@pytest.mark.parametrize("in_tuple", [False, True])
@pytest.mark.parametrize("case", LAYOUTS)
def test_layouts(backend, case, in_tuple):
    """Sizes, strides and dtypes are those of the captured output."""
    make = LAYOUTS[case]
    if in_tuple:
        check_output(backend, lambda t: (make(t), t + 1), list)
    else:
        check_output(backend, make, lambda out: [out])


@pytest.mark.parametrize("in_tuple", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda t: t > 0,
        lambda t: (t + 1).expand(3, 4),
        lambda t: (t + 1)[::2].expand(3, 2),
        lambda t: t.repeat(2).unfold(0, 3, 1),
        lambda t: (t + 1)[:1].expand(0, 5, 1),
    ],
)
def test_outputs_that_are_only_read(backend, make, in_tuple):
    """Booleans, and elements that share memory: expanded dimensions and sliding windows."""
    wrapped = (lambda t: (make(t), t + 1)) if in_tuple else make
    check_output(backend, wrapped, list if in_tuple else lambda out: [out], mutate=False)


def test_a_bridge_covers_the_bytes_of_its_leaves(backend):
    """Not the whole storage of a small view."""
    made = run_break(lambda t: (t.repeat(1 << 18)[1000:1004], t.repeat(1 << 18)[5:9]))
    x = backend.tensor(4)
    with backend.capture() as g:
        made.fn(x * 2)
    assert g.segments[1].bridge_bytes <= 2 * (256 + 16)


def split(t):
    return (t + 1).chunk(2)


def overlapping(t):
    out = t + 1
    return out[2:], out[:3], [out]


def same_twice(t):
    out = t + 1
    return [out, {"again": out}]


def other_dtype(t):
    out = t + 1
    return out[3:], out.view(torch.int32)[1:2]


def empty_first(t):
    out = t + 1
    return out[4:], out[1:], out


def two_groups(t):
    a, b = t + 1, t * 3
    return a[1:], b[:2], a[:2], b


@pytest.mark.parametrize(
    ("make", "unpack"),
    [
        (split, list),
        (overlapping, lambda o: [o[0], o[1], o[2][0]]),
        (same_twice, lambda o: [o[0], o[1]["again"]]),
        (other_dtype, list),
        (empty_first, list),
        (two_groups, list),
        (lambda t: [t + 1] * 3, list),
        (lambda t: torch.stack([t, t + 1]).unbind(1), list),
        (lambda t: torch.stack([t, t + 1], -1).unbind(-1), list),
    ],
)
def test_outputs_that_share_a_storage(backend, make, unpack):
    """Views stay views: what later graph code writes to one shows in the others."""
    check_output(backend, make, unpack)


@pytest.mark.parametrize(
    "make",
    [
        lambda t: t,
        lambda t: (t, t + 1),
        lambda t: [t[1:], t[:2], t],
        lambda t: {"same": t, "new": t * 2, "view": t.view(2, 2).t()},
        lambda t: Frozen(t, t),
    ],
)
def test_arguments_returned(backend, make):
    """An argument, or a view of one, stays itself: later writes to it show in both."""
    made = eager_break_during_capture(make, name="made")

    def model(x):
        t = x * 2
        out = made(t)
        leaves = tensors_of(out)
        for leaf in leaves:
            leaf.add_(1)
        return [t + 0, *[leaf + 0 for leaf in leaves]]

    g = backend.check(model, [backend.tensor(4)], "geg")
    assert g.segments[1].bridge_bytes <= 256 + 16


def tensors_of(out):
    values = [out] if isinstance(out, torch.Tensor) else vars(out) if isinstance(out, Frozen) else out
    return list(values.values()) if isinstance(values, dict) else list(values)


def test_static_inputs_and_weights_returned(backend):
    """Memory from before the capture stays itself too."""
    weight = backend.tensor(4, seed=1)
    made = eager_break_during_capture(lambda x: (x, weight, weight[1:], x + weight), name="made")

    def model(x):
        a, b, c, d = made(x)
        return [a * 2, b * 3, c * 4, d * 5]

    assert backend.check(model, [backend.tensor(4)]).segments[0].bridge_bytes == 16
    x = backend.tensor(4)
    with torch.no_grad(), backend.capture():
        a, b, *_ = made(x)
    assert a is x
    assert b is weight


@pytest.mark.parametrize("value", [None, 3, "text", torch.float16, (), torch.Size([2])])
def test_leaves_that_are_no_tensors(backend, value):
    """They arrive as they are, and draw no warning while they stay equal."""
    made = eager_break_during_capture(lambda t: (t + 1, value, [value]), name="made")

    def model(x):
        out, a, (b,) = made(x * 2)
        assert a == b == value
        return out * 2

    backend.check(model, [backend.tensor(4)], "geg")


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_none_alone(backend, guard):
    """A break that returns nothing needs no write-back, and may not start to return something."""
    step = run_break(lambda t: None)
    x = backend.tensor(4)
    with guard(), backend.capture() as g:
        assert step.fn(x * 2) is None
    g.replay()
    step.make = lambda t: t + 1
    with pytest.raises(OutputMismatchError, match="`out`"):
        g.replay()
    step.make = lambda t: None
    g.replay()


class Counter:
    """Returns another plain number at each call."""

    def __init__(self, pack):
        self.pack, self.n = pack, 0

    def __call__(self, t):
        self.n += 1
        return self.pack(t + self.n, self.n)


@pytest.mark.parametrize(
    ("pack", "path"),
    [
        (lambda t, n: (t, n), "out[1]"),
        (lambda t, n: Pair(t, n), "out.second"),
        (lambda t, n: {"k": [(n, t)]}, 'out["k"][0][0]'),
        (lambda t, n: (t, f"step {n}"), "out[1]"),
        (lambda t, n: (t, None if n == 1 else n), "out[1]"),
    ],
)
def test_a_frozen_value_warns_once(backend, pack, path):
    """A tuple's item cannot be replaced: one warning with its path, and tensors are still written."""
    fn = Counter(pack)
    made = eager_break_during_capture(fn, name="made")
    with warnings.catch_warnings(), torch.no_grad(), backend.capture() as g:
        warnings.simplefilter("error")
        out = made(torch.ones(2, device=backend.device))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            g.replay()
    assert [w.category for w in caught] == [FrozenValueWarning]
    assert f"`{path}`" in str(caught[0].message)
    assert "`made`" in str(caught[0].message)
    assert [t.tolist() for t in read(out)] == [[5, 5]]


def test_a_frozen_value_alone_warns(backend):
    """A break that returns a bare int."""
    fn = Counter(lambda t, n: n)
    made = eager_break_during_capture(fn, name="made")
    with torch.no_grad(), backend.capture() as g:
        assert made(torch.ones(2, device=backend.device)) == 1
    with pytest.warns(FrozenValueWarning, match=r"returned 2 at `out`, and 1 at capture"):
        g.replay()


@pytest.mark.parametrize(
    ("pack", "read"),
    [
        (lambda t, n: [t, n], lambda o: o[1]),
        (lambda t, n: {"t": t, "n": n}, lambda o: o["n"]),
        (lambda t, n: OrderedDict(n=n, t=t), lambda o: o["n"]),
        (lambda t, n: HfOutput(logits=t, hidden=n), lambda o: (o.hidden, o["hidden"])[n_of(o)]),
        (lambda t, n: Pair([n, t], t * 2), lambda o: o.first[0]),
        (lambda t, n: [{"deep": [n]}, t], lambda o: o[0]["deep"][0]),
        *[(lambda t, n, kind=kind: kind(t, n), lambda o: o.n) for kind in RECORDS],
    ],
)
def test_values_in_mutable_containers_are_replaced(backend, pack, read):
    """A later eager segment reads the new value from the very object it was given at capture."""
    fn, log, tensors = Counter(pack), [], []
    made = eager_break_during_capture(fn, name="made")
    look = eager_break_during_capture(lambda out: log.append(read(out)), name="look")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad(), backend.capture() as g:
            out = made(torch.ones(2, device=backend.device))
            look(out)
        for _ in range(3):
            g.replay()
            tensors.append(read(out))
    assert log == [1, 2, 3, 4]
    assert tensors == [2, 3, 4]


def n_of(out):
    return out["hidden"] % 2


def test_fields_of_objects_that_others_own_are_not_overwritten(backend):
    """Two configurations of the user's, returned in turn: a warning, and both stay as they are."""
    configs, calls = [Data(1, 10), Data(1, 20)], []

    def make(t):
        calls.append(1)
        return t + 1, configs[(len(calls) + 1) % 2]

    made = eager_break_during_capture(make, name="made")
    with torch.no_grad(), backend.capture() as g:
        made(torch.ones(2, device=backend.device))
    with pytest.warns(FrozenValueWarning, match=r"`out\[1\].n`"):
        g.replay()
    g.replay()
    assert configs == [Data(1, 10), Data(1, 20)]


def test_an_object_that_others_own_is_updated_by_its_owner(backend):
    """One object of the user's, changed and returned each time, needs no warning."""
    stats, log = {"calls": 0}, []

    def make(t):
        stats["calls"] += 1
        return t + 1, stats

    made = eager_break_during_capture(make, name="made")
    look = eager_break_during_capture(lambda s: log.append(s["calls"]), name="look")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad(), backend.capture() as g:
            look(made(torch.ones(2, device=backend.device))[1])
        g.replay()
        g.replay()
    assert log == [1, 2, 3]


class Cache:
    """A KV cache: grows in place, and hands out views of itself."""

    def __init__(self, backend):
        self.k = torch.zeros(6, 4, device=backend.device)
        self.v = torch.zeros(6, 4, device=backend.device)
        self.n = 0

    @eager_break_during_capture
    def update(self, t):
        at = self.n % 6
        self.n += 1
        self.k[at] = t
        self.v[at] = t * 2
        return self.k, self.v[1:], t + 1


def test_persistent_buffers_stay_themselves(backend):
    """A cache is not copied; graph code that writes to it writes to the user's memory."""

    def model(cache, x):
        k, v, t = cache.update(x * 2)
        k.mul_(2)
        return k.sum(0) + v.sum(0) + t

    cache, twin = Cache(backend), Cache(backend)
    x = backend.tensor(4)
    with torch.no_grad():
        expected = model(twin, x)
        with backend.capture() as g:
            out = model(cache, x)
        for seed in range(1, 4):
            assert torch.equal(out, expected)
            assert torch.equal(cache.k, twin.k)
            assert torch.equal(cache.v, twin.v)
            x.copy_(backend.tensor(4, seed=seed))
            expected = model(twin, x)
            g.replay()
    assert g.segments[1].bridge_bytes == 16


def test_a_new_tensor_in_a_persistent_dict(backend):
    """A container that the user owns keeps the user's tensors, not bridges."""
    state, kept = {}, []

    def make(t):
        state["k"] = t + 1
        kept.append(state["k"])
        return state

    made = eager_break_during_capture(make, name="made")
    with torch.no_grad(), backend.capture():
        made(torch.ones(2, device=backend.device))
    assert state["k"] is kept[0]


@pytest.mark.parametrize("view", [False, True])
def test_ping_pong_buffers_are_refused(backend, view):
    """Two buffers in turn: a copy would corrupt the other one, no copy would be stale."""
    buffers = [torch.zeros(4, device=backend.device) for _ in range(2)]
    calls = []

    def make(t):
        calls.append(1)
        buffer = buffers[(len(calls) + 1) % 2]
        buffer.copy_(t)
        return {"k": [buffer[1:] if view else buffer]}

    made = eager_break_during_capture(make, name="made")
    x = torch.ones(4, device=backend.device)
    with torch.no_grad(), backend.capture() as g:
        out = made(x * 2)["k"][0] * 1
    x.fill_(5)
    with pytest.raises(OutputMismatchError, match="others own") as info:
        g.replay()
    assert (info.value.segment, info.value.path) == (1, 'out["k"][0]')
    assert [b.tolist() for b in buffers] == [[2] * 4, [10] * 4]
    g.replay()
    assert out.tolist() == [10] * len(out)


class Remembers:
    """Keeps its last output, as modules do for inspection."""

    def __init__(self, make):
        self.make = make

    def __call__(self, t):
        self.last = self.make(t)
        return self.last


REMEMBERED = {
    "one tensor": (lambda t: t + 1, lambda o: [o]),
    "the same twice": (same_twice, lambda o: [o[0], o[1]["again"]]),
    "with views": (overlapping, lambda o: [o[0], o[1], o[2][0]]),
    "expanded": (lambda t: (t + 1).expand(2, 4), lambda o: [o]),
    "beside a new one": (lambda t: {"a": t + 1, "b": t * 2}, lambda o: list(o.values())),
}


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("case", REMEMBERED)
def test_an_output_that_its_function_remembers(backend, case, again):
    """`self.last = out`: copied once the function has let go of the captured one."""
    make, unpack = REMEMBERED[case]
    fn, log = Remembers(make), []
    made = eager_break_during_capture(fn, name="made")
    look = eager_break_during_capture(
        lambda *leaves: log.append([leaf.clone() for leaf in leaves]) or leaves, name="look"
    )
    x = backend.tensor(4)
    with torch.no_grad():
        with backend.capture() as g:
            leaves = unpack(made(x * 2))
            for _ in range(1 + again):
                leaves = look(*leaves)
            del leaves
        for seed in range(3):
            x.copy_(backend.tensor(4, seed=seed))
            g.replay()
            expected = unpack(make(x * 2))
            assert len(log) == (seed + 2) * (1 + again)
            for found, value in zip(log[-1], expected, strict=True):
                assert torch.equal(found, value)


def test_a_remembered_output_that_graph_segments_read(backend):
    """What a graph segment reads is not owned by it."""
    made = eager_break_during_capture(Remembers(lambda t: t + 1), name="made")
    x = backend.tensor(4)
    with torch.no_grad():
        with backend.capture() as g:
            out = made(x * 2) * 3
        x.fill_(5)
        g.replay()
    assert out.tolist() == [33] * 4


@pytest.mark.parametrize(
    "keep", [lambda t: t, lambda t: [t], lambda t: t[1:], lambda t: t.detach(), lambda t: t.view(2, 2)]
)
@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_a_remembered_output_that_the_user_keeps_too(backend, keep, guard):
    """A copy would change what the user kept: refused, and the kept values stay."""
    fn = Remembers(lambda t: t + 1)
    made = eager_break_during_capture(fn, name="made")
    x = torch.ones(4, device=backend.device)
    with guard():
        with backend.capture() as g:
            made(x * 2)
        kept = keep(fn.last)
        values = torch.as_tensor(kept[0] if isinstance(kept, list) else kept).clone()
        x.fill_(5)
        with pytest.raises(OutputMismatchError, match="others own"):
            g.replay()
        assert torch.equal(kept[0] if isinstance(kept, list) else kept, values)
        del kept
        if guard is torch.no_grad:
            g.replay()
        else:  # tensors of inference mode do not say whether captured code wrote to them
            with pytest.raises(OutputMismatchError):
                g.replay()


def test_bridges_that_come_back(backend):
    """A break that returns its own bridges, swapped or seen otherwise, reads them before writing."""
    state = {}

    def make(t):
        if "a" not in state:
            return t + 1, t + 2, t + 3
        return state["b"], state["a"].t(), state["c"]

    made = eager_break_during_capture(make, name="made")
    x = torch.arange(4.0, device=backend.device).view(2, 2)
    with torch.no_grad():
        with backend.capture() as g:
            state["a"], state["b"], state["c"] = made(x * 1)
            out = [state[k] + 0 for k in "abc"]
        a, b, c = (x + 1, x + 2, x + 3)
        for _ in range(3):
            g.replay()
            a, b = b, a.t().contiguous()
            assert [t.tolist() for t in out] == [a.tolist(), b.tolist(), c.tolist()]


def test_the_bridge_itself_transposed(backend):
    """The same address is not the same tensor."""
    state = {}
    made = eager_break_during_capture(lambda t: state["y"].t() if state else t + 1, name="made")
    x = torch.arange(4.0, device=backend.device).view(2, 2)
    with torch.no_grad():
        with backend.capture() as g:
            y = made(x * 1)
            out = y * 1
        state["y"] = y
        g.replay()
        assert torch.equal(out, (x + 1).t())


def test_host_tensors_in_the_output(backend):
    """CPU leaves are written back too, also copies from the device that are still in flight."""

    def make(t):
        host = torch.empty(t.shape, pin_memory=t.is_cuda)
        host.copy_(t, non_blocking=True)
        return {"host": host, "shape": torch.tensor([t.numel()]), "new": t + 1}

    made = eager_break_during_capture(make, name="made")
    look = eager_break_during_capture(lambda o: o["new"] + o["host"].sum() * o["shape"].item(), name="look")
    x = backend.tensor(4)
    with torch.no_grad():
        with backend.capture() as g:
            out = look(made(x * 2)) + 1
        for seed in range(1, 4):
            assert torch.equal(out, x * 2 + 1 + (x * 2).cpu().sum() * 4 + 1)
            x.copy_(backend.tensor(4, seed=seed))
            g.replay()
        assert torch.equal(out, x * 2 + 1 + (x * 2).cpu().sum() * 4 + 1)


def test_a_host_tensor_alone(backend):
    """One CPU leaf, read by a later break."""
    made = eager_break_during_capture(lambda t: t.cpu() + 1, name="made")
    look = eager_break_during_capture(lambda host, x: x * host.sum().item(), name="look")
    backend.check(lambda x: look(made(x * 2), x) + 1, [backend.tensor(4)], "geeg")


def test_another_order_of_keys(backend):
    """It is another structure: an error that names the first key that differs."""
    calls = []

    def make(t):
        calls.append(1)
        inner = [t + 1]
        items = [("a", inner), ("b", t * 2), ("c", inner), ("n", 1)]
        return dict(reversed(items) if len(calls) > 1 else items)

    made = eager_break_during_capture(make, name="made")
    x = backend.tensor(4)
    with torch.no_grad(), backend.capture() as g:
        made(x * 2)
    with pytest.raises(OutputMismatchError) as info:
        g.replay()
    assert (info.value.segment, info.value.path) == (1, 'out["a"]')


def test_other_strides_of_a_lone_leaf(backend):
    """Values count where no memory is shared."""
    calls = []

    def make(t):
        calls.append(1)
        out = torch.stack([t, t + 1])
        return out.t().contiguous().t() if len(calls) % 3 else out  # the third call is captured

    made = eager_break_during_capture(make, name="made")
    pair = eager_break_during_capture(lambda t: (make(t), t + 1), name="pair")
    backend.check(lambda x: made(x * 2) * 3, [backend.tensor(4)], "geg")
    backend.check(lambda x: [t * 3 for t in pair(x * 2)], [backend.tensor(4)], "geg")


MISMATCHES = {
    "another container": (lambda t: [t + 1], lambda t: (t + 1,), "out", ["a list", "a tuple"]),
    "container for a tensor": (lambda t: t + 1, lambda t: [t + 1], "out", ["list"]),
    "tensor for a container": (lambda t: {"a": t + 1}, lambda t: t + 1, "out", ["a dict", "a tensor"]),
    "another dict class": (lambda t: OrderedDict(a=t + 1), lambda t: {"a": t + 1}, "out", ["OrderedDict"]),
    "another record class": (lambda t: Data(t + 1), lambda t: Frozen(t + 1), "out", ["Data", "Frozen"]),
    "deep container": (lambda t: {"k": [t + 1]}, lambda t: {"k": [[t + 1]]}, 'out["k"][0]', ["a list"]),
    "missing key": (lambda t: {"k": t + 1, "v": t + 2}, lambda t: {"k": t + 1}, 'out["v"]', ["no"]),
    "missing first key": (lambda t: {"k": t + 1, "v": t + 2}, lambda t: {"v": t + 2}, 'out["k"]', []),
    "extra key": (lambda t: {"k": t + 1}, lambda t: {"k": t + 1, "v": t}, 'out["v"]', ["nothing"]),
    "renamed key": (lambda t: {"k": t + 1}, lambda t: {"K": t + 1}, 'out["k"]', ['out["K"]`, with']),
    "shorter list": (lambda t: {"k": [t + 1, t + 2]}, lambda t: {"k": [t + 1]}, 'out["k"][1]', ["no"]),
    "longer tuple": (
        lambda t: (t + 1,), lambda t: (t + 1, t + 2), "out[1]",
        ["nothing", "a tensor"],
    ),
    "missing attribute": (
        lambda t: SimpleNamespace(a=t + 1, b=1), lambda t: SimpleNamespace(a=t + 1), "out.b", [],
    ),
    "field None in ModelOutput": (
        lambda t: HfOutput(logits=t + 1, hidden=t + 2),
        lambda t: HfOutput(logits=t + 1), 'out["hidden"]', ["no"],
    ),
    "shape": (
        lambda t: {"k": [t + 1]},
        lambda t: {"k": [t[:3] + 1]}, 'out["k"][0]', ["float32 [3]", "float32 [4]", "pad"],
    ),
    "shape alone": (lambda t: t + 1, lambda t: t[:3] + 1, "out", ["float32 [3]", "float32 [4]"]),
    "broadcastable shape": (lambda t: (t + 1, t + 2), lambda t: (t[:1] + 1, t + 2), "out[0]", ["[1]", "[4]"]),
    "broadcastable shape alone": (lambda t: t.repeat(2, 1), lambda t: t + 1, "out", ["[4]", "[2, 4]"]),
    "broadcastable scalar": (lambda t: [t + 1, t + 2], lambda t: [t + 1, t.sum()], "out[1]", ["[]", "[4]"]),
    "dtype": (
        lambda t: (t + 1, t + 2), lambda t: (t + 1, t.half()), "out[1]", ["float16 [4]", "float32 [4]"],
    ),
    "dtype alone": (lambda t: t + 1, lambda t: t.double(), "out", ["float64", "float32", "convert"]),
    "device type": (lambda t: (t + 1, t + 2), lambda t: (t.to("meta"), t + 2), "out[0]", ["meta"]),
    "device type alone": (lambda t: t + 1, lambda t: t.to("meta"), "out", ["meta"]),
    "tensor became None": (lambda t: (t + 1, t + 2), lambda t: (t + 1, None), "out[1]", ["NoneType"]),
    "tensor became None alone": (lambda t: t + 1, lambda t: None, "out", ["NoneType"]),
    "tensor became a number": (
        lambda t: {"k": t + 1, "v": t}, lambda t: {"k": 2.0, "v": t}, 'out["k"]', ["float"],
    ),
    "None became a tensor": (
        lambda t: Pair(t + 1, None), lambda t: Pair(t + 1, t), "out.second", ["a plain value", "a tensor"],
    ),
    "sparse": (lambda t: (t + 1, t + 2), lambda t: (t.to_sparse(), t + 2), "out[0]", ["sparse"]),
    "sparse alone": (lambda t: t + 1, lambda t: t.to_sparse(), "out", ["sparse"]),
    "views became clones": (
        split, lambda t: (*(h.clone() for h in split(t)),), "out[1]", ["out[0]", "views"],
    ),
    "same became two": (same_twice, lambda t: [t + 1, {"again": t + 1}], 'out[1]["again"]', ["out[0]"]),
    "clones became views": (
        lambda t: [t + 1, t[1:] + 1], lambda t: [o := t + 1, o[1:]], "out[1]", ["in memory of its own"],
    ),
    "two became the same": (
        lambda t: [t + 1, t + 1], lambda t: [t + 1] * 2, "out[1]", ["out[0]", "in memory of its own"],
    ),
    "views at another distance": (split, lambda t: ((o := t + 1)[2:], o[:2]), "out[1]", ["out[0]"]),
    "views with other strides": (
        lambda t: [o := t.repeat(2), o[:4]],
        lambda t: [o := t.repeat(2), o[::2]], "out[1]", ["out[0]", "strides [2]"],
    ),
    "views of a nested range": (
        lambda t: [o := t + 1, o[1:2], o[2:3].clone()],
        lambda t: [o := t + 1, o[1:2], o[2:3]], "out[2]", ["out[0]"],
    ),
    "groups exchanged": (
        two_groups, lambda t: ((o := two_groups(t))[0], o[2], o[1], o[3]), "out[1]", ["in memory of its own"],
    ),
    "argument became new": (lambda t: (t, t + 1), lambda t: (t + 0, t + 1), "out[0]", ["others own"]),
    "another view of the argument": (lambda t: t[1:], lambda t: t[:3], "out", ["memory that others own"]),
    "argument with other strides": (
        lambda t: t.view(2, 2), lambda t: t.view(2, 2).t(), "out", ["strides [1, 2]"],
    ),
    "new became the argument twice": (
        lambda t: (t, t + 1), lambda t: (t, t), "out[1]", ["out[0]", "in memory of its own"],
    ),
    "expanded became full": (
        lambda t: (t + 1).expand(2, 4), lambda t: torch.stack([t + 1, t]), "out", ["strides [0, 1]"],
    ),
    "windows became full": (
        lambda t: [(t + 1).unfold(0, 2, 1)],
        lambda t: [torch.stack([t[:3], t[:3]], 1)], "out[0]", ["strides"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MISMATCHES)
def test_every_mismatch_is_an_error_with_its_path(backend, case):
    """Segment, name, place and path are in the message, and a correct replay works again."""
    good, bad, path, words = MISMATCHES[case]
    step = run_break(good)
    x = backend.tensor(4)

    with torch.no_grad():
        step.fn(x * 2)
        with backend.capture() as g:
            out = [leaf * 3 for leaf in read(step.fn(x * 2))]
        for seed in range(3):
            step.make = bad
            with pytest.raises(OutputMismatchError) as info:
                g.replay()
            message = str(info.value)
            assert (info.value.segment, info.value.path) == (1, path)
            assert f"`{path}`" in message
            assert "segment 1 (`made`, " in message
            assert __file__ in message
            for word in words:
                assert word in message
            step.make = good
            x.copy_(backend.tensor(4, seed=seed + 1))
            g.replay()
            expected = [leaf * 3 for leaf in read(good(x * 2))]
            assert [t.tolist() for t in out] == [t.tolist() for t in expected]


def read(out):
    """The tensors of an output, in order."""
    if isinstance(out, torch.Tensor):
        return [out]
    if isinstance(out, dict):
        out = out.values()
    elif not isinstance(out, tuple | list):
        out = vars(out).values() if hasattr(out, "__dict__") else ()
    return [leaf for part in out for leaf in read(part)]


def quantized(t):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(t, 0.1, 0, torch.quint8)


def nested(t):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([t, t[:2]])


class Sub(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda t: t.to_sparse(), "sparse_coo"),
        (lambda t: (t + 1).as_subclass(Sub), "Sub"),
        (lambda t: TwoTensor(t + 1, t + 2), "TwoTensor"),
        (quantized, "quantized"),
        (nested, "nested"),
        (lambda t: torch.complex(t, t + 1).conj(), "conjugate"),
        (lambda t: torch.complex(t, t + 1).conj().imag, "negative"),
    ],
)
def test_tensors_that_cannot_be_bridged_are_refused_by_name(backend, make, kind):
    """At capture, with the path; the next capture works."""
    step = run_break(lambda t: {"k": [make(t)]})
    x = backend.tensor(4)
    with torch.no_grad():
        with pytest.raises(CaptureFailedError, match=kind) as info:
            with backend.capture():
                step.fn(x * 2)
        assert (info.value.segment, info.value.path) == (1, 'out["k"][0]')
        step.make = lambda t: {"k": [t + 1]}
        with backend.capture() as g:
            out = step.fn(x * 2)["k"][0] * 1
        x.fill_(5)
        g.replay()
    assert out.tolist() == [11] * 4


def test_a_subclass_that_others_own(backend):
    """It stays itself; another object in its place is refused, for its memory cannot be compared."""
    held = [TwoTensor(backend.tensor(4), backend.tensor(4)) for _ in range(2)]
    step = run_break(lambda t: (held[0], t + 1))
    x = backend.tensor(4)
    with torch.no_grad():
        with backend.capture() as g:
            step.fn(x * 2)
        g.replay()
        step.make = lambda t: (held[1], t + 1)
        with pytest.raises(OutputMismatchError, match=r"`out\[0\]`"):
            g.replay()
        step.make = lambda t: (held[0], t + 1)
        g.replay()


LEAVES = "new", "same", "view", "flat", "argument", "argument view", "cache", "cache view", "none", "int"
outputs = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=4),
        st.tuples(inner, inner),
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1),
        st.builds(Frozen, inner),
        st.builds(Attrs, inner, inner),
    ),
    max_leaves=10,
)


def build(spec, t, cache):
    """An output of the drawn structure."""
    base = t.view(2, 2) * 3 + 1
    leaves = {
        "same": lambda: base,
        "view": lambda: base[1],
        "flat": lambda: base.view(-1)[1:3],
        "new": lambda: t - 1,
        "argument": lambda: t,
        "argument view": lambda: t[1:],
        "cache": lambda: cache,
        "cache view": lambda: cache[:2],
        "none": lambda: None,
        "int": lambda: 7,
    }

    cache.add_(t)
    return fill(spec, leaves)


def fill(part, leaves):
    if isinstance(part, str):
        return leaves[part]()
    if isinstance(part, dict):
        return {key: fill(value, leaves) for key, value in part.items()}
    if isinstance(part, tuple | list):
        return type(part)(fill(value, leaves) for value in part)
    return type(part)(fill(part.value, leaves), part.n and fill(part.n, leaves))


def leaves_of(out):
    if isinstance(out, torch.Tensor):
        return [out]
    parts = [out.value, out.n] if isinstance(out, Frozen | Attrs) else out
    if isinstance(parts, dict):
        parts = list(parts.values())
    return [leaf for part in parts for leaf in leaves_of(part)] if isinstance(parts, tuple | list) else []


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(spec=outputs, inference=st.booleans())
def test_any_structure_of_any_leaves(backend, spec, inference):
    """Whatever shares memory eagerly does so in a capture, and graph code that writes shows it."""
    made = eager_break_during_capture(build, name="made")

    def model(x, cache):
        t = x * 2
        leaves = leaves_of(made(spec, t, cache))
        for i, leaf in enumerate(leaves):
            leaf.mul_(i + 2)
        return [t + 0, cache + 0, *[leaf + 0 for leaf in leaves]]

    with torch.inference_mode(inference), torch.no_grad():
        cache, twin = (torch.zeros(4, device=backend.device) for _ in range(2))
        x = backend.tensor(4)
        expected = model(x, twin)
        with backend.capture() as g:
            out = model(x, cache)
        for seed in range(1, 4):
            assert [t.tolist() for t in out] == [t.tolist() for t in expected]
            x.copy_(backend.tensor(4, seed=seed))
            expected = model(x, twin)
            g.replay()
        assert [t.tolist() for t in out] == [t.tolist() for t in expected]
