"""Who lives how long: pools, aliases, dropped graphs, collections during a capture (C3, C5, C10)."""

import ctypes
import gc
import random
import sys
import threading
import weakref

import pytest
import torch

from segcapture import eager_break_during_capture
from segcapture.backends.cuda.driver import CACHES_WORKSPACES
from segcapture.backends.cuda.pool import segments_of
from tests.gpu import assert_process_is_well, process_state


@eager_break_during_capture
def scale(t, by):
    """A break with a fresh output."""
    return t * by.item()


def model(x, by):
    """Temporaries before, between and after two breaks."""
    h = x * 2
    h = scale(h, by) + x
    k = h.sin() + 1
    return scale(k, by) * h


def make(backend, size, seed=0):
    return backend.tensor(size, seed=seed), torch.tensor(2.0, device=backend.device)


def test_many_captures_in_one_pool_in_random_order(backend):
    """Mixed sizes, allocator churn in between, and junk tensors that stay intact."""
    order = random.Random(0)
    captures = []
    pool = None
    for size in (1 << 16, 7, 1 << 12, 300, 1 << 18, 33):
        x, by = make(backend, size)
        with torch.no_grad():
            model(x, by)
            with backend.capture(pool=pool) as g:
                out = model(x, by)
        pool = g.pool
        captures.append((g, x, by, out))
    junk = []
    for k in range(60):
        g, x, by, out = order.choice(captures)
        value, factor = backend.tensor(x.numel(), seed=k), float(k % 5)
        x.copy_(value)
        by.fill_(factor)
        g.replay()
        expected = model(value, torch.tensor(factor, device=backend.device))
        assert torch.equal(out, expected)
        junk.append((torch.full((order.choice([10, 1 << 10, 1 << 16]),), float(k), device=backend.device), k))
        if len(junk) > 8:
            del junk[order.randrange(len(junk))]
        assert all(bool((t == value).all()) for t, value in junk)


def test_deleting_one_capture_while_others_of_the_pool_live(backend):
    """The others replay as before, matrix products (with their workspace) included."""

    def f(x):
        return host(x @ x) @ x

    host = eager_break_during_capture(lambda t: t + 1, name="host")
    captures = []
    pool = None
    for size in (64, 128, 32):
        x = backend.tensor(size, size)
        with torch.no_grad():
            f(x)
            with backend.capture(pool=pool) as g:
                out = f(x)
        pool = g.pool
        captures.append((g, x, out))
    del pool, g, x, out
    while captures:
        captures.pop(0)
        gc.collect()
        if backend.device.type == "cuda":
            torch.cuda.empty_cache()
        for g, x, out in captures:
            value = backend.tensor(*x.shape, seed=len(captures))
            x.copy_(value)
            g.replay()
            with torch.no_grad():
                assert torch.equal(out, f(value))
        if captures:
            del g, x, out


def test_an_output_kept_two_breaks_long(backend):
    """A bridge that is read late still holds its value."""

    def f(x, by):
        first = scale(x + 1, by)
        second = scale(first + 2, by)
        third = scale(second + 3, by)
        return first + third

    backend.check(f, [*make(backend, 1000)])


def test_a_closure_over_a_tensor_of_the_pool(backend):
    """A break that returns a graph tensor which it did not get as an argument."""

    def f(x):
        h = x * 3

        @eager_break_during_capture
        def closed():
            return h

        return closed() + h

    g = backend.check(f, [backend.tensor(64)])
    assert g.num_eager_breaks == 1


def test_temporaries_from_before_the_capture(backend):
    """Dropped by the user, kept by the capture, as an argument in every position."""
    x = backend.tensor(64)
    before = x * 5
    kept = weakref.ref(before)
    fn = eager_break_during_capture(lambda t, pair, *, key: t + pair[0] + key, name="fn")
    with torch.no_grad(), backend.capture() as g:
        out = fn(before, (before, 1), key=before) + x
    expected = before * 3
    del before
    assert kept() is not None
    junk = [torch.full((64,), -1.0, device=backend.device) for _ in range(64)]
    g.replay()
    assert torch.equal(out, expected + x)
    del g, junk
    assert kept() is None


def test_a_capture_has_no_reference_cycles(backend):
    """It dies with its last reference, without the collector."""
    x, by = make(backend, 8)
    gc.collect()
    gc.disable()
    try:
        with torch.no_grad(), backend.capture() as g:
            model(x, by)
        g.replay()
        dead = [weakref.ref(g), *(weakref.ref(s) for s in g.segments)]
        del g
        assert [ref() for ref in dead] == [None] * len(dead)
    finally:
        gc.enable()


def test_the_plan_of_an_output_is_no_cycle(backend):
    """Whatever the output holds: its aliases keep the pool."""
    cache = torch.zeros(3, device=backend.device)

    def f(t):
        return {"new": (t + 1, None), "cache": [cache.copy_(t)], "again": [t], "n": 1}

    x = torch.ones(3, device=backend.device)
    gc.collect()
    gc.disable()
    try:
        with torch.no_grad(), backend.capture() as g:
            y = g.add_eager(f, x * 2)["new"][0] * 1
        g.replay()
        dead = [weakref.ref(s.writeback) for s in g.segments if s.kind == "eager"]
        pool = weakref.ref(g.pool.state) if g.pool is not None else lambda: None
        del g, y
        assert dead
        assert [ref() for ref in dead] == [None]
        assert pool() is None
    finally:
        gc.enable()


def test_the_loop_that_rebinds_its_capture(backend):
    """The old graphs die inside of the new capture, which must not mind."""
    outs = []
    for size in (64, 32, 16, 8):
        x, by = make(backend, size)
        with torch.no_grad(), backend.capture() as g:
            outs.append(model(x, by))
        g.replay()
        assert torch.equal(outs[-1], model(x, by))


def test_a_cache_that_drops_a_capture_inside_of_a_capture(backend):
    """And one that is dropped in an eager part, and segments that outlive their capture."""
    cache = {}

    def capture(size):
        x, by = make(backend, size)
        with torch.no_grad(), backend.capture() as g:
            y = x + 1
            cache.pop("graph", None)
            out = scale(y, by)
            g.add_eager(lambda: (cache.pop("eager", None), None)[1])
            out = out + 1
        return g, x, by, out

    for k in range(4):
        g, x, by, out = capture(16 + k)
        x.add_(1)
        g.replay()
        assert torch.equal(out, (x + 1) * by.item() + 1)
        cache["graph"], cache["eager"] = capture(5)[0], capture(6)[0].segments


@pytest.mark.parametrize("error_mode", ["thread_local", "global", "relaxed"])
@pytest.mark.parametrize("in_thread", [False, True])
def test_cyclic_garbage_with_graphs_dies_in_a_capture(backend, error_mode, in_thread):
    """With the collector run in the middle, and at every allocation, by this thread or another."""

    class Holder:
        pass

    def litter():
        for _ in range(3):
            holder = Holder()
            holder.me = holder
            x, by = make(backend, 9)
            with torch.no_grad(), backend.capture() as holder.capture:
                model(x, by)
            if backend.name == "cuda":
                holder.graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(holder.graph):
                    holder.out = x + 1

    def collect():
        if in_thread:
            worker = threading.Thread(target=gc.collect)
            worker.start()
            worker.join()
        else:
            gc.collect()

    gc.collect()
    thresholds, callbacks = gc.get_threshold(), list(gc.callbacks)
    gc.disable()
    try:
        litter()
        x, by = make(backend, 64)
        with torch.no_grad(), backend.capture(capture_error_mode=error_mode) as g:
            y = x * 2
            collect()
            out = scale(y, by)
            out = out + 1
            gc.enable()
            gc.set_threshold(1)
            out = scale(out, by) - 1
    finally:
        gc.enable()
        gc.set_threshold(*thresholds)
    assert gc.callbacks == callbacks
    x.add_(1)
    g.replay()
    assert torch.equal(out, (x * 2 * by.item() + 1) * by.item() - 1)


class Storing:
    """A break that keeps its argument."""

    def __init__(self):
        self.kept = []

    @eager_break_during_capture
    def look(self, t):
        self.kept.append(t)
        self.views = t.view(-1)[1:].detach()


@pytest.mark.cuda
def test_a_stored_alias_pins_the_pool(cuda):
    """Read after reset(), after the capture died, and after empty_cache(): never unmapped memory."""
    storing = Storing()
    x = torch.ones(1 << 20, device="cuda")
    with torch.no_grad(), cuda.capture() as g:
        storing.look(x * 2)
        x * 3
    g.replay()
    reserved = torch.cuda.memory_reserved()
    g.reset()
    del g
    gc.collect()
    torch.cuda.empty_cache()
    alias = storing.kept[1]
    assert alias.sum().item() == alias.double().sum().item()
    assert storing.views.shape == ((1 << 20) - 1,)
    storing.views.sum().item()
    storing.kept.clear()
    del alias
    storing.views.sum().item()
    del storing
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < reserved


@pytest.mark.cuda
def test_a_pool_is_used_again_after_its_captures_are_gone(cuda):
    """After reset(), and after the last capture died; no memory is added."""
    x, by = make(cuda, 1 << 20)
    before = process_state()
    sizes = []
    pool = None
    for k in range(4):
        with torch.no_grad(), cuda.capture(pool=pool) as g:
            out = model(x, by)
        pool = g.pool
        g.replay()
        assert torch.equal(out, model(x, by))
        if k % 2:
            g.reset()
        del g, out
        gc.collect()
        sizes.append(sum(s["total_size"] for s in segments_of(tuple(pool))))
    assert len(set(sizes)) == 1
    assert sizes[0] > 0
    id_ = tuple(pool)
    del pool
    torch.cuda.empty_cache()
    assert segments_of(id_) == []
    assert_process_is_well(before, cuda.capture)


@pytest.mark.cuda
def test_pools_of_every_kind_are_shared(cuda):
    """A capture's pool, a MemPool, a handle; and torch.cuda.graph takes a capture's pool too."""
    x, by = make(cuda, 1 << 16)
    for given in (None, torch.cuda.MemPool(), torch.cuda.graph_pool_handle()):
        with torch.no_grad():
            with cuda.capture(pool=given) as first:
                a = model(x, by)
            with cuda.capture(pool=first.pool) as second:
                b = model(x, by)
            plain = torch.cuda.CUDAGraph()
            with torch.cuda.graph(plain, pool=first.pool):
                c = x * 2
        x.add_(1)
        for _ in range(2):
            second.replay()
            assert torch.equal(b, model(x, by))
            first.replay()
            assert torch.equal(a, model(x, by))
            plain.replay()
            assert torch.equal(c, x * 2)
        if isinstance(given, torch.cuda.MemPool):
            assert tuple(first.pool) == tuple(given.id)
        del first, second, plain, a, b, c


@pytest.mark.cuda
def test_a_mempool_lives_as_long_as_the_last_capture_in_it(cuda):
    """Also one that shares it through the first, when that and the user's own reference are gone."""
    x, by = make(cuda, 1 << 16)
    mempool = torch.cuda.MemPool()
    alive = weakref.ref(mempool)
    with torch.no_grad():
        with cuda.capture(pool=mempool) as first:
            model(x, by)
        with cuda.capture(pool=first.pool) as second:
            out = model(x, by)
    del first, mempool
    gc.collect()
    torch.cuda.empty_cache()
    assert alive() is not None
    junk = [torch.full((1 << 16,), -1.0, device="cuda") for _ in range(8)]
    x.add_(1)
    second.replay()
    assert torch.equal(out, model(x, by))
    with torch.no_grad(), cuda.capture() as other:
        del second, out, junk  # inside of another capture, too
        y = x * 2
    gc.collect()
    assert alive() is None
    other.replay()
    assert torch.equal(y, x * 2)


@pytest.mark.cuda
@pytest.mark.parametrize("ours", [True, False])
def test_a_handle_whose_last_graph_has_died(cuda, ours):
    """It works again, as with torch.cuda.graph, whoever captured into it."""
    handle = torch.cuda.graph_pool_handle()
    x = torch.ones(4, device="cuda")
    before = process_state()

    def capture():
        context = cuda.capture(pool=handle) if ours else torch.cuda.graph(torch.cuda.CUDAGraph(), pool=handle)
        with torch.no_grad(), context:
            x + 1

    for _ in range(3):
        capture()
        with torch.no_grad(), cuda.capture(pool=handle) as g:
            y = x * 2 + 1
        x.add_(1)
        g.replay()
        assert torch.equal(y, x * 2 + 1)
        del g, y
    assert_process_is_well(before, cuda.capture)


@pytest.mark.cuda
def test_a_closed_handle_with_tensors_that_live(cuda):
    """torch cannot forget it: the error says what can be done, and dropping them helps."""
    from segcapture import CaptureStateError

    handle = torch.cuda.graph_pool_handle()
    before = process_state()
    with cuda.capture(pool=handle):
        kept = torch.ones(4, device="cuda") + 1
    with pytest.raises(CaptureStateError, match="cannot be opened"), cuda.capture(pool=handle):
        pass
    del kept
    with cuda.capture(pool=handle):
        torch.ones(4, device="cuda") + 1
    assert_process_is_well(before, cuda.capture)


@pytest.mark.cuda
@pytest.mark.parametrize("bad", [3, "pool", (1, 2, 3), (None, 1), [0, 1]])
def test_what_is_no_pool(cuda, bad):
    """ValueError with what was found."""
    with pytest.raises(ValueError, match="pool must be"):
        cuda.capture(pool=bad)


@pytest.mark.cuda
def test_bridges_and_temporaries_are_reused(cuda):
    """Eager outputs come from the pool, and their blocks are free when the model drops them."""
    size = 1 << 22
    x = torch.ones(size, device="cuda")
    by = torch.tensor(1.0, device="cuda")

    def f():
        h = x * 1
        for _ in range(16):
            h = scale(h, by) + 1
        return h

    with torch.no_grad():
        f()
        torch.cuda.empty_cache()
        with cuda.capture() as g:
            f()
    used = sum(s["total_size"] for s in segments_of(tuple(g.pool)))
    assert used <= 5 * size * 4
    assert g.segments[1].bridge_bytes == size * 4


@pytest.mark.cuda
def test_graphs_survive_the_death_of_a_cublas_workspace(cuda):
    """clearCublasWorkspaces, and captures that die in the middle, leave matrix products right."""
    x = torch.randn(256, 256, device="cuda")
    host = eager_break_during_capture(lambda t: t + 1, name="host")

    def f(t):
        return host(t @ t) @ t

    with torch.no_grad():
        f(x)
        with cuda.capture() as first:
            f(x)
        with cuda.capture(pool=first.pool) as second:
            out = f(x)
    del first
    torch.cuda.empty_cache()
    junk = [torch.full((1 << 22,), 5.0, device="cuda") for _ in range(8)]
    for _ in range(3):
        x.copy_(torch.randn(256, 256, device="cuda"))
        second.replay()
        with torch.no_grad():
            assert torch.equal(out, f(x))
    assert all(bool((t == 5).all()) for t in junk)


def steals_references(pool_id, include_traces):
    """torch 2.11's way to read a tuple: what it borrowed it gives away."""
    for number in pool_id:
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(number))
    return []


def test_looking_at_a_pool_keeps_its_id(monkeypatch):
    """The numbers of an id above 256 are objects, and torch's snapshot takes references to them."""
    monkeypatch.setattr(torch.cuda, "memory_snapshot", steals_references)
    pool_id = (0, int("100003"))
    spare = [pool_id[1]] * 200  # so that a fault is a failure and not a crash
    before = sys.getrefcount(pool_id[1])
    for _ in range(100):
        segments_of(pool_id)
    after = sys.getrefcount(pool_id[1])  # an assertion would count itself
    assert after == before
    assert len(spare) == 200


@pytest.mark.cuda
def test_the_three_hundredth_pool(cuda):
    """Its id is none of the numbers that Python keeps for ever."""
    while torch.cuda.graph_pool_handle()[1] < 300:
        pass
    x, by = make(cuda, 64)
    for _ in range(20):
        with torch.no_grad(), cuda.capture() as g:
            out = model(x, by)
        before = sys.getrefcount(g.pool[1])
        for _ in range(50):
            segments_of(g.pool)
        after = sys.getrefcount(g.pool[1])
        assert after >= before
        g.replay()
        assert torch.equal(out, model(x, by))


@pytest.mark.cuda
@pytest.mark.parametrize("warmed_up", [False, True])
def test_torch_frees_the_workspaces_of_cublas(cuda, warmed_up):
    """As torch.compile does when it records CUDA graphs: the addresses in our graphs stay ours."""

    def model(a, b):
        h = torch.relu(scale_by_two(a @ b) @ b.T)
        return torch.nn.functional.linear(h, weight, bias)  # by cuBLASLt

    scale_by_two = eager_break_during_capture(lambda t: t * 2, name="scale_by_two")
    a, b = (cuda.tensor(*shape).bfloat16() for shape in ((16, 8192), (8192, 64)))  # a split sum needs one
    weight, bias = b.T.contiguous(), cuda.tensor(64).bfloat16()
    before = process_state()
    torch._C._cuda_clearCublasWorkspaces()
    with torch.no_grad():
        g = cuda.capture()
        if warmed_up:
            with g.warm_up():
                model(a, b)
        with g:
            out = model(a, b)
        assert bool(segments_of(g._backend._pool.stream.workspace_pool)) == CACHES_WORKSPACES
        for k in range(3):
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
            junk = [torch.full((1 << 20,), 7.0, device=cuda.device) for _ in range(64)]
            a.copy_(cuda.tensor(16, 8192, seed=k))
            g.replay()
            replayed = out.clone()
            assert torch.equal(replayed, model(a, b))
            assert all(bool((t == 7).all()) for t in junk)
            del junk
    assert_process_is_well(before, cuda.capture)
