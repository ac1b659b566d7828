"""Autocast across segments (C7). Grad and inference mode are in test_capture."""

import pytest
import torch

from segcapture import BreakableCUDAGraphCapture, eager_break_during_capture


def test_a_weight_cast_inside_of_a_break_is_not_read_by_the_next_segment(backend):
    """The autocast cache is off: weights updated in place between replays are seen."""
    first = torch.nn.Linear(16, 16, device=backend.device)
    second = torch.nn.Linear(16, 16, device=backend.device)
    both = eager_break_during_capture(lambda t: second(first(t)), name="both")
    x = backend.tensor(4, 16)
    kind = backend.device.type

    def f(t):
        with torch.autocast(kind, dtype=torch.bfloat16):
            t = first(t)
            t = both(t)
            return second(first(t))

    with torch.no_grad():
        f(x)
        expected = f(x)
        with backend.capture() as g:
            out = f(x)
        assert torch.equal(out, expected)
        for k in range(3):
            value = backend.tensor(4, 16, seed=k)
            x.copy_(value)
            first.weight.add_(0.1)
            second.bias.mul_(1.5)
            g.replay()
            assert torch.equal(out, f(value))


def test_a_capture_inside_of_autocast_replays_outside_of_it(backend):
    """Also the other way round; and the caller's cache is as before."""
    layer = torch.nn.Linear(8, 8, device=backend.device)
    in_break = eager_break_during_capture(lambda t: layer(t), name="in_break")
    x = backend.tensor(2, 8)
    kind = backend.device.type
    seen = []

    def f(t):
        y = in_break(layer(t))
        seen.append(y.dtype)
        return y * 2

    with torch.no_grad():
        with torch.autocast(kind, dtype=torch.bfloat16):
            f(x)
            cached = torch.is_autocast_cache_enabled()
            with backend.capture() as g:
                out = f(x)
            assert torch.is_autocast_cache_enabled() == cached
            expected = f(x + 1)
        x.add_(1)
        g.replay()
        assert torch.equal(out, expected)
        assert not torch.is_autocast_enabled(kind)
        with backend.capture() as plain:
            out = f(x)
        expected = f(x + 1)
        x.add_(1)
        with torch.autocast(kind, dtype=torch.bfloat16):
            plain.replay()
        assert torch.equal(out, expected)
        assert set(seen) == {torch.bfloat16, torch.float32}


@pytest.mark.multi_gpu
def test_side_streams_at_a_break_that_is_called_on_another_device(cuda):
    """They are ordered with the stream of the replay, not with one of the device that is current."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    side = torch.cuda.Stream(0)
    x, counter = torch.ones(1 << 20, device="cuda:0"), torch.zeros(1, device="cuda:0")

    @eager_break_during_capture
    def there(t):
        with torch.cuda.device(0), torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            return t + 1

    with torch.no_grad(), BreakableCUDAGraphCapture(device=0) as g:
        main = torch.cuda.current_stream()
        y = x * 2
        side.wait_stream(main)
        with torch.cuda.stream(side):
            counter.add_(1)
        with torch.cuda.device(1):
            z = there(y)
        main.wait_stream(side)
        out = z * 3
    for value in (2.0, 3.0, 4.0):
        x.fill_(value)
        g.replay()
        torch.cuda.current_stream(0).synchronize()
        assert out[:4].tolist() == [(value * 2 + 1) * 3] * 4


@pytest.mark.multi_gpu
def test_a_break_called_while_another_device_is_current(cuda):
    """It runs there at each replay, whatever device the replay is called on, other segments on theirs."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    seen = []

    @eager_break_during_capture(name="there")
    def there(t):
        seen.append(torch.cuda.current_device())
        return t + 1

    here = eager_break_during_capture(
        lambda t: (seen.append(torch.cuda.current_device()), t * 2)[1], name="here"
    )
    x = torch.ones(4, device="cuda:0")
    with torch.no_grad(), BreakableCUDAGraphCapture(device=0) as g:
        y = x * 2
        with torch.cuda.device(1):
            z = there(y)
            w = z * 3
        out = here(w) + 1
    for current in (0, 1):
        with torch.cuda.device(current):
            for run in (g.replay, lambda: list(g.steps())):
                x.fill_(current + 3)
                run()
                torch.cuda.synchronize(0)
                assert out.tolist() == [((current + 3) * 2 + 1) * 6 + 1] * 4
                assert torch.cuda.current_device() == current
    assert seen == [1, 0] * 5
