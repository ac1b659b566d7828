"""Threads: captures and replays at once, and what other threads do meanwhile (C5, C10)."""

import gc
import threading
import time

import pytest
import torch

from segcapture import (
    BreakableCUDAGraphCapture,
    CaptureStateError,
    GraphedCallable,
    eager_break_during_capture,
    is_capturing,
)
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
def test_captures_of_one_pool_replay_in_two_threads(cuda):
    """Captures that share memory run one after the other, and stay right."""
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


@pytest.mark.cuda
def test_a_thread_whose_first_cuda_call_is_ours(cuda):
    """A capture, a replay on the same stream and on another one, and a served function."""
    x = torch.arange(8.0, device="cuda")
    with torch.no_grad(), cuda.capture() as g:
        y = x * 2
    found = []

    def served():
        found.append(GraphedCallable(lambda t: t * 2, warmup=0)(x))

    def captures():
        with torch.no_grad(), cuda.capture(stream=stream) as other:
            x * 3
        other.replay()

    stream = torch.cuda.Stream()
    run_threads(lambda k: g.replay(), 1)
    with torch.cuda.stream(torch.cuda.Stream()):
        g.replay()
    run_threads(lambda k: g.replay(), 1)
    run_threads(lambda k: served(), 1)
    run_threads(lambda k: captures(), 1)
    torch.cuda.synchronize()
    assert torch.equal(y, x * 2)
    assert torch.equal(found[0], x * 2)


@pytest.mark.cuda
@pytest.mark.parametrize("shared", [False, True])
def test_served_functions_that_call_each_other_from_two_threads(cuda, shared):
    """One in an eager function of another, while a second thread calls it: neither waits for ever."""
    inside, found, errors = threading.Event(), [], []
    options = {"warmup": 0, "stream": torch.cuda.Stream() if shared else None}

    @eager_break_during_capture
    def middle(x):
        if threading.current_thread() is first:
            inside.set()
            time.sleep(0.5)  # for the second thread to come as far as it can
        return inner(x)

    first = None
    inner = GraphedCallable(lambda x: x * 2, **options)
    outer = GraphedCallable(lambda x: middle(x + 1) + 1, **options)
    x = cuda.tensor(8)
    with torch.no_grad():
        expected = [inner(x), outer(x)]
        torch.cuda.synchronize()

    def serve(served):
        try:
            with torch.no_grad():
                found.append(served(x))
        except CaptureStateError as error:
            errors.append(error)

    first = threading.Thread(target=serve, args=(outer,), daemon=True)
    second = threading.Thread(target=serve, args=(inner,), daemon=True)
    first.start()
    assert inside.wait(5)
    second.start()
    for thread in (first, second):
        thread.join(10)
        assert not thread.is_alive()
    torch.cuda.synchronize()
    assert len(errors) <= shared  # on one stream each may have what the other one needs
    assert len(errors) + len(found) == 2
    assert all(any(torch.equal(a, b) for a in expected) for b in found)


def test_served_functions_may_meet_in_their_breaks(emulated):
    """Emulated, functions that have nothing to do with each other do not wait for each other."""
    meet = threading.Barrier(2)

    @eager_break_during_capture
    def wait(x):
        meet.wait(5)
        return x + 1

    served = [GraphedCallable(lambda x, k=k: wait(x) * k, warmup=0, device="cpu") for k in (1, 2)]
    x = emulated.tensor(4)

    def serve(k):
        with torch.no_grad():
            for _ in range(3):
                assert torch.equal(served[k](x), (x + 1) * (k + 1))

    run_threads(serve, 2)
