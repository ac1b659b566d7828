"""One fixture runs each behaviour test on every backend that there is."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import attrs
import pytest
import torch

from segcapture import BreakableCUDAGraphCapture
from segcapture.backends.cuda import driver
from segcapture.thread import state

FAIL_ON_SKIP = os.environ.get("SEGCAPTURE_FAIL_ON_SKIP") == "1"

if os.environ.get("SEGCAPTURE_TEST_DRIVER") == "torch":  # as on ROCm
    driver.CudaDriver = driver.Driver


@attrs.frozen
class Backend:
    """A backend under test: where its tensors live, and how a capture on it is made."""

    name: str
    device: torch.device
    emulated: bool
    mode: str | None = None

    def capture(self, **options: Any) -> BreakableCUDAGraphCapture:
        """A capture on this backend."""
        return BreakableCUDAGraphCapture(**{"device": self.device, "mode": self.mode, **options})

    def tensor(self, *shape: int, seed: int = 0) -> torch.Tensor:
        """Random float32 values of the given shape, always the same for one seed."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(*shape, generator=generator).to(self.device)

    def check(
        self,
        model: Callable[..., Any],
        inputs: Sequence[torch.Tensor],
        kinds: str | None = None,
        rounds: int = 3,
        guard: Callable[[], AbstractContextManager[Any]] = torch.no_grad,
        **options: Any,
    ) -> BreakableCUDAGraphCapture:
        """Capture `model(*inputs)` under `guard`, and compare replays on fresh inputs with eager runs.

        `kinds` are the first letters of the expected segments: `"geg"` is graph, eager, graph.
        """
        static = [t.clone() for t in inputs]
        with guard():
            model(*[t.clone() for t in inputs])  # warm-up
            expected = model(*[t.clone() for t in inputs])
            with self.capture(**options) as g:
                out = model(*static)
            assert_same(out, expected, "at capture")
            if kinds is not None:
                assert "".join(segment.kind[0] for segment in g.segments) == kinds
            for round_ in range(rounds):
                fresh = [_fresh(t, round_) for t in inputs]
                expected = model(*[t.clone() for t in fresh])
                for target, value in zip(static, fresh, strict=True):
                    target.copy_(value)
                g.replay()
                assert_same(out, expected, f"in round {round_}")
        return g


def _fresh(like: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + seed)
    if like.dtype.is_floating_point:
        return torch.randn(like.shape, generator=generator).to(like)
    return torch.randint(0, 4, like.shape, generator=generator).to(like)


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in nested tuples, lists, dicts and objects, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for item in value.values() for t in tensors(item)]
    if isinstance(value, tuple | list):
        return [t for item in value for t in tensors(item)]
    if hasattr(value, "__dict__") and not isinstance(value, torch.nn.Module):
        return [t for item in vars(value).values() for t in tensors(item)]
    return []


def assert_same(found: Any, expected: Any, when: str = "") -> None:
    """Equal tensors, bit by bit, in equal places."""
    pairs = list(zip(tensors(found), tensors(expected), strict=True))
    assert pairs, "nothing to compare"
    for index, (a, b) in enumerate(pairs):
        assert torch.equal(a, b), f"tensor {index} differs {when}: {a} against {b}"


_BACKENDS = [
    pytest.param("emulated"),
    pytest.param("cuda", marks=pytest.mark.cuda),
    pytest.param("debug", marks=pytest.mark.cuda),
]


def _make(name: str) -> Backend:
    if name == "emulated":
        return Backend(name, torch.device("cpu"), emulated=True)
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device = torch.device("cuda", torch.cuda.current_device())
    return Backend(name, device, emulated=name == "debug", mode="debug" if name == "debug" else None)


@pytest.fixture(params=_BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    """Every backend: emulated on the CPU, CUDA graphs, and debug mode on CUDA tensors."""
    return _make(request.param)


@pytest.fixture
def cuda() -> Backend:
    """CUDA graphs alone. Mark the test with `pytest.mark.cuda`."""
    return _make("cuda")


@pytest.fixture
def emulated() -> Backend:
    """The emulated backend on the CPU."""
    return _make("emulated")


@pytest.fixture(autouse=True)
def _clean_process() -> Iterator[None]:
    """No test leaves a capture, a grad mode or a seed behind."""
    torch.manual_seed(0)
    yield
    assert state.run is None
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    if torch.cuda.is_available():
        assert not torch.cuda.is_current_stream_capturing()
        assert torch.cuda.current_stream() == torch.cuda.default_stream()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """With SEGCAPTURE_FAIL_ON_SKIP=1 a skipped test is a failure."""
    report = yield
    if FAIL_ON_SKIP and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped under SEGCAPTURE_FAIL_ON_SKIP=1: {report.longrepr}"
    return report
