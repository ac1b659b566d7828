"""Pools: the order of what uses one, with streams and a driver that only keep a log, and on CUDA (C5, C6)."""

import contextlib
import threading
import types
from collections import defaultdict

import pytest
import torch

from segcapture import CaptureStateError, eager_break_during_capture
from segcapture.backends.cuda import driver, pool, streams
from segcapture.backends.cuda.pool import CaptureStream, Pool


class Stream:
    """A stream that says for whom it waits."""

    def __init__(self, raw, log):
        self.cuda_stream = raw
        self.device = torch.device("cuda", 0)
        self.device_index = 0
        self._log = log

    def wait_stream(self, other):
        self._log.append((self.cuda_stream, other.cuda_stream))


class Driver:
    """Orders streams in the log alone."""

    handle = int

    def __init__(self, log):
        self._log = log

    def order(self, after, before):
        self._log.append((after, before))


@pytest.fixture
def world(monkeypatch):
    """Three streams, of which 2 is current, and a log of (waits, is waited for)."""
    log = []
    made = types.SimpleNamespace(log=log, streams={raw: Stream(raw, log) for raw in range(1, 8)})
    made.current = made.streams[2]
    made.prepared = []
    made.captured = False

    @contextlib.contextmanager
    def stream(new):
        before, made.current = made.current, new
        try:
            yield
        finally:
            made.current = before

    fresh = iter(made.streams.values())
    monkeypatch.setattr(CaptureStream, "_make_workspace", lambda self: None)
    monkeypatch.setattr(CaptureStream, "prepare", lambda self: made.prepared.append(made.current.cuda_stream))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: made.current)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    current = "_cuda_getCurrentRawStream"
    monkeypatch.setattr(torch._C, current, lambda index: made.current.cuda_stream, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: made.captured, raising=False)
    monkeypatch.setattr(pool, "_free", defaultdict(list))
    monkeypatch.setattr(pool, "_of_users", {})
    monkeypatch.setattr(pool, "empty_graph", lambda pool_id, device: None)
    fake = Driver(log)
    fake.create_stream = lambda: next(fresh)
    monkeypatch.setattr(pool, "get_driver", lambda: fake)
    made.new = lambda stream=None, id=(0, 1): Pool(id, torch.device("cuda", 0), stream)
    return made


def test_a_stream_waits_for_the_one_used_last_and_only_then(world):
    """Nothing to pay while it does not change."""
    place = CaptureStream(world.streams[1])
    for raw in (1, 2, 2, 3, 2):
        with place.exclusive(raw):
            pass
    assert world.log == [(2, 1), (3, 2), (2, 3)]


def test_what_is_under_way_waits_for_what_is_inside_of_it(world):
    """On another stream; also when the block raises."""
    place = CaptureStream(world.streams[1])
    with place.exclusive(2):
        with contextlib.suppress(KeyError), place.exclusive(3):
            raise KeyError
        assert place.last == 2
        with place.exclusive(2):
            pass
    assert world.log == [(2, 1), (3, 2), (2, 3)]
    assert place.running is None


@pytest.mark.parametrize("fails", [False, True])
def test_a_capture_comes_after_all_else_and_the_outer_stream_after_it(world, fails):
    """Whatever happens in it, and with the workspaces of its stream."""
    place = CaptureStream(world.streams[1])
    with place.exclusive(3):
        pass
    with contextlib.suppress(KeyError), place.current():
        assert world.current is world.streams[1]
        with place.exclusive(3):  # a replay in an eager function
            pass
        assert place.last == 1
        if fails:
            raise KeyError
    assert world.log == [(3, 1), (1, 3), (1, 2), (3, 1), (1, 3), (2, 1)]
    assert world.prepared == [1]
    assert (place.last, place.running) == (2, None)
    assert world.current is world.streams[2]


def test_a_stream_is_left_alone_when_its_capture_cannot_be_left(world):
    """No later replay goes back to it."""
    place = CaptureStream(world.streams[1])

    def refuse(other):
        raise RuntimeError("still capturing")

    with pytest.raises(RuntimeError, match="still capturing"), place.current():
        world.streams[2].wait_stream = refuse
    assert (place.last, place.running) == (2, None)


def test_streams_of_dead_pools_are_taken_by_new_ones(world):
    """Each costs a workspace: with their order, since the last replay may be under way still."""
    one, two = world.new(), world.new()
    assert one.stream is not two.stream
    first = one.stream
    with first.exclusive(7):
        pass
    del one
    three = world.new()
    assert three.stream is first
    assert three.stream.last == 7


def test_a_stream_that_is_stuck_is_not_taken(world):
    """It would refuse the next capture."""
    one = world.new()
    first, one.free = one.stream, None
    del one
    assert world.new().stream is not first


def test_pools_on_a_users_stream_share_its_order(world):
    """As they share its workspace. It is never taken by another pool."""
    one, two = world.new(world.streams[5]), world.new(world.streams[5])
    assert one.stream is two.stream
    assert one.stream.stream is world.streams[5]
    del one, two
    assert world.new().stream.stream is not world.streams[5]


def replay_of(world, made, *, calls, run=lambda handle: None, on=None):
    """A replay in a pool that logs the stream it runs on."""
    return pool.in_order(made, on or made.stream, run, calls=calls)


@pytest.mark.parametrize("calls", [False, True])
def test_a_replay_comes_after_the_last_one(world, calls):
    """On another stream it waits, on the same one there is nothing to do."""
    made, seen = world.new(), []
    replay = replay_of(world, made, calls=calls, run=seen.append)
    for raw in (2, 2, 3):
        world.current = world.streams[raw]
        replay()
    assert seen == [2, 2, 3]
    assert world.log == [(2, 1), (3, 2)]
    assert made.stream.lock.owner is None
    assert made.stream.lock.acquire_at_once(False)
    made.stream.lock.release()


def test_a_replay_inside_of_a_replay_of_its_pool_is_refused(world):
    """And one of another pool on the same user's stream is ordered, both ways."""
    one, two = world.new(world.streams[5]), world.new(world.streams[5], (0, 2))
    inner, other = replay_of(world, one, calls=False), replay_of(world, two, calls=False)

    def run(handle):
        world.current = world.streams[3]
        other()
        world.current = world.streams[2]
        inner()

    with pytest.raises(CaptureStateError, match="a pool of its own"):
        replay_of(world, one, calls=True, run=run)()
    assert world.log == [(2, 5), (3, 2), (2, 3)]
    assert not one.in_use
    inner()


def test_a_capture_on_another_stream_than_the_pools_is_ordered_with_both(world):
    """Its memory is the pool's, and its workspace the stream's."""
    made, users = world.new(), pool.capture_stream(world.streams[5])
    with made.capturing(users):
        assert world.current is world.streams[5]
        assert made.in_use
    assert world.log == [(5, 1), (5, 2), (2, 5)]
    world.log.clear()
    seen = []
    world.current = world.streams[3]
    replay_of(world, made, calls=False, run=seen.append, on=users)()
    assert seen == [3]
    assert sorted(world.log) == [(3, 2), (3, 5)]
    world.log.clear()
    with made.exclusive(users):
        pass
    assert world.log == []


def test_a_replay_where_the_stream_is_captured_is_refused(world):
    """By another library: CUDA launches no graph there."""
    made = world.new()
    world.captured = True
    with pytest.raises(CaptureStateError, match="replay outside of it"):
        replay_of(world, made, calls=True)()


@pytest.mark.parametrize("one_capture", [False, True])
def test_pools_do_not_wait_for_each_other(world, monkeypatch, one_capture):
    """Two replays that meet in their eager functions, in two threads; captures too, where torch can."""
    monkeypatch.setattr(pool, "ONE_CAPTURE_A_DEVICE", one_capture)
    meet, errors = threading.Barrier(2), []

    def body(made):
        try:
            replay_of(world, made, calls=True, run=lambda handle: meet.wait(5))()
            if not one_capture:
                with made.capturing(made.stream):
                    meet.wait(5)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(world.new(id=(0, k)),)) for k in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_a_pool_that_torch_has_closed_is_opened_when_torch_has_forgotten_it(world, monkeypatch):
    """The cache is emptied only where it is needed."""
    emptied, undone = [], []

    def open_(pool_id, device):
        if not emptied:
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")

    monkeypatch.setattr(pool, "empty_graph", open_)
    monkeypatch.setattr(pool, "undo_begin", lambda pool_id, device: undone.append(pool_id))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    world.new(id=(0, 3))
    assert (emptied, undone) == ([1], [(0, 3)])
    world.new(id=(0, 4))
    assert len(emptied) == 1


def test_a_pool_that_torch_cannot_forget(world, monkeypatch):
    """The error says what can be done, and the stream is free again."""

    def open_(pool_id, device):
        raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    monkeypatch.setattr(pool, "undo_begin", lambda pool_id, device: None)
    with monkeypatch.context() as patch:
        patch.setattr(pool, "empty_graph", open_)
        with pytest.raises(CaptureStateError, match="tensors of it are alive"):
            world.new()
    assert len(pool._free[0]) == 1


def test_the_first_call_of_a_process_makes_a_context(monkeypatch):
    """The driver's calls need one, and asking whether a stream is captured makes none."""
    calls = []
    has_context = False

    def mem_get_info():
        nonlocal has_context
        has_context = True
        calls.append("made")

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda index: has_context, raising=False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    bound = "_cuda_isCurrentStreamCapturing"
    monkeypatch.setattr(torch._C, bound, lambda: calls.append("bound"), raising=False)
    driver.bind_context()
    driver.bind_context()
    assert calls == ["made", "bound", "bound"]


def test_streams_are_found_though_another_thread_takes_some(monkeypatch):
    """torch hands out 32 of each priority in turn."""
    handed_out = dict.fromkeys(range(-3, 1), 0)

    def stream(device, priority):
        handed_out[priority] += 1
        if handed_out[priority] % 5 == 0:  # the other thread's
            handed_out[priority] += 1
        return types.SimpleNamespace(cuda_stream=100 * -priority + handed_out[priority] % 32)

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    assert len(streams._torch_streams.__wrapped__(torch.device("cuda", 0))) == 128


class Forked(Stream):
    """A stream that may be capturing."""

    def __init__(self, raw, log, capture=0):
        super().__init__(raw, log)
        self.capture = capture


def test_which_streams_are_forked(monkeypatch):
    """Those of this capture alone; one from outside of torch while it is current, and then while forked."""
    log = []
    main, side, strange, outside = (Forked(raw, log) for raw in (1, 2, 3, 9))
    known = {s.cuda_stream: s for s in (main, side, strange)}
    every = {**known, 9: outside}
    current = main
    asked = []

    class Asks:
        def question(self, some):
            return lambda: asked.append(len(some)) or [s for s in some if s.capture]

        def capture_id(self, raw):
            return every[raw].capture

    monkeypatch.setattr(streams, "get_driver", Asks)
    monkeypatch.setattr(streams, "torch_streams", lambda device: known)
    monkeypatch.setattr(streams, "_question", lambda main: Asks().question(list(known.values())))
    raw_stream = "_cuda_getCurrentRawStream"
    monkeypatch.setattr(torch._C, raw_stream, lambda index: current.cuda_stream, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current)
    forks = streams.Forks(main)
    main.capture, strange.capture = 7, 8
    forks.find()
    assert forks.streams == forks.crossing() == ()
    side.capture = 7  # for the first time in a later segment
    forks.find()
    assert forks.streams == (side,)
    forks.fork()
    assert log == [(2, 1)]
    current, outside.capture = outside, 7
    forks.find()
    assert forks.streams == forks.crossing() == (side, outside)
    current = main
    forks.find()
    assert forks.streams == (side, outside)
    outside.capture = 0
    forks.find()
    assert forks.streams == (side,)
    current, side.capture = side, 0
    forks.find()
    assert forks.streams == ()
    assert forks.crossing() == (side,)


@pytest.mark.cuda
def test_replays_of_two_pools_run_at_the_same_time(cuda):
    """They meet in their eager functions, without a `stream=` of the user."""
    meet = threading.Barrier(2)
    waits = [False]

    @eager_break_during_capture
    def middle(t):
        if waits[0]:
            meet.wait(10)
        return t + 1

    captures = []
    for k in (1, 2):
        x = cuda.tensor(64, 64, seed=k)
        with torch.no_grad(), cuda.capture() as g:
            out = middle(x @ x) @ x
        captures.append((g, x, out))
    assert captures[0][0]._backend._pool.stream is not captures[1][0]._backend._pool.stream
    waits[0] = True
    errors = []

    def body(k):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(10):
                    captures[k][0].replay()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(k,)) for k in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert errors == []
    for _, x, out in captures:
        with torch.no_grad():
            assert torch.equal(out, (x @ x + 1) @ x)


@pytest.mark.cuda
def test_captures_in_two_threads_at_the_same_time(cuda):
    """From torch 2.12 on they meet; before, one a device, and the other one waits."""
    meet, together = threading.Barrier(2), not driver.ONE_CAPTURE_A_DEVICE
    errors = []

    def body(k):
        try:
            x = cuda.tensor(64, 64, seed=k)
            with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
                for _ in range(5):
                    with cuda.capture() as g:
                        y = g.add_eager(torch.neg, x @ x)
                        if together:
                            meet.wait(10)
                        out = y @ x
                    g.replay()
                    assert torch.equal(out, -(x @ x) @ x)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(k,)) for k in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


@pytest.mark.cuda
def test_two_threads_that_replay_each_others_captures(cuda):
    """Crosswise, in eager functions: one of them gets an error, and both go on."""
    inside, errors = threading.Barrier(2), []
    captures = []
    crosses = [False]

    def make(k):
        @eager_break_during_capture
        def middle():
            if crosses[0]:
                inside.wait(10)
                captures[1 - k].replay()

        x = torch.ones(4, device="cuda")
        with cuda.capture() as g:
            x + 1
            middle()
            x + 2
        captures.append(g)

    make(0)
    make(1)
    crosses[0] = True

    def body(k):
        try:
            captures[k].replay()
        except BaseException as error:
            errors.append(error)
            inside.abort()

    threads = [threading.Thread(target=body, args=(k,), daemon=True) for k in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert any(isinstance(error, CaptureStateError) for error in errors)
    crosses[0] = False
    for g in captures:
        g.replay()
    torch.cuda.synchronize()


@pytest.mark.cuda
def test_a_users_stream_in_a_pool_that_has_another(cuda):
    """Captures with both, and replays on alternating streams, stay right."""
    users = torch.cuda.Stream()
    x = cuda.tensor(256, 256)

    def f(t):
        return (t @ t + 1) @ t

    captures, pool_ = [], None
    with torch.no_grad():
        for stream in (None, users, None, users):
            with cuda.capture(pool=pool_, stream=stream) as g:
                out = f(x)
            captures.append((g, out, f(x)))
            pool_ = captures[0][0].pool
        with cuda.capture(stream=users) as g:
            out = f(x)
        captures.append((g, out, f(x)))
    outer = [torch.cuda.Stream() for _ in range(3)]
    for k in range(30):
        g, out, expected = captures[k % 5]
        with torch.cuda.stream(outer[k % 3]):
            outer[k % 3].wait_stream(outer[(k - 1) % 3])
            g.replay()
            assert torch.equal(out, expected), k
