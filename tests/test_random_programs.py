"""Random programs: whatever is captured, replays as eager runs it, bit by bit.

`SEGCAPTURE_EXAMPLES` says how many are tried, new ones each time; left out, it is the same 150. Each holds
up to three captures that share a pool.
"""

import os
import random
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from segcapture import break_graph, eager_break_during_capture
from tests.conftest import assert_same

EXAMPLES = int(os.environ.get("SEGCAPTURE_EXAMPLES", "150"))
SLOTS = 5


class Pair(NamedTuple):
    """An output that is kept as what it is."""

    left: torch.Tensor
    right: torch.Tensor


def fraction(a, b):
    """Reads a count on the host, and has a size inside that depends on the data."""
    chosen = a[a > b.mean()]
    return a * (chosen.numel() / 16) + chosen.sum().item() / 16


def in_place(a, b, kept):
    a.mul_(0.5).add_(b.clone().sin())


def remember(a, b, kept):
    kept.copy_(kept * 0.5 + a.tanh())
    return kept


def in_place_and_back(a, b, kept):
    in_place(a, b, kept)
    return a, b.cos()


def shared(a, b, kept):
    c = a.sin() + b.cos()
    return c, c.t(), c[:, :]


def repeated(a, b, kept):
    row = a[0] * 0.5
    return row.expand(4, 4)


def twice(a, b, kept):
    c = (a + b).tanh()
    return [c, c]


# Each takes two tensors and a persistent buffer; what it returns is flattened into the slots.
BREAKS = {
    "fresh": lambda a, b, kept: (a * 0.5 + b).sin(),
    "host": lambda a, b, kept: fraction(a, b),
    "tuple": lambda a, b, kept: ((a + b).tanh(), (a - b).sin()),
    "dict": lambda a, b, kept: {"x": a.sin(), "y": [b.cos(), None]},
    "namedtuple": lambda a, b, kept: Pair(a.cos(), Pair(b.sin(), a.tanh())),
    "strides": lambda a, b, kept: (a.t() * 0.5, b.t().contiguous().t().sin()),
    "slice": lambda a, b, kept: torch.cat([a, b]).sin()[2:6],
    "shared": shared,
    "repeated": repeated,
    "twice": twice,
    "argument": lambda a, b, kept: a,
    "view": lambda a, b, kept: a.t(),
    "views": lambda a, b, kept: (a.t(), (a + b).sin(), b[:]),
    "persistent": remember,
    "buffer alone": lambda a, b, kept: kept,
    "nothing": lambda a, b, kept: None,
    "in place": in_place,
    "in place and back": in_place_and_back,
    "random": lambda a, b, kept: (a * 0.5 + torch.rand_like(b)).sin(),
}
MARKED = {name: eager_break_during_capture(fn, name=name) for name, fn in BREAKS.items()}

OPERATORS = {
    "add": lambda a, b: (a + b) * 0.5,
    "mul": lambda a, b: a.sin() * b.cos(),
    "matmul": lambda a, b: torch.tanh(a @ b),
    "softmax": lambda a, b: (a + b).softmax(-1),
    "where": lambda a, b: torch.where(a > b, a, b.sin()),
    "cat": lambda a, b: torch.cat([a[:1], b[1:]]),
    "sort": lambda a, b: torch.sort(a, dim=0).values,
    "sdpa": lambda a, b: torch.nn.functional.scaled_dot_product_attention(a[None], b[None], a[None])[0],
    "masked": lambda a, b: a.masked_fill(b > 0, 0.25),
    "gather": lambda a, b: a.gather(0, b.argsort(0)),
    "random": lambda a, b: (a + torch.rand_like(a)).sin(),
    "empty": lambda a, b: torch.empty_like(a).copy_(b),
    "out": lambda a, b: torch.sub(a, b, out=torch.empty(0, device=a.device)).sin(),
}
WATCHED = {
    "matmul": "aten::matmul",
    "softmax": "aten::_softmax",
    "sort": "aten::sort",
    "sdpa": "aten::scaled_dot_product_attention",
    "masked": "aten::masked_fill.Scalar",
}
VIEWS = {
    "transposed": lambda a: a.t(),
    "same": lambda a: a[:],
    "reshaped": lambda a: a.reshape(16).view(4, 4) if a.is_contiguous() else a,
    "contiguous": lambda a: a.contiguous(),
    "expanded": lambda a: a[:1].expand(4, 4),
    "detached": lambda a: a.detach(),
}
PARTS = {
    "all": lambda a: a,
    "row": lambda a: a[1],
    "rows": lambda a: a[1:3],
    "column": lambda a: a[:, 2],
    "diagonal": lambda a: a.diagonal(),
    "steps": lambda a: a[::2, ::3],
}


def writes(part, kind, source):
    """Write to a part of a tensor in place."""
    if kind == "add":
        part.mul_(0.5).add_(source)
    elif kind == "copy":
        part.copy_(source)
    elif kind == "scalar":
        part.fill_(0.5)
    else:
        part[part > 0] = -0.25


slot = st.integers(0, SLOTS - 1)
step = st.one_of(
    st.tuples(st.just("operator"), st.sampled_from(list(OPERATORS)), slot, slot, slot),
    st.tuples(st.just("view"), st.sampled_from(list(VIEWS)), slot, slot),
    st.tuples(
        st.just("write"),
        st.sampled_from(list(PARTS)),
        slot,
        slot,
        st.sampled_from(["add", "copy", "scalar", "mask"]),
    ),
    st.tuples(st.just("break"), st.sampled_from(list(BREAKS)), slot, slot, slot),
    st.tuples(st.just("break"), st.sampled_from(list(BREAKS)), slot, slot, slot),
    st.tuples(st.just("split")),
)
program = st.fixed_dictionaries(
    {
        "steps": st.lists(step, min_size=1, max_size=14),
        "keep": st.sets(slot, min_size=1),
        "watch": st.sets(st.sampled_from(list(WATCHED)), max_size=2),
        "guard": st.sampled_from([torch.no_grad, torch.inference_mode]),
    }
)


class Run:
    """A program with memory of its own: static inputs, two of which overlap, and a persistent buffer."""

    def __init__(self, program, backend):
        self.program, self.device = program, backend.device
        self.inputs = [torch.zeros(4, 4, device=self.device), torch.zeros(8, 4, device=self.device)]
        self.kept = torch.zeros(4, 4, device=self.device)

    def break_on(self):
        """The watched operators that the program calls."""
        called = {details[0] for kind, *details in self.program["steps"] if kind == "operator"}
        return [WATCHED[name] for name in sorted(self.program["watch"] & called)]

    def fill(self, seed):
        """New values for the static inputs, and a seed for what draws random numbers."""
        generator = torch.Generator().manual_seed(seed)
        for tensor in self.inputs:
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        torch.manual_seed(seed)

    def __call__(self):
        """The forward pass; returns the slots that are kept."""
        x, base = self.inputs
        slots = [x, base[:4], base[2:6], x * 0.5, x.t()]
        for kind, *details in self.program["steps"]:
            getattr(self, kind)(slots, *details)
        return [slots[i] for i in sorted(self.program["keep"])]

    def operator(self, slots, name, a, b, to):
        slots[to] = OPERATORS[name](slots[a], slots[b])

    def view(self, slots, name, a, to):
        slots[to] = VIEWS[name](slots[a])

    def write(self, slots, part, target, source, kind):
        # A source of its own: torch refuses to write to what it reads at other strides.
        self._own(slots, target)
        writes(PARTS[part](slots[target]), kind, PARTS[part](slots[source]).clone().sin())

    def split(self, slots):
        break_graph()

    def _own(self, slots, i):
        if 0 in slots[i].stride():
            slots[i] = slots[i].clone(memory_format=torch.contiguous_format)

    # Not `break`, which is a word of Python.
    def _break(self, slots, name, a, b, to):
        self._own(slots, a)
        out = MARKED[name](slots[a], slots[b], self.kept)
        for i, tensor in enumerate(_leaves(out)):
            slots[(to + i) % SLOTS] = tensor


setattr(Run, "break", Run._break)


def _leaves(out):
    if isinstance(out, dict):
        out = list(out.values())
    if isinstance(out, tuple | list):
        return [t for item in out for t in _leaves(item)]
    return [] if out is None else [out]


class Churn:
    """Tensors outside of the pool that come and go between replays, and must stay as they are."""

    def __init__(self, device, seed):
        self._random, self._device = random.Random(seed), device
        self._junk = []

    def turn(self):
        """Check all, drop some, make some."""
        for tensor, value in self._junk:
            assert (tensor == value).all(), "a replay wrote to memory that is not its own"
        self._random.shuffle(self._junk)
        del self._junk[len(self._junk) // 2 :]
        for _ in range(4):
            value = self._random.random()
            size = self._random.choice([16, 64, 512, 4096])
            self._junk.append((torch.full((size,), value, dtype=torch.float64, device=self._device), value))


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize="SEGCAPTURE_EXAMPLES" not in os.environ,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    programs=st.lists(program, min_size=1, max_size=3),
    order=st.lists(st.integers(0, 2), min_size=3, max_size=6),
)
def test_random_programs(backend, programs, order):
    """Several captures in one pool, replayed in any order on fresh inputs, against eager runs."""
    pool, alive = None, []
    churn = Churn(backend.device, len(order))
    for index, each in enumerate(programs):
        eager, captured, warm_up = (Run(each, backend) for _ in range(3))
        for run in (eager, captured, warm_up):
            run.fill(index)
        with each["guard"]():
            if not backend.emulated:
                warm_up()
                torch.manual_seed(index)
            expected = eager()
            torch.manual_seed(index)
            with backend.capture(pool=pool, break_on=captured.break_on()) as g:
                out = captured()
            _compare(eager, captured, expected, out, "at capture")
        pool = g.pool
        alive.append((g, eager, captured, out))
        churn.turn()
    for round_, which in enumerate(order):
        g, eager, captured, out = alive[which % len(alive)]
        eager.fill(100 + round_)
        with eager.program["guard"]():
            expected = eager()
        captured.fill(100 + round_)
        g.replay()
        _compare(eager, captured, expected, out, f"in round {round_}")
        churn.turn()


def _compare(eager, captured, expected, out, when):
    assert_same(out, expected, when)
    assert_same([captured.inputs, captured.kept], [eager.inputs, eager.kept], when)


@pytest.mark.parametrize("name", BREAKS)
def test_each_kind_of_break(backend, name):
    """The least program with it, so that none is left to chance."""
    steps = [("operator", "add", 0, 1, 3), ("break", name, 3, 1, 2), ("operator", "mul", 2, 3, 4)]
    case = {"steps": steps, "keep": {2, 3, 4}, "watch": set(), "guard": torch.no_grad}
    test_random_programs.hypothesis.inner_test(backend, [case, case], [1, 0, 0])
