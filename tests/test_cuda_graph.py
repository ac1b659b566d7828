"""When a CUDA graph of ours dies: after the capture of its thread, and not while another one begins (C10)."""

import threading
import weakref

import pytest
import torch

from segcapture.backends.cuda import graph as graphs
from segcapture.backends.cuda.graph import CudaGraph
from segcapture.thread import state


class Graph:
    """Stands for torch's object: says whether the lock was held when it died."""

    def __init__(self, log):
        self.log = log

    def __del__(self):
        self.log.append(_locked_by_this_thread())

    def replay(self):
        self.log.append("replay")


def _locked_by_this_thread():
    """Whether another thread could not take the lock now."""
    taken = []

    def take():
        taken.append(graphs._registry_lock.acquire(blocking=False))
        if taken[0]:
            graphs._registry_lock.release()

    worker = threading.Thread(target=take)
    worker.start()
    worker.join()
    return not taken[0]


def test_a_graph_dies_under_the_lock():
    """Its last reference is dropped while no other thread can begin a capture."""
    log = []
    owned = CudaGraph([Graph(log)])
    del owned
    assert log == [True]


def test_a_graph_segment_that_draws_dies_under_the_lock():
    """Its launch function holds the box, not the graph."""
    log = []
    made = CudaGraph([Graph(log)])
    launch = made.launch
    launch(None)
    del made
    assert log == ["replay", True]
    del launch


def test_a_graph_that_is_dropped_in_a_capture_dies_after_it():
    """And then under the lock."""
    log = []
    state.keep_alive = []
    try:
        owned = CudaGraph([Graph(log)])
        alive = weakref.ref(owned.graph)
        del owned
        assert alive() is not None
        assert log == []
    finally:
        state.keep_alive = None
    assert alive() is None
    assert log == [True]


@pytest.mark.cuda
def test_threads_drop_graphs_while_others_begin_captures(cuda):
    """torch's registry of graphs stays whole: captures after it work, in every thread."""
    start = threading.Barrier(8)
    errors = []

    def body(k):
        try:
            start.wait()
            with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
                x = cuda.tensor(8, seed=k)
                for _ in range(50):
                    with cuda.capture() as g:
                        out = g.add_eager(torch.neg, x * 2) + 1
                    g.replay()
                    assert torch.equal(out, 1 - x * 2)
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=body, args=(k,)) for k in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert errors == []
    cuda.check(lambda x: x + 1, [cuda.tensor(3)], "g")
