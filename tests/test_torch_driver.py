"""Without cuda-python, as on ROCm: torch's own API alone, with CUDA as a stand-in."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from segcapture.backends.cuda.driver import CudaDriver, Driver

TESTS = Path(__file__).parent


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("files", "chosen"),
    [
        (["test_rng.py", "test_training.py", "test_ambient.py", "test_threads.py"], "cuda"),
        (["test_streams.py"], "not nobody_elses"),  # a stream that torch gives nobody takes the driver
        (["test_faults.py"], "do_raise or do_interrupt or do_out_of_memory"),
        (["test_lifetimes.py"], "test"),
    ],
)
def test_the_same_tests_pass(cuda, files, chosen):
    """In a process of their own: streams, pools and locks are made with the driver."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "cuda and not multi_gpu"]
    done = subprocess.run(
        [*command, "-k", f"({chosen}) and not debug", *(str(TESTS / name) for name in files)],
        env={**os.environ, "SEGCAPTURE_TEST_DRIVER": "torch"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout


def test_streams_are_joined_one_by_one(monkeypatch):
    """The nodes of a graph are not known."""
    waits = []

    class Stream:
        def __init__(self, raw):
            self.raw = raw

        def wait_stream(self, other):
            waits.append((self.raw, other.raw))

    driver = Driver()
    monkeypatch.setattr(driver, "_stream", Stream)
    monkeypatch.setattr(driver, "is_valid", lambda raw: raw == 1)
    assert driver.join(1, [Stream(2), Stream(3)]) == -1
    driver.order(after=4, before=5)
    assert waits == [(1, 2), (1, 3), (4, 5)]
    assert driver.join(2, [Stream(3)]) is None


def test_what_it_cannot_do():
    """Captures run in the mode that minds least, and torch launches the graphs."""
    driver = Driver()
    assert driver.error_mode("thread_local") == "relaxed"
    assert driver.launcher(None) is None
    assert driver.handle(7) == 7


def test_torch_is_asked_which_streams_are_capturing_where_it_can_say(monkeypatch):
    """From 2.13 on; cuda-python is not needed for that."""

    class Stream:
        def __init__(self, capturing):
            self.capturing = capturing

        def is_capturing(self):
            return self.capturing

    monkeypatch.setattr("torch.Stream", Stream)
    streams = [Stream(False), Stream(False)]
    for driver in (Driver(), object.__new__(CudaDriver)):
        ask = driver.question(streams)
        streams[1].capturing = False
        assert ask() == []
        streams[1].capturing = True
        assert ask() == [streams[1]]
