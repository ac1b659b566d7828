"""All that a new output holds is stored, or an error says why not."""

import warnings
from typing import NamedTuple

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from segcapture import BreakableCUDAGraphCapture, OutputMismatchError
from segcapture.trees import flatten


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


@settings(max_examples=400, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(OUTPUTS, OUTPUTS, st.booleans())
def test_what_was_returned_is_stored_or_an_error(before, after, changed):
    """Twice: the second time with what the first has left behind."""
    maker = Maker()
    with BreakableCUDAGraphCapture(device="cpu") as g:
        g.add_eager(lambda: maker.make(before, 1.0))
    writeback = g.segments[0].writeback
    for value in (2.0, 3.0):
        out = maker.make(after if changed else before, value)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                writeback.store(out)
            except OutputMismatchError:
                assert changed
                continue
        stored = {leaf.path: leaf.target.tolist() for leaf in writeback.leaves}
        nodes = [place for place in flatten(out) if place.same_as < 0]
        assert stored == {n.path: n.value.tolist() for n in nodes if isinstance(n.value, torch.Tensor)}
        assert changed or not warned
