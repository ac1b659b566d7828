"""Streams: capture on one, replay on any, and side streams across breaks (C6)."""

import pytest
import torch

from segcapture import CaptureStateError, eager_break_during_capture
from tests.gpu import spin

pytestmark = pytest.mark.cuda

N = 1 << 16


@eager_break_during_capture
def plus_one(t):
    """A break that depends on what came before it."""
    return t + 1


def fork_wait_stream(main, side):
    side.wait_stream(main)


def fork_wait_event(main, side):
    side.wait_event(main.record_event())


def fork_event_wait(main, side):
    main.record_event().wait(side)


FORKS = [fork_wait_stream, fork_wait_event, fork_event_wait]


def check(cuda, f, expected, x, rounds=3):
    """Capture `f(static)`, replay on fresh values, compare with `expected`, which uses no streams."""
    static = x.clone()
    torch.cuda.synchronize()
    with torch.no_grad():
        f(static)
        torch.cuda.synchronize()
        with cuda.capture() as g:
            out = f(static)
        torch.cuda.synchronize()
        assert torch.equal(out, expected(x))
        for k in range(rounds):
            value = x + k
            static.copy_(value)
            g.replay()
            torch.cuda.synchronize()
            assert torch.equal(out, expected(value)), k
    return g


@pytest.fixture
def x():
    return torch.arange(N, device="cuda", dtype=torch.float32)


@pytest.mark.parametrize("fork", FORKS)
@pytest.mark.parametrize("breaks", [1, 3])
def test_a_fork_that_spans_breaks(cuda, x, fork, breaks):
    """Joined at each boundary, forked again after it; a new wait is not needed in between."""
    side = torch.cuda.Stream()

    def f(t):
        main = torch.cuda.current_stream()
        y = t * 2
        fork(main, side)
        with torch.cuda.stream(side):
            spin()
            z = y + 1
        keep = [y]  # the allocator of torch does not know that the side stream reads it
        for _ in range(breaks):
            y = plus_one(y)
            with torch.cuda.stream(side):  # no wait: a monolithic capture would not need one either
                spin()
                z = z * 2
        main.wait_stream(side)
        del keep
        return y + z

    check(cuda, f, lambda t: (t * 2 + breaks) + (t * 2 + 1) * 2**breaks, x)


def test_a_fork_left_unjoined_at_the_end(cuda, x):
    """Its work is part of the capture, and done when a replay is."""
    side = torch.cuda.Stream()
    kept = torch.zeros(N, device="cuda")

    def f(t):
        y = plus_one(t * 2)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            spin()
            kept.copy_(y * 3)
        return y

    static = x.clone()
    with torch.no_grad(), cuda.capture() as g:
        f(static)
    for k in range(3):
        static.copy_(x + k)
        g.replay()
        assert torch.equal(kept, ((x + k) * 2 + 1) * 3)


def test_a_fork_without_work_before_the_break(cuda, x):
    """A stream that only waited is forked all the same."""
    side = torch.cuda.Stream()

    def f(t):
        spin()
        y = t * 2
        side.wait_stream(torch.cuda.current_stream())
        y = plus_one(y)
        with torch.cuda.stream(side):
            z = y * 5
        torch.cuda.current_stream().wait_stream(side)
        return z

    check(cuda, f, lambda t: (t * 2 + 1) * 5, x)


def test_two_side_streams_and_a_nested_fork(cuda, x):
    """A fork of a fork, across breaks."""
    one, two = torch.cuda.Stream(), torch.cuda.Stream(priority=-1)

    def f(t):
        main = torch.cuda.current_stream()
        a = t + 1
        one.wait_stream(main)
        with torch.cuda.stream(one):
            spin()
            b = a * 2
            two.wait_stream(one)
            with torch.cuda.stream(two):
                spin()
                c = b * 3
        keep = [a, b, c]
        a = plus_one(a)
        with torch.cuda.stream(two):
            c = c + 1
        with torch.cuda.stream(one):
            b = b + 1
        keep += [a]
        a = plus_one(a)
        main.wait_stream(one)
        main.wait_stream(two)
        del keep
        return a + b + c

    check(cuda, f, lambda t: (t + 3) + ((t + 1) * 2 + 1) + ((t + 1) * 6 + 1), x)


def test_a_break_called_while_a_side_stream_is_current(cuda, x):
    """The function runs on that stream, ordered both ways."""
    side = torch.cuda.Stream()
    seen = []

    @eager_break_during_capture
    def on_side(t):
        seen.append(torch.cuda.current_stream() == side)
        spin()
        return t + 1

    def f(t):
        main = torch.cuda.current_stream()
        y = t * 2
        side.wait_stream(main)
        with torch.cuda.stream(side):
            spin()
            z = on_side(y * 3) * 2
        main.wait_stream(side)
        return y + z

    check(cuda, f, lambda t: t * 2 + (t * 6 + 1) * 2, x)
    assert all(seen)


def test_an_output_that_is_carried_on_a_side_stream(cuda):
    """The next segment waits at capture too until its bridge is filled."""
    side = torch.cuda.Stream()
    x = torch.ones(1 << 26, device="cuda")  # a copy of 256 MiB takes a while

    @eager_break_during_capture
    def on_side(t):
        out = t + 1
        spin()
        return out

    def f(t):
        main = torch.cuda.current_stream()
        y = t * 2
        side.wait_stream(main)
        with torch.cuda.stream(side):
            z = on_side(y)
        main.wait_stream(side)
        return z[-4:] + z[:4]

    check(cuda, f, lambda t: t[:4] * 4 + 2, x)


def test_a_nested_replay_on_another_stream_is_waited_for(cuda, x):
    """If it shares a stream's workspace: what comes after the function comes after it, at capture too."""
    other, users = torch.cuda.Stream(), torch.cuda.Stream()
    static, total = torch.ones(N, device="cuda"), torch.zeros(N, device="cuda")
    with torch.no_grad(), cuda.capture(stream=users) as inner:
        spin()
        total.add_(static)

    @eager_break_during_capture
    def replays():
        with torch.cuda.stream(other):
            inner.replay()  # not joined by hand

    with torch.no_grad(), cuda.capture(stream=users) as g:
        static.mul_(1)
        replays()
        seen = total * 1
    torch.cuda.synchronize()
    assert torch.equal(seen, torch.full_like(seen, 2))
    for k in range(3):
        g.replay()
        with torch.cuda.stream(other):
            inner.replay()
        torch.cuda.synchronize()
        assert torch.equal(seen, torch.full_like(seen, 3 + 2 * k))
        assert torch.equal(total, torch.full_like(total, 4 + 2 * k))


def test_an_eager_function_may_not_use_the_pool_that_it_belongs_to(cuda, x):
    """What lives across the break would be overwritten, by replays and captures alike."""
    with torch.no_grad(), cuda.capture() as inner:
        inside = (x * 5) * 6
    with torch.no_grad(), pytest.raises(CaptureStateError, match="a pool of its own"):
        with cuda.capture(pool=inner.pool) as g:
            h = x * 2
            g.add_eager(inner.replay)
            h + 1
    step = [lambda: None]
    with torch.no_grad(), cuda.capture(pool=inner.pool) as g:
        h = x * 2
        g.add_eager(lambda: step[0]())
        out = h + 1

    def captures():
        with cuda.capture(pool=inner.pool):
            x * 3

    for step[0] in (inner.replay, captures):
        with torch.no_grad(), pytest.raises(CaptureStateError, match="a pool of its own"):
            g.replay()
    step[0] = lambda: None
    g.replay()
    assert torch.equal(out, x * 2 + 1)
    inner.replay()
    assert torch.equal(inside, x * 30)


@pytest.mark.parametrize("slow", ["graph", "eager"])
def test_eager_work_on_a_forked_stream(cuda, x, slow):
    """It comes after the segment's work there, without a wait of its own, and before its bridge is filled."""
    side = torch.cuda.Stream()

    def on_side(part, fn):
        with torch.cuda.stream(side):
            if slow == part:
                spin()
            return fn()

    @eager_break_during_capture
    def use(t):
        return on_side("eager", lambda: t * 3)

    def f(t):
        main = torch.cuda.current_stream()
        y = t * 2
        side.wait_stream(main)
        w = use(on_side("graph", lambda: y + 1))
        main.wait_stream(side)
        return w + 1

    check(cuda, f, lambda t: (t * 2 + 1) * 3 + 1, x)


def test_an_output_of_a_side_stream_is_copied_before_its_memory_is_used_again(cuda):
    """It dies when the copy is queued, and the next tensor of that stream gets its memory."""
    n = 1 << 24
    side, x, buffer = torch.cuda.Stream(), torch.ones(n, device="cuda"), torch.empty(n, device="cuda")

    @eager_break_during_capture
    def on_side(t):
        return t + 1

    def f(t):
        main = torch.cuda.current_stream()
        spin()
        y = t * 2
        side.wait_stream(main)
        with torch.cuda.stream(side):
            buffer.copy_(on_side(y) * 2)
        main.wait_stream(side)

    with torch.no_grad():
        f(x)
        with cuda.capture() as g:
            f(x)
        for _ in range(3):
            torch.cuda.synchronize()
            g.replay()
            with torch.cuda.stream(side):
                junk = torch.full((n,), 7.0, device="cuda")
            torch.cuda.synchronize()
            assert bool((buffer == 6).all())
            del junk


def test_a_replay_inside_of_torchs_capture_is_refused(cuda, x):
    """CUDA launches no graph in a capture. The other capture stays valid."""
    static = x.clone()
    with torch.no_grad(), cuda.capture() as g:
        y = static * 2
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        z = static + 1
        with pytest.raises(CaptureStateError, match="replay outside of it"):
            g.replay()
        z += 1
    for k in range(3):
        static.copy_(x + k)
        graph.replay()
        g.replay()
        assert torch.equal(z, x + k + 2)
        assert torch.equal(y, (x + k) * 2)


def test_work_that_an_eager_function_leaves_on_a_forked_stream(cuda, x):
    """Where forks cross the break, the next segment waits for it."""
    side = torch.cuda.Stream()
    buffer = torch.zeros(N, device="cuda")

    @eager_break_during_capture
    def leave(t):
        with torch.cuda.stream(side):
            spin()
            buffer.copy_(t * 3)

    def f(t):
        main = torch.cuda.current_stream()
        y = t * 2
        side.wait_stream(main)
        with torch.cuda.stream(side):
            z = y + 1
        leave(y)
        main.wait_stream(side)
        return buffer + z

    check(cuda, f, lambda t: t * 6 + t * 2 + 1, x)


def test_capture_on_a_users_stream(cuda, x):
    """`stream=` is the one that the operations of the block are recorded on."""
    stream = torch.cuda.Stream()
    static = x.clone()
    with torch.no_grad(), cuda.capture(stream=stream) as g:
        assert torch.cuda.current_stream() == stream
        out = plus_one(static * 2) * 2
    static.add_(1)
    g.replay()
    assert torch.equal(out, ((x + 1) * 2 + 1) * 2)


def test_capture_waits_for_the_outer_stream_and_the_outer_for_it(cuda, x):
    """Slow work on either side is not overtaken."""
    with torch.cuda.stream(torch.cuda.Stream()):
        spin()
        y = x + 1
        with torch.no_grad(), cuda.capture():
            z = plus_one(y)
            spin()
            z = z * 2
        assert torch.equal(z, (x + 2) * 2)


def test_replays_on_alternating_streams_are_ordered(cuda, x):
    """Two captures of one pool, four streams, no manual synchronisation between replays."""
    streams = [torch.cuda.Stream() for _ in range(4)]
    static = torch.zeros(N, device="cuda")
    expected = torch.zeros(N)
    with torch.no_grad(), cuda.capture() as first:
        static.add_(1)
        spin(2_000_000)
        plus_one(static)
        static.mul_(0.5)
    with torch.no_grad(), cuda.capture(pool=first.pool) as second:
        spin(2_000_000)
        plus_one(static)
        static.add_(3)
    static.zero_()
    torch.cuda.synchronize()
    for k in range(24):
        with torch.cuda.stream(streams[k % 4]):
            (first if k % 3 else second).replay()
        expected = (expected + 1) * 0.5 if k % 3 else expected + 3
    torch.cuda.synchronize()
    assert torch.equal(static.cpu(), expected)


def test_the_capture_stream_is_nobody_elses(cuda):
    """None of torch's streams is the one that is captured on, however many a program makes."""
    with cuda.capture():
        capturing = torch.cuda.current_stream().cuda_stream
        others = {torch.cuda.Stream(priority=p).cuda_stream for p in (0, -1, -2, -3) for _ in range(40)}
        assert capturing not in others
        assert len(others) == 128


def test_uncaptured_work_on_another_stream_runs(cuda, x):
    """Work on a stream that is not forked is not captured, but done."""
    other = torch.cuda.Stream()
    z = torch.zeros(4, device="cuda").fill_(1)
    torch.cuda.synchronize()
    with torch.no_grad(), cuda.capture() as g:
        y = x + 1
        with torch.cuda.stream(other):
            z.fill_(7)
        plus_one(y)
    torch.cuda.synchronize()
    assert z.tolist() == [7.0] * 4
    g.replay()


def test_an_external_side_stream_is_joined_and_forked_again(cuda, x):
    """A stream that torch did not make is found while it is current."""
    from segcapture.backends.cuda.driver import get_driver

    side = get_driver().create_stream()

    static = x.clone()
    with torch.no_grad(), cuda.capture() as g:
        y = static * 2
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            spin()
            z = y + 1
        y = plus_one(y)
        out = y + z
    static.add_(1)
    g.replay()
    assert torch.equal(out, (x + 1) * 2 + 1 + (x + 1) * 2 + 1)


def test_torch_streams_are_not_patched(cuda):
    """The classes and functions that other libraries see are torch's own, inside of a capture too."""
    before = (torch.cuda.Stream, torch.cuda.Stream.wait_stream, torch.cuda.stream, torch.cuda.Event.wait)
    with cuda.capture():
        assert before == (
            torch.cuda.Stream, torch.cuda.Stream.wait_stream, torch.cuda.stream, torch.cuda.Event.wait,
        )  # fmt: skip
