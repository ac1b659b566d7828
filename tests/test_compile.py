"""torch.compile: compiled regions with eager breaks between them.

CUDA captures the kernels of compiled code. A tape sees operators alone, so there the regions run as they are
written; either way the values are eager's, or an error says why not.
"""

import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn

from segcapture import CaptureFailedError, GraphedCallable, eager_break_during_capture
from tests.conftest import assert_same

ENGINES = ["eager", "aot_eager"]
if shutil.which("g++") or shutil.which("clang++"):
    ENGINES.append("inductor")

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # of torch itself
engines = pytest.mark.parametrize("engine", ENGINES)
guards = pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode], ids=lambda g: g.__name__)


@pytest.fixture(autouse=True)
def _compiled_anew():
    """No test uses what another has compiled."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@eager_break_during_capture
def rescale(h):
    """Reads on the host."""
    return h / max(1.0, h.abs().max().item())


def region(x):
    return (x.sin() * 2 + x.cos()).relu()


def model(x, region=region):
    """Region, break, region."""
    return region(rescale(region(x)) + 1)


def assert_near(found, expected):
    """Fused kernels round in another order."""
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def check(backend, compiled, plain, guard, kinds="geg"):
    """Capture the compiled function, and compare replays on fresh inputs with the plain one."""
    x = backend.tensor(16, 16)
    with guard():
        compiled(x)  # warm-up: compiles
        with backend.capture() as g:
            out = compiled(x)
        assert "".join(segment.kind[0] for segment in g.segments) == kinds
        assert_near(out, plain(x))
        for seed in range(1, 4):
            x.copy_(backend.tensor(16, 16, seed=seed) * seed)
            g.replay()
            assert_near(out, plain(x))
    return g


@engines
@guards
def test_compiled_regions_around_a_break(backend, engine, guard):
    """Each is part of a graph segment."""
    compiled = torch.compile(region, backend=engine, fullgraph=True)
    check(backend, lambda x: model(x, compiled), model, guard)


@engines
def test_a_break_is_a_graph_break_of_compiled_code(backend, engine):
    """The regions that Dynamo makes on both sides of it are captured."""
    check(backend, torch.compile(model, backend=engine), model, torch.no_grad)


@engines
def test_operators_on_the_tape_are_those_of_the_plain_code(emulated, engine):
    """A region adds no operators of its own, and hides none."""

    def operations(fn):
        x = emulated.tensor(4)
        with torch.no_grad():
            fn(x)
            with emulated.capture() as g:
                fn(x)
        return [segment.operations for segment in g.segments if segment.kind == "graph"]

    assert operations(torch.compile(model, backend=engine)) == operations(model)


@engines
def test_a_region_in_an_eager_segment(backend, engine):
    """Compiled at replay, whatever it was at capture."""
    compiled = torch.compile(region, backend=engine)
    compiled_break = eager_break_during_capture(lambda x: compiled(x) * 1)
    check(
        backend,
        lambda x: compiled_break(x + 1) * 2,
        lambda x: region(x + 1) * 2,
        torch.no_grad,
    )


@engines
def test_new_shapes_are_compiled_between_captures(backend, engine):
    """Dynamo compiles at a warm-up of each shape, after the observed one; captures stay right."""
    compiled = torch.compile(region, backend=engine)
    g = GraphedCallable(lambda x: model(x, compiled), device=backend.device, mode=backend.mode, warmup=1)
    with torch.no_grad():
        for step in range(12):
            x = backend.tensor(4 + 3 * (step % 3), 4, seed=step)
            assert_near(g(x), model(x))
    assert (g.stats().captures, g.stats().replays) == (3, 3)


@engines
def test_a_training_step_with_a_compiled_model(backend, engine):
    """Forward, backward and optimizer of six steps: losses and weights as without compiling."""

    def prepare(compiling):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(backend.device)
        for p in net.parameters():
            p.grad = torch.zeros_like(p)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        forward = torch.compile(net, backend=engine) if compiling else net

        def step(x):
            optimizer.zero_grad(set_to_none=False)
            loss = forward(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return net, step

    inputs = [backend.tensor(4, 8, seed=seed) for seed in range(6)]
    plain, step = prepare(compiling=False)
    expected = torch.stack([step(x) for x in inputs])
    net, step = prepare(compiling=True)
    g = GraphedCallable(step, device=backend.device, mode=backend.mode, warmup=1)
    assert_near(torch.stack([g(x) for x in inputs]), expected)
    for a, b in zip(net.parameters(), plain.parameters(), strict=True):
        assert_near(a, b)
    assert g.stats().replays == 3


FIRST_COMPILED_INSIDE = """
import sys
import torch
from segcapture import BreakableCUDAGraphCapture

assert "torch._dynamo" not in sys.modules
x = torch.randn(8)
with torch.no_grad(), BreakableCUDAGraphCapture(device="cpu") as g:
    compiled = torch.compile(lambda x: x.sin() * 2, backend="aot_eager")
    out = compiled(x)
x.add_(1)
g.replay()
assert torch.equal(out, x.sin() * 2)
assert torch.equal(out, compiled(x))
"""


def test_a_process_that_first_compiles_inside_of_a_capture():
    """Dynamo is imported while the tape records, which it then respects too."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FIRST_COMPILED_INSIDE], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("engine", ENGINES)
def test_a_backward_that_was_compiled_before_the_capture(emulated, engine):
    """Its forward ran outside: right values, or a refusal where the kernels are no operators."""
    net = nn.Linear(4, 4)
    compiled = torch.compile(lambda x: net(x).tanh().sum(), backend=engine)
    compiled(emulated.tensor(2, 4)).backward()
    loss = compiled(emulated.tensor(2, 4))
    net.zero_grad(set_to_none=False)
    seed = torch.ones(())
    if engine == "inductor":
        with pytest.raises(CaptureFailedError, match=r"torch.compile.*test_compile.py"):
            with emulated.capture():
                loss.backward(seed)
        compiled(emulated.tensor(2, 4)).backward(seed)  # outside of a capture as ever
        expected = net.weight.grad.clone()
        loss = compiled(emulated.tensor(2, 4))
        net.zero_grad(set_to_none=False)
        with emulated.capture() as g:
            g.add_eager(loss.backward, seed)
            doubled = net.weight.grad * 2
        assert_near(doubled, expected * 2)
        return
    with emulated.capture() as g:
        loss.backward(seed)
    first = net.weight.grad.clone()
    net.zero_grad(set_to_none=False)
    seed.fill_(3)
    g.replay()
    assert_near(net.weight.grad, first * 3)


@pytest.mark.cuda
def test_compiled_kernels_are_what_is_captured(cuda):
    """Fused on CUDA: fewer nodes than the plain code has."""
    plain = check(cuda, model, model, torch.no_grad)
    fused = check(cuda, torch.compile(model), model, torch.no_grad)

    def nodes(g):
        return sum(segment.operations for segment in g.segments if segment.kind == "graph")

    assert nodes(fused) < nodes(plain)


@pytest.mark.cuda
def test_a_compiled_llama_like_block(cuda):
    """Matrix products, norms and a break at attention, dynamic shapes, bit by bit as compiled eager."""
    torch.manual_seed(0)
    norm, qkv, out = nn.RMSNorm(64), nn.Linear(64, 192), nn.Linear(64, 64)
    for module in (norm, qkv, out):
        module.to(cuda.device)

    @torch.compile(dynamic=True)
    def before(x):
        return qkv(norm(x)).chunk(3, dim=-1)

    @eager_break_during_capture
    def attention(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None])[0]

    @torch.compile(dynamic=True)
    def after(x, mixed):
        return x + out(mixed).relu()

    def block(x):
        return after(x, attention(*before(x)))

    with torch.inference_mode():
        for length in (8, 24):
            x = cuda.tensor(length, 64)
            block(x)
            with cuda.capture() as g:
                found = block(x)
            assert g.num_eager_breaks == 1
            for seed in range(3):
                x.copy_(cuda.tensor(length, 64, seed=seed))
                g.replay()
                assert_same(found, block(x))


@pytest.mark.cuda
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_capture_compiles_nothing(cuda, guard, autocast):
    """What was compiled before is used: nothing that Dynamo guards on differs in the block."""
    torch._dynamo.reset()
    compilations = []

    def backend(graph, example_inputs):
        compilations.append(graph)
        return graph.forward

    layer = torch.nn.Linear(8, 8, device="cuda").requires_grad_(False)
    step = torch.compile(lambda x: layer(x).relu() + 1, backend=backend)
    seen = eager_break_during_capture(lambda x: x * 2, name="seen")

    def model(x):
        return step(seen(step(x)).float())

    x = cuda.tensor(4, 8)
    with guard(), torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
        for _ in range(3):
            model(x)
        before = len(compilations)
        with cuda.capture() as g:
            out = model(x)
        assert len(compilations) == before > 0
        for seed in range(3):
            x.copy_(cuda.tensor(4, 8, seed=seed))
            g.replay()
            assert torch.equal(out, model(x))
        assert len(compilations) == before
