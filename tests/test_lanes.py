"""The order of what shares a capture stream, with streams and a driver that only keep a log (C6)."""

import contextlib
import types

import pytest
import torch

from segcapture.backends.cuda import lanes
from segcapture.backends.cuda import streams as forks
from segcapture.backends.cuda.lanes import Lane


class Stream:
    """A stream that says for whom it waits."""

    def __init__(self, raw, log):
        self.cuda_stream = raw
        self.device = torch.device("cuda", 0)
        self._log = log

    def wait_stream(self, other):
        self._log.append((self.cuda_stream, other.cuda_stream))


class Driver:
    """Orders streams in the log alone."""

    def __init__(self, log):
        self._log = log

    def order(self, after, before):
        self._log.append((after, before))


@pytest.fixture
def world(monkeypatch):
    """A lane on stream 1, streams 2 and 3, and a log of (waits, is waited for)."""
    log = []
    made = types.SimpleNamespace(log=log, streams={raw: Stream(raw, log) for raw in (1, 2, 3)})
    made.current = made.streams[2]
    made.prepared = []

    @contextlib.contextmanager
    def stream(new):
        before, made.current = made.current, new
        try:
            yield
        finally:
            made.current = before

    def workspace(device):
        return types.SimpleNamespace(prepare=lambda: made.prepared.append(made.current.cuda_stream))

    monkeypatch.setattr(lanes, "Workspace", workspace)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: made.current)
    monkeypatch.setattr(lanes, "get_driver", lambda: Driver(log))
    made.lane = Lane(made.streams[1], on_offer=True)
    return made


def test_a_stream_waits_for_the_one_used_last_and_only_then(world):
    """Nothing to pay while it does not change."""
    for raw in (1, 2, 2, 3, 2):
        with world.lane.turn(raw):
            pass
    assert world.log == [(2, 1), (3, 2), (2, 3)]


def test_what_is_under_way_waits_for_a_turn_inside_of_it(world):
    """On another stream; also when the block raises."""
    lane = world.lane
    with lane.turn(2):
        lane.running = 2
        with contextlib.suppress(KeyError), lane.turn(3):
            raise KeyError
        assert lane.last == 2
        with lane.turn(2):
            pass
        lane.running = None
    assert world.log == [(2, 1), (3, 2), (2, 3)]


@pytest.mark.parametrize("fails", [False, True])
def test_a_capture_comes_after_all_else_and_the_outer_stream_after_it(world, fails):
    """Whatever happens in it, and with the workspaces of its stream."""
    lane = world.lane
    with lane.turn(3):
        pass
    with contextlib.suppress(KeyError), lane.capturing(world.streams[1]):
        assert world.current is world.streams[1]
        assert not lane.free
        with lane.turn(3):  # a replay in an eager function
            pass
        assert lane.last == 1
        if fails:
            raise KeyError
    assert world.log == [(3, 1), (1, 3), (1, 2), (3, 1), (1, 3), (2, 1)]
    assert world.prepared == [1]
    assert (lane.last, lane.running, lane.free) == (2, None, True)
    assert world.current is world.streams[2]


def test_a_lane_is_as_before_when_the_capture_cannot_be_left(world):
    """No later replay goes back to a stream of it."""
    lane = world.lane

    def refuse(other):
        raise RuntimeError("still capturing")

    with pytest.raises(RuntimeError, match="still capturing"), lane.capturing(world.streams[1]):
        world.streams[2].wait_stream = refuse
    assert (lane.running, lane.free) == (None, True)


def test_eager_code_beside_is_ordered_both_ways(world):
    """A warm-up: on the capture stream, with its workspaces."""
    with world.lane.beside(world.streams[1]):
        assert world.current is world.streams[1]
    assert world.log == [(2, 1), (1, 2), (2, 1)]
    assert world.prepared == [1]


def test_a_broken_lane_is_not_chosen(world, monkeypatch):
    """A stream that cannot end its capture would refuse the next one."""
    monkeypatch.setattr(lanes, "_lanes", {(0, 1): world.lane})
    device = torch.device("cuda", 0)
    assert lanes.free_lane(device) is world.lane
    world.lane.on_offer = False
    new = types.SimpleNamespace(create_stream=lambda: world.streams[3])
    monkeypatch.setattr(lanes, "get_driver", lambda: new)
    assert lanes.free_lane(device).stream is world.streams[3]


def test_streams_are_found_though_another_thread_takes_some(monkeypatch):
    """torch hands out 32 of each priority in turn."""
    handed_out = dict.fromkeys(range(-3, 1), 0)

    def stream(device, priority):
        handed_out[priority] += 1
        if handed_out[priority] % 5 == 0:  # the other thread's
            handed_out[priority] += 1
        return types.SimpleNamespace(cuda_stream=100 * -priority + handed_out[priority] % 32)

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(forks, "_torch_streams", {})
    assert len(forks.torch_streams(torch.device("cuda", 0))) == 128
