"""The tape and what no operator shows: constants, bodies in Python, generators, questions of libraries."""

import threading

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint

from segcapture import CaptureFailedError, eager_break_during_capture, find_breaks
from segcapture.operators.intercept import aside, replaced, watching
from tests.conftest import assert_same

GUARDS = [torch.no_grad, torch.inference_mode, torch.enable_grad]


@pytest.fixture(params=GUARDS, ids=lambda guard: guard.__name__)
def guard(request):
    """No grad, inference mode, and torch's default."""
    return request.param


CONSTANTS = {
    "tensor": lambda x: torch.tensor([1.0, 2.0]),
    "tensor of one": lambda x: torch.tensor(0.0),
    "as_tensor": lambda x: torch.as_tensor([1.0, 2.0]),
    "asarray": lambda x: torch.asarray([1.0, 2.0]),
    "new_tensor": lambda x: x.new_tensor([1.0, 2.0]),
    "Tensor": lambda x: torch.Tensor([1.0, 2.0]),
    "full": lambda x: torch.full((2,), 3.0),
    "zeros": lambda x: torch.zeros(2),
    "ones_like": lambda x: torch.ones_like(x[:2]),
    "arange": lambda x: torch.arange(2.0),
    "scalar_tensor": lambda x: torch.scalar_tensor(4.0),
}


@pytest.mark.parametrize("make", CONSTANTS.values(), ids=CONSTANTS)
def test_a_constant_that_the_code_writes_to(emulated, guard, make):
    """Each replay begins with the value that the code gave it, also in a view and after a break."""

    @eager_break_during_capture
    def passes(c):
        return c * 1

    def model(x):
        c = make(x)
        c += x.sum()
        before = c * 1
        after = passes(c)
        c.view(-1)[:1].mul_(2)
        return before, c, after + c

    emulated.check(model, [emulated.tensor(4)], "geg", guard=guard)


def test_memory_of_the_user_is_no_constant(emulated):
    """An array that `as_tensor` shows is a static input."""
    array = emulated.tensor(3).numpy()
    with torch.no_grad(), emulated.capture() as g:
        out = torch.as_tensor(array) * 2
    array[:] = 5
    g.replay()
    assert out.tolist() == [10, 10, 10]


@torch.library.custom_op("segcapture_operators::norm", mutates_args=())
def norm(x: torch.Tensor) -> torch.Tensor:
    """Reads on the host, in its body."""
    return x / float(x.max())


@torch.library.custom_op("segcapture_operators::picked", mutates_args=())
def picked(x: torch.Tensor) -> torch.Tensor:
    """Has a size that depends on the data, in its body."""
    return x.clone() if x[x > 0].numel() else x * 2


@pytest.mark.parametrize(("fn", "operator"), [(norm, "Tensor.__float__"), (picked, "aten::index")])
def test_a_host_read_in_the_body_of_an_operator(emulated, guard, fn, operator):
    """The tape refuses it, and find_breaks finds it, at its line in the body."""
    x = emulated.tensor(4)
    with guard():
        with pytest.raises(CaptureFailedError) as info, emulated.capture():
            fn(x * 2)
        (found,) = find_breaks(lambda x: fn(x * 2), x)
    body = fn._init_fn.__code__
    for text in (str(info.value), found.location):
        assert f"{__file__}:{body.co_firstlineno + 3}" in text
    assert info.value.operator == found.operator == operator


LIBRARY = torch.library.Library("segcapture_undeclared", "DEF")
LIBRARY.define("writes(Tensor x) -> ()")
LIBRARY.define("returns(Tensor x) -> Tensor")
LIBRARY.impl("writes", lambda x: [x.add_(1)].clear(), "CPU")
LIBRARY.impl("returns", lambda x: x.mul_(2), "CPU")


def test_operators_that_write_though_their_schema_does_not_say_so(emulated):
    """As a CUDA graph holds their kernels: on the tape."""

    def model(x):
        y = x * 1
        torch.ops.segcapture_undeclared.writes(y[:2])
        return torch.ops.segcapture_undeclared.returns(y) + 1, y

    emulated.check(model, [emulated.tensor(4)], "g")


def packed(x):
    return nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 2])).data


def ctc(lengths):
    return lambda x: F.ctc_loss(x.log_softmax(2), torch.ones(2, 1, dtype=torch.long), *lengths)


@pytest.mark.parametrize(
    ("fn", "operator"),
    [
        (packed, "aten::_pack_padded_sequence"),
        (ctc(((3, 3), (1, 1))), "aten::_ctc_loss"),
        (ctc(torch.tensor([[3, 3], [1, 1]])), "aten::_ctc_loss"),
    ],
)
def test_lengths_on_the_host(emulated, guard, fn, operator):
    """They go to the device or size the result."""
    x = emulated.tensor(3, 2, 4)
    with guard():
        with pytest.raises(CaptureFailedError) as info, emulated.capture():
            fn(x)
        (found,) = find_breaks(fn, x)
    assert info.value.operator == found.operator == operator


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
@pytest.mark.filterwarnings("ignore:.*nested tensors.*")
def test_the_fast_path_of_a_transformer(emulated, guard):
    """It is taken as in eager: right without a mask, and refused where it makes nested tensors."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    x, mask = emulated.tensor(2, 4, 8), torch.tensor([[False] * 4, [False, False, True, True]])
    with guard():
        emulated.check(encoder, [x], "g", guard=guard)
        with pytest.raises(CaptureFailedError) as info, emulated.capture():
            encoder(x, src_key_padding_mask=mask)
        found = find_breaks(encoder, x, src_key_padding_mask=mask)
    assert "nested" in info.value.operator
    assert info.value.operator == found[0].operator


def test_nested_tensors(emulated):
    """A result of the user's own."""
    x = emulated.tensor(3)
    with pytest.raises(CaptureFailedError) as info, emulated.capture():
        torch.nested.nested_tensor([x, x[:2]])
    assert "nested" in info.value.operator
    made = torch.nested.nested_tensor([x, x[:2]])
    with pytest.raises(CaptureFailedError) as info, emulated.capture():
        made * 2
    assert info.value.operator == "aten::mul"


@pytest.mark.parametrize("broken", [False, True])
def test_checkpointed_dropout(emulated, broken):
    """Backward draws what forward drew, at each replay, also beyond a break."""
    weight = nn.Parameter(emulated.tensor(64))
    weight.grad = torch.zeros(64)
    look = eager_break_during_capture(lambda: None)

    def step():
        weight.grad.zero_()
        y = checkpoint(lambda w: F.dropout(F.dropout(w, 0.5) * 2, 0.3), weight, use_reentrant=False)
        if broken:
            look()
        y.sum().backward()
        return y.detach(), weight.grad * 1, torch.rand(2)

    torch.manual_seed(3)
    expected = [step() for _ in range(4)]
    torch.manual_seed(3)
    with emulated.capture() as g:
        out = step()
    assert_same(out, expected[0])
    for value in expected[1:]:
        g.replay()
        assert_same(out, value)
        assert torch.equal(out[0] != 0, out[1] != 0)


@pytest.mark.parametrize("then", [lambda: torch.rand(2), lambda: None], ids=["draws", "ends"])
def test_a_seed_in_a_graph_segment(emulated, then):
    """A replay would not seed: refused. In a break it is right."""

    def model(x, seed):
        x = x + torch.rand_like(x)
        seed()
        return x + torch.rand_like(x)

    x = emulated.tensor(3)
    with pytest.raises(CaptureFailedError, match="seeded"), emulated.capture():
        torch.rand(2)
        torch.manual_seed(1)
        then()
    (found,) = find_breaks(lambda: [torch.rand(2), torch.manual_seed(2), then()])
    assert found.operator == "torch.manual_seed"
    in_a_break = eager_break_during_capture(lambda: torch.manual_seed(0) and None)
    assert find_breaks(model, x, in_a_break) == ()
    expected = model(x, in_a_break)
    with emulated.capture() as g:
        out = model(x, in_a_break)
    for _ in range(3):
        expected = model(x, in_a_break)
        g.replay()
        assert torch.equal(out - x > 0, expected - x > 0)


def test_libraries_that_ask_whether_cuda_captures(emulated, monkeypatch):
    """Yes, to the thread that captures, inside of a graph segment; others hear CUDA itself."""
    asked, found = lambda: "CUDA", []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", asked)

    @eager_break_during_capture
    def in_a_break():
        found.append(torch.cuda.is_current_stream_capturing())

    def program(x):
        found.append(torch.cuda.is_current_stream_capturing())
        worker = threading.Thread(target=in_a_break)
        worker.start()
        worker.join()
        in_a_break()

    x = emulated.tensor(2)
    with torch.no_grad(), emulated.capture() as g:
        program(x * 2)
    assert found == [True, "CUDA", False]
    assert torch.cuda.is_current_stream_capturing is asked
    found.clear()
    g.replay()
    assert found == ["CUDA"]
    found.clear()
    find_breaks(program, x)
    assert found == [True, "CUDA", False]
    assert torch.cuda.is_current_stream_capturing is asked


def test_replays_of_one_capture_take_turns(emulated):
    """Several threads at once: each eager function sees what its own replay computed (C6)."""
    x, values, running = emulated.tensor(64), [], []

    @eager_break_during_capture
    def alone(y):
        running.append(1)
        values.append((len(running), y.clone()))
        running.pop()

    with torch.no_grad(), emulated.capture() as inner:
        y = x * 2
    with torch.no_grad(), emulated.capture() as g:
        z = x + 1
        alone(z)
        g.add_eager(inner.replay)  # of the same thread
        z.mul_(3)
    start = threading.Barrier(4)

    def serve():
        start.wait(30)
        for _ in range(50):
            g.replay()

    threads = [threading.Thread(target=serve) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(values) == 201
    assert all(count == 1 and torch.equal(value, x + 1) for count, value in values)
    assert torch.equal(y, x * 2)


def test_aside_no_mode_is_told(emulated):
    """Functions, operators, and what is nested; after it, all as before, after an exception too."""
    seen = []

    def operator(func, args, kwargs, call):
        seen.append(str(func))
        return call()

    def function(func, args, kwargs, call):
        seen.append(func.__name__)
        return call()

    x = emulated.tensor(2)
    with watching(operator, function):
        with pytest.raises(KeyError), aside():
            x.sum(0).view(x.new_empty(()).shape)
            with aside():
                x + 1
            x + 1
            raise KeyError
        assert seen == []
        x + 1
        assert seen == ["add", "aten.add.Tensor"]
    x + 1
    assert len(seen) == 2


def test_a_function_that_is_replaced_for_one_thread():
    """The innermost block of the thread decides; the last one out puts the original back."""

    class Owner:
        @staticmethod
        def ask():
            return "original"

    original, found = Owner.ask, []
    with replaced(Owner, "ask", lambda original: "outer"):
        with replaced(Owner, "ask", lambda original: f"not {original()}"):
            found.append(Owner.ask())
            worker = threading.Thread(target=lambda: found.append(Owner.ask()))
            worker.start()
            worker.join()
        found.append(Owner.ask())
    assert found == ["not original", "original", "outer"]
    assert Owner.ask is original
