"""What a refusal tells people to do."""

import pytest
import torch

from segcapture import CaptureFailedError, eager_break_during_capture
from segcapture.backends.cuda.backend import CudaBackend


def said(backend, fn, *args, guard=torch.no_grad, **options):
    """The message and the notes of the exception that a capture of `fn` ends with."""
    with guard():
        fn(*args)
        with pytest.raises(RuntimeError) as info, backend.capture(**options):
            fn(*args)
    return "\n".join([str(info.value), *info.value.__notes__])


def has_padding(x):
    return bool((x > 5).any())


def attention(x):
    return x * 2 if has_padding(x) else x * 3


def test_a_function_that_returns_a_bool(backend):
    """Its caller is named too, with the line of the call."""
    text = said(backend, lambda x: attention(x * 1), backend.tensor(4))
    assert "`has_padding` is one if it returns no bool or None" in text
    assert f"mark the caller, `attention` ({__file__}:{attention.__code__.co_firstlineno + 1})" in text


@pytest.mark.parametrize("read", [torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.cpu, torch.nonzero])
def test_every_read_gets_the_advice(backend, read):
    """Whoever refuses it, and in the function of the `with` block too, which cannot be marked."""
    x = backend.tensor(1)
    read(x)
    with torch.no_grad(), pytest.raises(RuntimeError) as info, backend.capture():
        read(x * 2)
    text = "\n".join([str(info.value), *info.value.__notes__])
    assert "into a function marked `@eager_break_during_capture`" in text
    assert "is one if" not in text
    assert "the caller" not in text


def test_a_marked_function_is_not_told_to_be_marked(backend):
    """But what keeps it from breaking."""
    x = backend.tensor(4)
    marked = eager_break_during_capture(has_padding)
    off = eager_break_during_capture(enable=False)(lambda x: has_padding(x))
    for fn, options, cause in (
        (marked, {"mode": "full"}, "`has_padding` is marked, but mode='full'"),
        (marked, {"breaks": ["padding"]}, "`has_padding` is marked, but `breaks=` does not name it"),
        (off, {}, "is marked with `enable=False`"),
    ):
        text = said(backend, lambda x, fn=fn: fn(x * 1) or x, x, **options)
        assert cause in text
        assert "Move it" not in text


def test_full_mode_is_named_where_nothing_is_marked(backend):
    """Marking would not help there."""
    text = said(backend, attention, backend.tensor(4), mode="full")
    assert "mode='full' marked functions are captured too" in text


def test_a_misspelt_name_is_told_though_something_else_is_refused(backend):
    """It may be why. Names that were called are not told."""
    marked = eager_break_during_capture(name="attention")(has_padding)
    other = eager_break_during_capture(name="other")(lambda x: x + 1)
    text = said(backend, lambda x: marked(other(x)), backend.tensor(4), breaks=["atention", "other"])
    assert "breaks names 'atention', and until then" in text
    assert "called were: 'attention', 'other'" in text


# Debug mode does not see it: the count is on another device, and torch asks a stream that is not capturing.
@pytest.mark.parametrize("backend", ["emulated", pytest.param("cuda", marks=pytest.mark.cuda)], indirect=True)
def test_an_optimizer_that_counts_on_the_host(backend):
    """It is told the options that let it be captured; with them it is."""
    weight = torch.nn.Parameter(backend.tensor(4))
    weight.grad = torch.ones_like(weight)
    text = said(backend, torch.optim.Adam([weight], lr=0.1).step)
    assert "make it with `fused=True, capturable=True`" in text
    optimizer = torch.optim.Adam([weight], lr=0.1, fused=True, capturable=True)
    optimizer.step()
    with backend.capture() as g:
        optimizer.step()
    before = weight.detach().clone()
    g.replay()
    assert not torch.equal(weight, before)


def test_what_torch_refuses_without_a_code():
    """Two of its messages are known; the words of others are not read."""
    copy = (
        "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned."
    )
    for words, part in (
        (copy, "Make a constant before"),
        ("Attempting CUDA graph capture of step() for", ""),
    ):
        text = CudaBackend.advice(None, RuntimeError(words))
        assert part in text
        assert "@eager_break_during_capture" in text
    assert CudaBackend.advice(None, RuntimeError(f"Mine: {copy}")) == ""
    assert CudaBackend.advice(None, CaptureFailedError(copy)) == ""
