"""Finding breaks, the segment table, steps, times and memory."""

import builtins
import gc
import importlib
import itertools
import re
import weakref

import pytest
import torch
from torch.profiler import ProfilerActivity

import segcapture
from segcapture import (
    CaptureStateError,
    EagerSegment,
    break_graph,
    eager_break_during_capture,
    find_breaks,
    is_capturing,
)
from segcapture.backends.cuda.graph import demangle
from segcapture.inspect.profile import ProfileReport
from segcapture.inspect.table import _brief_name


@eager_break_during_capture
def attend(x, cache, scale, size, label):
    """A break with frozen arguments, a kept one and a bridge of 32 bytes."""
    cache.add_(x)
    return x * scale * x.max().item()


def model(x, cache):
    h = x * 2 + 1
    h = attend(h, cache, 0.123456789, 8, "a long label that goes on, and on, and on")
    break_graph("tail")
    return h.relu() - 1


@pytest.fixture
def captured(backend):
    """Capture, input and output of the model above."""
    x, cache = backend.tensor(8), torch.zeros(8, device=backend.device)
    with torch.no_grad(), backend.capture(name="decode") as g:
        out = model(x, cache)
    return g, x, cache, out


class TestFindBreaks:
    """`find_breaks` lists what a capture would refuse, without capturing."""

    def test_all_at_once_by_line(self, backend):
        """Operators and conversions to Python, with their lines, reasons and numbers of calls."""

        def bad(x):
            n = x.nonzero()
            if x.sum() > 0:
                x = x + 1
            for _ in range(3):
                x = x * x.max().item()
            y = x[x > 0]
            return n, y.tolist()

        found = find_breaks(bad, backend.tensor(8).abs())
        first = bad.__code__.co_firstlineno
        assert [(f.operator, int(f.location.rpartition(":")[2]) - first, f.calls) for f in found] == [
            ("aten::nonzero", 1, 1),
            ("Tensor.__bool__", 2, 1),
            ("Tensor.item", 5, 3),
            ("aten::index", 6, 1),
            ("Tensor.tolist", 7, 1),
        ]
        assert {f.location.rpartition(":")[0] for f in found} == {__file__}
        text = str(found)
        assert "5 operators at 5 lines cannot be captured (0 eager breaks passed)" in text
        assert "x = x * x.max().item()" in text
        assert "reads a value on the host (3 calls)" in text
        assert "@eager_break_during_capture" in text

    def test_what_runs_in_breaks_is_not_listed(self, backend):
        """They are counted."""
        found = find_breaks(model, backend.tensor(8), torch.zeros(8, device=backend.device))
        assert found == ()
        assert str(found) == "No operator needs an eager break (1 eager break passed)."

    @pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode, torch.enable_grad])
    def test_ambient_modes_change_nothing(self, backend, guard):
        """Composite operators are opened, whatever autograd does with them."""
        layer = torch.nn.Linear(4, 4).to(backend.device)
        with guard():
            found = find_breaks(lambda x: layer(x)[torch.where(x > 0)], backend.tensor(2, 4))
        assert [f.operator for f in found] == ["aten::nonzero"]

    def test_it_agrees_with_a_capture(self, backend):
        """What is found is refused, and once it is in breaks the capture works."""

        def sizes(x):
            return x.unique()

        x = backend.tensor(8)
        assert [f.operator for f in find_breaks(sizes, x)] == ["aten::_unique2"]
        with pytest.raises(RuntimeError), torch.no_grad(), backend.capture():
            sizes(x)
        fixed = eager_break_during_capture(sizes)
        assert find_breaks(fixed, x) == ()
        with torch.no_grad(), backend.capture():
            fixed(x)

    def test_one_hot_with_classes_is_fine(self, backend):
        """The CPU kernel reads values that CUDA's does not."""
        index = torch.arange(3, device=backend.device)
        assert find_breaks(torch.nn.functional.one_hot, index, 4) == ()
        assert len(find_breaks(torch.nn.functional.one_hot, index)) > 0

    def test_breaks_in_backward_are_seen(self, backend):
        """Backward runs on this thread."""

        class Clip(torch.autograd.Function):
            @staticmethod
            def forward(ctx, t):
                return t * 1

            @staticmethod
            def backward(ctx, grad):
                return grad / grad.max().item()

        x = backend.tensor(3).requires_grad_()
        found = find_breaks(lambda: Clip.apply(x).sum().backward())
        assert [f.operator for f in found] == ["aten::_local_scalar_dense"]

    def test_an_exception_comes_through(self, backend):
        """With what was found until then."""

        def failing(x):
            x.tolist()
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError) as caught:
            find_breaks(failing, backend.tensor(2))
        assert "Tensor.tolist" in caught.value.__notes__[0]
        assert not is_capturing()

    def test_inside_of_a_capture_it_is_refused(self, backend):
        """It is about a run without one."""
        x = backend.tensor(2)
        with backend.capture(), pytest.raises(CaptureStateError, match="leave the outer `with` block first"):
            find_breaks(torch.neg, x)


class TestTable:
    """`describe`, rich, HTML and Graphviz."""

    def test_text(self, captured, backend):
        """Places, numbers of operations, bridges, frozen arguments by name, totals."""
        g, *_ = captured
        text = g.describe()
        lines = text.splitlines()
        assert str(g) == text
        assert lines[0].startswith("capture 'decode' on ")
        assert "2 graph segments, 1 eager segment" in lines[0]
        assert [line.split()[1] for line in lines[2:5]] == ["graph", "eager", "graph"]
        assert [segment.name for segment in g.segments] == ["start", "attend", "tail"]
        assert re.search(
            r"attend +test_inspection.py:\d+ +32 B +scale=0.1235, size=8, label='a long", lines[3]
        )
        assert max(map(len, lines)) < 200
        assert lines[-1].startswith("total: ")
        assert lines[-1].endswith("bridges of 32 B")
        if backend.emulated:
            assert "aten::mul, aten::add" in lines[2]
            assert "total: 4 operators" in lines[-1]

    def test_names_of_nodes(self, captured, backend):
        """Demangled kernels, or operators; as many as there are operations."""
        g, *_ = captured
        first = g.segments[0]
        assert len(first.nodes) == first.operations
        kinds = {kind for kind, _ in first.nodes}
        if backend.emulated:
            assert first.nodes == [("operator", "aten::mul"), ("operator", "aten::add")]
        else:
            assert kinds == {"kernel"}
            assert all("at::native" in name and "elementwise_kernel" in name for _, name in first.nodes)
            assert "elementwise_kernel" in g.describe()

    def test_rich(self, captured):
        """Printed by rich as a table, with brackets left alone."""
        rich_console = pytest.importorskip("rich.console")
        g, *_ = captured
        console = rich_console.Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
        console.print(g)
        console.file.close()
        text = console.export_text()
        assert "attend" in text
        assert "scale=0.1235" in text

    def test_html(self, captured):
        """A table with escaped cells."""
        g, *_ = captured
        html = g._repr_html_()
        assert html.count("<tr") == 4
        assert "label=&#x27;a long" in html

    def test_dot(self, captured, tmp_path):
        """Nodes for segments; the edge behind a break has the bytes of its bridges."""
        g, *_ = captured
        g.to_dot(tmp_path / "g.dot")
        text = (tmp_path / "g.dot").read_text()
        assert text.startswith('digraph "decode" {')
        assert "s0 -> s1;" in text
        assert 's1 -> s2 [label="32 B"];' in text
        assert text.count("label=") == 4

    def test_before_a_capture(self, backend):
        """An empty table is no error."""
        assert "0 graph segments, 0 eager segments" in str(backend.capture())

    def test_graph_segments_say_where_they_begin(self, backend):
        """At the start, after a break, or where `break_graph` says."""
        x, cache = backend.tensor(8), torch.zeros(8, device=backend.device)
        with torch.no_grad(), backend.capture() as g:
            attend(x * 2, cache, 1.0, 1, "") + 1
            break_graph("tail")
            x * 2
        names = ["start", "attend", "after attend", "tail"]
        assert [segment.name for segment in g.segments] == names
        assert [line.split("  ")[2].strip() for line in g.describe().splitlines()[2:6]] == names
        assert str(g.segments[2]).startswith("graph segment 2 (after attend, test_inspection.py:")

    def test_none_is_a_frozen_value(self, backend):
        """Like any other plain value, in tuples too; named as the function does, or by its place."""
        x = backend.tensor(3)
        with torch.no_grad(), backend.capture() as g:
            g.add_eager(lambda x, mask, *rest, size: x + 1, x, None, (1, 2.5), size="all")
        assert "mask=None, rest[0][0]=1, rest[0][1]=2.5, size='all'" in g.describe()

    def test_repr(self, backend):
        """State, name and numbers of segments, without the table."""
        x = backend.tensor(3)
        g = backend.capture(name="decode")
        assert repr(g) == "<BreakableCUDAGraphCapture 'decode': new, 0 graph segments, 0 eager segments>"
        with torch.no_grad(), g:
            assert repr(g).startswith("<BreakableCUDAGraphCapture 'decode': capturing, ")
            g.add_eager(torch.neg, x * 2)
        assert repr(g) == "<BreakableCUDAGraphCapture 'decode': ready, 1 graph segment, 1 eager segment>"
        g.invalidate("weights moved")
        assert "'decode': invalid, " in repr(g)
        assert repr(backend.capture()).startswith("<BreakableCUDAGraphCapture: new, ")


def test_short_names_of_kernels():
    """Demangled by the C++ runtime, and shortened for the table."""
    assert demangle("_ZN2at6native4reluEf") in ("at::native::relu(float)", "_ZN2at6native4reluEf")
    assert demangle("triton_poi_fused_add") == "triton_poi_fused_add"
    name = "void at::native::(anonymous namespace)::row_kernel<float, at::Fn<int, 4>>(int, float*)"
    assert _brief_name(name) == "row_kernel"
    assert _brief_name("aten::add") == "aten::add"
    assert _brief_name("sm90_xmma_gemm_f32<x>") == "sm90_xmma_gemm_f32"


class TestSteps:
    """`steps` in debug mode stops between operators."""

    def test_operators(self, backend):
        """Their names, lines and results, one by one, under the caller's own modes."""
        x, cache = backend.tensor(8), torch.zeros(8, device=backend.device)
        with torch.no_grad(), backend.capture(mode="debug") as g:
            out = model(x, cache)
        x.copy_(backend.tensor(8, seed=1))
        seen = []
        for step in g.steps():
            assert not torch.is_inference_mode_enabled()
            seen.append(step.kind if step.kind != "operator" else step.name)
            if seen[-1] == "aten::mul":
                assert torch.equal(step.results[0], x * 2)
                assert step.segment is g.segments[0]
                assert step.location.startswith(__file__)
                assert "operator aten::mul (test_inspection.py:" in str(step)
        assert seen == ["aten::mul", "aten::add", "graph", "eager", "aten::relu", "aten::sub", "graph"]
        assert torch.equal(out, model(x, cache))

    def test_other_modes_stop_at_segments(self, captured, backend):
        """As before."""
        if backend.mode is None:
            g, *_ = captured
            assert [step.kind for step in g.steps()] == ["graph", "eager", "graph"]


class TestProfile:
    """`profile`, and what torch.profiler sees."""

    def test_it_is_no_cycle(self, backend):
        """What was timed dies with the capture, without the collector."""
        layer = torch.nn.Identity()
        with backend.capture() as g:
            g.add_eager(lambda layer: layer(None), layer)
        dead = weakref.ref(layer)
        gc.collect()
        gc.disable()
        try:
            g.profile(1)
            del g, layer
            assert dead() is None
        finally:
            gc.enable()

    def test_times(self, captured, backend):
        """Each segment has its part; functions are apart from what is ours."""
        g, x, cache, out = captured
        report = g.profile(5)
        assert report.replays == 5
        graph, eager, _ = report.segments
        assert graph.function == 0
        assert 0 < eager.function < eager.host
        assert eager.ours == pytest.approx(eager.host - eager.function)
        assert report.host > 0
        assert report.watched > 0
        assert report.done >= report.host
        spans = report.timeline
        assert [span.segment for span in spans] == list(g.segments)
        assert all(a.host[1] <= b.host[0] for a, b in itertools.pairwise(spans))
        on_gpu = backend.device.type == "cuda"
        assert all((row.gpu is not None) == on_gpu for row in report.segments)
        if on_gpu:
            assert all(row.gpu > 0 for row in report.segments)
        text = str(report)
        assert ("GPU us" in text) == on_gpu
        assert "medians of 5 replays" in text
        assert "total" in text

    def test_it_replays(self, captured, backend):
        """State advances in every replay, and the capture is as before."""
        g, x, cache, out = captured
        cache.zero_()
        g.profile(2)
        assert torch.allclose(cache, 6 * (x * 2 + 1))  # and one of each kind to warm up
        x.copy_(backend.tensor(8, seed=1))
        g.replay()
        assert torch.equal(out, model(x, cache))

    def test_n_must_be_positive(self, captured):
        """Expected and got."""
        with pytest.raises(ValueError, match="n must be 1 or more, got 0"):
            captured[0].profile(0)

    @pytest.mark.parametrize("suffix", ["png", "svg"])
    def test_plot(self, captured, tmp_path, suffix):
        """A picture of one replay, without pyplot."""
        pytest.importorskip("matplotlib")
        path = tmp_path / f"timeline.{suffix}"
        captured[0].profile(3).plot(path)
        assert path.stat().st_size > 1000

    def test_plot_without_matplotlib(self, captured, monkeypatch, tmp_path):
        """Says which extra is missing."""
        report: ProfileReport = captured[0].profile(1)
        real = builtins.__import__

        def without(name, *args, **kwargs):
            if name.startswith("matplotlib"):
                raise ImportError(name)
            return real(name, *args, **kwargs)

        monkeypatch.setattr(builtins, "__import__", without)
        with pytest.raises(ImportError, match=r"segcapture\[plot\]"):
            report.plot(tmp_path / "x.png")

    def test_segments_are_ranges_of_torch_profiler(self, captured):
        """Each by its name, and replays are right meanwhile."""
        g, x, cache, out = captured
        with torch.profiler.profile(activities=[ProfilerActivity.CPU], acc_events=True) as recorded:
            g.replay()
        names = [event.name for event in recorded.events() if " segment " in event.name]
        assert names == [str(segment) for segment in g.segments]
        assert torch.equal(out, model(x, cache))

    def test_an_error_under_the_profiler_names_its_segment(self, backend):
        """The same note as without."""
        fail = [False]

        @eager_break_during_capture
        def maybe(t):
            if fail[0]:
                raise ZeroDivisionError
            return t + 1

        x = backend.tensor(3)
        with backend.capture() as g:
            maybe(x * 2)
        fail[0] = True
        with torch.profiler.profile(activities=[ProfilerActivity.CPU], acc_events=True):
            with pytest.raises(ZeroDivisionError) as caught:
                g.replay()
        assert any("raised in eager segment 1" in note for note in caught.value.__notes__)

    @pytest.mark.cuda
    def test_nvtx_ranges(self, cuda, monkeypatch):
        """With the flag each segment is pushed and popped."""
        monkeypatch.setenv("SEGCAPTURE_NVTX", "1")
        seen = []
        monkeypatch.setattr(torch.cuda.nvtx, "range_push", seen.append)
        monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: seen.append("pop"))
        x, cache = cuda.tensor(8), torch.zeros(8, device=cuda.device)
        with torch.no_grad(), cuda.capture() as g:
            model(x, cache)
        g.replay()
        assert seen == [text for segment in g.segments for text in (str(segment), "pop")]


class TestMemory:
    """`memory_report`."""

    def test_bytes(self, captured, backend):
        """Bridges and kept arguments by segment; the pool on CUDA."""
        g, *_ = captured
        report = g.memory_report()
        eager = next(row for row in report.segments if isinstance(row.segment, EagerSegment))
        assert eager.bridges == report.bridges == 32
        text = str(report)
        assert "kept arguments" in text
        if backend.emulated:
            assert report.arguments == 64  # `x` too: nothing is in a pool
            assert report.reserved is None
            assert "no pool" in text
            assert report.segments[0].results >= 64
        else:
            assert report.arguments == 512 or report.arguments == 32  # the cache alone
            assert report.reserved >= 2 * 2**20
            assert 0 < report.active <= report.reserved
            assert "MiB reserved" in text

    def test_an_argument_of_many_segments_counts_once(self, backend):
        """Each storage once, at the segment that has it first."""
        cache = torch.zeros(64, device=backend.device)
        x = backend.tensor(64)

        @eager_break_during_capture
        def add(cache, half):
            cache.add_(1)

        with backend.capture() as g:
            x.add_(1)
            add(cache, cache[:32])
            x.add_(1)
            add(cache, cache[32:])
        rows = [row.arguments for row in g.memory_report().segments]
        assert rows == [0, 256, 0, 0]


@pytest.mark.parametrize("name", ["profile", "steps", "verify"])
def test_what_replays_needs_a_complete_capture(backend, name):
    """The same error as `replay`."""
    with pytest.raises(CaptureStateError, match="captured nothing yet"):
        getattr(backend.capture(), name)(*[torch.neg] * (name == "verify"))


def test_inspection_is_loaded_when_it_is_asked_for():
    """`import segcapture` does not import matplotlib or rich, nor what only one method of a capture needs."""
    import subprocess
    import sys

    code = (
        "import sys, segcapture; print(sorted(m for m in sys.modules"
        " if m in ('matplotlib', 'rich') or m.startswith('segcapture.inspect.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['segcapture.inspect.find_breaks', 'segcapture.inspect.snapshot']"
    assert importlib.import_module("segcapture") is segcapture
