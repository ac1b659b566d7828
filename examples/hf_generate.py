"""A Hugging Face Llama generates: attention is the eager break, registered through transformers' interfaces.

No line of the model is edited. Each step attends to the valid part of the static cache alone, whose length is
read on the host, once per step. `GraphedCallable` serves the decoding step: it warms up, captures and replays
as it is called. Random weights, on CUDA over a billion of them. Compares the tokens with eager, and the rates
with the whole step as one graph and, with --compile, with torch.compile. Runs on CUDA, or emulated on the CPU
(where the rates mean nothing): pip install transformers; python examples/hf_generate.py
"""

import argparse
import inspect
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    LlamaConfig,
    LlamaForCausalLM,
    StaticCache,
)

from segcapture import GraphedCallable, eager_break_during_capture

CUDA = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)
NAMES = ("layers", "hidden", "intermediate", "heads", "kv-heads", "vocab", "batch", "prompt", "tokens")
SIZES = (16, 2048, 8192, 32, 8, 128256, 1, 64, 256) if CUDA else (2, 64, 96, 4, 2, 100, 2, 5, 12)
NOW = {"length": 0}


@eager_break_during_capture
def read_length(offset: Tensor | int, queries: int) -> None:
    """Read on the host, once per step, how much of the cache will be valid."""
    NOW["length"] = int(offset) + queries


@eager_break_during_capture
def attend(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Attend to the valid part of the cache: [batch, heads, queries, dim] to [batch, queries, heads, dim]."""
    key, value = key[:, :, : NOW["length"]], value[:, :, : NOW["length"]]
    causal = query.shape[2] > 1
    out = F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous()


def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, **options: Any) -> Any:
    """What transformers calls in each layer."""
    return attend(query, key, value, options["scaling"]), None


def no_mask(*, q_length: int, q_offset: Tensor | int = 0, **options: Any) -> None:
    """What transformers calls once per step for the mask, of which there is none: the cache is cut."""
    read_length(q_offset, q_length)


AttentionInterface.register("cut_cache", attention)
AttentionMaskInterface.register("cut_cache", no_mask)


class Generator:
    """Greedy generation. `serve` makes the decoding step what it is: eager, graphed or compiled."""

    def __init__(
        self, model: LlamaForCausalLM, attention: str, max_length: int, serve: Callable[..., Any]
    ) -> None:
        self.model, self.attention = model, attention
        self.cache = StaticCache(config=model.config, max_cache_len=max_length)
        names = inspect.signature(model.forward).parameters
        self.cache_name = "cache" if "cache" in names else "past_key_values"  # renamed in transformers 5.2x
        self.step = serve(self.forward)

    def forward(self, ids: Tensor) -> Tensor:
        """The next token of each sequence: int64 [batch, length] to [batch, 1]. Advances the cache."""
        options = {self.cache_name: self.cache, "use_cache": True, "logits_to_keep": 1}
        return self.model(input_ids=ids, **options).logits.argmax(-1)

    def generate(self, prompt: Tensor, count: int) -> tuple[Tensor, float]:
        """The tokens int64 [batch, count] after a prompt, and tokens per second without the prompt's."""
        self.model.set_attn_implementation(self.attention)
        self.cache.reset()
        found = [self.forward(prompt)]
        start = now()
        for _ in range(count - 1):
            found.append(self.step(found[-1]).clone())
        return torch.cat(found, dim=1), len(prompt) * (count - 1) / (now() - start)


def llama(sizes: Mapping[str, int]) -> LlamaForCausalLM:
    """A model with random weights."""
    config = LlamaConfig(
        num_hidden_layers=sizes["layers"],
        hidden_size=sizes["hidden"],
        intermediate_size=sizes["intermediate"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["kv_heads"],
        vocab_size=sizes["vocab"],
        tie_word_embeddings=True,
        dtype=DTYPE,
    )
    with torch.device(DEVICE):
        return LlamaForCausalLM(config).to(DTYPE).eval()


def ways(compiled: bool) -> dict[str, tuple[str, Callable[..., Any]]]:
    """By name: the attention, and how the decoding step is served."""

    def graphed(**options: Any) -> Callable[..., Any]:
        return lambda fn: GraphedCallable(fn, device=DEVICE, **options)

    found: dict[str, tuple[str, Callable[..., Any]]] = {
        "eager": ("cut_cache", lambda fn: fn),
        "breaks at attention": ("cut_cache", graphed()),
        "eager, whole cache": ("sdpa", lambda fn: fn),
        "one graph, whole cache": ("sdpa", graphed(mode="full")),
    }
    if compiled:
        found["torch.compile, whole cache"] = ("sdpa", lambda fn: torch.compile(fn, mode="reduce-overhead"))
    return found


def now() -> float:
    """Seconds, after all work on the device."""
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


@torch.inference_mode()
def main() -> int:
    """Generate in each way, twice: the first time warms up and captures."""
    parser = argparse.ArgumentParser()
    for name, default in zip(NAMES, SIZES, strict=True):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--compile", action="store_true", help="torch.compile with its own CUDA graphs, too")
    a = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cuda.enable_cudnn_sdp(False)  # it would plan anew for each length
    model = llama(vars(a))
    prompt = torch.randint(a.vocab, (a.batch, a.prompt), device=DEVICE)
    print(f"{model.num_parameters():,} parameters, {DTYPE}, on {DEVICE}")
    same, expected = True, {}
    for name, (attention_name, serve) in ways(a.compile).items():
        generator = Generator(model, attention_name, a.prompt + a.tokens, serve)
        generator.generate(prompt, a.tokens)
        tokens, rate = generator.generate(prompt, a.tokens)
        reference = expected.setdefault(attention_name, tokens)
        equal = torch.equal(tokens, reference)
        same &= equal or name.startswith("torch.compile")  # it rounds in another order
        verdict = "" if tokens is reference else ", the same tokens" if equal else ", OTHER TOKENS"
        print(f"{name:28}{rate:9.1f} tokens/s{verdict}")
        if isinstance(generator.step, GraphedCallable):
            print(f"{'':28}{str(generator.step.stats()).splitlines()[0]}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
