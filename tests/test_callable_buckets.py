"""Sizes that vary, served by captures of a few."""

import re

import pytest
import torch

from segcapture import (
    Bucket,
    CaptureFailedError,
    CaptureStateError,
    GraphedCallable,
)
from tests.conftest import assert_same
from tests.served import graphed, rescale, state_of


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

    bucket = Bucket(sizes=(2, 4, 8), dims={"x": 0}, out=0)
    g = graphed(backend, fn, warmup=1, bucket=bucket, ignore_state=("*.seen",))
    g.precapture(inputs=lambda n: (backend.tensor(n),))
    assert seen == [8, 8, 4, 4, 2, 2]
    for n in range(1, 9):
        x = backend.tensor(n, seed=n)
        assert torch.equal(g(x), x.sin().cos())
    assert state_of(g) == {"warmups": 3, "captures": 3, "replays": 8}
    with pytest.raises(ValueError, match="no bucket"):
        graphed(backend, fn).precapture(inputs=lambda n: (n,))
    plain = graphed(backend, fn, warmup=0, ignore_state=("*.seen",))
    plain.precapture([1, 3], inputs=lambda n: {"x": backend.tensor(n)})
    assert seen[-2:] == [3, 1]


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


def test_one_dimension_of_all_arguments(backend):
    """`dims` as a number; what cannot be one is refused when the bucket is made."""
    g = graphed(backend, lambda x, y: x * y[0], bucket=Bucket(sizes=(4, 8), dims=0, out=0), warmup=0)
    for n in (3, 4, 2, 7):
        x, y = backend.tensor(n, 2, seed=n), backend.tensor(n, 2, seed=n + 1)
        assert torch.equal(g(x, y), x * y[0])
    assert state_of(g) == {"captures": 2, "replays": 2}
    for wrong in ({"dims": "x"}, {"dims": ["x"]}, {"dims": {"x": "1"}}, {"dims": 0, "out": "x"}):
        with pytest.raises(TypeError, match="takes a dimension"):
            Bucket(sizes=(4,), **wrong)


def test_names_of_keyword_only_parameters(backend):
    """May be in `dims` too."""
    g = graphed(backend, lambda *, x: x + 1, bucket=Bucket(sizes=(4,), dims={"x": 0}, out=0), warmup=0)
    for n in (2, 3):
        assert torch.equal(g(x=backend.tensor(n)), backend.tensor(n) + 1)


def test_two_views_of_one_memory_that_are_both_padded(backend):
    """Are read, each from its own padded copy; a write to one of them is refused."""
    bucket = Bucket(sizes=(8,), dims={"x": 0, "y": 0}, out=0)
    g = graphed(backend, lambda x, y: x + y, bucket=bucket, warmup=0)
    for n in (3, 5):
        x = backend.tensor(n)
        assert torch.equal(g(x, x[:]), x + x)
    with pytest.raises(CaptureFailedError, match="padded to a bucket"):
        graphed(backend, lambda x, y: x.add_(y), bucket=bucket, warmup=0)(x, x[:])
