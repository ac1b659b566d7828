"""Greedy decoding with a small Llama-like model: attention is the eager break, the rest is captured.

Each step attends to the valid part of the KV cache alone. Its length is read on the host, which one
monolithic CUDA graph could not hold. Decodes eagerly and replayed, with random weights, and compares the
tokens. Runs on CUDA, or emulated on the CPU (where the rates mean nothing): python examples/decode_loop.py
"""

import argparse
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from segcapture import BreakableCUDAGraphCapture, eager_break_during_capture

CUDA = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)
NAMES = ("layers", "hidden", "heads", "kv-heads", "vocab", "batch", "tokens", "max-len")
SIZES = (16, 2048, 16, 4, 32000, 1, 256, 1024) if CUDA else (4, 256, 8, 2, 1000, 1, 32, 128)


@eager_break_during_capture
def read_length(position: Tensor, step: dict[str, int]) -> None:
    """Read on the host, once per step, how much of the cache is valid."""
    step["length"] = int(position.item()) + 1


@eager_break_during_capture
def attention(q: Tensor, cache: Tensor, step: dict[str, int]) -> Tensor:
    """Attend to the valid part. The dict is passed as itself, so each replay sees its new length."""
    keys, values = cache[:, :, : step["length"]].chunk(2, dim=1)
    return F.scaled_dot_product_attention(q, keys, values)


class Layer(nn.Module):
    """Grouped-query attention with a KV cache that is written in place, then SwiGLU."""

    def __init__(self, a: argparse.Namespace) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = a.heads, a.kv_heads, a.hidden // a.heads
        self.norm, self.mlp_norm = nn.RMSNorm(a.hidden, eps=1e-5), nn.RMSNorm(a.hidden, eps=1e-5)
        self.qkv = nn.Linear(a.hidden, (a.heads + 2 * a.kv_heads) * self.dim, bias=False)
        self.o = nn.Linear(a.hidden, a.hidden, bias=False)
        self.gate_up = nn.Linear(a.hidden, 6 * a.hidden, bias=False)
        self.down = nn.Linear(3 * a.hidden, a.hidden, bias=False)
        self.register_buffer("cache", torch.zeros(a.batch, 2 * a.kv_heads, a.max_len, self.dim))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, position: Tensor, step: dict[str, int]) -> Tensor:
        """One token per sequence: [batch, hidden] to the same."""
        batch, kv = x.shape[0], self.kv_heads
        qk, v = self.qkv(self.norm(x)).view(batch, -1, 1, self.dim).split((self.heads + kv, kv), dim=1)
        left, right = qk.chunk(2, dim=-1)
        qk = torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
        q, k = qk.split((self.heads, kv), dim=1)
        self.cache.index_copy_(2, position, torch.cat((k, v), dim=1))
        # The query heads of a group share their keys, so they go in as if they were a sequence.
        mixed = attention(q.reshape(batch, kv, -1, self.dim), self.cache, step)
        x = x + self.o(mixed.reshape(batch, -1))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Decoder(nn.Module):
    """A step of all sequences: advances int64 [batch] tokens and int64 [1] position in place."""

    def __init__(self, a: argparse.Namespace) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(a.vocab, a.hidden), nn.RMSNorm(a.hidden, eps=1e-5)
        self.layers = nn.ModuleList(Layer(a) for _ in range(a.layers))
        self.head = nn.Linear(a.hidden, a.vocab, bias=False)
        half = a.hidden // a.heads // 2
        angles = torch.arange(a.max_len)[:, None] * 1e4 ** -(torch.arange(half) / half)
        self.register_buffer("rotary", torch.stack((angles.cos(), angles.sin())))
        self.step = {"length": 0}

    def forward(self, tokens: Tensor, position: Tensor) -> None:
        read_length(position, self.step)
        x, (cos, sin) = self.embed(tokens), self.rotary[:, position]
        for layer in self.layers:
            x = layer(x, cos, sin, position, self.step)
        tokens.copy_(self.head(self.norm(x)).argmax(dim=-1))
        position.add_(1)


def now() -> float:
    """Seconds, after all work on the device."""
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


def decode(run: Callable[[], None], tokens: Tensor, position: Tensor, count: int) -> tuple[Tensor, float]:
    """Decode from token 0 at position 0: int64 [count, batch], and tokens per second."""
    found = torch.empty(count, len(tokens), dtype=torch.int64, device=DEVICE)
    tokens.zero_()
    position.zero_()
    start = now()
    for i in range(count):
        run()
        found[i] = tokens
    return found, found.numel() / (now() - start)


@torch.inference_mode()
def main() -> int:
    """Decode eagerly, capture one step, decode by replaying it."""
    parser = argparse.ArgumentParser()
    for name, default in zip(NAMES, SIZES, strict=True):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    a = parser.parse_args()
    if a.tokens > a.max_len or a.heads % a.kv_heads or a.hidden % (2 * a.heads):
        parser.error("tokens must fit max-len, kv-heads divide heads, and 2 * heads divide hidden")
    torch.manual_seed(0)
    torch.backends.cuda.enable_cudnn_sdp(False)  # it would plan anew for each length
    with torch.device(DEVICE):
        model = Decoder(a).to(DTYPE)
        tokens, position = torch.zeros(a.batch, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)

    for _ in range(2):  # the first is the warm-up
        expected, eager_rate = decode(lambda: model(tokens, position), tokens, position, a.tokens)

    position.zero_()  # a capture is a real step, and here is room for it in the cache
    with BreakableCUDAGraphCapture(device=DEVICE, name="decode step") as g:
        model(tokens, position)
    for layer in model.layers:
        layer.cache.zero_()  # nothing of the eager run may help the replayed one
    found, replay_rate = decode(g.replay, tokens, position, a.tokens)

    lines = g.describe().splitlines()
    print("\n".join(lines if len(lines) <= 14 else [*lines[:7], "...", *lines[-3:]]))
    print(f"\neager     {eager_rate:8.1f} tokens/s\nreplayed  {replay_rate:8.1f} tokens/s")
    if DEVICE == "cpu":
        print("(no GPU: the segments are emulated, operator by operator, and the rates mean nothing)")
    same = torch.equal(found, expected)
    print("the same tokens" if same else f"DIFFERENT TOKENS: {(found != expected).sum()} of {found.numel()}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
