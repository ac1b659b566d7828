"""Threads: captures and replays at once, and what other threads do meanwhile (C5, C10)."""

import gc
import threading

import pytest
import torch

from segcapture import BreakableCUDAGraphCapture, eager_break_during_capture, is_capturing
from tests.gpu import process_state

THREADS = 8


def run_threads(body, count=THREADS):
    """Run `body(k)` in threads that start together, and raise what any of them raised."""
    start = threading.Barrier(count)
    errors = []

    def guarded(k):
        try:
            start.wait()
            body(k)
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=guarded, args=(k,)) for k in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]


@eager_break_during_capture
def scale(t, by):
    """Reads on the host."""
    return t * by.item()


def one_thread(backend, k):
    """Capture, and replay ten times against eager, all in one thread."""
    x = backend.tensor(64, 64, seed=k)
    by = torch.tensor(float(k + 1), device=backend.device)

    def f(t):
        return scale(t @ t, by) @ t + 1

    with torch.no_grad():
        f(x)
        for _ in range(3):
            with backend.capture() as g:
                out = f(x)
            for i in range(10):
                value = backend.tensor(64, 64, seed=100 * k + i)
                x.copy_(value)
                g.replay()
                assert torch.equal(out, f(value))


def test_threads_capture_and_replay_at_once(backend):
    """Each on its own current stream, compared with eager."""

    def body(k):
        if backend.device.type == "cuda":
            with torch.cuda.stream(torch.cuda.Stream()):
                one_thread(backend, k)
        else:
            one_thread(backend, k)

    run_threads(body)


@pytest.mark.cuda
def test_other_threads_work_during_captures(cuda):
    """They allocate, pin memory, query events, collect; captures do not notice."""
    stop = threading.Event()
    before = process_state()

    def disturb(k):
        with torch.cuda.stream(torch.cuda.Stream()):
            event = torch.cuda.Event()
            while not stop.is_set():
                t = torch.full((1 << (10 + k),), 1.0, device="cuda")
                pinned = torch.empty(1 << 12, pin_memory=True)
                pinned.copy_(t[: 1 << 12] if t.numel() >= 1 << 12 else torch.ones(1 << 12))
                event.record()
                event.query()
                gc.collect(0)

    def body(k):
        if k >= 4:
            disturb(k)
            return
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                one_thread(cuda, k)
        finally:
            finished.append(k)
            if len(finished) == 4:
                stop.set()

    finished = []
    run_threads(body)
    assert process_state() == before


@pytest.mark.cuda
def test_captures_of_one_lane_replay_in_two_threads(cuda):
    """Captures that share a stream's workspace or a pool take turns, and stay right."""
    captures = []
    pool = None
    with torch.no_grad():
        for k in range(4):
            x = cuda.tensor(512, 512, seed=k)
            host = eager_break_during_capture(lambda t: t + 1, name="host")

            def f(t, host=host):
                return host(t @ t) @ t

            f(x)
            with cuda.capture(pool=pool) as g:
                out = f(x)
            pool = g.pool if k % 2 else None
            captures.append((g, x, out, f(x)))

    def body(k):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                captures[k][0].replay()

    run_threads(body, 4)
    torch.cuda.synchronize()
    # The pool is shared: compare when nobody else writes to it.
    for g, _, out, expected in captures:
        g.replay()
        assert torch.equal(out, expected)


def test_a_worker_started_inside_of_a_capture_is_not_capturing(backend):
    """Its breaks are plain calls."""
    seen = []

    @eager_break_during_capture
    def f():
        seen.append((is_capturing(), BreakableCUDAGraphCapture.current()))

    with backend.capture() as g:
        worker = threading.Thread(target=f)
        worker.start()
        worker.join()
        torch.ones(2, device=backend.device)
    assert seen == [(False, None)]
    assert g.num_eager_breaks == 0


def test_overlapping_captures_leave_the_collector_alone(backend):
    """Two threads inside of captures at once (where torch can), and gc is as before at every moment."""
    gc.collect()
    callbacks = list(gc.callbacks)
    seen = []

    def body(k):
        with backend.capture() as g:
            seen.append(gc.isenabled())
            torch.ones(2, device=backend.device)
        seen.append(gc.isenabled())
        g.replay()

    run_threads(body, 4)
    assert seen == [True] * 8
    assert gc.callbacks == callbacks
