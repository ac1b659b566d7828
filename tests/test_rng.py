"""Random numbers: same seed, same sequence as eager, in graph and eager segments (C8)."""

import pytest
import torch

from segcapture import eager_break_during_capture


@eager_break_during_capture
def draw_in_break(t):
    """Draws between two graph segments."""
    return t + torch.rand_like(t)


def draw(x):
    """Dropout, rand and multinomial in graph segments, and a draw in a break."""
    y = torch.nn.functional.dropout(x, 0.5)
    y = y + torch.rand_like(y)
    y = draw_in_break(y)
    picked = torch.multinomial(torch.softmax(y, -1), 3, replacement=True)
    return y + torch.randn_like(y) + picked.sum()


def seed(value):
    torch.manual_seed(value)


def test_ten_replays_draw_what_eager_draws(backend):
    """Capture is the first pass, replays the next ones."""
    x = backend.tensor(64)
    with torch.no_grad():
        draw(x)
        seed(7)
        expected = [draw(x) for _ in range(11)]
        seed(7)
        with backend.capture() as g:
            out = draw(x)
        found = [out.clone()]
        for _ in range(10):
            g.replay()
            found.append(out.clone())
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_a_seed_set_between_replays_is_obeyed(backend):
    """Also by a capture that was alive when another one failed."""
    x = backend.tensor(64)
    with torch.no_grad():
        draw(x)
        with backend.capture() as g:
            out = draw(x)
        for k in range(3):
            with pytest.raises(ZeroDivisionError), backend.capture():
                draw(x)
                torch.rand(3, device=backend.device)
                raise ZeroDivisionError
            seed(k)
            expected = [draw(x) for _ in range(3)]
            seed(k)
            for value in expected:
                g.replay()
                assert torch.equal(out, value)


def test_graphs_that_draw_nothing_do_not_advance(backend):
    """The sequence after a replay is the sequence before it."""
    x = backend.tensor(8)
    with torch.no_grad(), backend.capture() as g:
        g.add_eager(lambda: None)
        x * 2
    seed(3)
    expected = torch.rand(4, device=backend.device)
    seed(3)
    g.replay()
    assert torch.equal(torch.rand(4, device=backend.device), expected)


def test_extra_generators(backend):
    """Registered for every segment; each keeps its own sequence."""
    generator = torch.Generator(backend.device)
    x = backend.tensor(16)

    @eager_break_during_capture
    def in_break(t):
        return t + torch.rand(16, generator=generator, device=backend.device)

    def f(t):
        t = t + torch.rand(16, generator=generator, device=backend.device)
        t = in_break(t)
        return t + torch.rand(16, generator=generator, device=backend.device) + torch.rand_like(t)

    with torch.no_grad():
        f(x)
        seed(1)
        generator.manual_seed(5)
        expected = [f(x) for _ in range(5)]
        seed(1)
        generator.manual_seed(5)
        with backend.capture(generators=[generator]) as g:
            out = f(x)
        assert torch.equal(out, expected[0])
        for value in expected[1:]:
            g.replay()
            assert torch.equal(out, value)
