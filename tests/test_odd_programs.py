"""Random programs whose breaks return odd things: right, or refused, never wrong."""

import os

import pytest
import torch

from segcapture import CaptureFailedError, OutputMismatchError, eager_break_during_capture
from tests.odd_programs import Program, outcome

EXAMPLES = int(os.environ.get("SEGCAPTURE_EXAMPLES", "200"))
GUARDS = [torch.no_grad, torch.no_grad, torch.no_grad, torch.inference_mode]


def test_odd_programs(backend):
    """Most are right; what is refused is memory that others own, or that captured code writes to."""
    found = {}
    for seed in range(EXAMPLES):
        text = outcome(seed, backend.device, GUARDS[seed % 4], mode=backend.mode)
        assert not text.startswith("wrong"), f"{text}\n{Program(seed)}"
        found[text.partition(":")[0]] = found.get(text.partition(":")[0], 0) + 1
    assert found["right"] > EXAMPLES // 3


@pytest.mark.parametrize("write", [False, True])
def test_memory_that_torch_does_not_own(backend, write):
    """An array of NumPy is its owner's: what captured code writes to it is seen by a later break."""
    import numpy as np

    if backend.device.type != "cpu":
        array = torch.zeros(4, device=backend.device)
        tensor = torch.from_dlpack(array)
    else:
        array = np.zeros(4, dtype=np.float32)
        tensor = torch.from_numpy(array)
    made = eager_break_during_capture(lambda t: tensor.view(-1).copy_(t), name="made")
    read = eager_break_during_capture(lambda t: t + torch.as_tensor(array, device=t.device), name="read")

    def model(x):
        y = made(x * 2)
        if write:
            y.add_(1)
        return read(x * 1) * 1

    with torch.no_grad():
        x = backend.tensor(4)
        with backend.capture() as g:
            out = model(x)
        for seed in range(3):
            x.copy_(backend.tensor(4, seed=seed))
            g.replay()
            assert torch.equal(out, x * 2 + write + x)


def test_another_array_each_time_is_refused():
    """Its memory cannot be known to be nobody's."""
    import numpy as np

    from segcapture import BreakableCUDAGraphCapture

    with torch.no_grad(), BreakableCUDAGraphCapture(device="cpu") as g:
        g.add_eager(lambda: torch.from_numpy(np.ones(4))) * 1
    keep = np.ones(4)  # so that the allocator gives another address
    with pytest.raises(OutputMismatchError) as info:
        g.replay()
        g.replay()
    assert (info.value.segment, info.value.path) == (0, "out")
    assert keep.sum() == 4


@pytest.mark.parametrize("keep", ["storage", "last"])
@pytest.mark.parametrize("write", [False, True])
def test_memory_that_the_function_keeps(backend, keep, write):
    """Its storage, or the tensor: right while only breaks read it, refused if captured code writes to it."""
    state = {}

    @eager_break_during_capture
    def made(t):
        y = t * 2
        state["kept"] = y.untyped_storage() if keep == "storage" else y
        return y

    @eager_break_during_capture
    def read(t):
        kept = state["kept"]
        if keep == "storage":
            kept = torch.empty(0, device=t.device).set_(kept, 0, (4,), (1,))
        return t + kept

    x = backend.tensor(4)
    with torch.no_grad():
        with backend.capture() as g:
            y = made(x * 1)
            if write:
                y.add_(1)
            out = read(y * 1) * 1
            del y
        if write:
            with pytest.raises(OutputMismatchError) as info:
                g.replay()
            assert (info.value.segment, info.value.path) == (1, "out")
        else:
            for seed in range(3):
                x.copy_(backend.tensor(4, seed=seed))
                g.replay()
                assert torch.equal(out, x * 4)


def test_a_refused_program_leaves_a_clean_thread(backend):
    """The next capture works."""
    x = backend.tensor(4)
    with torch.no_grad(), pytest.raises(CaptureFailedError):
        with backend.capture() as g:
            g.add_eager(lambda t: {t + 1}, x * 2)
    backend.check(lambda t: t * 2, [backend.tensor(4)], "g")
