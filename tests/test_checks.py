"""`check=True`, and what a user is told about each fault there is a check for."""

import importlib
import importlib.util
import threading

import pytest
import torch

from segcapture import (
    CaptureFailedError,
    CaptureStateError,
    FrozenValueWarning,
    eager_break_during_capture,
)
from segcapture.backends import emulated as emulated_backend
from segcapture.operators import compiled

FAULTS = {
    "escaped_tensor": (
        CaptureFailedError,
        [
            "`aten::add` at ",
            "escaped_tensor.py:16 in graph segment 1 reads a tensor that eager segment 0",
            "(`Model.plan`) made (`aten::cumsum` at ",
            "escaped_tensor.py:11) and did not return",
            "Return it from the function",
        ],
    ),
    "escaped_argument": (
        CaptureFailedError,
        [
            "Eager segment 2 (`Model.attend`, ",
            "escaped_argument.py:19) is given a tensor that eager",
            "segment 0 (`Model.plan`) made (`aten::cumsum` at ",
            "escaped_argument.py:11)",
        ],
    ),
    "rebound_weight": (
        CaptureStateError,
        [
            "graph segment 0 (start, rebound_weight.py:9) cannot be replayed",
            "rebound_weight.py:10 reads",
            "a parameter (float32 [4, 4] on ",
            "was dropped or re-bound after the capture",
            "copy_",
        ],
    ),
    "moved_weight": (
        CaptureStateError,
        ["moved_weight.py:10 reads a parameter (float32 [4, 4] on ", "has moved to another address"],
    ),
    "dropped_input": (
        CaptureStateError,
        ["`aten::add` at ", "dropped_input.py:9 reads a tensor (float32 [4] on ", "was dropped or re-bound"],
    ),
    "dropped_at_once": (
        CaptureFailedError,
        ["`aten::add` at ", "dropped_at_once.py:9 in graph segment 0 reads a tensor", "freed memory"],
    ),
    "frozen_object": (
        FrozenValueWarning,
        [
            "eager segment 0 (attend, frozen_object.py:22) reads `meta` (a dict that holds tensors)",
            "only the capture refers to any more",
            "Live(",
        ],
    ),
}
CUDA_FAULTS = {
    "host_memory": ["`aten::copy_` at ", "host_memory.py:10", "float32 [4] on cpu", "was dropped"],
    "other_stream": ["`aten::mul_` at ", "other_stream.py:10 runs on a stream that is not part of the"],
}


def program(name):
    return importlib.import_module(f"tests.faulty.{name}").run


def message(error):
    return " ".join([str(error), *getattr(error, "__notes__", [])])


def assert_captures(backend):
    """A clean capture works after the fault."""
    x = backend.tensor(3)
    with backend.capture(check=True) as g:
        out = x + 1
    x.add_(1)
    g.replay()
    assert torch.equal(out, x + 1)


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_named(backend, name):
    """The message names the operator, its line, and what to do."""
    kind, parts = FAULTS[name]
    with pytest.raises(kind) as caught:
        program(name)(backend)
    for part in parts:
        assert part in message(caught.value)
    del caught
    assert_captures(backend)


def test_a_missing_break_is_named(backend):
    """By the operator or CUDA's own error, with the line and the fix."""
    with pytest.raises(RuntimeError) as caught:
        program("missing_break")(backend)
    assert "missing_break.py:7" in message(caught.value)
    assert "@eager_break_during_capture" in message(caught.value)
    del caught
    assert_captures(backend)


@pytest.mark.cuda
@pytest.mark.parametrize("name", CUDA_FAULTS)
def test_each_fault_of_cuda_is_named(cuda, name):
    """What the CPU does not know: streams, and memory of the host."""
    with pytest.raises((CaptureFailedError, CaptureStateError)) as caught:
        program(name)(cuda)
    for part in CUDA_FAULTS[name]:
        assert part in message(caught.value)
    del caught
    assert_captures(cuda)


@pytest.mark.multi_gpu
def test_work_on_another_device_is_named(cuda):
    """The operator, where it ran, and what is captured."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    with pytest.raises(CaptureFailedError, match=r"`aten::mul` at .*other_device.py:10 runs on cuda:"):
        program("other_device")(cuda)
    assert_captures(cuda)


@pytest.mark.cuda
def test_a_triton_launch_in_debug_mode_is_refused(cuda):
    """A kernel past the dispatcher would be missing at replay: never silence."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("no triton")
    import attrs

    debug = attrs.evolve(cuda, emulated=True, mode="debug")
    with pytest.raises(CaptureFailedError, match="Triton kernel.*double.*triton_launch.py:18.*triton_op"):
        program("triton_launch")(debug)
    assert_captures(debug)


class Chain(list):
    """Triton's chain of hooks."""

    add = list.append

    def __call__(self, metadata):
        for hook in self:
            hook(metadata)


def test_the_hook_of_triton_is_taken_and_given_back(monkeypatch):
    """Without Triton: its chain of hooks. Seen launches pass, and those of other threads."""

    class Metadata:
        def get(self):
            return {"name": "some_kernel"}

    hooks, unseen = Chain(), [False]
    monkeypatch.setattr(compiled, "_triton_hooks", lambda: hooks)
    with compiled.kernels_refused(lambda: unseen[0], triton=True):
        hooks(Metadata())
        unseen[0] = True
        with pytest.raises(CaptureFailedError, match=r"`some_kernel` was launched at .*test_checks.py:\d+"):
            hooks(Metadata())
        thread = threading.Thread(target=hooks, args=[Metadata()])
        thread.start()  # an error in it would be one in the test
        thread.join()
    assert not hooks


def test_work_that_is_not_recorded_is_named(emulated, monkeypatch):
    """The same message without a GPU: a backend that says that it does not record."""
    monkeypatch.setattr(emulated_backend.EmulatedBackend, "is_recording", lambda self: False)
    x = emulated.tensor(3)
    with (
        pytest.raises(CaptureFailedError, match=r"`aten::mul` at .*test_checks.py:\d+ runs on a stream"),
        emulated.capture(check=True),
    ):
        x * 2


def test_an_empty_segment_in_which_operators_ran_is_named(emulated, monkeypatch):
    """Should the stream not tell, the missing nodes do."""
    monkeypatch.setattr(emulated_backend.EmulatedBackend, "end", lambda self: None)
    x = emulated.tensor(3)
    with (
        pytest.raises(CaptureFailedError, match=r"segment 0 is empty though 2 operators ran.*`aten::mul` at"),
        emulated.capture(check=True),
    ):
        x * 2 + 1


class Layer(torch.nn.Module):
    """All that is allowed: a cache written in place, fresh outputs, arguments of the capture's own."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)
        self.register_buffer("cache", torch.zeros(2, 4))

    @eager_break_during_capture
    def attend(self, h, meta):
        self.cache.copy_(h * meta["scale"])
        hidden = h.softmax(-1)
        return {"out": hidden * self.cache.amax().item(), "cache": self.cache, "parts": hidden.split(2, -1)}

    def forward(self, x, scale):
        found = self.attend(self.inner(x), {"scale": scale})
        return self.inner(found["out"]) + found["cache"] + torch.cat(found["parts"], -1)


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_a_sound_program_passes(backend, guard):
    """No check fires on what replays rightly, and replays are right under checks."""
    layer = Layer().to(backend.device)
    inputs = [backend.tensor(2, 4), backend.tensor(1, seed=1)]
    backend.check(layer, inputs, "geg", guard=guard, check=True)


def test_checks_hold_in_a_training_step(backend):
    """Backward and the optimizer run under them too."""
    layer = torch.nn.Linear(4, 4, device=backend.device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x = backend.tensor(2, 4)

    def step():
        optimizer.zero_grad(set_to_none=False)
        loss = layer(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    for _ in range(2):
        step()
    with backend.capture(check=True) as g:
        loss = step()
    before = loss.item()
    g.replay()
    assert loss.item() < before


def test_steps_are_checked_as_replays_are(backend):
    """What is gone is named before the segment that reads it runs."""
    weights, x = [backend.tensor(3)], backend.tensor(3)
    with torch.no_grad(), backend.capture(check=True) as g:
        y = x * weights[0]
    assert len(list(g.steps())) >= 1
    before = y.clone()
    weights[0] = torch.zeros_like(x)
    x.fill_(2)
    for replay in (g.replay, lambda: list(g.steps())):
        with pytest.raises(CaptureStateError, match="was dropped or re-bound"):
            replay()
    assert torch.equal(y, before)


def test_full_mode_is_checked_too(backend):
    """Breaks are ignored, checks are not."""
    if backend.mode is not None:
        return
    layer = torch.nn.Linear(4, 4, device=backend.device)
    x = backend.tensor(2, 4)
    with torch.no_grad(), backend.capture(check=True, mode="full") as g:
        layer(x)
    layer.weight = torch.nn.Parameter(torch.ones_like(layer.weight))
    with pytest.raises(CaptureStateError, match="re-bound"):
        g.replay()


def test_the_warning_about_an_object_comes_once(backend):
    """And not for one that was made for the call."""
    meta = [{"t": backend.tensor(3)}]

    @eager_break_during_capture
    def add(x, first, second):
        return x + first["t"] + second["t"]

    x = backend.tensor(3)
    with torch.no_grad(), backend.capture(check=True) as g:
        add(x, meta[0], {"t": x})
    g.replay()
    meta[0] = None
    with pytest.warns(FrozenValueWarning, match="`first`") as caught:
        g.replay()
    assert len(caught) == 1
    g.replay()


def test_a_number_that_captured_code_computed_with(backend):
    """A break puts a new one into its dict; the graph goes on with the old one. Others may change."""

    @eager_break_during_capture
    def measure(y):
        return {"largest": float(y.max()), "smallest": float(y.min())}

    x = backend.tensor(4).abs()
    with torch.no_grad(), backend.capture(check=True) as g:
        x / measure(x * 2)["largest"]
    g.replay()
    x.mul_(3)
    told = r"`aten::div` at .*test_checks.py:.* graph segment 2 .* `out\[\"largest\"\]` of eager segment 1"
    with pytest.warns(FrozenValueWarning, match=told) as caught:
        g.replay()
    assert len(caught) == 1
    g.replay()


@pytest.mark.parametrize("name", ["escaped_tensor", "escaped_argument", "dropped_at_once"])
def test_errors_say_where_in_attributes_too(backend, name):
    """The index of the segment that reads, and the operator."""
    with pytest.raises(CaptureFailedError) as caught:
        program(name)(backend)
    segment, operator = {
        "escaped_tensor": (1, "aten::cumsum"),
        "escaped_argument": (2, "aten::cumsum"),
        "dropped_at_once": (0, "aten::add"),
    }[name]
    assert (caught.value.segment, caught.value.operator) == (segment, operator)
