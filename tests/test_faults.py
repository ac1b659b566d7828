"""Whatever fails, where it fails: the original exception first, and the process as before (C9)."""

import gc

import pytest
import torch

from segcapture import CaptureFailedError, CaptureStateError, eager_break_during_capture
from segcapture.backends.cuda.graph import CudaGraph
from tests.gpu import assert_process_is_well, process_state


class Mine(Exception):
    """An exception of the user."""


def do_item(t):
    t.sum().item()


def do_synchronize(t):
    torch.cuda.synchronize()


def do_raise(t):
    raise Mine("of the user")


def do_interrupt(t):
    raise KeyboardInterrupt


def do_out_of_memory(t):
    torch.empty(1 << 45, device=t.device)


def do_wait_for_uncaptured_work(t):
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        torch.cuda._sleep(1000)
    torch.cuda.current_stream().wait_stream(other)


def do_legacy_stream(t):
    with torch.cuda.stream(torch.cuda.default_stream()):
        t + 1


GRAPH_FAULTS = [
    (do_item, torch.AcceleratorError, "waits for the device or reads from it"),
    (do_synchronize, torch.AcceleratorError, "waits for the device or reads from it"),
    (do_raise, Mine, "graph segment"),
    (do_interrupt, KeyboardInterrupt, "graph segment"),
    (do_out_of_memory, torch.OutOfMemoryError, "pool of the capture could not grow"),
    (do_wait_for_uncaptured_work, torch.AcceleratorError, "not part of this segment"),
]
EAGER_FAULTS = [
    (do_raise, Mine, "eager segment"),
    (do_interrupt, KeyboardInterrupt, "eager segment"),
    (do_out_of_memory, torch.OutOfMemoryError, "eager segment"),
]


def program(fault, where, part):
    """Two breaks, and a fault in the first, middle or last segment, in its graph or eager part."""

    @eager_break_during_capture(name="first")
    def first(t):
        return fault(t) if (part, where) == ("eager", "first") else t + 1

    @eager_break_during_capture(name="last")
    def last(t):
        return fault(t) if part == "eager" and where != "first" else t + 1

    def run(x):
        y = torch.rand_like(x) + x
        if (part, where) == ("graph", "first"):
            fault(y)
        y = first(y) * 2
        if (part, where) == ("graph", "middle"):
            fault(y)
        y = last(y) * 2
        if (part, where) == ("graph", "last"):
            fault(y)
        return y

    return run


CASES = [
    *((*case, "graph", where) for case in GRAPH_FAULTS for where in ("first", "middle", "last")),
    *((*case, "eager", where) for case in EAGER_FAULTS for where in ("first", "last")),
]


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("fault", "kind", "words", "part", "where"), CASES, ids=lambda v: getattr(v, "__name__", str(v))[:24]
)
def test_a_fault_leaves_the_process_well(cuda, fault, kind, words, part, where):
    """The exception arrives as it was, with a note; everything works after it."""
    x = torch.ones(1024, device="cuda")
    run = program(fault, where, part)
    before = process_state()
    g = cuda.capture()
    with pytest.raises(kind) as info:
        with torch.no_grad(), g:
            run(x)
    assert type(info.value) is kind
    assert info.traceback[-1].name in (fault.__name__, "__exit__") or kind is not Mine
    notes = "\n".join(info.value.__notes__)
    assert words in notes
    assert "while cleaning up" not in notes
    assert "test_faults.py:" in notes
    with pytest.raises(CaptureStateError, match="failed"):
        g.replay()
    del info
    assert_process_is_well(before, cuda.capture)
    g.reset()
    with torch.no_grad(), g:
        y = x + 1
    g.replay()
    assert torch.equal(y, x + 1)


@pytest.mark.parametrize(
    ("fault", "kind", "part", "where"),
    [
        (fault, kind, part, where)
        for fault, kind in (
            (do_raise, Mine),
            (do_interrupt, KeyboardInterrupt),
            (do_item, CaptureFailedError),
        )
        for part in ("graph", "eager")
        for where in ("first", "middle", "last")
        if not (fault is do_item and part == "eager") and not (part == "eager" and where == "middle")
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_fault_on_the_tape(emulated, fault, kind, part, where):
    """The same on the emulated backend."""
    x = torch.ones(16)
    collecting, callbacks = gc.isenabled(), list(gc.callbacks)
    generator_state = torch.get_rng_state()
    with pytest.raises(kind) as info:
        with torch.no_grad(), emulated.capture():
            program(fault, where, part)(x)
    assert f"{part} segment" in "\n".join(info.value.__notes__)
    assert (gc.isenabled(), list(gc.callbacks)) == (collecting, callbacks)
    torch.set_rng_state(generator_state)
    with torch.no_grad(), emulated.capture() as g:
        y = g.add_eager(torch.add, x, 1) * 2
    x.fill_(2)
    g.replay()
    assert y.tolist() == [6.0] * 16


@pytest.mark.cuda
def test_an_error_that_the_block_caught(cuda):
    """A swallowed CUDA error has made the segment invalid: it says so, at the next boundary."""
    x = torch.ones(4, device="cuda")
    before = process_state()
    with pytest.raises(CaptureFailedError, match="its exception was caught"):
        with cuda.capture():
            y = x + 1
            try:
                y.sum().item()
            except RuntimeError:
                pass
    assert_process_is_well(before, cuda.capture)


@pytest.mark.cuda
def test_an_error_inside_of_enter(cuda, monkeypatch):
    """What was entered already is left again."""
    from segcapture.backends.cuda import backend as module

    before = process_state()

    def fail(self):
        raise Mine("in begin")

    with monkeypatch.context() as patched:
        patched.setattr(module.CudaBackend, "begin", fail)
        with pytest.raises(Mine):
            with cuda.capture():
                raise AssertionError("not reached")
    with monkeypatch.context() as patched:
        patched.setattr(module, "PoolMemory", fail)
        with pytest.raises(Mine):
            with cuda.capture():
                raise AssertionError("not reached")
    assert_process_is_well(before, cuda.capture)


@pytest.mark.cuda
@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_interrupt_as_a_segment_begins(cuda, monkeypatch, at):
    """When torch's capture has begun already: of the pool's own graph, the first segment, a later one."""
    begin, count = CudaGraph.begin, [0]

    def interrupted(self, *args):
        begin(self, *args)
        count[0] += 1
        if count[0] == at:
            raise KeyboardInterrupt

    x = torch.ones(8, device="cuda")
    before = process_state()
    with monkeypatch.context() as patch:
        patch.setattr(CudaGraph, "begin", interrupted)
        with torch.no_grad(), pytest.raises(KeyboardInterrupt), cuda.capture() as g:
            g.add_eager(torch.neg, x * 2) + 1
    assert count[0] == at
    assert_process_is_well(before, cuda.capture)


@pytest.mark.cuda
def test_what_the_allocator_caches_is_given_back_for_a_capture(cuda):
    """As `torch.cuda.graph` does: a capture cannot do so itself when memory runs out."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    room = 1 << 30
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + room) / total)
    try:
        large = torch.empty(room * 6 // 10, dtype=torch.uint8, device="cuda")
        del large
        x = torch.zeros(1, dtype=torch.uint8, device="cuda")
        with torch.no_grad(), cuda.capture() as g:
            y = x.expand(room // 2).clone()
        x.fill_(3)
        g.replay()
        assert int(y[-1]) == 3
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.cuda
def test_an_event_of_an_ended_segment_is_named(cuda):
    """Waiting for an event that was recorded before the break cannot work."""
    x = torch.ones(4, device="cuda")
    event, side = torch.cuda.Event(), torch.cuda.Stream()
    skip = eager_break_during_capture(lambda: None, name="skip")
    before = process_state()
    with pytest.raises(torch.AcceleratorError) as info:
        with cuda.capture():
            y = x + 1
            event.record()
            skip()
            side.wait_event(event)
            with torch.cuda.stream(side):
                y + 1
            torch.cuda.current_stream().wait_stream(side)
    assert "that has ended" in "\n".join(info.value.__notes__)
    assert_process_is_well(before, cuda.capture)


@pytest.mark.cuda
def test_fifty_failed_captures_leak_nothing(cuda):
    """Memory after them is what it was after the first ones."""
    x = torch.ones(1 << 20, device="cuda")

    def fail(k):
        with pytest.raises((RuntimeError, Mine)):
            with torch.no_grad(), cuda.capture():
                program([do_item, do_raise, do_synchronize][k % 3], "last", "graph")(x)

    def memory():
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(), torch.cuda.memory_allocated()

    for k in range(3):
        fail(k)
    first = memory()
    for k in range(50):
        fail(k)
    assert memory() == first


def test_a_replay_that_fails_can_be_replayed_again(backend):
    """The exception names the segment, and the next replay is right."""
    calls = []

    @eager_break_during_capture
    def sometimes(t):
        calls.append(1)
        if len(calls) == 3:
            raise Mine("at replay 2")
        return t * 2

    x = torch.ones(4, device=backend.device)
    with torch.no_grad(), backend.capture() as g:
        out = sometimes(x + 1) + 1
    g.replay()
    with pytest.raises(Mine) as info:
        g.replay()
    assert "eager segment 1" in info.value.__notes__[0]
    assert "during replay" in info.value.__notes__[0]
    x.fill_(4)
    g.replay()
    assert out.tolist() == [11.0] * 4
