"""Capture and replay: segments, states, modes, and what bad input gets."""

import threading
import warnings

import pytest
import torch

import segcapture
from segcapture import (
    BreakableCUDAGraphCapture,
    CaptureFailedError,
    CaptureStateError,
    EagerSegment,
    GraphSegment,
    break_graph,
    eager_break_during_capture,
    is_capturing,
)


@eager_break_during_capture
def host_scale(x, n):
    """Cannot be captured: reads `n` on the host."""
    return x * (n.item() + 1)


def model(x, n):
    """Graph, eager, graph."""
    h = x @ x.T
    return host_scale(h, n).relu() + 1


def inputs(backend):
    return [backend.tensor(4, 4), torch.tensor(2.0, device=backend.device)]


def test_the_public_names():
    """The package exports what its documents name, and nothing else."""
    assert sorted(segcapture.__all__) == [
        "BreakableCUDAGraphCapture",
        "Bucket",
        "CaptureFailedError",
        "CaptureStateError",
        "EagerSegment",
        "FrozenValueWarning",
        "GraphSegment",
        "GraphedCallable",
        "Live",
        "OutputMismatchError",
        "SegcaptureError",
        "break_graph",
        "check_same_segments",
        "eager_break_during_capture",
        "find_breaks",
        "is_capturing",
    ]


def test_replay_equals_eager(backend):
    """Replays on fresh inputs give what the function gives."""
    backend.check(model, inputs(backend), "geg")


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_outputs_are_valid_after_capture(backend, guard):
    """Capture is a real forward pass: nothing needs to be replayed first (C1)."""
    x, n = inputs(backend)
    with guard():
        expected = model(x, n)
        with backend.capture() as g:
            out = model(x, n)
        assert torch.equal(out, expected)
        x.add_(1)
        g.replay()
        assert torch.equal(out, model(x, n))


def test_eager_code_sees_real_values_at_capture(backend):
    """A break reads what the graph segment before it computed (C1)."""
    seen = []

    @eager_break_during_capture
    def look(t):
        seen.append(t.tolist())

    x = torch.ones(3, device=backend.device)
    with backend.capture() as g:
        look(x * 7)
    x.fill_(2)
    g.replay()
    assert seen == [[7.0] * 3, [14.0] * 3]


def test_state_advances_once_in_capture_and_once_in_each_replay(backend):
    """A counter in a graph segment and one in a break count the passes (C1)."""
    in_graph = torch.zeros(1, device=backend.device)
    in_break = torch.zeros(1, device=backend.device)

    @eager_break_during_capture
    def count():
        in_break.add_(1)

    with backend.capture() as g:
        in_graph.add_(1)
        count()
    for _ in range(3):
        g.replay()
    assert in_graph.item() == in_break.item() == 4


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("breaks", [1, 2, 5])
@pytest.mark.parametrize("after", [0, 1])
def test_empty_segments_do_not_exist(backend, before, breaks, after):
    """Breaks at the start, at the end and in a row leave no empty graph, and warn of none (C11)."""

    @eager_break_during_capture
    def double(t):
        return t * 2

    def f(x):
        if before:
            x = x + 1
        for _ in range(breaks):
            x = double(x)
        if after:
            x = x - 3
        return x

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backend.check(f, [backend.tensor(5)], "g" * before + "e" * breaks + "g" * after)


def test_a_capture_without_operations_is_empty(backend):
    """Nothing captured is nothing replayed."""
    with backend.capture() as g:
        pass
    assert g.segments == ()
    g.replay()


def test_break_graph_splits(backend):
    """break_graph ends a graph segment, and nothing runs in between."""

    def f(x):
        y = x + 1
        break_graph("here")
        return y * 2

    g = backend.check(f, [backend.tensor(3)], "gg")
    assert g.segments[1].name == "here"
    assert torch.equal(f(backend.tensor(3)), (backend.tensor(3) + 1) * 2)


def test_add_eager(backend):
    """add_eager takes a function with or without arguments, and returns its output."""
    x = backend.tensor(3)
    log = []
    with backend.capture() as g:
        y = x * 2
        z = g.add_eager(lambda t, plus: t + plus, y, plus=1)
        g.add_eager(lambda: log.append(1))
        out = z * 3
    assert [s.kind for s in g.segments] == ["graph", "eager", "eager", "graph"]
    x.fill_(1)
    g.replay()
    assert torch.equal(out, torch.full_like(out, 9))
    assert log == [1, 1]


def test_segments_say_where_they_come_from(backend):
    """Index, kind, name and the user's file:line."""
    x, n = inputs(backend)
    with backend.capture(name="decode") as g:
        model(x, n)
    first, second, third = g.segments
    assert isinstance(first, GraphSegment)
    assert isinstance(second, EagerSegment)
    assert [s.index for s in g.segments] == [0, 1, 2]
    assert second.name == "host_scale"
    assert [s.location.rsplit(":", 1)[0] for s in g.segments] == [__file__] * 3
    assert third.location == second.location
    assert (g.num_graphs, g.num_eager_breaks, g.name) == (2, 1, "decode")
    text = g.describe()
    assert str(g) == text
    assert "capture 'decode'" in text
    assert "host_scale" in text
    assert "test_capture.py:" in text
    with pytest.raises(AttributeError):
        second.name = "other"


def test_steps_run_one_segment_at_a_time(backend):
    """Between steps memory shows the state after the segment."""
    x, n = inputs(backend)
    marks = torch.zeros(2, device=backend.device)

    @eager_break_during_capture
    def mark():
        marks[1] += 1

    with backend.capture() as g:
        marks[0] += 1
        mark()
        marks[0] += 1
    seen = []
    for step in g.steps():
        if step.kind != "operator":  # debug mode stops there too
            seen.append((step.kind, marks.tolist()))
    assert seen == [("graph", [3, 1]), ("eager", [3, 2]), ("graph", [4, 2])]


def test_reset_lets_the_object_capture_again(backend):
    """reset() frees the segments, is idempotent, and a second capture works."""
    x, n = inputs(backend)
    g = backend.capture()
    for _ in range(3):
        with torch.no_grad(), g:
            out = model(x, n)
        x.add_(1)
        g.replay()
        assert torch.equal(out, model(x, n))
        g.reset()
        g.reset()
        assert g.segments == ()
        with pytest.raises(CaptureStateError, match="nothing to replay"):
            g.replay()


def test_current_and_is_capturing(backend):
    """True inside of a capture, eager breaks included, and only in its thread."""
    seen = {}

    @eager_break_during_capture
    def in_break():
        seen["break"] = is_capturing()

    def in_thread():
        seen["thread"] = (is_capturing(), BreakableCUDAGraphCapture.current())

    assert not is_capturing()
    with backend.capture() as g:
        assert BreakableCUDAGraphCapture.current() is g
        assert is_capturing()
        in_break()
        worker = threading.Thread(target=in_thread)
        worker.start()
        worker.join()
    assert not is_capturing()
    assert seen == {"break": True, "thread": (False, None)}


class TestModes:
    """The same model code in each mode."""

    def test_full_captures_the_breaks_too(self, backend):
        """One graph segment; the decorated function is a plain call (C2)."""
        if backend.mode == "debug":
            backend = type(backend)("cuda", backend.device, emulated=False)

        @eager_break_during_capture
        def double(t):
            return t * 2

        def f(x):
            y = double(x + 1)
            break_graph()
            return BreakableCUDAGraphCapture.current().add_eager(double, y) if is_capturing() else double(y)

        backend.check(f, [backend.tensor(3)], "g", mode="full")

    def test_debug_has_the_same_segments(self, backend):
        """No CUDA graph, the same path."""
        g = backend.check(model, inputs(backend), "geg", mode="debug")
        assert g.mode == "debug"

    def test_the_environment_sets_the_default(self, backend, monkeypatch):
        """SEGCAPTURE_MODE counts where mode= is left out."""
        monkeypatch.setenv("SEGCAPTURE_MODE", "debug")
        assert BreakableCUDAGraphCapture(device=backend.device).mode == "debug"
        assert BreakableCUDAGraphCapture(device=backend.device, mode="full").mode == "full"

    def test_a_misspelt_mode_lists_the_valid_ones(self, backend, monkeypatch):
        """From the argument and from the environment."""
        with pytest.raises(ValueError, match="mode='braekable'.*'breakable', 'full', 'debug'"):
            backend.capture(mode="braekable")
        monkeypatch.setenv("SEGCAPTURE_MODE", "nothing")
        with pytest.raises(ValueError, match="SEGCAPTURE_MODE='nothing'.*'breakable', 'full', 'debug'"):
            BreakableCUDAGraphCapture(device=backend.device)


class TestBreaks:
    """Which decorated functions break is a property of the capture."""

    @pytest.mark.parametrize(
        ("breaks", "kinds"),
        [
            (None, "gegeg"),
            (("first",), "geg"),
            ({"second"}, "geg"),
            ((), "g"),
            (lambda name: name.startswith("f"), "geg"),
        ],
    )
    def test_names_and_predicates_choose(self, backend, breaks, kinds):
        """A collection of names, a predicate, or all."""

        @eager_break_during_capture(name="first")
        def f(t):
            return t + 1

        @eager_break_during_capture(name="second")
        def g(t):
            return t * 3

        backend.check(lambda x: g(f(x - 1) * 2) + 5, [backend.tensor(4)], kinds, breaks=breaks)

    def test_a_string_is_no_collection_of_names(self, backend):
        """Its characters would match nothing, silently."""
        with pytest.raises(ValueError, match="'attention'"):
            backend.capture(breaks="attention")

    def test_a_name_that_no_called_function_has(self, backend):
        """Misspelt, it would capture what must not be; the names that were called are listed."""

        @eager_break_during_capture(name="attention")
        def f(t):
            return t + 1

        def model(x):
            return f(x) * 2

        x = backend.tensor(4)
        with pytest.raises(
            CaptureFailedError, match=r"breaks names 'attentoin', .* were: 'attention'"
        ) as error:
            with torch.no_grad(), backend.capture(breaks=["attentoin"]):
                model(x)
        notes = getattr(error.value, "__notes__", [])
        assert not any("could not be captured" in note for note in notes)
        backend.check(model, [x], "g", breaks=["attentoin"], mode="full")
        backend.check(model, [x], "eg", breaks=["attention"])
        backend.check(lambda x: x * 2, [x], "g", breaks=lambda name: name == "attention")

    def test_barrier_runs_between_graph_and_function_at_capture_only(self, backend):
        """After the segment has ended, before the function, never at replay."""
        log = []

        @eager_break_during_capture
        def f(t):
            log.append("f")

        x = torch.ones(2, device=backend.device)
        with backend.capture(barrier=lambda: log.append("barrier")) as g:
            f(x + 1)
        assert log == ["barrier", "f"]
        g.replay()
        assert log == ["barrier", "f", "f"]

    def test_capture_stub_runs_at_capture_only(self, backend):
        """The function itself runs at replay, and outside of captures."""

        @eager_break_during_capture(capture_stub=lambda t: torch.zeros_like(t))
        def f(t):
            return t + 1

        x = torch.ones(2, device=backend.device)
        with backend.capture() as g:
            out = f(x * 2) * 10
        assert out.tolist() == [0, 0]
        g.replay()
        assert out.tolist() == [30, 30]
        assert f(x).tolist() == [2, 2]


class TestBadInput:
    """A clear error, and nothing lost."""

    def test_nested_capture(self, backend):
        """Refused, and the outer capture goes on."""
        x, n = inputs(backend)
        with torch.no_grad(), backend.capture() as g:
            with pytest.raises(
                CaptureStateError, match=r"already capturing \(segment 0, opened at .*test_capture"
            ):
                backend.capture().__enter__()
            out = model(x, n)
        g.replay()
        assert torch.equal(out, model(x, n))

    def test_a_capture_inside_of_an_eager_segment(self, backend):
        """Captures do not nest there either."""

        @eager_break_during_capture
        def f():
            with pytest.raises(CaptureStateError, match="already capturing"), backend.capture():
                pass

        with backend.capture():
            f()

    def test_replay_before_during_and_after_a_failed_capture(self, backend):
        """Each says what the state is, and what to do."""
        g = backend.capture(name="g")
        with pytest.raises(CaptureStateError, match="Capture 'g' has captured nothing yet"):
            g.replay()
        with pytest.raises(CaptureStateError, match="has captured nothing yet"):
            g.steps()
        with pytest.raises(ZeroDivisionError), g:
            with pytest.raises(CaptureStateError, match="still capturing"):
                g.replay()
            with pytest.raises(CaptureStateError, match="leave the `with` block"):
                g.reset()
            raise ZeroDivisionError
        with pytest.raises(CaptureStateError, match=r"failed.*reset\(\)"):
            g.replay()
        with pytest.raises(CaptureStateError, match=r"failed.*reset\(\)"):
            g.__enter__()
        g.reset()
        with g:
            torch.ones(2, device=backend.device)
        g.replay()

    def test_a_capture_is_not_entered_twice(self, backend):
        """Without reset() the first segments would be lost."""
        g = backend.capture()
        with g:
            torch.ones(2, device=backend.device)
        with pytest.raises(CaptureStateError, match=r"complete.*reset\(\)"):
            g.__enter__()
        assert len(g.segments) == 1

    def test_add_eager_outside_of_the_capture(self, backend):
        """Before, after, and in another thread."""
        g = backend.capture()
        with pytest.raises(CaptureStateError, match="add_eager needs a running capture"):
            g.add_eager(print)
        errors = []

        def other():
            try:
                g.add_eager(print)
            except CaptureStateError as error:
                errors.append(str(error))

        with g:
            worker = threading.Thread(target=other)
            worker.start()
            worker.join()
        assert "another thread" in errors[0]
        with pytest.raises(CaptureStateError):
            g.add_eager(print)

    def test_a_non_callable(self, backend):
        """TypeError, and the capture is whole."""
        with backend.capture() as g:
            with pytest.raises(TypeError, match="add_eager takes a function, got 3"):
                g.add_eager(3)
            torch.ones(2, device=backend.device)
        g.replay()
        with pytest.raises(TypeError, match="takes a function"):
            eager_break_during_capture(3)
        with pytest.raises(TypeError, match="Live takes"):
            segcapture.Live(3)

    def test_exit_in_another_thread(self, backend):
        """Refused there; the thread that entered can still leave."""
        g = backend.capture().__enter__()
        errors = []

        def leave():
            try:
                g.__exit__(None, None, None)
            except CaptureStateError as error:
                errors.append(str(error))

        worker = threading.Thread(target=leave)
        worker.start()
        worker.join()
        torch.ones(2, device=backend.device)
        g.__exit__(None, None, None)
        assert "another thread" in errors[0]
        assert len(g.segments) == 1

    def test_execute_false_on_the_emulated_backend(self, emulated):
        """The tape records by running."""
        with pytest.raises(ValueError, match="execute=False"):
            emulated.capture(execute=False)

    def test_pool_and_stream_of_another_device(self, emulated):
        """There is neither on the CPU."""
        with pytest.raises(ValueError, match="pool"):
            emulated.capture(pool=(0, 1))
        with pytest.raises(ValueError, match="stream"):
            emulated.capture(stream=object())

    def test_unknown_devices_and_error_modes(self):
        """The message shows what is possible."""
        with pytest.raises(ValueError, match="CUDA device or the CPU"):
            BreakableCUDAGraphCapture(device="meta")
        with pytest.raises(ValueError, match="'thread_local', 'global', 'relaxed'"):
            BreakableCUDAGraphCapture(device="cpu", capture_error_mode="local")

    def test_a_generator_of_another_device(self, backend):
        """Refused by name: torch 2.11 crashes on it."""
        other = torch.Generator("cpu")
        if backend.device.type == "cpu":
            with backend.capture(generators=[other]):
                pass
        else:
            with pytest.raises(ValueError, match="one is of cpu, and the capture of cuda"):
                backend.capture(generators=[other])

    def test_coroutines_and_generators_are_refused(self):
        """Their bodies run after the call."""

        async def coroutine():
            pass

        def generator():
            yield

        async def async_generator():
            yield

        class Callable:
            async def __call__(self):
                pass

        for fn in (coroutine, generator, async_generator, Callable()):
            with pytest.raises(TypeError, match="Mark an ordinary function"):
                eager_break_during_capture(fn)

    def test_an_exception_that_the_block_catches(self, backend):
        """What would have been captured after it is not known: the capture fails, by name."""

        @eager_break_during_capture
        def fails():
            raise KeyError("mine")

        with pytest.raises(CaptureFailedError, match="KeyError, which the code in the `with` block caught"):
            with backend.capture() as g:
                try:
                    fails()
                except KeyError:
                    pass
                torch.ones(2, device=backend.device)
        with pytest.raises(CaptureStateError):
            g.replay()

    def test_replay_inside_of_a_graph_segment(self, backend):
        """Refused there, allowed in an eager segment."""
        x = torch.ones(2, device=backend.device)
        with backend.capture() as inner:
            y = x + 1
        replayed = eager_break_during_capture(lambda: inner.replay(), name="inner")
        with backend.capture() as g:
            with pytest.raises(CaptureStateError, match="inside of a graph segment"):
                inner.replay()
            x.mul_(3)
            replayed()
            z = y * 1
        assert z.tolist() == [4, 4]
        g.replay()
        assert z.tolist() == [10, 10]


class TestPlainCalls:
    """Everywhere else a break is a plain call (C2)."""

    def test_kinds_of_callables(self, backend):
        """Functions, methods, static and class methods, forward, callables, partials, with options."""

        class Layer(torch.nn.Module):
            scale = 3.0

            @eager_break_during_capture
            def forward(self, t):
                return t * self.scale

            @eager_break_during_capture
            def method(self, t):
                return t + self.scale

            @staticmethod
            @eager_break_during_capture
            def below_static(t):
                return t - 1

            @eager_break_during_capture(name="outer")
            @staticmethod
            def above_static(t):
                return t - 2

            @eager_break_during_capture
            @classmethod
            def of_class(cls, t):
                return t / cls.scale

        layer = Layer()
        called = eager_break_during_capture(torch.nn.ReLU())

        def f(x):
            x = layer(x + 1)
            x = layer.method(x)
            x = layer.below_static(x)
            x = Layer.above_static(x)
            x = Layer.of_class(x)
            return called(x) + 0

        g = backend.check(f, [backend.tensor(4)], "geeeeeeg")
        names = [s.name for s in g.segments if s.kind == "eager"]
        assert [name.rsplit(".", 1)[-1] for name in names] == [
            "forward", "method", "below_static", "outer", "of_class", "ReLU",
        ]  # fmt: skip

    def test_the_signature_is_kept(self):
        """Name, docstring and signature; enable=False returns the function itself."""
        import inspect

        def f(a, *, b=2):
            """Says something."""
            return a + b

        marked = eager_break_during_capture(f)
        assert (marked.__name__, marked.__doc__) == ("f", "Says something.")
        assert str(inspect.signature(marked)) == "(a, *, b=2)"
        assert marked(1, b=3) == 4
        assert eager_break_during_capture(enable=False)(f) is f

    def test_a_break_inside_of_a_break(self, backend):
        """The inner one is part of the outer, at capture and at replay."""

        @eager_break_during_capture
        def inner(t):
            return t + t.sum().item()

        @eager_break_during_capture
        def outer(t):
            break_graph()
            return inner(t) * 2

        backend.check(lambda x: outer(x + 1) - 1, [backend.tensor(3)], "geg")


class TestGradMode:
    """An eager break is opaque to autograd (C7)."""

    @pytest.mark.parametrize("where", ["argument", "output"])
    def test_requires_grad_is_refused_with_the_ways_out(self, backend, where):
        """In torch's default grad mode: what is returned, made from an argument or not."""
        weight = torch.nn.Parameter(torch.ones(2, device=backend.device))
        fn = eager_break_during_capture(lambda *args: args[0] * 2 if args else weight * 2, name="f")
        with pytest.raises(CaptureFailedError, match="requires grad") as info:
            with backend.capture():
                fn(weight) if where == "argument" else fn()
        assert (info.value.segment, info.value.path) == (0, "out")
        for way in ("torch.no_grad()", "torch.inference_mode()", "autograd.Function"):
            assert way in str(info.value)
        with torch.no_grad(), backend.capture() as g:
            out = fn(weight)
        g.replay()
        assert out.tolist() == [2, 2]

    def test_an_argument_that_requires_grad_may_be_read(self, backend):
        """The loss between forward and backward, in a tuple and a list too (C3)."""
        weight = torch.nn.Parameter(torch.ones(2, device=backend.device))
        x, log = torch.ones(2, device=backend.device), []

        @eager_break_during_capture
        def read(loss, more, listed):
            log.append((loss.item(), more[0].item(), listed[0].detach().clone()))

        with backend.capture() as g:
            loss = (weight * x).sum()
            read(loss, (loss * 2, 1), [weight])
            loss.backward()
        for value in (2.0, 3.0, 4.0):
            x.fill_(value)
            g.replay()
            assert log[-1][:2] == (2 * value, 4 * value)
            assert weight.grad.tolist() == [value] * 2

    @pytest.mark.parametrize("write", [lambda t: t.detach().mul_(2), lambda t: t.mul_(2)])
    def test_an_argument_that_requires_grad_must_not_be_written_to(self, backend, write):
        """A replay passes a detached alias: the graph of autograd would know nothing of it."""
        weight = torch.nn.Parameter(torch.ones(2, device=backend.device))

        def call(t):
            with torch.no_grad():
                write(t)

        fn = eager_break_during_capture(call, name="fn")
        with pytest.raises(CaptureFailedError, match="wrote to an argument that requires grad") as info:
            with backend.capture():
                fn(weight * 2)
        assert info.value.segment == 1
        backend.check(lambda t: t * 2, [backend.tensor(3)], "g")

    @pytest.mark.parametrize("at_replay", [torch.no_grad, torch.inference_mode, torch.enable_grad])
    @pytest.mark.parametrize("at_capture", [torch.no_grad, torch.inference_mode, torch.enable_grad])
    def test_segments_replay_under_the_mode_of_the_capture(self, backend, at_capture, at_replay):
        """Whatever the caller's is."""
        seen = []

        @eager_break_during_capture
        def look(t):
            seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
            return t * 2

        x = torch.ones(3, device=backend.device)
        with at_capture(), backend.capture() as g:
            out = look(x + 1) + 1
        with at_replay():
            before = (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
            x.fill_(4)
            g.replay()
            assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == before
        assert seen[0] == seen[1]
        assert out.tolist() == [11] * 3

    def test_a_mode_set_inside_of_the_capture(self, backend):
        """Each eager segment replays under what was set around its own call."""
        seen = []
        look = eager_break_during_capture(
            lambda: seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled(backend.device.type))),
            name="look",
        )
        with backend.capture() as g:
            look()
            with torch.no_grad():
                look()
            with torch.autocast(backend.device.type, dtype=torch.bfloat16):
                look()
        first, seen[:] = list(seen), []
        with torch.inference_mode():
            g.replay()
        assert seen == first == [(True, False), (False, False), (True, True)]


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_a_gpu_where_there_is_none(monkeypatch, device):
    """It is named, with what works instead."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(ValueError, match=f"device='{device}', and torch finds no GPU here: device='cpu'"):
        BreakableCUDAGraphCapture(device=device)
