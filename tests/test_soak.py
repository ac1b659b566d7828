"""Long runs: neither device nor host memory grows."""

import gc
import os

import pytest
import torch

from segcapture import eager_break_during_capture


@eager_break_during_capture
def look(t):
    """A fresh output in each replay."""
    return t + 1


def model(x):
    for _ in range(16):
        x = look(x) * 0.5
    return x


def host_bytes():
    """Resident memory of this process."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(device):
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.memory_reserved(), torch.cuda.memory_allocated(), host_bytes()
    return 0, 0, host_bytes()


def soak(backend, replays, captures):
    """Growth in bytes (reserved, allocated, host) over replays, and over captures with reset."""
    x = backend.tensor(256)
    g = backend.capture()
    with torch.no_grad(), g:
        out = model(x + 0)
    assert len(g.segments) == 33
    for _ in range(max(200, replays // 20)):
        g.replay()
    assert torch.equal(out, model(x + 0))
    before = measure(backend.device)
    for k in range(replays):
        g.replay()
        if k % 1000 == 0 and backend.device.type == "cuda":
            torch.cuda.synchronize()
    after = measure(backend.device)
    kept = [out]
    grown = [tuple(b - a for a, b in zip(before, after, strict=True))]

    def capture_again():
        g.reset()
        with torch.no_grad(), g:
            kept.append(model(x + 0))
        del kept[:-1]
        g.replay()

    for _ in range(max(20, captures // 10)):
        capture_again()
    before = measure(backend.device)
    for _ in range(captures):
        capture_again()
    after = measure(backend.device)
    grown.append(tuple(b - a for a, b in zip(before, after, strict=True)))
    return grown


def check(grown):
    for reserved, allocated, host in grown:
        assert reserved == 0
        assert allocated == 0
        assert host < 4 << 20


def test_a_short_soak(backend):
    """300 replays and 30 captures."""
    check(soak(backend, 300, 30))


@pytest.mark.slow
@pytest.mark.cuda
def test_a_long_soak(cuda):
    """200,000 replays of 33 segments, and 500 captures with reset."""
    grown = soak(cuda, 200_000, 500)
    print("growth in bytes (reserved, allocated, host) over replays and captures:", grown)
    check(grown)
