"""Locks that raise where waiting would never end."""

import threading

import pytest

from segcapture.errors import CaptureStateError
from segcapture.exclusive import Exclusive


def test_it_is_reentrant_and_excludes_other_threads():
    """The owner enters again; another thread waits until it has left as often."""
    lock, entered, order = Exclusive(), threading.Event(), []

    def other():
        entered.set()
        with lock:
            order.append("other")

    with lock, lock:
        thread = threading.Thread(target=other)
        thread.start()
        entered.wait()
        assert not lock.acquire_at_once(False) or lock.release() is None
        order.append("owner")
    thread.join()
    assert order == ["owner", "other"]
    assert lock.owner is None


@pytest.mark.parametrize("count", [2, 3])
def test_a_circle_of_waiting_threads_is_an_error(count):
    """One of them gets it, and the others go on."""
    locks = [Exclusive() for _ in range(count)]
    barrier, errors, done = threading.Barrier(count), [], []

    def run(i):
        with locks[i]:
            barrier.wait()
            try:
                with locks[(i + 1) % count]:
                    done.append(i)
            except CaptureStateError as error:
                errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(errors) >= 1
    assert len(errors) + len(done) == count
    assert all(lock.owner is None for lock in locks)
