"""`break_on`: operators become eager segments under whatever name they are called."""

import warnings

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from segcapture import CaptureFailedError, CaptureStateError, eager_break_during_capture
from tests.conftest import assert_same

aten = torch.ops.aten
SDPA = "aten::scaled_dot_product_attention"
GUARDS = [torch.no_grad, torch.inference_mode, torch.enable_grad]


@pytest.fixture(params=GUARDS, ids=lambda guard: guard.__name__)
def guard(request):
    """No grad, inference mode, and torch's default."""
    return request.param


@torch.library.custom_op("segcapture_break::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    """Returns something new."""
    return x * 2


@torch.library.custom_op("segcapture_break::increment_", mutates_args={"x"})
def increment_(x: torch.Tensor) -> None:
    """Writes to its argument."""
    x.add_(1)


def eager_names(g):
    return [segment.name for segment in g.segments if segment.kind == "eager"]


def heads(x):
    return x.reshape(1, 2, 8, 16)


def attend(x):
    q = heads(x) * 1
    return F.scaled_dot_product_attention(q, q + 1, q) + 1


def attend_by_operator(x):
    q = heads(x) * 1
    return aten.scaled_dot_product_attention.default(q, q + 1, q) + 1


def multiply(x):
    return (x * 1) @ x.t() + 1


def update(x):
    y = x * 3
    view = y[0]
    view.add_(1)
    return y * 2, view


def custom(x):
    y = x + 1
    increment_(y)
    return double(y) - 1


@pytest.mark.parametrize(
    ("model", "entry", "kinds", "name"),
    [
        (multiply, aten.mm, "geg", "aten::mm"),
        (multiply, aten.mm.default, "geg", "aten::mm"),
        (multiply, "aten::mm", "geg", "aten::mm"),
        (multiply, "aten::mm.default", "geg", "aten::mm"),
        (multiply, "aten.mm.default", "geg", "aten::mm"),
        (multiply, "mm", "geg", "aten::mm"),
        (multiply, "aten::*mm", "geg", "aten::mm"),
        (multiply, "aten::matmul", "geg", "aten::matmul"),
        (multiply, aten.add.Tensor, "ge", "aten::add"),
        (attend, aten.scaled_dot_product_attention, "geg", SDPA),
        (attend, aten.scaled_dot_product_attention.default, "geg", SDPA),
        (attend, SDPA, "geg", SDPA),
        (attend, "*scaled_dot_product*", "geg", SDPA),
        (attend_by_operator, SDPA, "geg", SDPA),
        (update, aten.add_, "geg", "aten::add_"),
        (update, "aten::add_.Tensor", "geg", "aten::add_"),
        (custom, "segcapture_break::double", "geg", "segcapture_break::double"),
        (custom, torch.ops.segcapture_break.increment_, "geg", "segcapture_break::increment_"),
        (custom, "segcapture_break::*", "geeg", "segcapture_break::increment_"),
    ],
)
def test_entries(backend, guard, model, entry, kinds, name):
    """Packets, overloads, names and globs; composite, in-place and custom operators; in each grad mode."""
    g = backend.check(model, [backend.tensor(16, 16)], kinds, guard=guard, break_on=[entry])
    assert eager_names(g)[0] == name
    place = g.segments[1].location
    assert place.startswith(__file__)
    assert int(place.rsplit(":", 1)[1]) > model.__code__.co_firstlineno


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    ("entry", "kinds"),
    [
        (SDPA, "geg"),
        ("aten::linear", "gegeg"),
        ("aten::_scaled_dot_product_*", "geg"),
    ],
)
def test_operators_inside_of_functions_of_torch(backend, guard, entry, kinds):
    """What nn.MultiheadAttention calls is seen whole and in parts, with the very values of eager."""
    module = torch.nn.MultiheadAttention(16, 2, batch_first=True, device=backend.device)

    def model(x):
        y = x.reshape(2, 8, 16) * 1
        return module(y, y, y, need_weights=False)[0] * 1

    backend.check(model, [backend.tensor(16, 16)], kinds, guard=guard, break_on=[entry])


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("entry", ["aten::linear", "aten::matmul", "aten::t", "aten::nothing_of_it"])
def test_watching_changes_no_kernel(backend, guard, entry):
    """`linear` picks its kernel by whether a view of the weight requires grad: it still does."""
    weight = torch.nn.Parameter(backend.tensor(16, 16))
    bias = torch.nn.Parameter(backend.tensor(16))

    def model(x):
        return F.linear(x.reshape(2, 8, 16).transpose(0, 1), weight, bias) * 1

    x = backend.tensor(16, 16)
    if entry == "aten::nothing_of_it":
        with guard():
            expected, out = model(x), []
            with pytest.raises(CaptureFailedError), backend.capture(break_on=[entry]):
                out.append(model(x))
            assert_same(out, [expected])
    else:
        backend.check(model, [x], guard=guard, break_on=[entry])


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("entry", ["aten::einsum", "aten::bmm", "aten::softmax", "aten::linear"])
def test_under_autocast(backend, guard, entry):
    """Replay casts where eager casts, though composite operators lie ahead of autocast."""

    def model(x):
        with torch.autocast(backend.device.type, dtype=torch.bfloat16):
            y = torch.einsum("bij,bkj->bik", x, x)
            return F.linear(y.softmax(-1), x[0])

    backend.check(model, [backend.tensor(2, 8, 8)], guard=guard, break_on=[entry])


def test_several_entries_may_match_one_call(backend):
    """The call becomes one segment, and all entries count as matched."""
    g = backend.check(
        multiply, [backend.tensor(4, 4)], "geg", break_on=["aten::mm", aten.mm, "*mm", aten.mm.default]
    )
    assert eager_names(g) == ["aten::mm"]


def test_an_entry_that_matched_nothing(backend):
    """An error that lists the near names that were seen; the next capture works."""
    x = backend.tensor(16, 16)
    with torch.no_grad():
        attend(x)
        with pytest.raises(CaptureFailedError, match="matched no call") as info:
            with backend.capture(break_on=["aten::scaled_dot_product_atention", "aten::mul"]):
                attend(x)
        assert f"'aten::scaled_dot_product_atention' (near names: {SDPA}" in str(info.value)
        assert "'aten::mul'" not in str(info.value)
        with pytest.raises(CaptureFailedError, match=r"'flash_attn::\*' \(near names: none\)"):
            with backend.capture(break_on=["flash_attn::*"]):
                x * 2
    backend.check(attend, [x], "geg", break_on=[SDPA])


def test_a_failed_block_keeps_its_own_error(backend):
    """That an entry matched nothing is no news then."""
    with pytest.raises(KeyError) as info:
        with backend.capture(break_on=["aten::mm"]):
            raise KeyError("mine")
    assert "matched no call" not in "".join(info.value.__notes__)


@pytest.mark.parametrize(
    "bad",
    ["aten::mm", aten.mm, aten.mm.default, None, [3], [""], [None], [F.scaled_dot_product_attention]],
    ids=repr,
)
def test_bad_entries(backend, bad):
    """A ValueError that shows them, before anything is captured."""
    with pytest.raises(ValueError, match="break_on takes"):
        backend.capture(break_on=bad)


def test_inside_of_an_eager_segment_nothing_matches(backend):
    """At capture and at replay the operator just runs there."""
    log = []

    @eager_break_during_capture(name="inner")
    def inner(x):
        log.append(1)
        return attend(x) @ heads(x).mT

    g = backend.check(
        lambda x: attend(inner(x * 1)[0, 0, 0, 0] + x), [backend.tensor(16, 16)], break_on=[SDPA]
    )
    assert eager_names(g) == ["inner", SDPA] or [n.rsplit(".", 1)[-1] for n in eager_names(g)] == [
        "inner",
        SDPA,
    ]
    assert len(log) == 9


def test_mode_full_ignores_it(backend):
    """One graph, as if nobody had asked."""
    if backend.mode == "debug":
        return
    backend.check(attend, [backend.tensor(16, 16)], "g", mode="full", break_on=[SDPA])


def test_only_the_calls_of_this_thread(backend):
    """Operators of other threads run as they are."""
    import threading

    x = backend.tensor(4, 4)
    with torch.no_grad(), backend.capture(break_on=["aten::mm"]) as g:
        worker = threading.Thread(target=lambda: torch.ones(4, 4) @ torch.ones(4, 4))
        worker.start()
        worker.join()
        multiply(x)
    assert eager_names(g) == ["aten::mm"]


class TestGradMode:
    """With grad enabled and weights that require it."""

    @pytest.mark.parametrize(
        ("call", "entry"),
        [
            (attend, SDPA),
            (attend_by_operator, SDPA),
            (multiply, "aten::matmul"),
            (lambda x: F.linear(x * 1, x), "aten::linear"),
        ],
    )
    def test_a_composite_operator_is_refused_with_the_ways_out(self, backend, call, entry):
        """It lies above autograd, to which an eager segment is opaque."""
        weight = torch.nn.Parameter(backend.tensor(16, 16))
        call(weight)
        with pytest.raises(CaptureFailedError, match="requires grad") as info:
            with backend.capture(break_on=[entry]):
                call(weight)
        for way in ("torch.no_grad()", "torch.inference_mode()", "consists of", "autograd.Function"):
            assert way in str(info.value)
        assert f"{__file__}:" in str(info.value)
        backend.check(call, [backend.tensor(16, 16)], break_on=[entry])

    def test_kernels_break_below_autograd(self, backend):
        """A step with breaks at each matrix product, backward's too, gives eager's gradients."""

        def step(x, weight):
            loss = ((x @ weight).relu() @ weight.t()).pow(2).mean()
            (grad,) = torch.autograd.grad(loss, weight)
            return loss, grad

        x = backend.tensor(8, 4)
        weight = torch.nn.Parameter(backend.tensor(4, 4, seed=1))
        for _ in range(2):
            step(x, weight)
        with backend.capture(break_on=["aten::mm"]) as g:
            out = step(x, weight)
        assert len(eager_names(g)) >= 4
        for seed in range(3):
            x.copy_(backend.tensor(8, 4, seed=seed + 2))
            g.replay()
            assert_same([t.detach() for t in out], [t.detach() for t in step(x, weight)])


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_compiled_region_warns_once(backend, fullgraph):
    """It runs operator by operator in this capture, and its operators are matched."""
    region = torch.compile(lambda x: (x * 2).relu() @ x, backend="eager", fullgraph=fullgraph)

    def model(x):
        return region(region(x)) + 1

    x = backend.tensor(4, 4)
    with torch.no_grad():
        expected = model(x)
        with pytest.warns(UserWarning, match=r"break_on watches each operator.*test_break_on.py:\d+") as seen:
            with backend.capture(break_on=["aten::relu"]) as g:
                out = model(x)
        assert len(seen) == 1
        assert_same(out, expected)
        assert eager_names(g) == ["aten::relu"] * 2
        x.mul_(-0.5)
        g.replay()
        assert_same(out, model(x))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with backend.capture():
                model(x)


def test_reset_begins_to_count_anew(backend):
    """An entry that matched in one capture must match in the next one, too."""
    x = backend.tensor(4, 4)
    g = backend.capture(break_on=["aten::mm"])
    with torch.no_grad():
        with g:
            multiply(x)
        g.reset()
        with pytest.raises(CaptureFailedError, match="matched no call"), g:
            x * 2
        with pytest.raises(CaptureStateError):
            g.replay()
