"""Decode steps of a 32-layer decoder: eager, compiled, as one graph, and broken at each attention.

The decoder has what sets the cost of a step: RMS norms, attention over the whole static cache, a gated MLP,
a head and greedy sampling. Positional embedding and masking are left out, and the weights are random.
"""

import gc
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from contenders import (
    BARE,
    EAGER,
    OURS,
    PEER,
    TORCH,
    Break,
    bare_loop,
    capture_ours,
    capture_peer,
    capture_torch,
    peer,
)
from harness import Bench, Factory
from timing import Call, Measured
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from segcapture import eager_break_during_capture

COMPILE = "torch.compile"
FRESH = f"{OURS}, fresh tensors"
BUFFER = f"{OURS}, into a buffer"
FULL = f'{OURS}, mode="full"'

T = torch.Tensor
Attend = Callable[[T, T, T, T, T, T], T]


def attention(q: T, k: T, v: T, keys: T, values: T, position: T) -> T:
    """Write one token into the cache and attend to all of it; `[batch, heads, tokens, head_dim]` each."""
    keys.index_copy_(2, position, k)
    values.index_copy_(2, position, v)
    return scaled_dot_product_attention(q, keys, values)


def attention_into(out: T, q: T, k: T, v: T, keys: T, values: T, position: T) -> None:
    """The same, into a buffer of the caller."""
    out.copy_(attention(q, k, v, keys, values, position))


def through_buffer(break_: Break) -> Attend:
    """Make the buffer before the break."""
    call = break_(attention_into)

    def attend(q: T, *rest: T) -> T:
        out = torch.empty_like(q)
        call(out, q, *rest)
        return out

    return attend


@attrs.frozen(eq=False)
class Layer:
    """Weights and cache of one layer."""

    qkv: T
    proj: T
    gate_up: T
    down: T
    keys: T
    values: T


class Decoder:
    """Static tokens and position, which each step advances, and static logits."""

    def __init__(
        self, device: torch.device, layers: int, hidden: int, batch: int, context: int, vocab: int
    ) -> None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.head_dim = min(128, hidden // 4)
        inner = hidden * 8 // 3 // 64 * 64
        cache = (batch, hidden // self.head_dim, context, self.head_dim)

        def weight(rows: int, columns: int) -> T:
            return torch.randn(rows, columns, device=device, dtype=dtype) / columns**0.5

        self.layers = [
            Layer(
                weight(3 * hidden, hidden),
                weight(hidden, hidden),
                weight(2 * inner, hidden),
                weight(hidden, inner),
                *(torch.zeros(cache, device=device, dtype=dtype) for _ in range(2)),
            )
            for _ in range(layers)
        ]
        self.embedding, self.head = weight(vocab, hidden), weight(vocab, hidden)
        self.tokens = torch.ones(batch, dtype=torch.int64, device=device)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.logits = torch.zeros(batch, vocab, device=device, dtype=dtype)
        self.context = context

    def step(self, attend: Attend) -> None:
        """One token for each sequence."""
        x = self.embedding[self.tokens]
        batch, hidden = x.shape
        for layer in self.layers:
            qkv = linear(rms_norm(x, (hidden,)), layer.qkv)
            q, k, v = qkv.view(batch, 3, -1, 1, self.head_dim).unbind(1)
            mixed = attend(q, k, v, layer.keys, layer.values, self.position)
            x = x + linear(mixed.reshape(batch, hidden), layer.proj)
            gate, up = linear(rms_norm(x, (hidden,)), layer.gate_up).chunk(2, dim=-1)
            x = x + linear(silu(gate) * up, layer.down)
        self.logits.copy_(linear(rms_norm(x, (hidden,)), self.head))
        self.tokens.copy_(self.logits.argmax(-1))
        self.position.add_(1).remainder_(self.context)

    def first_logits(self, call: Call) -> T:
        """Logits of the first step from the start."""
        self.tokens.fill_(1)
        self.position.zero_()
        for layer in self.layers:
            layer.keys.zero_()
            layer.values.zero_()
        call()
        return self.logits.clone()

    def body(self, attend: Attend) -> Call:
        """A step, warmed up."""

        def run() -> None:
            self.step(attend)

        run()
        return run


@contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """TimeoutError after so many seconds."""

    def ring(*_: Any) -> None:
        raise TimeoutError(f"took more than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@attrs.define
class Compiler:
    """`torch.compile` in its default mode, as long as its time lasts."""

    seconds_left: float

    def compiled(self, model: Decoder) -> Call:
        """The whole step, compiled."""
        start = time.monotonic()
        torch.compiler.reset()
        step = torch.compile(model.step, dynamic=False)
        try:
            with alarm(self.seconds_left):
                for _ in range(2):
                    step(attention)
        except TimeoutError:
            self.seconds_left = 0
            raise
        self.seconds_left = max(0.0, self.seconds_left - (time.monotonic() - start))
        return lambda: step(attention)


def contenders(bench: Bench, model: Decoder, compiler: Compiler) -> dict[str, Factory]:
    """Everyone who can run the step here."""
    mark, device = eager_break_during_capture, bench.device
    found: dict[str, Factory] = {
        EAGER: lambda: model.body(attention),
        FRESH: lambda: capture_ours(model.body(mark(attention)), device).replay,
        BUFFER: lambda: capture_ours(model.body(through_buffer(mark)), device).replay,
        BARE: lambda: bare_loop(capture_ours(model.body(through_buffer(mark)), device)),
        FULL: lambda: capture_ours(model.body(mark(attention)), device, mode="full").replay,
    }
    if bench.cuda:
        found[TORCH] = lambda: capture_torch(model.body(attention)).replay
        if peer is not None:
            found[f"{PEER}, into a buffer"] = lambda: (
                capture_peer(model.body(through_buffer(peer.no_graph))).replay
            )
    if compiler.seconds_left > 0:
        found[COMPILE] = lambda: compiler.compiled(model)
    return found


def size(bench: Bench, hidden: int, batch: int, compiler: Compiler) -> None:
    """All contenders at one size."""
    layers, context, vocab = (2, 16, 64) if bench.small else (32, 512, 32000)
    model = Decoder(bench.device, layers, hidden, batch, context, vocab)
    case = f"hidden {hidden}, batch {batch}"
    expected = model.first_logits(model.body(attention))

    def check(name: str, call: Call) -> None:
        error = (model.first_logits(call) - expected).abs().max().item()
        # Compiled kernels round bfloat16 elsewhere; logits of another program differ by the largest and more.
        if not error <= 0.15 * expected.abs().max().item():
            raise AssertionError(f"the first logits differ from eager's by {error}")

    def columns(name: str, measured: Measured) -> dict[str, float]:
        step = measured.step_us or measured.host_us
        return {"tokens_per_s": batch / step.median * 1e6}

    factories = contenders(bench, model, compiler)
    found = bench.run(case, factories, check=check, calls=3, show_memory=True, columns=columns)
    value = None
    if FRESH in found and TORCH in found:
        ours, whole = found[FRESH].gpu_us, found[TORCH].gpu_us
        if ours is not None and whole is not None and found[FRESH].ahead and found[TORCH].ahead:
            value = (ours.median - whole.median) / layers
    bench.target(f"{case}: GPU us a break above one graph", value, 4.0)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all sizes."""
    seconds = {"type": float, "default": 0.0, "metavar": "SECONDS", "help": "time for torch.compile in all"}
    bench, options = Bench.from_arguments("decode", argv, ("--compile", seconds))
    compiler = Compiler(options.compile)
    with torch.no_grad():
        for hidden in (64,) if bench.small else (512, 2048, 4096):
            for batch in (2,) if bench.small else (1, 16):
                try:
                    size(bench, hidden, batch, compiler)
                except Exception as error:
                    bench.failed(f"hidden {hidden}, batch {batch}", "all", error)
                gc.collect()
    bench.notes.append(
        "build_reserved_mib is what the allocator reserved more after a contender was built, in one process: "
        "the first one on a capture stream pays for its cuBLAS workspace, and eager temporaries are not in "
        "it. `bound` says what limits steps back to back: where it is the host, the GPU waits for it, and "
        "tokens per second are those of the host. gpu_us is the GPU's part, with the host ahead of it."
    )
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
