"""`verify`: the first segment that differs from the eager function, and nothing left behind."""

import importlib
import itertools
import re
import warnings

import pytest
import torch

from segcapture import (
    BreakableCUDAGraphCapture,
    CaptureStateError,
    FrozenValueWarning,
    Live,
    break_graph,
    eager_break_during_capture,
    is_capturing,
)


def program(name):
    return importlib.import_module(f"tests.faulty.{name}").run


class Model(torch.nn.Module):
    """Two breaks, a cache that a break writes, a dropout that draws, a counter in a graph segment."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))
        self.cache = torch.zeros(2, 4)

    def _apply(self, fn, recurse=True):
        self.cache = fn(self.cache)
        return super()._apply(fn, recurse)

    @eager_break_during_capture
    def attend(self, h, cache, scale):
        cache.add_(h)
        return {"out": cache * scale / (1 + h.abs().max().item()), "heads": h.split(2, -1)}

    @eager_break_during_capture
    def route(self, h):
        return h if h.sum().item() > 0 else h * 2

    def forward(self, x):
        self.count += 1
        found = self.attend(self.first(x), self.cache, 0.5)
        h = found["out"] + torch.cat(found["heads"], -1)
        return self.second(self.route(torch.nn.functional.dropout(h, 0.5))) + self.count


@pytest.fixture
def captured(backend):
    """A model, its static input, the capture and the output."""
    model, x = Model().to(backend.device), backend.tensor(2, 4)
    with torch.no_grad():
        model(x)
        with backend.capture() as g:
            out = model(x)
    return model, x, g, out


def test_agreement(captured, backend):
    """On several inputs the report is true and says what was compared."""
    model, x, g, out = captured
    for seed in range(3):
        x.copy_(backend.tensor(2, 4, seed=seed))
        report = g.verify(model, x, outputs=out)
        assert report, str(report)
        assert "5 segments" in str(report)
        assert report.compared > 10
        assert report.difference is None


def test_nothing_is_left_behind(captured, backend):
    """Tensors, random states and `grad` are as before."""
    model, x, g, out = captured
    g.replay()
    tensors = [x, model.cache, model.count, *model.parameters()]
    before = [t.clone() for t in tensors]
    state = torch.get_rng_state()
    assert g.verify(model, x, outputs=out)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert not is_capturing()


def test_state_is_restored_when_the_function_fails(captured):
    """The exception arrives, and what ran until then is undone."""
    model, x, g, _ = captured
    before = model.cache.clone()

    def failing(x):
        model(x)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        g.verify(failing, x)
    assert torch.equal(model.cache, before)
    assert g.verify(model, x)


def test_without_outputs_it_says_so(captured):
    """The breaks alone are compared then."""
    model, x, g, _ = captured
    assert "pass what the capture returned as outputs=" in str(g.verify(model, x))


def test_a_function_without_arguments(captured):
    """What it closes over is found, and restored."""
    model, x, g, out = captured
    assert g.verify(lambda: model(x), outputs=out)


def test_a_stale_weight(backend):
    """The graph segment between the breaks is named, the leaf, and that its inputs agreed."""
    report = program("stale_weight")(backend)
    found = report.difference
    assert not report
    assert found.kind == "argument"
    assert found.segment.index == 2
    assert found.segment.kind == "graph"
    assert found.location.endswith("stale_weight.py:22")
    assert found.inputs_agreed
    assert found.largest > 0
    text = str(report)
    assert "first in graph segment 2 (after Model.norm, stale_weight.py:22)" in text
    assert "`x` of eager segment 3 (Model.gate, stale_weight.py:22): largest difference" in text
    assert "Its inputs still agreed" in text


def test_nothing_is_said_of_what_was_not_compared(backend):
    """No break, and another input than the static one: and both segments after the last break are named."""
    weight, x = backend.tensor(3), backend.tensor(3, seed=1)

    def model(x):
        y = x * weight
        break_graph("half")
        return y + 1

    with torch.no_grad():
        model(x)
        with backend.capture() as g:
            out = model(x)
        report = g.verify(model, x * 2, outputs=out)
    assert not report.difference.inputs_agreed
    text = str(report)
    assert "agreed" not in text
    assert "an input not copied into its static tensor" in text
    assert "graph segments 0 to 1" in text if backend.mode is None else "graph segment" in text


def test_a_frozen_value(backend):
    """The value of then and the value of now, by the parameter's name."""
    report = program("frozen_value")(backend)
    assert report.difference.kind == "value"
    assert not report.difference.inputs_agreed
    assert "`step` of eager segment 1 (Model.rotate, frozen_value.py:16): expected 3, found 0" in str(report)
    assert "Live(" in str(report)


def test_a_replaced_object(backend):
    """A field of the old object, and of the new one."""
    report = program("replaced_object")(backend)
    assert report.difference.kind == "field"
    assert not report.difference.inputs_agreed
    assert "`meta.max_len` of eager segment 1" in str(report)
    assert "expected 3, found 2" in str(report)
    assert "in place" in str(report)


def test_hidden_state(backend):
    """A function that differs though its arguments agree."""
    report = program("hidden_state")(backend)
    assert report.difference.kind == "output"
    assert report.difference.segment.kind == "eager"
    assert report.difference.inputs_agreed
    assert "depends on something besides its arguments" in str(report)


def test_nondeterminism(backend):
    """Reported as such, and not as a fault of the capture."""
    report = program("nondeterministic")(backend)
    assert not report
    assert report.difference is None
    assert report.nondeterminism.kind == "output"
    assert "The eager function is not deterministic" in str(report)
    assert "break `noise`, nondeterministic.py:" in str(report)


def test_a_rebound_tensor(captured):
    """An argument at another address is the segment's own fault, not that of the graph before it."""
    model, x, g, out = captured
    model.cache = model.cache + 1
    found = g.verify(model, x, outputs=out).difference
    assert found.kind == "rebound"
    assert found.segment.name == "Model.attend"
    assert "`cache`" in found.path
    assert not found.inputs_agreed


def test_breaks_that_come_in_another_order(backend):
    """Python control flow is fixed at capture."""
    flags = [True]

    @eager_break_during_capture
    def one(t):
        return t + 1

    @eager_break_during_capture
    def two(t):
        return t + 2

    def f(x):
        return one(x) if flags[0] else two(x)

    x = backend.tensor(3)
    with torch.no_grad(), backend.capture() as g:
        out = f(x)
    flags[0] = False
    found = g.verify(f, x, outputs=out).difference
    assert found.kind == "structure"
    assert "came to break `two`" in found.detail
    flags[0] = True
    assert g.verify(f, x, outputs=out)
    missing = g.verify(lambda x: x + 1, x, outputs=out).difference
    assert "came to its end" in missing.detail
    more = g.verify(lambda x: two(one(x)), x, outputs=out).difference
    assert "the capture has no break there" in more.detail


def test_the_last_graph_segment(backend):
    """What comes after the last break shows in the final output."""

    @eager_break_during_capture
    def double(t):
        return t * 2

    weight = [backend.tensor(3, seed=1)]

    def f(x):
        return {"logits": double(x) * weight[0]}

    x = backend.tensor(3)
    with torch.no_grad(), backend.capture() as g:
        out = f(x)
    old = weight[0]
    weight[0] = old + 1
    found = g.verify(f, x, outputs=out).difference
    assert found.kind == "final"
    assert found.segment is g.segments[-1]
    assert 'out["logits"]' in found.path.replace("'", '"')


def test_state_after_the_run(backend):
    """What a graph segment writes in place and nobody returns."""
    counter, step = torch.zeros((), device=backend.device), [1]

    def f(x):
        counter.add_(step[0])
        return x + 0

    x = backend.tensor(3)
    with backend.capture() as g:
        out = f(x)
    step[0] = 5
    found = g.verify(f, x, outputs=out).difference
    assert found.kind == "state"
    assert "counter" in found.path
    assert found.largest == 4


@pytest.mark.parametrize("mode", ["full", "debug"])
def test_other_modes(backend, mode):
    """Without breaks the output is compared, and debug mode runs the same comparison."""
    model, x = torch.nn.Linear(4, 4, device=backend.device), backend.tensor(2, 4)

    @eager_break_during_capture
    def double(t):
        return t * 2

    def f(x):
        return double(model(x)) + 1

    with torch.no_grad(), backend.capture(mode=mode) as g:
        out = f(x)
    assert g.verify(f, x, outputs=out)


def test_every_way_to_break_is_observed(backend):
    """break_on, add_eager, break_graph, `breaks=` and Live."""

    @eager_break_during_capture
    def add(t, n):
        return t + n

    @eager_break_during_capture
    def not_a_break_here(t):
        return t - 1

    step = [1.0]
    g = backend.capture(break_on=["aten::cumsum"], breaks=["add"])

    def f(x):
        break_graph()
        x = add(not_a_break_here(x * 2), Live(lambda: step[0]))
        x = x.cumsum(0)
        capture = BreakableCUDAGraphCapture.current()
        return g.add_eager(torch.neg, x) if capture is g else -x

    x = backend.tensor(3)
    with torch.no_grad():
        with g:
            out = f(x)
        assert g.num_eager_breaks == 3
        step[0] = 4.0
        assert g.verify(f, x, outputs=out)


def test_a_training_step(backend):
    """Parameters, gradients and the optimizer's state are restored; breaks in backward are compared."""

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t):
            return double(t)

        @staticmethod
        def backward(ctx, grad):
            return double(grad)

    @eager_break_during_capture
    def double(t):
        return t * 2

    model, x = torch.nn.Linear(4, 4, device=backend.device), backend.tensor(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step():
        optimizer.zero_grad(set_to_none=False)
        loss = Scale.apply(model(x)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    for _ in range(2):
        step()
    with backend.capture() as g:
        loss = step()
    before = [p.clone() for p in model.parameters()]
    report = g.verify(step, outputs=loss, state=optimizer)
    assert report, str(report)
    assert g.num_eager_breaks == 2
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


def test_the_ambient_state_is_that_of_the_capture(backend):
    """A caller who forgets no_grad or autocast gets no false alarm."""

    @eager_break_during_capture
    def double(t):
        return t * 2

    model, x = torch.nn.Linear(4, 4, device=backend.device), backend.tensor(2, 4)
    with torch.inference_mode(), torch.autocast(backend.device.type, torch.bfloat16), backend.capture() as g:
        out = double(model(x)) + 1
    assert out.dtype == torch.bfloat16
    assert g.verify(lambda: double(model(x)) + 1, outputs=out)


def test_tolerances(backend):
    """Given ones take the place of the dtype's own."""

    @eager_break_during_capture
    def look(t):
        return t * 1

    step = [0.0]
    x = backend.tensor(3)
    with backend.capture() as g:
        out = look(x + step[0])
    step[0] = 1e-3
    assert not g.verify(lambda: look(x + step[0]), outputs=out)
    assert g.verify(lambda: look(x + step[0]), outputs=out, atol=1e-2)


def test_it_needs_a_complete_capture(backend):
    """Before one, and inside of one, it is refused."""
    g = backend.capture()
    with pytest.raises(CaptureStateError, match="captured nothing yet"):
        g.verify(torch.neg, backend.tensor(3))
    x = backend.tensor(3)
    with g:
        out = -x
    with backend.capture(), pytest.raises(CaptureStateError, match="leave the outer `with` block first"):
        g.verify(torch.neg, x, outputs=out)


@eager_break_during_capture(name="decide")
def decide(flag):
    """A decision on the host."""
    return bool(flag.all())


@eager_break_during_capture(name="masked")
def masked(t, mask=None):
    """With a mask or without."""
    return t * 2 if mask is None else t * mask


def test_an_argument_that_was_not_passed_at_capture(backend):
    """The Python code took another branch; not the function's fault."""
    choice = [False]

    def f(x):
        y = x + 1
        return (masked(y, y * 3) if choice[0] else masked(y)) * 2

    x = backend.tensor(4)
    with torch.no_grad(), backend.capture() as g:
        out = f(x)
    assert g.verify(f, x, outputs=out)
    choice[0] = True
    report = g.verify(f, x, outputs=out)
    assert not report
    assert report.difference.kind == "passed"
    assert re.search(r"`mask` of .*masked.*: expected a tensor \[4\], not passed at capture", str(report))
    assert "took another branch" in str(report)
    assert "still agreed" not in str(report)


def test_a_value_that_a_break_returned_is_named_first(backend):
    """What comes after it was captured for the old one; alone it is no difference."""

    def f(x, flag):
        y = x + 1
        return y * 3 if decide(flag) else y * 5

    def unaffected(x, flag):
        decide(flag)
        return x * 2

    x, flag = backend.tensor(4), torch.ones(1, device=backend.device)
    for function, same in ((f, False), (unaffected, True)):
        flag.fill_(1)
        with torch.no_grad(), backend.capture() as g:
            out = function(x, flag)
        assert g.verify(function, x, flag, outputs=out)
        flag.zero_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FrozenValueWarning)
            report = g.verify(function, x, flag, outputs=out)
        assert bool(report) is same
    flag.fill_(1)
    with torch.no_grad(), backend.capture() as g:
        out = f(x, flag)
    flag.zero_()
    with pytest.warns(FrozenValueWarning):
        report = g.verify(f, x, flag, outputs=out)
    assert report.difference.kind == "returned"
    told = r"eager segment \d \(decide.*\n  `out` of its output: expected False, found True at capture"
    assert re.search(told, str(report))


@eager_break_during_capture(name="measure")
def measure(y):
    """A number in a dict, and a tensor."""
    return {"largest": float(y.max()), "values": y * 1}


def test_a_number_in_a_container_that_captured_code_computed_with(backend):
    """It is put into the dict at each replay, and the graph goes on with the old one."""

    def f(x):
        y = x * 2
        return y / measure(y)["largest"]

    x = backend.tensor(4).abs()
    with torch.no_grad(), backend.capture() as g:
        out = f(x)
    assert g.verify(f, x, outputs=out)
    x.mul_(3)
    found = g.verify(f, x, outputs=out).difference
    assert found.kind == "returned"
    assert found.segment.name == "measure"
    assert found.path == '`out["largest"]` of its output'
    assert g.verify(lambda x: measure(x * 2)["values"], x)  # alone it is no difference


def test_inputs_that_repeat_their_elements(backend):
    """Expanded tensors and overlapping windows are restored as memory."""

    @eager_break_during_capture
    def double(t):
        return t * 2

    row = backend.tensor(3)
    inputs = row.expand(2, 3), backend.tensor(6).as_strided((2, 3), (1, 1))
    for x in inputs:
        with torch.no_grad(), backend.capture() as g:
            out = double(x) + 1
        for seed in range(3):
            row.copy_(backend.tensor(3, seed=seed))
            before = x.clone()
            assert g.verify(lambda x: double(x) + 1, x, outputs=out)
            assert torch.equal(x, before)


class TestGradients:
    """`.grad` is state: eager code adds to it, or puts another tensor there; a replay does neither."""

    @pytest.fixture
    def micro(self, backend):
        """A layer, a function that leaves gradients, and the function's input."""
        layer, x = torch.nn.Linear(2, 1, device=backend.device), backend.tensor(3, 2)

        def micro(x):
            loss = layer(x).square().mean()
            loss.backward()
            return loss.detach()

        micro(x)
        layer.zero_grad()
        return layer, micro, x

    def test_they_are_compared(self, backend, micro):
        """Captured with none, a replay overwrites what eager code adds to."""
        layer, micro, x = micro
        with backend.capture() as g:
            out = micro(x)
        gradient = layer.weight.grad
        before = gradient.clone()
        found = g.verify(micro, x, outputs=out).difference
        assert found.kind == "state"
        assert "weight.grad" in found.path
        assert layer.weight.grad is gradient
        assert torch.equal(gradient, before)

    def test_one_that_is_put_anew(self, backend, micro):
        """After zero_grad() eager code makes a tensor that the replay does not know."""
        layer, micro, x = micro
        with backend.capture() as g:
            out = micro(x)
        layer.zero_grad()
        report = g.verify(micro, x, outputs=out)
        assert report.nondeterminism is None
        assert report.difference.kind == "anew"
        assert "weight.grad" in report.difference.path
        assert layer.weight.grad is None

    def test_a_step_that_begins_with_zero_grad_agrees(self, backend, micro):
        """It puts the gradients anew, but no run reads those of the one before."""
        layer, micro, x = micro

        def step(x):
            layer.zero_grad()
            return micro(x)

        with backend.capture() as g:
            out = step(x)
        for seed in range(3):
            x.copy_(backend.tensor(3, 2, seed=seed))
            assert g.verify(step, x, outputs=out)


class TestPutAnew:
    """A tensor that a run puts into the place of another is named, not called chance."""

    def check(self, g, f, args, out, path):
        report = g.verify(f, *args, outputs=out)
        assert report.nondeterminism is None
        assert report.difference.kind == "anew"
        assert f"`{path}`" in report.difference.path
        assert "never changes which tensor stands there" in str(report)

    def test_an_item_of_an_argument(self, backend):
        """And it stands there again afterwards."""

        def f(state):
            state["h"] = state["h"] * 2 + 1
            return state["h"] * 1

        state = {"h": backend.tensor(3)}
        with torch.no_grad(), backend.capture() as g:
            out = f(state)
        stands = state["h"]
        before = stands.clone()
        self.check(g, f, [state], out, 'args[0]["h"]')
        assert state["h"] is stands
        assert torch.equal(stands, before)

    def test_an_attribute_of_a_module(self, backend):
        """One that is only written is no difference."""

        class Streaming(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.h, self.last = torch.zeros(3, device=backend.device), None

            def forward(self, x):
                self.last = x * 3
                return self.step(x)

            def step(self, x):
                return x + 1

        class Carrying(Streaming):
            def step(self, x):
                self.h = self.h + x
                return self.h * 1

        x = backend.tensor(3)
        for model in (Streaming(), Carrying()):
            with torch.no_grad():
                model(x)
                with backend.capture() as g:
                    out = model(x)
            x.copy_(backend.tensor(3, seed=1))
            if type(model) is Streaming:
                assert g.verify(model, x, outputs=out)
            else:
                self.check(g, model, [x], out, "Carrying.h")

    def test_in_an_object_that_is_put_anew_itself(self, backend):
        """The place cannot be put back by itself; it is named all the same."""

        class Layer:
            def __init__(self, keys):
                self.keys = keys

        layers = [Layer(torch.zeros(3, device=backend.device))]

        def f(x):
            layers[0] = Layer(layers[0].keys + x)
            return layers[0].keys * 1

        x = backend.tensor(3)
        with torch.no_grad(), backend.capture() as g:
            out = f(x)
        self.check(g, f, [x], out, "f.layers[0].keys")

    def test_chance_is_still_called_so(self, backend):
        """A place that is put anew and not read does not hide it."""
        count = itertools.count()
        last = []

        def f(x):
            last[:] = [x * 2]
            return x + next(count)

        x = backend.tensor(3)
        f(x)
        with torch.no_grad(), backend.capture() as g:
            out = f(x)
        report = g.verify(f, x, outputs=out)
        assert report.nondeterminism.kind == "final"
        assert report.difference is None


def test_a_tensor_for_none(backend):
    """An optional argument that the capture had not, or had alone."""
    mask = [None]

    def f(x):
        return masked(x + 1, mask[0]) * 2

    x = backend.tensor(4)
    for then, now, told in ((None, x, "expected a tensor [4], found None"), (x, None, "found a tensor [4]")):
        mask[0] = then
        with torch.no_grad(), backend.capture() as g:
            out = f(x)
        assert g.verify(f, x, outputs=out)
        mask[0] = now
        found = g.verify(f, x, outputs=out).difference
        assert (found.kind, found.segment.name) == ("passed", "masked")
        assert told in found.detail


def test_memory_that_the_function_keeps_may_move(backend):
    """What verify itself holds does not count as an owner of what a break returned."""

    class Model:
        last = None

        @eager_break_during_capture
        def double(self, t):
            self.last = t * 2
            return self.last

        def __call__(self, x):
            return self.double(x + 1) * 3

    model, x = Model(), backend.tensor(3)
    with torch.no_grad():
        model(x)
        with backend.capture() as g:
            out = model(x)
    for seed in range(3):
        x.copy_(backend.tensor(3, seed=seed))
        report = g.verify(model, x, outputs=out)
        assert report, str(report)
        g.replay()
        assert torch.equal(out, model(x))
