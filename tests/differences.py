"""What CUDA refuses and what the tape refuses: small programs, each captured and replayed, as a table.

`python -m tests.differences --device cpu --json tests/differences/cpu.json` runs them all on one backend, and
`python -m tests.differences --table` writes `tests/DIFFERENCES.md` from what was recorded so.
"""

import argparse
import copy
import json
import re
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from segcapture import BreakableCUDAGraphCapture, CaptureFailedError, find_breaks
from tests.benchmarks.report import environment

ROOT = Path(__file__).resolve().parent
RECORDED = ROOT / "differences"
PAGE = ROOT / "DIFFERENCES.md"
COLUMNS = {"cpu": "the tape, on the CPU", "cuda-2.11": "CUDA, torch 2.11", "cuda-2.15": "CUDA, torch 2.15"}
SECONDS = 60
"""For one program."""
TOGETHER = {False: 6, True: 2}
"""Programs in one process, by whether they need a break: then they may break its CUDA context."""


class Things:
    """What a program works on. Only the values of `x` change from call to call."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        self.device = device
        self.x = torch.randn(4, 4).to(device)
        self.z = torch.zeros(4, 4, device=device)
        self.square = (torch.eye(4) * 4).to(device)
        self.index = torch.tensor([2, 0, 1, 3]).to(device)
        self.mask = torch.tensor([True, False, True, True]).to(device)
        self.n = torch.tensor(2).to(device)
        self.s = torch.tensor(1.5).to(device)
        self.pageable = torch.ones(4)
        self.pinned = torch.ones(4).pin_memory() if device.type == "cuda" else torch.ones(4)
        self._kept: dict[str, Any] = {}

    def keep(self, make: Callable[[], Any]) -> Any:
        """What `make` returns, made in the first call, which is a warm-up."""
        key = f"{make.__code__.co_filename}:{make.__code__.co_firstlineno}"
        if key not in self._kept:
            with torch.enable_grad():
                made = make()
            self._kept[key] = made.to(self.device) if hasattr(made, "to") else made
        return self._kept[key]


@attrs.frozen
class Program:
    """One row of the table."""

    name: str
    run: Callable[[Things], Any]
    breaks: bool
    """Whether it needs a break on CUDA, as far as known."""
    only: str = ""
    """The device that it is for."""


PROGRAMS: dict[str, Program] = {}


def fine(name: str, run: Callable[[Things], Any], only: str = "") -> None:
    PROGRAMS[name] = Program(name, run, False, only)


def breaks(name: str, run: Callable[[Things], Any], only: str = "") -> None:
    PROGRAMS[name] = Program(name, run, True, only)


def set_item(target, index, value):
    target[index] = value
    return target * 1


# Reads on the host

breaks("t.item()", lambda t: t.x * t.x.sum().item())
breaks("t.tolist()", lambda t: t.x * t.x.tolist()[0][0])
breaks("t.numpy()", lambda t: t.x + float(t.x.numpy()[0, 0]))
breaks("t.cpu()", lambda t: t.x.cpu() * 2)
breaks("t.to('cpu')", lambda t: t.x.to("cpu") * 2)
breaks("bool(t)", lambda t: t.x + bool(t.x.sum() > 0))
breaks("if t:", lambda t: t.x * 2 if t.x.sum() > 0 else t.x)
breaks("int(t)", lambda t: t.x * int(t.x.sum() * 100))
breaks("float(t)", lambda t: t.x * float(t.x.sum()))
breaks("complex(t)", lambda t: t.x * complex(t.x.sum()))
breaks("range(t)", lambda t: t.x + len(range(t.n)))
breaks("f'{t:.2f}'", lambda t: t.x + len(f"{t.s:.2f}"))
breaks("repr(t)", lambda t: t.x + len(repr(t.x)))
breaks("1.0 in t", lambda t: t.x + (1.0 in t.x))
breaks("max(t[0]) of Python", lambda t: t.x + max(t.x[0]))
breaks("torch.equal", lambda t: t.x + torch.equal(t.x, t.z))
breaks("torch.allclose", lambda t: t.x + torch.allclose(t.x, t.z))
breaks("torch.is_nonzero", lambda t: t.x + torch.is_nonzero(t.s))
breaks("x[:n] with a tensor n", lambda t: t.x[: t.n] * 2)
breaks("x[:n.item()]", lambda t: t.x[: t.n.item()] * 2)
breaks("x[n] with a tensor n", lambda t: t.x[t.n] * 2)
breaks("torch.add(alpha=t)", lambda t: torch.add(t.x, t.x, alpha=t.s))
breaks("torch.arange(t)", lambda t: torch.arange(t.n, device=t.device) * 2)
breaks("torch.tensor([t, t])", lambda t: torch.tensor([t.s, t.s], device=t.device) + t.x[0, 0])
fine("torch.stack([t, t])", lambda t: torch.stack([t.s, t.s]) + t.x[0, 0])
fine("a shape, a dtype, a stride", lambda t: t.x * t.x.shape[0] * t.x.stride(0) + t.x.numel())

# Masks, and sizes that depend on the data

breaks("x[mask]", lambda t: t.x[t.x > 0] * 2)
breaks("x[:, mask]", lambda t: t.x[:, t.mask] * 2)
breaks("x[mask] = rows", lambda t: set_item(t.z, t.mask, t.x[:3]))
breaks("x[mask] = 0-dim tensor", lambda t: set_item(t.x * 1, t.x > 0, t.s))
fine("x[mask] = number", lambda t: set_item(t.x * 1, t.x > 0, 5.0))
fine("x[index]", lambda t: t.x[t.index] * 2)
fine("x[index] = rows", lambda t: set_item(t.z, t.index, t.x))
fine("masked_fill(number)", lambda t: t.x.masked_fill(t.x > 0, 1.0))
breaks("masked_fill(tensor)", lambda t: t.x.masked_fill(t.x > 0, t.s))
fine("masked_scatter", lambda t: t.x.masked_scatter(t.x > 0, t.x * 2))
breaks("masked_select", lambda t: torch.masked_select(t.x, t.x > 0))
breaks("nonzero", lambda t: t.x.relu().nonzero())
fine("nonzero_static", lambda t: torch.nonzero_static(t.x.relu(), size=4))
breaks("where(c)", lambda t: torch.where(t.x > 0)[0])
fine("where(c, a, b)", lambda t: torch.where(t.x > 0, t.x, 0.0))
breaks("unique", lambda t: torch.unique(t.x))
breaks("unique_consecutive", lambda t: torch.unique_consecutive(t.x.sign()))
breaks("bincount", lambda t: torch.bincount(t.index))
breaks("bincount(minlength)", lambda t: torch.bincount(t.index, minlength=4))
breaks("histc", lambda t: torch.histc(t.x))
fine("histc(min, max)", lambda t: torch.histc(t.x, min=-1, max=1))
breaks("repeat_interleave(tensor)", lambda t: t.x.repeat_interleave(t.index, dim=0))
fine("repeat_interleave(output_size)", lambda t: t.x.repeat_interleave(t.index, dim=0, output_size=6))
fine("repeat_interleave(number)", lambda t: t.x.repeat_interleave(2, dim=0))
breaks("one_hot(index)", lambda t: F.one_hot(t.index))
fine("one_hot(index, classes)", lambda t: F.one_hot(t.index, 4) + t.x)

# Linear algebra, order, sums

breaks("linalg.inv", lambda t: torch.linalg.inv(t.square + t.x * 0.1))
fine("linalg.inv_ex", lambda t: torch.linalg.inv_ex(t.square + t.x * 0.1).inverse)
breaks("linalg.cholesky", lambda t: torch.linalg.cholesky(t.square + t.x.t() @ t.x))
breaks("linalg.eigvals", lambda t: torch.linalg.eigvals(t.square + t.x).abs().sum())
breaks("linalg.eigh", lambda t: torch.linalg.eigvalsh(t.square + t.x.t() @ t.x))
breaks("linalg.svdvals", lambda t: torch.linalg.svdvals(t.square + t.x))
breaks("linalg.solve", lambda t: torch.linalg.solve(t.square + t.x * 0.1, t.x))
breaks("linalg.norm(ord=2)", lambda t: torch.linalg.norm(t.x, ord=2))
breaks("linalg.pinv", lambda t: torch.linalg.pinv(t.square + t.x * 0.1))
breaks("linalg.lu_factor", lambda t: torch.linalg.lu_factor(t.square + t.x * 0.1).LU)
breaks("linalg.matrix_exp", lambda t: torch.linalg.matrix_exp(t.x * 0.1))
fine("linalg.det", lambda t: torch.linalg.det(t.square + t.x * 0.1))
fine("linalg.lstsq", lambda t: torch.linalg.lstsq(t.square + t.x * 0.1, t.x).solution)
fine("quantile(0.5)", lambda t: torch.quantile(t.x, 0.5, dim=1))
fine("cdist", lambda t: torch.cdist(t.x, t.x + 1))
fine("searchsorted, isin", lambda t: torch.searchsorted(t.x.sort().values, t.x) + torch.isin(t.x, t.z))
fine("tensor_split(host tensor)", lambda t: torch.tensor_split(t.x, torch.tensor([1, 3]))[1] * 2)
breaks("combinations", lambda t: torch.combinations(t.x[0]))
fine("_assert_async", lambda t: torch._assert_async(torch.isfinite(t.x).all()) or t.x * 2)
fine("linalg.qr", lambda t: torch.linalg.qr(t.square + t.x * 0.1).R.abs())
fine("sort", lambda t: t.x.sort(0).values)
fine("topk", lambda t: t.x.topk(2).values)
fine("cumsum", lambda t: t.x.cumsum(0))
fine("scatter", lambda t: torch.zeros_like(t.x).scatter(0, t.index[None], t.x))
fine("median", lambda t: t.x.median())
fine("fft", lambda t: torch.fft.rfft(t.x).abs())

# Host memory and constants


def adds_in_place(t):
    c = torch.tensor(0.0, device=t.device)
    c += t.x.sum()
    return c


def writes_to_a_made_one(t):
    c = torch.full((2,), 3.0, device=t.device)
    c += t.x.sum()
    return c


breaks("x * torch.tensor(0.5, device=)", lambda t: t.x * torch.tensor(0.5, device=t.device))
fine("x * torch.tensor(0.5) of the host", lambda t: t.x * torch.tensor(0.5))
breaks("as_tensor(list, device=)", lambda t: t.x * torch.as_tensor([1.0, 2, 3, 4], device=t.device))
breaks("new_tensor(list)", lambda t: t.x * t.x.new_tensor([1.0, 2, 3, 4]))
breaks("c = torch.tensor(0.); c += x.sum()", adds_in_place)
fine("c = torch.full(...); c += x.sum()", writes_to_a_made_one)
fine(
    "arange, linspace of numbers",
    lambda t: t.x + torch.arange(4, device=t.device) + torch.linspace(0, 1, 4, device=t.device),
)
fine("zeros, ones, eye", lambda t: t.x + torch.ones_like(t.x) + torch.eye(4, device=t.device))
breaks("copy of pageable memory", lambda t: t.x + t.pageable.to(t.device))
breaks("copy_ of pageable memory", lambda t: t.z[0].copy_(t.pageable) + t.x)
fine("copy of pinned memory, non_blocking", lambda t: t.x + t.pinned.to(t.device, non_blocking=True))
breaks("copy of pinned memory, blocking", lambda t: t.x + t.pinned.to(t.device))
breaks("x[list of integers]", lambda t: t.x[[0, 2]] * 2)
fine("deepcopy of a tensor", lambda t: copy.deepcopy(t.x) * 2)

# Random numbers


def checkpointed_dropout(t):
    with torch.enable_grad():
        w = t.keep(lambda: nn.Parameter(torch.ones(4, 4, device=t.device)))
        out = checkpoint(lambda v: F.dropout(v * t.x, 0.5) * v, w, use_reentrant=False)
        (grad,) = torch.autograd.grad(out.sum(), w)
    return out.detach(), grad


def seeded(t):
    torch.manual_seed(7)
    return torch.rand_like(t.x) + t.x


fine("dropout", lambda t: F.dropout(t.x, 0.5))
fine("rand, randn, randint, bernoulli", lambda t: (
    t.x + torch.rand(4, device=t.device) + torch.randn_like(t.x)
    + torch.randint(5, (4,), device=t.device) + torch.bernoulli(t.x.sigmoid())
))  # fmt: skip
fine("randperm", lambda t: t.x[torch.randperm(4, device=t.device)])
fine("multinomial", lambda t: torch.multinomial(t.x.softmax(-1), 1) + t.x)
fine("multinomial of several", lambda t: torch.multinomial(t.x.softmax(-1), 2) + t.x[:, :2])
breaks("Categorical(probs).sample()", lambda t: (
    torch.distributions.Categorical(t.x.softmax(-1)).sample() + t.x
))  # fmt: skip
fine("Categorical(validate_args=False).sample()", lambda t: (
    torch.distributions.Categorical(t.x.softmax(-1), validate_args=False).sample() + t.x
))  # fmt: skip
breaks("normal(tensors)", lambda t: torch.normal(t.x, t.x.abs()))
fine("normal_()", lambda t: torch.empty_like(t.x).normal_() + t.x)
fine("checkpoint around dropout", checkpointed_dropout)
breaks("manual_seed in the block", seeded)

# Operators of torch.library


@torch.library.custom_op("segcapture_differences::reads", mutates_args=())
def reads(x: torch.Tensor) -> torch.Tensor:
    return x / float(x.abs().max())


@torch.library.custom_op("segcapture_differences::scaled", mutates_args=())
def scaled(x: torch.Tensor, by: float) -> torch.Tensor:
    return x * by


@torch.library.custom_op("segcapture_differences::sized", mutates_args=())
def sized(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0].clone()


UNDECLARED = torch.library.Library("segcapture_differences_undeclared", "DEF")
UNDECLARED.define("writes(Tensor x) -> ()")
UNDECLARED.define("returns(Tensor x) -> Tensor")
for key in ("CPU", "CUDA"):
    UNDECLARED.impl("writes", lambda x: [x.add_(1)].clear(), key)
    UNDECLARED.impl("returns", lambda x: x.mul_(2), key)


def undeclared_write(t):
    y = t.x * 1
    torch.ops.segcapture_differences_undeclared.writes(y)
    return y + 1


breaks("custom operator that reads", lambda t: reads(t.x) * 2)
breaks("custom operator with a mask", lambda t: sized(t.x) * 2)
fine("custom operator", lambda t: scaled(t.x, 3.0))
fine("operator with an undeclared write", undeclared_write)
fine(
    "operator that returns its argument",
    lambda t: torch.ops.segcapture_differences_undeclared.returns(t.x * 1) + 1,
)

# Layers


def packed(t, enforce_sorted=True):
    return pack_padded_sequence(
        t.x[:, :, None], torch.tensor([4, 3, 2, 1]), enforce_sorted=enforce_sorted
    ).data


def ctc(t, targets, lengths):
    return F.ctc_loss(t.x[:, None].log_softmax(2), targets, *lengths)


def encoded(t, **options):
    layer = t.keep(lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval())
    return layer(t.x[None], **options)


def batch_norm(t):
    layer = t.keep(lambda: nn.BatchNorm1d(4))
    return layer(t.x), layer.running_mean * 1


def autocast(t):
    layer = t.keep(lambda: nn.Linear(4, 4))
    with torch.autocast(t.device.type, dtype=torch.bfloat16):
        return layer(t.x).float()


breaks("pack_padded_sequence", packed)
breaks("pack_padded_sequence, not sorted", lambda t: packed(t, enforce_sorted=False))
breaks(
    "ctc_loss, host lengths",
    lambda t: ctc(t, torch.ones(1, 1, dtype=torch.long), (torch.tensor([4]), torch.tensor([1]))),
)
breaks("ctc_loss, lengths as numbers", lambda t: ctc(t, t.index[None, 2:3], ((4,), (1,))))
breaks("nested_tensor", lambda t: torch.nested.nested_tensor([t.x, t.x[:2]]).to_padded_tensor(0.0))
fine("TransformerEncoder", encoded)


def padded(t):
    make = lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 1).eval()  # noqa: E731
    mask = t.index[None] > 2
    return t.keep(make)(t.x[None], src_key_padding_mask=mask)


breaks("TransformerEncoder with a padding mask", padded)
fine("scaled_dot_product_attention", lambda t: F.scaled_dot_product_attention(*[t.x[None, None]] * 3))
fine("attention, causal", lambda t: F.scaled_dot_product_attention(*[t.x[None, None]] * 3, is_causal=True))
fine("embedding", lambda t: F.embedding(t.index, t.x))
breaks("embedding(max_norm)", lambda t: F.embedding(t.index, t.x * 1, max_norm=0.5))
fine("embedding_bag", lambda t: F.embedding_bag(t.index[None], t.x))
fine("conv2d", lambda t: t.keep(lambda: nn.Conv2d(1, 2, 3))(t.x[None, None]))
fine("LSTM", lambda t: t.keep(lambda: nn.LSTM(4, 4, batch_first=True))(t.x[None])[0])
fine("batch norm in training", batch_norm)
fine("cross_entropy", lambda t: F.cross_entropy(t.x, t.index))
fine("autocast", autocast)
fine("torch.compile(backend='aot_eager')", lambda t: t.keep(
    lambda: torch.compile(lambda x: (x * 2).relu() + 1, backend="aot_eager")
)(t.x))  # fmt: skip
breaks("torch.cond", lambda t: torch.cond(t.x.sum() > 0, torch.sin, torch.cos, (t.x,)))

# Training


def trained(make: Callable[[Any], Any] | None) -> Callable[[Things], Any]:
    def step(t):
        def both():
            layer = nn.Linear(4, 4).to(t.device)
            return layer, make(layer.parameters()) if make else None

        layer, optimizer = t.keep(both)
        with torch.enable_grad():
            for p in layer.parameters():
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad.zero_()
            loss = layer(t.x).square().mean()
            loss.backward()
            if optimizer:
                optimizer.step()
        return loss.detach() * 1, layer.weight.grad * 1, layer.weight.detach() * 1

    return step


fine("backward", trained(None))
fine("SGD", trained(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)))
breaks("Adam", trained(lambda p: torch.optim.Adam(p, lr=0.1)))
breaks("Adam(fused=True)", trained(lambda p: torch.optim.Adam(p, lr=0.1, fused=True)))
fine("Adam(capturable=True)", trained(lambda p: torch.optim.Adam(p, lr=0.1, capturable=True)), "cuda")
fine(
    "Adam(fused=True, capturable=True)",
    trained(lambda p: torch.optim.Adam(p, lr=0.1, fused=True, capturable=True)),
)
breaks("clip_grad_norm_(error_if_nonfinite)", lambda t: nn.utils.clip_grads_with_norm_(
    [], nn.utils.get_total_norm([t.x], error_if_nonfinite=True), t.x.sum()
) or t.x * 1)  # fmt: skip

# Streams, and being asked


def forked(t, joined=True):
    side, main = t.keep(torch.cuda.Stream), torch.cuda.current_stream()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        y = t.x * 2
    if joined:
        main.wait_stream(side)
    return y


def synchronizes(t):
    torch.cuda.synchronize()
    return t.x * 2


def asks(t):
    try:
        capturing = torch.cuda.is_current_stream_capturing()
    except RuntimeError:  # of a torch without CUDA
        capturing = False
    return t.x * 2 if capturing or bool(torch.isfinite(t.x).all()) else t.z


fine("is_current_stream_capturing()", asks)
fine("a side stream, joined", forked, "cuda")
breaks("torch.cuda.synchronize()", synchronizes, "cuda")
breaks("stream.synchronize()", lambda t: torch.cuda.current_stream().synchronize() or t.x * 2, "cuda")

# Metadata, dtypes and layouts


def in_place_metadata(t):
    y = t.x + 1
    y.t_()
    y.unsqueeze_(0)
    y.squeeze_(0)
    return y * 2


def resized(t):
    y = torch.ones(2, device=t.device)
    y.resize_(4, 4)
    return y.copy_(t.x) * 2


def data_set(t):
    y = torch.zeros_like(t.x)
    y.data = t.x * 5
    return y * 1


fine("t_(), unsqueeze_()", in_place_metadata)
fine("resize_", resized)
fine("y.data =", data_set)
fine("out=", lambda t: torch.add(t.x, 1, out=torch.empty(0, device=t.device)) * 2)
fine("complex numbers", lambda t: (torch.complex(t.x, t.x * 2).conj() * 2).imag * 1)
breaks("to_sparse", lambda t: t.x.relu().to_sparse().to_dense())
fine("sparse matrix of before @ x", lambda t: torch.sparse.mm(t.keep(lambda: torch.eye(4).to_sparse()), t.x))
fine("sparse matrix of before * 2", lambda t: (t.keep(lambda: torch.eye(4).to_sparse()) * 2).to_dense() + t.x)
fine("quantize_per_tensor", lambda t: torch.quantize_per_tensor(t.x, 0.1, 0, torch.qint8).dequantize())
fine("fake_quantize", lambda t: torch.fake_quantize_per_tensor_affine(t.x, 0.1, 0, -128, 127))
fine("float8", lambda t: t.x.to(torch.float8_e4m3fn).float())


# Running one


def run(program: Program, device: torch.device) -> dict[str, Any]:
    """What `find_breaks` lists, and what a capture does."""
    if program.only not in ("", device.type):
        return {"find_breaks": [], "capture": "not on this device"}
    inputs = [torch.randn(4, 4, generator=torch.Generator().manual_seed(i)).to(device) for i in range(4)]
    stage = "eager fails"
    with torch.no_grad():
        try:
            eager = _warm(program, Things(device))
            expected = [_call(program, eager, x) for x in inputs]
            found_breaks = find_breaks(program.run, _warm(program, Things(device)))
            listed = sorted({found.operator for found in found_breaks})
            g, ours = BreakableCUDAGraphCapture(device=device), Things(device)
            with g.warm_up():
                _warm(program, ours)
            ours.x.copy_(inputs[0])
            stage = "refused"
            with g:
                out = program.run(ours)
            for i, x in enumerate(inputs):
                stage = f"fails at replay {i}"
                if i:
                    ours.x.copy_(x)
                    g.replay()
                if not _same(_read(out), expected[i]):
                    return {"find_breaks": listed, "capture": f"wrong at {f'replay {i}' if i else 'capture'}"}
        except Exception as error:
            found = f"{stage}: {_words(error)}"
            return {"find_breaks": [] if stage == "eager fails" else listed, "capture": found}
    return {"find_breaks": listed, "capture": "right"}


def _warm(program: Program, t: Things) -> Things:
    for _ in range(2):
        program.run(t)
    torch.manual_seed(1)
    return t


def _call(program: Program, t: Things, x: torch.Tensor) -> list[torch.Tensor]:
    t.x.copy_(x)
    return _read(program.run(t))


def _read(out: Any) -> list[torch.Tensor]:
    tensors = out if isinstance(out, tuple) else (out,)
    return [t.detach().to("cpu", copy=True) for t in tensors]


def _same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(a.shape == b.shape and torch.allclose(a, b, 1e-4, 1e-5, equal_nan=True) for a, b in pairs)


def _words(error: Exception) -> str:
    """The operator that was refused, the code of CUDA, or how the message begins."""
    if isinstance(error, CaptureFailedError) and error.operator:
        return f"`{error.operator}`"
    code = getattr(error, "error_code", None)
    if isinstance(code, int):
        return f"CUDA error {code}"
    text = re.sub(r"\S*/\S+", "...", str(error).split("\n")[0]).replace("|", "/")
    return f"{type(error).__name__}, {textwrap.shorten(text, 72, placeholder=' ...')}"


# Running them all


def _run_here(names: list[str], device: torch.device) -> None:
    """One line of JSON for each, until one has broken the CUDA context."""
    warnings.simplefilter("ignore")
    for name in names:
        found = run(PROGRAMS[name], device)
        if found["capture"].startswith("refused") or len(names) == 1 or device.type == "cpu":
            pass
        elif found["capture"] != "right":
            return  # It gets a process of its own.
        print(json.dumps([name, found]), flush=True)
        if device.type != "cpu":
            torch.rand(2, device=device).sum().item()


def _run_in_process(names: list[str], device: str) -> dict[str, Any]:
    """Their outcomes. What had none in a common process gets one of its own."""
    command = [sys.executable, "-m", "tests.differences", "--device", device, "--only", *names]
    try:
        done = subprocess.run(
            command, cwd=ROOT.parent, capture_output=True, text=True, timeout=SECONDS * len(names)
        )
        printed, end = done.stdout, f"exit status {done.returncode}"
    except subprocess.TimeoutExpired as error:
        printed, end = (error.stdout or b"").decode(), f"no end in {SECONDS} s"
    found = dict(json.loads(line) for line in printed.splitlines() if line.startswith('["'))
    missing = [name for name in names if name not in found]
    if len(names) == 1:
        return found or {names[0]: {"find_breaks": [], "capture": f"process lost, {end}"}}
    for name in missing:
        found |= _run_in_process([name], device)
    return found


def run_all(device: str, jobs: int) -> dict[str, Any]:
    """The outcome of each program, by name."""
    if device == "cpu":
        groups = [[*PROGRAMS][i::jobs] for i in range(jobs)]
    else:
        groups = []
        for breaking, size in TOGETHER.items():
            names = [name for name, program in PROGRAMS.items() if program.breaks == breaking]
            groups += [names[i : i + size] for i in range(0, len(names), size)]
    with ThreadPoolExecutor(jobs) as pool:
        outcomes = list(pool.map(lambda names: _run_in_process(names, device), groups))
    found = {name: outcome for part in outcomes for name, outcome in part.items()}
    return {name: found[name] for name in PROGRAMS}


# The table


def page() -> str:
    """The text of `tests/DIFFERENCES.md`, from what was recorded."""
    recorded = {
        name: json.loads(path.read_text()) for name in COLUMNS if (path := RECORDED / f"{name}.json").exists()
    }
    lines = [
        "# Where the tape differs from CUDA",
        "",
        "Without a GPU, graph segments are tapes of operators. Each row is a small program that was captured "
        "as one segment, and replayed three times on other inputs: *right* means that all four results were "
        "those of eager runs. On the CPU, host and device are one, so that no copy between them is seen. "
        "Generated by `python -m tests.differences --table`; do not edit.",
        "",
        f"| Program | Needs a break | {' | '.join(COLUMNS.values())} | `find_breaks` on the CPU |",
        "| --- " * (len(COLUMNS) + 3) + "|",
    ]
    for name, program in PROGRAMS.items():
        cells = [_cell(recorded.get(column), name) for column in COLUMNS]
        listed = recorded.get("cpu", {}).get("programs", {}).get(name, {}).get("find_breaks", [])
        shown = ", ".join(f"`{operator}`" for operator in listed) or "-"
        lines.append(f"| `{name}` | {'yes' if program.breaks else 'no'} | {' | '.join(cells)} | {shown} |")
    return "\n".join([*lines, "", *_foot(recorded), ""])


def _cell(column: Any, name: str) -> str:
    if column is None or name not in column["programs"]:
        return "not run"
    return str(column["programs"][name]["capture"])


def _foot(recorded: dict[str, Any]) -> list[str]:
    lines = []
    for column, title in COLUMNS.items():
        if column not in recorded:
            lines.append(f"* {title}: not run.")
            continue
        where = recorded[column]["environment"]
        lines.append(f"* {title}: torch {where['torch']}, CUDA {where['cuda']}, {where['device']}.")
    tape = recorded.get("cpu")
    for column in [None, *(c for c in COLUMNS if c != "cpu" and c in recorded)]:
        if tape is None:
            break
        title = "what is known to need a break" if column is None else COLUMNS[column]
        compared, passes, refusals = _counted(tape["programs"], column and recorded[column]["programs"])
        lines.append(
            f"* Against {title}, {compared} programs: {len(passes)} false passes (the tape accepts what is "
            f"refused: {', '.join(passes) or 'none'}), {len(refusals)} false refusals (the tape refuses what "
            f"is captured: {', '.join(refusals) or 'none'})."
        )
    return lines


def _counted(tape: dict[str, Any], cuda: dict[str, Any] | None) -> tuple[int, list[str], list[str]]:
    """How many programs were compared, false passes, and false refusals."""
    compared, passes, refusals = 0, [], []
    for name, program in PROGRAMS.items():
        ours = tape.get(name, {}).get("capture", "not")
        theirs = cuda.get(name, {}).get("capture", "not") if cuda is not None else "right"
        if cuda is None and program.breaks:
            theirs = "refused"
        if any(outcome.startswith(("not", "eager fails")) for outcome in (ours, theirs)):
            continue
        compared += 1
        if ours.startswith("refused") and theirs == "right":
            refusals.append(name)
        elif not ours.startswith("refused") and theirs.startswith(("refused", "process lost")):
            passes.append(name)
    return compared, passes, refusals


def main() -> int:
    """Run the programs on one device, or write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", nargs="+", help="run these in this process")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        PAGE.write_text(page())
        return 0
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    if options.only:
        _run_here(options.only, device)
        return 0
    found = {"programs": run_all(options.device, options.jobs)}
    text = json.dumps({"environment": environment(device), **found}, indent=1) + "\n"
    if options.json is None:
        print(text)
    else:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
