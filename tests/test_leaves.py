"""Outputs of plain containers are stored without a walk: with the same result as by one, whatever comes."""

import warnings
from typing import NamedTuple

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from segcapture import BreakableCUDAGraphCapture, SegcaptureError
from segcapture.leaves import leaf_reader
from segcapture.structure import walk


class Pair(NamedTuple):
    """A tuple with names."""

    one: object
    two: object


class Maker:
    """Makes an output from a description: names are tensors, of which those of one name are one."""

    def __init__(self):
        self.cache = {name: torch.zeros(2, 3) for name in ("cached", "other")}

    def make(self, what, value):
        """The output, its fresh tensors filled with `value`."""
        return self._make(what, value, {})

    def _make(self, what, value, made):
        if what in ("fresh", "again"):
            return (
                made.setdefault(what, torch.full((2, 3), value))
                if what == "again"
                else torch.full((2, 3), value)
            )
        if what == "long":
            return torch.full((4,), value)
        if isinstance(what, str):
            self.cache[what].fill_(value)
            return self.cache[what]
        if isinstance(what, tuple | list):
            items = [self._make(item, value, made) for item in what]
            return Pair(*items) if isinstance(what, Pair) else type(what)(items)
        if isinstance(what, dict):
            return {key: self._make(item, value, made) for key, item in what.items()}
        return what


LEAVES = st.sampled_from(["fresh", "fresh", "again", "long", "cached", "other", None, 1, 1.0, True, 2**40])
OUTPUTS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.builds(Pair, inner, inner),
        st.dictionaries(st.sampled_from(["a", "b", 1]), inner, max_size=3),
    ),
    max_leaves=5,
)


def captured(what):
    """A maker, and the write-back of a break that returned what it made."""
    maker = Maker()
    with BreakableCUDAGraphCapture(device="cpu") as g:
        g.add_eager(lambda: maker.make(what, 1.0))
    return maker, g.segments[0].writeback


def outcome(store, writeback, out):
    """What a store came to: the error, or the values that later segments read, and the warnings."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            store(out)
        except SegcaptureError as error:
            return type(error)
    return [(path, t.tolist()) for path, t in writeback.leaves()], len(seen)


@settings(max_examples=400, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(OUTPUTS, OUTPUTS, st.booleans())
def test_the_short_way_and_the_walk_agree(before, after, changed):
    """Twice: the second time with what the first has left behind."""
    quick_maker, quick = captured(before)
    maker, walked = captured(before)
    for value in (2.0, 3.0):
        what = after if changed else before
        found = outcome(quick.store, quick, quick_maker.make(what, value))
        assert found == outcome(walked._store_tree, walked, maker.make(what, value))


@settings(max_examples=200, derandomize=True, deadline=None)
@given(OUTPUTS)
def test_leaves_come_in_the_order_of_the_walk(what):
    """Whatever is inside of what."""
    out = Maker().make(what, 1.0)
    read, found = leaf_reader(out), []
    assert read is None or read(out, found)
    nodes = walk(out)
    if read is not None:
        assert [id(leaf) for leaf in found] == [id(node.value) for node in nodes if not node.container]
    else:
        assert any(node.same_as >= 0 for node in nodes)  # the empty tuple is one object
