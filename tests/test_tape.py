"""The tape: it refuses what a CUDA capture refuses, and replays everything else as eager runs it.

Both tables run on every backend, so that CUDA itself says whether the tape is right.
"""

import contextlib
import copy
import gc
import io
import sys
import weakref
from types import SimpleNamespace

import attrs
import numpy
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn.attention.flex_attention import flex_attention

from segcapture import CaptureFailedError, eager_break_during_capture
from segcapture.backends.refusals import CUDA_WORDS, check_operator
from tests.conftest import assert_same

GUARDS = [torch.no_grad, torch.inference_mode, torch.enable_grad]

aten = torch.ops.aten


@pytest.fixture(params=GUARDS, ids=lambda guard: guard.__name__)
def guard(request):
    """No grad, inference mode, and torch's default."""
    return request.param


def things(device):
    """Tensors to try to read."""
    made = {
        "x": torch.arange(-3, 3).float().reshape(2, 3),
        "z": torch.zeros(2, 3),
        "square": torch.eye(3) * 4,
        "mask": torch.tensor([[True, False, True], [False, True, True]]),
        "index": torch.tensor([0, 2, 1]),
        "row": torch.tensor([True, False, True]),
        "n": torch.tensor(2),
        "s": torch.tensor(1.5),
        "flag": torch.tensor(True),
    }
    return SimpleNamespace(**{key: value.to(device) for key, value in made.items()})


def printed(value):
    with contextlib.redirect_stdout(io.StringIO()):
        print(value)


def set_item(target, index, value):
    target[index] = value


def branch(flag):
    return 1 if flag else 2


REFUSED = {
    "item": (lambda t: t.s.item(), "Tensor.item"),
    "item of a row": (lambda t: [v.item() for v in t.x[0]], "Tensor.item"),
    "tolist": (lambda t: t.x.tolist(), "Tensor.tolist"),
    "cpu": (lambda t: t.x.cpu(), "Tensor.cpu"),
    "print": (lambda t: printed(t.x), "Tensor.__repr__"),
    "repr": (lambda t: repr(t.x), "Tensor.__repr__"),
    "str": (lambda t: str(t.x), "Tensor.__repr__"),
    "f-string": (lambda t: f"{t.x}", "Tensor.__repr__"),
    "f-string of one": (lambda t: f"{t.s:.2f}", "Tensor.__format__"),
    "bool": (lambda t: bool(t.flag), "Tensor.__bool__"),
    "if": (lambda t: branch(t.x.sum() > 0), "Tensor.__bool__"),
    "is_nonzero": (lambda t: torch.is_nonzero(t.s), "aten::_local_scalar_dense"),
    "int": (lambda t: int(t.n), "Tensor.__int__"),
    "float": (lambda t: float(t.s), "Tensor.__float__"),
    "complex": (lambda t: complex(t.s), "Tensor.__complex__"),
    "range": (lambda t: range(t.n), "Tensor.__index__"),
    "list index": (lambda t: "abc"[t.n], "Tensor.__index__"),
    "in": (lambda t: 1.0 in t.x, "Tensor.__contains__"),
    "max of Python": (lambda t: max(t.x[0]), "Tensor.__bool__"),
    "x[mask]": (lambda t: t.x[t.mask], "aten::index"),
    "x[:, mask]": (lambda t: t.x[:, t.row], "aten::index"),
    "x[mask] = tensor": (lambda t: set_item(t.z, t.mask, t.x.flatten()[:4]), "mask"),
    "x[:, mask] = rows": (lambda t: set_item(t.z, (slice(None), t.row), t.x[:, :2]), "mask"),
    "x[mask] = scalar tensor": (lambda t: set_item(t.z, t.mask, t.s), "mask"),
    "x[mask] += 1": (lambda t: t.z.index_put_((t.mask,), t.s, accumulate=True), "mask"),
    "masked_fill tensor": (lambda t: t.x.masked_fill(t.mask, t.s), "Tensor.masked_fill"),
    "index_fill tensor": (lambda t: t.x.index_fill(1, t.index, t.s), "Tensor.index_fill"),
    "x[n]": (lambda t: t.x.flatten()[t.n], "aten::_local_scalar_dense"),
    "x[:n]": (lambda t: t.x.flatten()[: t.n], "aten::_local_scalar_dense"),
    "arange": (lambda t: torch.arange(t.n, device=t.n.device), "aten::_local_scalar_dense"),
    "alpha": (lambda t: torch.add(t.x, t.x, alpha=t.s), "aten::_local_scalar_dense"),
    "nonzero": (lambda t: t.x.nonzero(), "aten::nonzero"),
    "nonzero as tuple": (lambda t: torch.nonzero(t.x, as_tuple=True), "aten::nonzero"),
    "where(c)": (lambda t: torch.where(t.mask), "aten::nonzero"),
    "argwhere": (lambda t: torch.argwhere(t.x), "aten::nonzero"),
    "masked_select": (lambda t: torch.masked_select(t.x, t.mask), "aten::masked_select"),
    "unique": (lambda t: torch.unique(t.x), "aten::_unique2"),
    "unique of rows": (lambda t: torch.unique(t.x, dim=0), "aten::unique_dim"),
    "unique_consecutive": (lambda t: torch.unique_consecutive(t.x), "aten::unique_consecutive"),
    "bincount": (lambda t: torch.bincount(t.index), "aten::bincount"),
    "histc": (lambda t: torch.histc(t.x), "aten::histc"),
    "equal": (lambda t: torch.equal(t.x, t.z), "aten::equal"),
    "allclose": (lambda t: torch.allclose(t.x, t.z), "aten::allclose"),
    "repeat_interleave": (lambda t: t.x.repeat_interleave(t.index, dim=1), "aten::repeat_interleave"),
    "repeats alone": (lambda t: torch.repeat_interleave(t.index), "aten::repeat_interleave"),
    "tensor of tensors": (lambda t: torch.tensor([t.s, t.s]), "torch.tensor"),
    "as_tensor of tensors": (lambda t: torch.as_tensor([[t.s], [t.s]]), "torch.as_tensor"),
    "new_tensor of tensors": (lambda t: t.x.new_tensor([t.s, 1.0]), "torch.new_tensor"),
    "one_hot": (lambda t: F.one_hot(t.index), "aten::_local_scalar_dense"),
    "normal": (lambda t: torch.normal(t.x, t.x.abs()), "aten::normal"),
    "inv": (lambda t: torch.linalg.inv(t.square), "aten::_linalg_check_errors"),
    "cholesky": (lambda t: torch.linalg.cholesky(t.square), "aten::_linalg_check_errors"),
    "to_sparse": (lambda t: t.x.to_sparse(), "aten::_to_sparse"),
    "cond": (lambda t: torch.cond(t.flag, torch.sin, torch.cos, (t.x,)), "higher_order::cond"),
}
if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15):
    del REFUSED["normal"]  # it reads nothing any more


@pytest.mark.parametrize("name", REFUSED)
def test_what_cuda_refuses(backend, guard, name):
    """The operator's name, CUDA's words and the user's line; a clean capture works after it."""
    fn, operator = REFUSED[name]
    t = things(backend.device)
    with contextlib.suppress(RuntimeError), guard():
        fn(t)  # warm-up
    with pytest.raises(CaptureFailedError if backend.emulated else Exception) as info:
        with guard(), backend.capture():
            t.x + 1
            fn(t)
    if backend.emulated:
        assert operator in str(info.value)
        assert CUDA_WORDS in str(info.value)
        assert f"{__file__}:" in str(info.value)
        assert "@eager_break_during_capture" in str(info.value)
    backend.check(lambda x: x * 2 + 1, [backend.tensor(3)], "g")


@pytest.mark.parametrize(
    ("convert", "name"), [(lambda t: t.numpy(), "Tensor.numpy"), (numpy.asarray, "Tensor.__array__")]
)
def test_numpy_conversions_are_refused(emulated, guard, convert, name):
    """On CUDA they never work, in a capture or outside of one."""
    with pytest.raises(CaptureFailedError, match=rf"`{name}`.*test_tape.py:\d+: {CUDA_WORDS}"):
        with guard(), emulated.capture():
            convert(emulated.tensor(3))


def test_a_refusal_names_the_line_of_the_call(emulated):
    """The innermost frame outside of torch, not the `with` block's."""

    def reads(t):
        return t.sum().item()

    with pytest.raises(CaptureFailedError, match=f":{reads.__code__.co_firstlineno + 1}: operation not"):
        with emulated.capture():
            reads(emulated.tensor(3))


def in_place_metadata(x):
    y = x + 1
    first = y * 2
    y.t_()
    y.unsqueeze_(0)
    second = y.sum(1)
    y.squeeze_(0)
    y.transpose_(0, 1)
    y.add_(3)
    return first, second, y


def out_variants(x):
    empty = torch.empty(0, device=x.device)
    torch.add(x, 1, out=empty)
    values, indices = torch.empty_like(x), torch.empty_like(x, dtype=torch.long)
    torch.sort(x, out=(values, indices))
    view = torch.zeros(2, *x.shape, device=x.device)
    torch.mul(x, 3, out=view[1])
    return empty, values, indices, view


def moved_storage(x):
    y = torch.empty(0, device=x.device)
    y.set_(x * 2)
    y.add_(1)
    z = torch.ones(2, device=x.device)
    z.resize_(x.shape)
    z.copy_(x)
    w = torch.zeros_like(x)
    w.data = x * 5
    return y, z, w * 1


def chained_in_place(x):
    y = x.clone()
    view = y[1:]
    view.mul_(2)
    view.view(-1)[::2].add_(1)
    y.transpose(0, 1)[0].zero_()
    y[0, 1:3] = 7
    y[:, -1] += y[:, 0]
    return y, view


def views_and_copies(x):
    t = x.t()
    return (
        x.to(torch.float32), x.to(torch.float16), x.to(x.device, copy=True), x.type_as(x), x.double().float(),
        x.contiguous(), t.contiguous(), x.reshape(-1), t.reshape(-1), t.flatten(), x.flatten(), t.ravel(),
        torch.movedim(x, 0, 1) + 1, (x * 1).broadcast_to(2, *x.shape), (x[:1] * 1).expand_as(x),
    )  # fmt: skip


def foreach(x):
    a, b = [x * 1, x[0] * 1], [x + 1, x[0] + 1]
    torch._foreach_mul_(a, 2.0)
    torch._foreach_add_(a, b)
    torch._foreach_copy_(b, a)
    return a, torch._foreach_sqrt(torch._foreach_abs(a)), b


def batch_norm(x):
    mean, var = torch.zeros(x.shape[1], device=x.device), torch.ones(x.shape[1], device=x.device)
    y = F.batch_norm(x, mean, var, training=True)
    return y, mean, var, F.batch_norm(x, mean, var)


def complex_numbers(x):
    c = torch.complex(x, x * 2)
    real = torch.view_as_real(c)
    real[..., 0].add_(1)
    return c.conj() * c, c.real + c.imag, real, torch.fft.rfft(x).abs(), c.conj().mH.imag


def scatters(x, index):
    index = index.argsort()  # each once: what is written last is not defined on CUDA
    rows = index.unsqueeze(1).expand(-1, x.shape[1])
    y = torch.zeros_like(x).scatter(0, rows, x)
    y.scatter_add_(0, rows, x)
    y.index_copy_(1, index[:1], x[:, :1])
    y.index_add_(0, index, x[: len(index)])
    return (
        y,
        torch.gather(x, 0, rows),
        y.index_select(0, index),
        x.take_along_dim(rows, 0),
        x.index_fill(0, index, 3),
    )


def embed(x, index):
    return F.embedding(index, x), F.embedding(index[None], x).sum(1), F.embedding_bag(index[None], x)


def cache_update(x, index):
    index = index.argsort()
    cache = torch.zeros(8, x.shape[1], device=x.device)
    cache[index] = x[: len(index)]
    cache.narrow(0, 4, 4).copy_(x)
    return cache


def attention(x):
    q = x.reshape(1, 1, *x.shape)
    mask = torch.ones(x.shape[0], x.shape[0], dtype=torch.bool, device=x.device).tril()
    return (
        F.scaled_dot_product_attention(q, q, q),
        F.scaled_dot_product_attention(q, q, q, is_causal=True),
        F.scaled_dot_product_attention(q, q, q, attn_mask=mask),
    )


def masks(x):
    y = x.clone()
    y[y > 0] = 5.0
    y[:, 0][y[:, 0] < 0] = -1
    return (
        y,
        x.masked_fill(x > 0, 1),
        torch.where(x > 0, x, 0.0),
        x.masked_scatter(x > 0, x * 2),
        x.clamp(min=0),
    )


def uninitialised(x):
    y = torch.empty(3, device=x.device)
    y.fill_(2)
    z = x.new_empty(x.shape).copy_(x)
    w = torch.empty_like(x)
    w.zero_()
    w[1] = x[1]
    return y, z, w, torch.full((2,), 7.0, device=x.device), x.new_zeros(2), torch.arange(4, device=x.device)


def several_outputs(x):
    values, indices = x.topk(2)
    mean = torch.var_mean(x, dim=1)
    a, b = x.chunk(2, dim=1)
    return (
        values, indices, x.sort(0), x.argmax(1), x.max(0), x.argsort(), mean, a * 2, b + 1, (x * 1).unbind(),
        torch.split(x * 2, 1), x.cumsum(0), x.cummax(1), x.aminmax(), x.kthvalue(1), x.median(0),
        torch.meshgrid(x[0], x[0], indexing="ij"),
    )  # fmt: skip


def counts(x, index):
    return (
        F.one_hot(index, 5), F.one_hot(index, num_classes=4).float() @ torch.ones(4, 1, device=x.device),
        x.repeat_interleave(2, dim=0), torch.histc(x, min=-1, max=1), torch.nonzero_static(x, size=4),
        torch.searchsorted(x.sort().values, x), torch.bucketize(x, x[0].sort().values), x.count_nonzero(),
        torch.repeat_interleave(x[:3], index.argsort(), dim=0, output_size=3),
    )  # fmt: skip


def lists(x):
    return torch.cat([x, x * 2]), torch.stack([x, x]), torch.einsum("ij,kj->ik", x, x), torch.block_diag(x, x)


def autocast(x):
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        y = torch.einsum("ij,kj->ik", x, x)
        return y, F.linear(y.softmax(-1), x), F.layer_norm(y, y.shape[1:])


ACCEPTED = {
    f.__name__: f
    for f in (
        in_place_metadata, out_variants, moved_storage, chained_in_place, views_and_copies, foreach,
        batch_norm, complex_numbers, scatters, embed, cache_update, attention, masks, uninitialised,
        several_outputs, counts, lists, autocast,
    )
}  # fmt: skip


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_cuda_captures(backend, guard, name):
    """Replays on fresh inputs give what the same operators give eagerly."""
    fn = ACCEPTED[name]
    inputs = [backend.tensor(4, 4), torch.tensor([2, 0, 1], device=backend.device)]
    backend.check(fn, inputs[: fn.__code__.co_argcount], guard=guard)


def test_random_numbers_are_drawn_anew(backend, guard):
    """Dropout, rand and normal_ on the tape advance the generator as eager calls do (C8)."""

    def model(x):
        noise = torch.rand_like(x) + torch.randn(x.shape, device=x.device)
        return F.dropout(x, 0.5) + noise + torch.empty_like(x).normal_() + torch.rand(2, device=x.device)[0]

    x = backend.tensor(64)
    with guard():
        model(x)
        torch.manual_seed(5)
        expected = [model(x) for _ in range(4)]
        torch.manual_seed(5)
        with backend.capture() as g:
            out = model(x)
        assert torch.equal(out, expected[0])
        for value in expected[1:]:
            g.replay()
            assert torch.equal(out, value)


@torch.library.custom_op("segcapture_tape::scale", mutates_args=())
def scale(x: torch.Tensor, by: float) -> torch.Tensor:
    """A custom operator that returns something new."""
    return x * by


@torch.library.custom_op("segcapture_tape::fill_", mutates_args={"out"})
def fill_(out: torch.Tensor, x: torch.Tensor) -> None:
    """A custom operator that writes to an argument, and returns nothing."""
    out.copy_(x).add_(1)


@torch.library.custom_op("segcapture_tape::both", mutates_args={"state"})
def both(state: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A custom operator that does both."""
    state.add_(x)
    return state * 2, x - 1


def test_custom_operators(backend, guard):
    """Whether they return, write, or both."""

    def model(x):
        out, state = torch.zeros_like(x), torch.ones_like(x)
        fill_(out, x)
        fill_(out[1:], scale(x, 3.0)[1:])
        return out, both(state, x), state

    backend.check(model, [backend.tensor(4)], "g", guard=guard)


def test_a_changed_result_shape_is_an_error_at_replay(emulated):
    """An operator that depends on values unseen is named, and nothing is written to the wrong place."""
    size = [3]

    @torch.library.custom_op("segcapture_tape::sized", mutates_args=())
    def sized(x: torch.Tensor) -> torch.Tensor:
        return x.new_ones(size[0])

    with emulated.capture() as g:
        out = sized(emulated.tensor(2))
    size[0] = 4
    with pytest.raises(CaptureFailedError, match=r"segcapture_tape::sized.*\[4\].*\[3\]"):
        g.replay()
    assert out.tolist() == [1, 1, 1]


class Wrapped(torch.Tensor):
    """A tensor subclass around an inner tensor, as quantized and distributed tensors are."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        inner = [a.inner if isinstance(a, Wrapped) else a for a in args]
        return Wrapped(func(*inner, **(kwargs or {})))


def test_tensor_subclasses_show_their_inner_operators(backend, guard):
    """The operators on the inner tensors are what is recorded."""
    backend.check(lambda x: torch.sin(Wrapped(x * 2) + 1).inner * 3, [backend.tensor(4)], "g", guard=guard)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_operators_that_take_functions(emulated, guard):
    """flex_attention is recorded whole, and the tensors that its function uses are read anew."""

    def model(x):
        q = x.reshape(1, 1, *x.shape) * 2
        return flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score + x[i, 0]) + 1

    emulated.check(model, [emulated.tensor(128, 16)], "g", guard=guard)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_regions_run_as_written(emulated, guard, fullgraph):
    """Dynamo compiles nothing while the tape records, also what it had compiled at warm-up."""
    runs = []

    def count(module, example):
        return lambda *args: runs.append(1) or module(*args)

    compiled = torch.compile(lambda x: (x * 2).relu() + 1, backend=count, fullgraph=fullgraph)
    x = emulated.tensor(4)
    with guard():
        expected = compiled(x)
        runs.clear()
        with emulated.capture() as g:
            out = compiled(x)
        assert not runs
        assert_same(out, expected)
        x.mul_(-1)
        g.replay()
        assert_same(out, compiled(x))
        assert runs


def test_sparse_results_are_refused_by_the_tape_alone(emulated):
    """A difference from CUDA, said in an error: there is no memory to write new values to."""
    sparse = torch.eye(4).to_sparse()
    with pytest.raises(CaptureFailedError, match="made a sparse or nested tensor at .*test_tape") as info:
        with emulated.capture():
            sparse * 2
    assert info.value.operator == "aten::mul"
    emulated.check(lambda x: torch.sparse.mm(sparse, x) + 1, [emulated.tensor(4, 2)], "g")


def test_deepcopy_is_refused_by_the_tape_alone(emulated):
    """A difference from CUDA, said in an error: it copies memory past the operators."""
    with pytest.raises(CaptureFailedError) as info, emulated.capture():
        copy.deepcopy(emulated.tensor(2))
    assert info.value.operator == "Tensor.__deepcopy__"


def test_a_copy_to_the_host_is_none_on_the_cpu(emulated, guard):
    """A difference from CUDA: there host and device are one, and models call `.to(device)` everywhere."""
    s = emulated.tensor(3)
    with guard(), emulated.capture():
        assert s.to("cpu") is s


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("copies", "pinned", "non_blocking", "refused"),
    [
        ("to the host", True, True, False),
        ("to the host", True, False, True),
        ("to the host", False, True, True),
        ("to the device", True, True, False),
        ("to the device", True, False, True),
        ("to the device", False, True, True),
        (".to('cpu')", False, False, True),
    ],
)
def test_copies_between_host_and_device(cuda, copies, pinned, non_blocking, refused):
    """Captured if nobody has to wait: pinned and non_blocking. Debug mode agrees with CUDA."""
    on_host = torch.ones(4, pin_memory=pinned)
    on_device = torch.zeros(4, device=cuda.device)

    def run():
        if copies == "to the host":
            on_host.copy_(on_device, non_blocking=non_blocking)
        elif copies == "to the device":
            on_device.copy_(on_host, non_blocking=non_blocking)
        else:
            on_device.to("cpu", non_blocking=non_blocking)

    for mode in ("breakable", "debug"):
        with pytest.raises(RuntimeError) if refused else contextlib.nullcontext():
            with cuda.capture(mode=mode):
                run()


def test_the_copies_rule_without_a_device():
    """What the rule for copies reads, on tensors that only say where they are."""
    host, device = torch.ones(2), torch.ones(2, device="meta")
    check_operator(aten.copy_.default, (device, device), {})
    check_operator(aten._to_copy.default, (device,), {"dtype": torch.float16})
    check_operator(aten._to_copy.default, (device,), {"device": torch.device("cpu"), "non_blocking": True})
    for func, args, kwargs in (
        (aten.copy_.default, (host, device), {}),
        (aten.copy_.default, (device, host, True), {}),
        (aten._to_copy.default, (device,), {"device": torch.device("cpu")}),
        (aten._to_copy.default, (host,), {"device": torch.device("meta"), "non_blocking": True}),
    ):
        with pytest.raises(CaptureFailedError, match=CUDA_WORDS):
            check_operator(func, args, kwargs)


def test_operators_that_read_on_another_device_pass(emulated):
    """Tensors elsewhere are none of the capture's business."""
    elsewhere = torch.ones(3, device="meta")
    with emulated.capture():
        assert "meta" in repr(elsewhere)


def test_what_was_made_empty_may_change_its_shape_after_a_break(backend, guard):
    """An eager segment gets its argument as it was at the call, whoever made the memory."""

    def model(x):
        y = torch.empty_like(x).copy_(x)
        z = brk(y)
        y.t_()
        return z + 1, y

    brk = eager_break_during_capture(lambda y: y.sum(0))
    backend.check(model, [backend.tensor(2, 3)], "geg", guard=guard)


@attrs.define
class Modes:
    """The modes and the stance of this thread, to compare."""

    functions: int = attrs.Factory(torch._C._len_torch_function_stack)
    operators: int = attrs.Factory(torch._C._len_torch_dispatch_stack)
    stance: str = attrs.Factory(lambda: sys.modules["torch._dynamo"].eval_frame._stance.stance)


@pytest.mark.parametrize("fail", ["refusal", "user", "break"])
def test_a_failure_leaves_nothing_behind(backend, guard, fail):
    """No mode, no stance and no tape; the same object captures again."""
    import torch._dynamo  # noqa: F401

    before, x = Modes(), backend.tensor(3)
    g = backend.capture(break_on=["aten::exp"])
    with guard():
        x.sum().item()
        with pytest.raises((RuntimeError, KeyError)), g:
            x.exp()
            if fail == "refusal":
                x.sum().item()
            elif fail == "user":
                raise KeyError
            else:
                g.add_eager(lambda: {}["missing"])
        assert Modes() == before
        g.reset()
        with g:
            y = x.exp() + 1
        assert Modes() == before
        x.add_(1)
        g.replay()
        assert_same(y, x.exp() + 1)


def test_overlapping_captures_share_the_stance(emulated):
    """The last one out of several threads puts the user's stance back."""
    import threading

    import torch._dynamo  # noqa: F401

    before, entered, leave = Modes(), threading.Event(), threading.Event()

    def capture():
        with emulated.capture():
            entered.set()
            leave.wait(30)

    worker = threading.Thread(target=capture)
    with emulated.capture():
        worker.start()
        assert entered.wait(30)
    assert Modes().stance == "force_eager"
    leave.set()
    worker.join()
    assert Modes() == before


@torch.library.custom_op("segcapture_tests::with_a_break", mutates_args=())
def with_a_break(x: torch.Tensor) -> torch.Tensor:
    """An operator whose body calls an eager break."""
    return doubled(x) + 1


@eager_break_during_capture
def doubled(x):
    return x * 2


def test_a_break_inside_of_an_operator_is_refused(emulated):
    """The operator would be on no tape: a CUDA graph holds its kernels on either side of the break."""
    x = emulated.tensor(3)
    for before in (lambda t: t, lambda t: t * 2):
        with (
            torch.no_grad(),
            pytest.raises(CaptureFailedError, match="inside of the operator `segcapture_tests"),
        ):
            with emulated.capture():
                with_a_break(before(x))
    emulated.check(lambda t: doubled(t * 2) + 1, [x], "geg")


def test_memory_that_was_made_empty_belongs_to_the_capture(emulated):
    """As what operators compute does."""
    x = emulated.tensor(3)
    with torch.no_grad(), emulated.capture() as g:
        y = torch.empty(3)
        y.copy_(x)
        z = y * 2
    owned = {storage.data_ptr() for storage in g.storages()}
    assert {y.data_ptr(), z.data_ptr()} <= owned
    assert x.data_ptr() not in owned


def test_memory_of_the_user_is_never_the_captures(emulated):
    """Also where it has the identity of a storage that died in the capture."""
    for _ in range(30):
        made = []

        def make():
            made.append(torch.ones(64))  # noqa: B023  (called in this round)

        with torch.no_grad(), emulated.capture() as g:
            for _ in range(8):
                torch.empty(64)
            g.add_eager(make)
            g.add_eager(len, made[0])
        kept = g.segments[-1].call.args[0]
        assert kept is made[0]
        assert made[0].data_ptr() not in {storage.data_ptr() for storage in g.storages()}


def test_a_refusal_that_the_block_caught(emulated):
    """It says so at the next boundary, as a CUDA capture does that was made invalid."""
    x = emulated.tensor(4)
    for refused in (lambda t: t.sum().item(), lambda t: t[t > 0], copy.deepcopy):
        with torch.no_grad(), pytest.raises(CaptureFailedError, match="its exception was caught"):
            with emulated.capture():
                with contextlib.suppress(CaptureFailedError):
                    refused(x * 2)
                x.add_(1)
    emulated.check(lambda t: t * 2, [x], "g")


def test_a_refusal_keeps_nothing_alive(emulated):
    """Once its exception is gone, without the collector."""
    x = emulated.tensor(4)

    def refuse():
        with torch.no_grad(), emulated.capture() as g:
            alive.append(weakref.ref(g))
            (x * 2).sum().item()

    alive = []
    for _ in range(2):  # torch itself keeps the frames of the first one
        gc.collect()
        gc.disable()
        try:
            with pytest.raises(CaptureFailedError) as caught:
                refuse()
            del caught
            found = alive.pop()()
        finally:
            gc.enable()
    assert found is None
