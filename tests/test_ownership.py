"""Freshness: which tensors of an output belong to it alone (contract C4)."""

import dataclasses
import gc
import sys
from collections import OrderedDict, defaultdict
from contextlib import contextmanager
from typing import NamedTuple

import attrs
import pytest
import torch
from transformers.utils import ModelOutput

from segcapture import BreakableCUDAGraphCapture
from segcapture.outputs import _is_ours_alone
from segcapture.tensors import own_alias, own_aliases
from segcapture.trees import find_owned, flatten


class Pair(NamedTuple):
    first: object
    second: object


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    value: object


@attrs.define
class Slotted:
    value: object


@dataclasses.dataclass
class HfOutput(ModelOutput):
    logits: object = None
    hidden: object = None


class Plain:
    def __init__(self, value):
        self.value = value
        self.scale = 2.0


class World:
    """What exists besides the output of a function: its argument, and the owners of other tensors."""

    def __init__(self, device):
        self.argument = torch.ones(4, device=device)
        self.cache = torch.ones(4, device=device)
        self.module = torch.nn.Module()
        self.module.register_buffer("buffer", torch.ones(4, device=device))
        self.parameter = torch.nn.Parameter(torch.ones(4, device=device), requires_grad=False)
        self.stored = []
        self.state = {}
        self.last = None

    def new(self):
        return self.argument + 1

    def keep(self, value):
        self.stored.append(value)
        return value


def remember(w):
    w.last = w.new()
    return w.last


def in_persistent_dict(w):
    w.state["k"] = w.new()
    return w.state


def in_stored_tuple_in_a_new_list(w):
    return [w.keep((w.new(),)), w.new()]


def closed_over(w):
    out = w.new()
    w.stored.append(lambda: out)
    return out


def twice_in_a_list(w):
    out = w.new()
    return [out, out]


def with_view(w):
    out = w.new()
    return out, out[1:]


def two_views(w):
    out = w.new()
    return [out[:2], {"k": out[2:]}]


def view_elsewhere(w):
    out = w.new()
    w.stored.append(out[1:])
    return out


def detached_elsewhere(w):
    out = w.new()
    w.stored.append(out.detach())
    return out


def base_elsewhere(w):
    return w.keep(w.new())[1:]


def one_of_two_views_elsewhere(w):
    out = w.new()
    return out[:2], w.keep(out[2:])


def held_by_cpp(w):
    out = w.new()
    w.parameter.grad = out
    return out


def complex_base_elsewhere(w):
    return torch.view_as_real(w.keep(w.new() * 1j))


def rotated(w):
    return torch.view_as_real(torch.view_as_complex(w.new().view(2, 2)))


def cycle(w):
    out = Plain(w.new())
    out.self = out
    return out


def one_list_twice(w):
    inner = [w.new()]
    return {"a": inner, "b": inner}


def object_elsewhere(w):
    return w.keep(Plain(w.new()))


def attributes_elsewhere(w):
    out = Plain(w.new())
    w.stored.append(vars(out))
    return out


ALL = "all"
CASES = {
    "new": (World.new, ALL),
    "attribute": (lambda w: w.cache, ()),
    "module buffer": (lambda w: w.module.buffer, ()),
    "parameter": (lambda w: w.parameter, ()),
    "view of cache": (lambda w: w.cache[1:], ()),
    "detached cache": (lambda w: w.cache.detach(), ()),
    "view of buffer in list": (lambda w: [w.module.buffer.view(2, 2)], ()),
    "view of new": (lambda w: w.new()[1:], ALL),
    "view of view of new": (lambda w: w.new().view(2, 2)[1].t(), ALL),
    "detached new": (lambda w: w.new().detach(), ALL),
    "new as another dtype": (lambda w: w.new().view(torch.int32)[1:], ALL),
    "expanded new": (lambda w: w.new().expand(3, 4), ALL),
    "windows of new": (lambda w: w.new().unfold(0, 2, 1), ALL),
    "no elements": (lambda w: w.new()[:0], ALL),
    "no elements of cache": (lambda w: w.cache[:0], ()),
    "no dimensions": (lambda w: w.new().sum(), ALL),
    "new beside cache": (lambda w: (w.new(), w.cache), ("out[0]",)),
    "view of cache beside new": (lambda w: {"c": w.cache[:2], "n": w.new()}, ('out["n"]',)),
    "twice in a list": (twice_in_a_list, ALL),
    "with a view": (with_view, ALL),
    "two views": (two_views, ALL),
    "argument": (lambda w: w.argument, ()),
    "view of argument": (lambda w: w.argument[2:], ()),
    "argument in a list": (lambda w: [w.argument, w.new()], ("out[1]",)),
    "view in ModelOutput": (lambda w: HfOutput(logits=w.new(), hidden=w.new()[1:]), ALL),
    "OrderedDict": (lambda w: OrderedDict(a=w.new(), b=w.new()), ALL),
    "defaultdict": (lambda w: defaultdict(list, a=[w.new()]), ALL),
    "frozen slotted dataclass": (lambda w: Frozen(w.new()), ALL),
    "attrs": (lambda w: Slotted([w.new()]), ALL),
    "NamedTuple": (lambda w: Pair(w.new(), Pair(w.new(), None)), ALL),
    "plain object": (lambda w: Plain([w.new()]), ALL),
    "struct sequence": (lambda w: w.new().topk(2), ALL),
    "cycle": (cycle, ALL),
    "one list twice": (one_list_twice, ALL),
    "self.last": (remember, ()),
    "stored in a list": (lambda w: w.keep(w.new()), ()),
    "closed over": (closed_over, ()),
    "view elsewhere": (view_elsewhere, ()),
    "detached elsewhere": (detached_elsewhere, ()),
    "base elsewhere": (base_elsewhere, ()),
    "one of two views elsewhere": (one_of_two_views_elsewhere, ()),
    "held by C++ alone": (held_by_cpp, ()),
    "persistent dict": (in_persistent_dict, ()),
    "tuple elsewhere": (in_stored_tuple_in_a_new_list, ("out[1]",)),
    "object elsewhere": (object_elsewhere, ()),
    "attributes elsewhere": (attributes_elsewhere, ()),
    "real part of new": (lambda w: (w.new() * 1j).real, ALL),
    "complex base elsewhere": (complex_base_elsewhere, ()),
    "rotated": (rotated, ALL),
}
GUARDS = [torch.no_grad, torch.inference_mode, torch.enable_grad]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device(request.param)


@contextmanager
def debugger():
    """A tracer that looks at the variables of each frame, as debuggers do."""

    def trace(frame, event, arg):
        frame.f_locals
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def fresh_paths(function, world):
    """Paths of the tensors that get a bridge, and of all."""
    with BreakableCUDAGraphCapture(device=world.argument.device) as g:
        g.add_eager(lambda: function(world))
    leaves = g.segments[0].writeback.leaves
    assert leaves, "nothing to tell"
    return {leaf.path for leaf in leaves if leaf.block.fresh}, {leaf.path for leaf in leaves}


@pytest.mark.parametrize("guard", GUARDS)
@pytest.mark.parametrize("case", CASES)
def test_freshness(device, case, guard):
    """Each case is judged alike in each grad mode, with and without a tracer."""
    function, expected = CASES[case]
    with guard():
        plain = fresh_paths(function, World(device))
        with debugger():
            traced = fresh_paths(function, World(device))
    assert plain == traced
    assert plain[0] == (plain[1] if expected == ALL else set(expected))


def test_containers_are_judged_too():
    """A container that others hold, and what is in it, does not belong to the output."""
    shared = {"n": 1}
    places = flatten([shared, [torch.ones(2)], {}])
    owned = [place.path for place, mine in zip(places, find_owned(places), strict=True) if mine]
    assert owned == ["out", "out[1]", "out[2]"]


OWNERS = {
    "nobody": (lambda t: None, True),
    "the tensor": (lambda t: t, False),
    "a container": (lambda t: [t], False),
    "a view": (lambda t: t[1:], False),
    "a detached tensor": (lambda t: t.detach(), False),
    "a NumPy array": (lambda t: t.numpy(), False),
    "its storage": (lambda t: t.untyped_storage(), False),
    "an alias of ours": (own_alias, True),
}


@pytest.mark.parametrize("owner", OWNERS)
@pytest.mark.parametrize("guard", GUARDS)
def test_owners(owner, guard):
    """Memory is ours alone when nothing but our aliases keeps it."""
    make, alone = OWNERS[owner]
    with guard():
        tensor = torch.ones(4)
        alias, held = own_alias(tensor), make(tensor)
        del tensor
        assert _is_ours_alone(alias) is alone
        del held
        assert _is_ours_alone(alias)


def test_aliases_are_forgotten_with_their_death():
    """Their number is that of the living ones, so that a later owner is seen."""
    tensor = torch.ones(4)
    for _ in range(3):
        own_alias(tensor)
    gc.collect()
    assert own_aliases(tensor) == []
    alias = own_alias(tensor)
    assert not _is_ours_alone(alias)
