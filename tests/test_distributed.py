"""Captures of several ranks: gloo with two processes and emulated segments, NCCL where there are GPUs."""

import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from segcapture import (
    CaptureFailedError,
    CaptureStateError,
    break_graph,
    check_same_segments,
    eager_break_during_capture,
)
from tests.conftest import assert_same
from tests.ranks import Ranks, RanksFailedError, join

EXAMPLE = Path(__file__).parent.parent / "examples" / "tensor_parallel_decode.py"

_RANKS = [
    pytest.param(("gloo", 2, None), id="gloo"),
    pytest.param(("nccl", 2, None), id="nccl", marks=pytest.mark.multi_gpu),
    pytest.param(("nccl", 2, "debug"), id="nccl-debug", marks=pytest.mark.multi_gpu),
    pytest.param(("nccl", 1, None), id="nccl-alone", marks=pytest.mark.cuda),
]


@pytest.fixture(scope="module", params=_RANKS)
def ranks(request, tmp_path_factory):
    """Two CPU processes, a process for each of two GPUs, or one GPU with a group of its own."""
    transport, size, mode = request.param
    if transport == "nccl" and torch.cuda.device_count() < size:
        pytest.skip(f"no {size} CUDA devices")
    ranks = Ranks(tmp_path_factory.mktemp("ranks"), transport, size, mode)
    yield ranks
    ranks.close()


# What is called between two other operations. Ranks pass different values.


def all_reduce(x):
    dist.all_reduce(x)
    return x


def all_gather(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return torch.cat(parts)


def all_gather_into_tensor(x):
    out = x.new_empty(dist.get_world_size() * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(out, x)
    return out


def reduce_scatter_tensor(x):
    out = x.new_empty(x.shape[0] // dist.get_world_size(), *x.shape[1:])
    dist.reduce_scatter_tensor(out, x)
    return out


def broadcast(x):
    dist.broadcast(x, dist.get_world_size() - 1)
    return x


def reduce(x):
    dist.reduce(x, 0, op=dist.ReduceOp.MAX)
    return x if dist.get_rank() == 0 else x * 0  # what others find in it is nobody's business


def all_to_all_single(x):
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x)
    return out


def asynchronous(x):
    work = dist.all_reduce(x, async_op=True)
    y = torch.ones_like(x) * 5
    work.wait()
    return x + y


def to_the_next(x):
    """Waiting twice for one `send` would wait for another one with gloo."""
    rank, size = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(x)
    for sender in range(size):
        if rank == sender:
            dist.send(x, (sender + 1) % size)
        elif rank == (sender + 1) % size:
            dist.recv(received, sender)
    return received


def exchange(x):
    """Both ranks receive before they send: waiting for the first at once would be for ever."""
    rank, size = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(x)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.irecv, received, (rank - 1) % size),
            dist.P2POp(dist.isend, x, (rank + 1) % size),
        ]
    )
    for work in works:
        work.wait()
    return received


def never_waits(x):
    """The end of the segment does."""
    dist.all_reduce(x, async_op=True)
    break_graph()
    return x


COLLECTIVES = [
    all_reduce,
    all_gather,
    all_gather_into_tensor,
    reduce_scatter_tensor,
    broadcast,
    reduce,
    all_to_all_single,
    asynchronous,
]


def functional_all_reduce(x):
    from torch.distributed import _functional_collectives

    return _functional_collectives.all_reduce(x, "sum", dist.group.WORLD)


def functional_all_gather(x):
    from torch.distributed import _functional_collectives

    return _functional_collectives.all_gather_tensor(x, 0, dist.group.WORLD)


FUNCTIONAL = [functional_all_reduce, functional_all_gather]


def replay_is_eager(backend, collective, kinds, guard, options):
    """The program of most tests: compare replays on fresh inputs with eager runs, on each rank."""
    warnings.simplefilter("ignore", FutureWarning)  # torch renames some of them from 2.13
    rank = dist.get_rank()

    def model(x):
        return collective(x * 2 + rank) * 3

    g = backend.check(model, [backend.tensor(4, 6)], kinds, guard=guard, **options)
    if collective is not to_the_next:  # there ranks differ
        check_same_segments(g)
    return [segment.name for segment in g.segments]


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("collective", [*COLLECTIVES, *FUNCTIONAL])
def test_a_collective_in_a_graph_segment(ranks, collective, guard):
    """It runs again at each replay, and is done before the next operation reads its result."""
    ranks.run(replay_is_eager, collective, "g", guard, {})


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_collective_as_an_eager_segment(ranks, collective, guard):
    """`break_on` makes it a segment, which ends when the collective does; no Work is a frozen value."""
    for names in ranks.run(replay_is_eager, collective, "geg", guard, {"break_on": ["c10d::*"]}):
        assert names[1].startswith("c10d::")


@pytest.mark.parametrize("collective", FUNCTIONAL)
def test_a_functional_collective_as_an_eager_segment(ranks, collective):
    """One segment: the operators that only wait stay with it."""
    options = {"break_on": ["_c10d_functional::*"]}
    ranks.run(replay_is_eager, collective, "geg", torch.no_grad, options)


@pytest.mark.parametrize("options", [{}, {"break_on": ["c10d::*"]}], ids=["graph", "eager"])
def test_send_and_receive(ranks, options):
    """Each rank sends to the next."""
    if ranks.size == 1:
        return
    ranks.run(replay_is_eager, to_the_next, None, torch.no_grad, options)


def test_an_exchange_in_a_graph_segment(ranks):
    """Each Work is waited for at replay where it was at capture."""
    if ranks.size > 1 and not (ranks.transport == "nccl" and ranks.mode):  # NCCL needs its own batch
        ranks.run(replay_is_eager, exchange, "g", torch.no_grad, {})


def joined_at_the_end(backend):
    x = backend.tensor(4)
    with torch.no_grad(), backend.capture() as g:
        y = never_waits(x * 2) * 3
    for value in range(3):
        x.fill_(value)
        g.replay()
        assert y.tolist() == [6.0 * value * dist.get_world_size()] * 4


def test_what_nobody_waits_for_ends_with_its_segment(ranks):
    """As all streams are joined there."""
    ranks.run(joined_at_the_end)


def reduces_in_an_eager_function(backend):
    @eager_break_during_capture
    def reduced(x):
        y = x.clone()
        dist.all_reduce(y)
        return y

    for _ in range(50 if backend.emulated else 5):
        backend.check(lambda x: reduced(x * 2) * 3, [backend.tensor(4)], "geg", rounds=1)


def test_a_collective_in_an_eager_function(ranks):
    """What it wrote to is a fresh output, though a thread of gloo may still hold it for a moment."""
    ranks.run(reduces_in_an_eager_function)


def waits_after_a_break(backend, options):
    x = backend.tensor(4)

    def model(x):
        work = dist.all_reduce(x, async_op=True)
        break_graph()
        y = x * 2
        work.wait()
        return y + x

    model(x.clone())
    if options:
        with torch.no_grad(), backend.capture(**options) as g:
            y = model(x)
        x.fill_(1)
        g.replay()
        size = dist.get_world_size()
        assert y.tolist() == [3.0 * size] * 4
        return
    with pytest.raises(Exception) as caught:  # noqa: PT011  (CUDA's own, or ours)
        with torch.no_grad(), backend.capture():
            model(x)
    if backend.emulated:
        assert isinstance(caught.value, CaptureFailedError)
        assert "has ended" in str(caught.value)
    assert any("segcapture" in note for note in caught.value.__notes__)
    replay_is_eager(backend, all_reduce, "g", torch.no_grad, {})


def test_a_work_that_crosses_a_break_is_refused(ranks):
    """CUDA knows its event only in the capture that it was recorded in, and the tape says so."""
    ranks.run(waits_after_a_break, {})


def test_the_work_of_an_eager_collective_may_cross_a_break(ranks):
    """It has nothing left to wait for."""
    ranks.run(waits_after_a_break, {"break_on": ["c10d::*"]})


def captures_a_barrier(backend):
    x = backend.tensor(4)
    dist.barrier()
    if not backend.emulated and tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15):
        with torch.no_grad(), backend.capture() as g:  # NCCL's is an operation on the device there
            x.add_(1)
            dist.barrier()
        before = x.clone()
        g.replay()
        assert torch.equal(x, before + 1)
        return
    with pytest.raises(Exception, match="operation not permitted when stream is capturing"):
        with torch.no_grad(), backend.capture():
            x.add_(1)
            dist.barrier()


def test_a_barrier_in_a_graph_segment_is_refused(ranks):
    """It waits on the host; from torch 2.15 on NCCL's waits on the device, and CUDA captures it."""
    ranks.run(captures_a_barrier)


# Ranks of different speed


def store():
    """Keys and values that all ranks see."""
    return dist.distributed_c10d._get_default_store()


def meets_at_the_barrier(backend, options):
    rank, size = dist.get_rank(), dist.get_world_size()
    calls = 0

    def barrier():
        nonlocal calls
        calls += 1
        store().set(f"rank {rank} waits", "")
        dist.barrier()

    @eager_break_during_capture
    def eager(x):
        if capturing:
            # Not before the slowest rank has ended its graph segment.
            assert store().check([f"rank {r} has ended its segment" for r in range(size)])
        return x + 1

    def model(x):
        y = x * 2
        if capturing:
            if rank == size - 1:  # the slow one: all others wait in the barrier already
                store().wait([f"rank {r} waits" for r in range(size - 1)])
            store().set(f"rank {rank} has ended its segment", "")
        y = eager(y)
        dist.all_reduce(y)
        return y * 3

    x = backend.tensor(4)
    capturing = False
    model(x)
    dist.barrier()
    with torch.no_grad():
        capturing = True
        with backend.capture(barrier=barrier, **options) as g:
            y = model(x)
        capturing = False
        at_capture = calls
        for value in range(3):
            x.fill_(value)
            g.replay()
            assert_same(y, model(x.clone()))
    assert calls == at_capture
    return at_capture, [segment.name for segment in g.segments if segment.kind == "eager"]


def test_barrier_keeps_ranks_together(ranks):
    """Called once a break, at capture: no rank runs the eager function while another is behind it."""
    for calls, names in ranks.run(meets_at_the_barrier, {}):
        assert calls == len(names) == 1


def test_barrier_is_no_segment_of_its_own(ranks):
    """Though it is a collective, and those break."""
    for calls, names in ranks.run(meets_at_the_barrier, {"break_on": ["c10d::allreduce_"]}):
        assert calls == len(names) == 2
    for calls, names in ranks.run(meets_at_the_barrier, {"break_on": ["c10d::*"]}):
        assert calls == len(names) == 2


def captures_one_after_the_other(backend):
    rank = dist.get_rank()

    def exchange(x):
        y = x.clone()
        dist.all_reduce(y)
        return y

    stubbed = eager_break_during_capture(capture_stub=torch.zeros_like)(exchange)

    def model(x, function):
        return function(x * 2) + rank

    x = backend.tensor(4)
    model(x, exchange)
    if rank:
        store().wait([f"rank {rank - 1} has captured"])
    with torch.no_grad(), backend.capture() as g:
        y = model(x, stubbed)
    store().set(f"rank {rank} has captured", "")
    assert y.tolist() == [float(rank)] * 4
    check_same_segments(g)
    for value in range(3):
        x.fill_(value)
        g.replay()
        assert_same(y, model(x.clone(), exchange))


def test_capture_stub_for_a_body_that_needs_all_ranks(ranks):
    """Each rank captures alone, and the real body meets the others at replay."""
    ranks.run(captures_one_after_the_other)


# The same segments


@eager_break_during_capture
def first(x):
    return x + 1


@eager_break_during_capture
def second(x):
    return x + 2


def differs(backend, functions, message):
    """Rank r breaks at `functions[r]`, with graph segments between; all raise the same message."""
    x = backend.tensor(4)
    g = backend.capture(name="step")
    with torch.no_grad(), g:
        for function in functions[dist.get_rank()]:
            x.mul_(2)
            x.copy_(function(x))
    if message is None:
        check_same_segments(g)
        return
    for _ in range(2):
        with pytest.raises(CaptureStateError) as caught:
            check_same_segments(g)
        assert message in str(caught.value)


_DIFFERENT = [
    ([[first], [first]], None),
    (
        [[first], [second]],
        "segment 1: rank 1 has eager segment `second`, and rank 0 has eager segment `first`",
    ),
    (
        [[first, second], [first]],
        "segment 3: rank 1 has no such segment, and rank 0 has eager segment `second`",
    ),
    (
        [[first], [first, second]],
        "segment 3: rank 1 has eager segment `second`, and rank 0 has no such segment",
    ),
    ([[first], []], "segment 0: rank 1 has captured nothing, and rank 0 has graph segment `start`"),
]


@pytest.mark.parametrize(("functions", "message"), _DIFFERENT)
def test_ranks_that_break_elsewhere_are_told(ranks, functions, message):
    """Every rank raises, and names the first segment that differs."""
    if ranks.size == 2:
        ranks.run(differs, functions, message)


def fails_on_one_rank(backend):
    g, x = backend.capture(), backend.tensor(4)
    try:
        with torch.no_grad(), g:
            x.mul_(2)
            if dist.get_rank() == dist.get_world_size() - 1:
                raise KeyError("only here")
    except KeyError:
        pass
    with pytest.raises(CaptureStateError, match="rank 1 has captured nothing"):
        check_same_segments(g)


def test_a_rank_that_failed_tells_the_others(ranks):
    """Nobody waits for its collectives."""
    if ranks.size == 2:
        ranks.run(fails_on_one_rank)


def checks_in_a_group_and_in_a_capture(backend):
    rank = dist.get_rank()
    own = [dist.new_group([r]) for r in range(dist.get_world_size())][rank]
    x = backend.tensor(4)
    with torch.no_grad(), backend.capture() as g:
        for _ in range(rank + 1):
            x.add_(1)
            break_graph()
    check_same_segments(g, own)
    g.reset()
    with pytest.raises(CaptureStateError, match="after the `with` block"):
        with torch.no_grad(), g:
            check_same_segments(g)


def test_the_check_takes_a_group(ranks):
    """Ranks of other groups may differ. In a graph segment it is refused on the spot."""
    ranks.run(checks_in_a_group_and_in_a_capture)


def test_the_check_needs_a_process_group(emulated):
    """As every collective."""
    with torch.no_grad(), emulated.capture() as g:
        torch.ones(2).mul_(2)
    with pytest.raises(ValueError, match="process group"):
        check_same_segments(g)


# The end of a process group


def outlives_its_group(backend, store, reset):
    rank, size = dist.get_rank(), dist.get_world_size()
    x = backend.tensor(4)

    def alone(x):
        return first(x * 2) * 3

    def together(x):
        y = x * 2
        dist.all_reduce(y)
        return first(y) * 3

    together(x)
    with torch.no_grad(), backend.capture() as g:
        y = alone(x)
    with torch.no_grad(), backend.capture() as h:
        together(x)
    h.replay()
    if reset:
        h.reset()
    dist.destroy_process_group()
    x.fill_(1)
    g.replay()
    assert_same(y, alone(x.clone()))
    h.reset()
    join(store, dist_transport(backend), rank, size)
    replay_is_eager(backend, all_reduce, "g", torch.no_grad, {})


def dist_transport(backend):
    return "gloo" if backend.device.type == "cpu" else "nccl"


def test_a_group_ends_after_reset(ranks, tmp_path):
    """Captures without collectives go on, and new groups can be made and captured."""
    ranks.run(outlives_its_group, str(tmp_path / "store"), True)


def test_a_group_ends_with_captures_alive(ranks, tmp_path):
    """Not with NCCL, which waits for its graphs forever."""
    if ranks.transport == "nccl" and ranks.mode is None:
        try:
            ranks.run(outlives_its_group, str(tmp_path / "store"), False, timeout=20)
        except RanksFailedError as failure:
            if "did not end" in str(failure):
                pytest.xfail("https://github.com/pytorch/pytorch/issues/115388")
            raise
    else:
        ranks.run(outlives_its_group, str(tmp_path / "store"), False)


# NCCL's own thread


def captures_while_work_is_in_flight(backend, error_mode):
    x, big = backend.tensor(4), torch.ones(1 << 20, device=backend.device)
    dist.all_reduce(x)
    dist.all_reduce(big)
    for options in ({}, {"break_on": ["c10d::*"]}):
        torch.cuda.synchronize()
        torch.cuda._sleep(1_000_000_000)  # half a second: the watchdog has something to ask for
        work = dist.all_reduce(big, async_op=True)
        with torch.no_grad(), backend.capture(capture_error_mode=error_mode, **options) as g:
            y = x * 2
            started = time.monotonic()
            while time.monotonic() - started < 0.35:  # it asks every 100 ms
                y = y + 0
            dist.all_reduce(y)
            z = first(y) * 3
        work.wait()
        for value in range(3):
            x.fill_(value)
            g.replay()
            expected = x * 2
            dist.all_reduce(expected)
            assert_same(z, (expected + 1) * 3)


@pytest.mark.parametrize("error_mode", ["thread_local", "global", "relaxed"])
def test_the_watchdog_does_not_disturb_a_capture(ranks, error_mode):
    """The thread that asks whether eager collectives are done runs on while a capture does."""
    if ranks.transport == "nccl":
        ranks.run(captures_while_work_is_in_flight, error_mode)


# The example


@pytest.mark.parametrize("collectives", [["captured"], ["captured", "eager"]], ids=["captured", "both"])
def test_the_tensor_parallel_example(ranks, collectives):
    """Run as a user runs it: the same tokens on all ranks as on one."""
    if (ranks.transport == "gloo" and len(collectives) == 1) or ranks.mode is not None:
        return  # the other one runs this too
    sizes = {"layers": 2, "hidden": 64, "heads": 4, "kv-heads": 2, "vocab": 100, "tokens": 12, "max-len": 16}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks.size}"]
    options = [*(f"--{k}={v}" for k, v in sizes.items()), "--collectives", *collectives]
    done = subprocess.run(
        [*launch, str(EXAMPLE), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"}
        | ({"CUDA_VISIBLE_DEVICES": ""} if ranks.transport == "gloo" else {}),
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tempfile.gettempdir(),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"the same tokens on {ranks.size} ranks as on one" in done.stdout
    device = "cpu" if ranks.transport == "gloo" else "cuda:0"
    assert f"on {device}" in done.stdout
    for name in ["eager  ", *(f"{c} collectives" for c in collectives)]:
        assert name in done.stdout


def test_the_tensor_parallel_example_wants_torchrun():
    """And says so."""
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "torchrun" in done.stderr
