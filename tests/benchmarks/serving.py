"""Functions served by `GraphedCallable`: one call, embeddings of any length, generation by a Llama."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from contenders import EAGER, OURS, capture_ours
from harness import Bench, Factory
from timing import Call, Measured, Spread

from segcapture import Bucket, GraphedCallable, eager_break_during_capture

sys.path.append(str(Path(__file__).parents[2] / "examples"))
import embed_server
import hf_generate

SERVED = "GraphedCallable"
BUCKETS = (8, 16, 32, 64)


@eager_break_during_capture
def half(x: torch.Tensor) -> torch.Tensor:
    """A break with a fresh output."""
    return x * 0.5


def step(x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
    """Little work, so that the cost of the call shows."""
    return {"sum": half(x + y) * scale, "difference": x - y}


def one_call(bench: Bench) -> None:
    """What a call costs above a replay by hand: the signature, the copies in, the clones out."""
    inputs = [torch.randn(64, 64, device=bench.device) for _ in range(3)]

    def by_hand() -> Call:
        static = [t.clone() for t in inputs]
        step(*static)
        capture = capture_ours(lambda: step(*static), bench.device)

        def call() -> None:
            torch._foreach_copy_(static, inputs)
            capture.replay()

        return call

    def served(**options: Any) -> Factory:
        def build() -> Call:
            server = GraphedCallable(step, device=bench.device, **options)
            for _ in range(3):
                server(*inputs)
            given = inputs if options.get("clone_outputs", True) else server.static_arguments(*inputs)[0]
            return lambda: server(*given)

        return build

    bench.run(
        "one call",
        {
            EAGER: lambda: lambda: step(*inputs),
            SERVED: served(),
            f"{SERVED}, static inputs, outputs not cloned": served(clone_outputs=False),
            f"{OURS}, one copy and replay()": by_hand,
        },
        burst=20,
    )


def embeddings(bench: Bench) -> None:
    """Requests of 1 to 60 tokens, one after the other."""
    model, _ = embed_server.load(random_weights=True)
    embed = embed_server.embedder(model)
    batches = embed_server.requests(4 if bench.small else 100, None)
    expected = [embed(*batch) for batch in batches]

    def all_of(serve: Any) -> Call:
        return lambda: [serve(*batch) for batch in batches]

    def served() -> Call:
        bucket = Bucket(sizes=BUCKETS, dims={"ids": 1, "mask": 1}, fill=0)
        server = GraphedCallable(embed, bucket=bucket, device=embed_server.DEVICE)
        server.precapture(inputs=embed_server.blank)
        return all_of(server)

    def check(name: str, call: Any) -> None:
        for found, wanted in zip(call(), expected, strict=True):
            torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-3)

    def columns(name: str, measured: Measured) -> dict[str, float]:
        took = measured.step_us or measured.host_us
        return {"per_s": len(batches) / took.median * 1e6}

    case = f"MiniLM embeddings, {len(batches)} requests of 1 to 60 tokens"
    factories: dict[str, Factory] = {EAGER: lambda: all_of(embed), f"{SERVED}, buckets {BUCKETS}": served}
    bench.run(case, factories, check=check, calls=1, columns=columns)


def generation(bench: Bench, compiled: bool, rounds: int) -> None:
    """Tokens per second of greedy decoding, the prompt's time left out."""
    names = [name.replace("-", "_") for name in hf_generate.NAMES]
    tiny = (2, 64, 96, 4, 2, 100, 2, 5, 12)
    sizes = dict(zip(names, tiny if bench.small else hf_generate.SIZES, strict=True))
    torch.backends.cuda.enable_cudnn_sdp(False)
    model = hf_generate.llama(sizes)
    prompt = torch.randint(sizes["vocab"], (sizes["batch"], sizes["prompt"]), device=hf_generate.DEVICE)
    case = f"Llama of {model.num_parameters() / 1e9:.2f}B parameters, {sizes['tokens']} tokens"
    generators, rates, expected = {}, {}, {}
    for name, (attention, serve) in hf_generate.ways(compiled).items():
        print(f"{case}: {name}", file=sys.stderr, flush=True)
        try:
            made = hf_generate.Generator(model, attention, sizes["prompt"] + sizes["tokens"], serve)
            tokens, _ = made.generate(prompt, sizes["tokens"])  # warm-up and capture
            # A compiled model rounds in another order, so its tokens part at some point.
            wanted = expected.setdefault(attention, tokens)
            if not name.startswith("torch.compile") and not torch.equal(tokens, wanted):
                raise AssertionError("other tokens than eager's")
            generators[name], rates[name] = made, []
        except Exception as error:
            bench.failed(case, name, error)
    for _ in range(rounds):
        for name, made in generators.items():
            rates[name].append(made.generate(prompt, sizes["tokens"])[1])
    for name, found in rates.items():
        bench.add(case, name, per_s=Spread.of(found))


def main(argv: Sequence[str] | None = None) -> int:
    """Run all cases."""
    compiled = {"action": "store_true", "help": "torch.compile with its own CUDA graphs too"}
    bench, options = Bench.from_arguments("serving", argv, ("--compile", compiled))
    on_cpu = bench.device.type == "cpu"
    embed_server.DEVICE = hf_generate.DEVICE = bench.device.type
    hf_generate.DTYPE, hf_generate.CUDA = torch.float32 if on_cpu else torch.bfloat16, not on_cpu
    with torch.inference_mode():
        one_call(bench)
        embeddings(bench)
        generation(bench, options.compile, min(bench.rounds, 3))
    bench.notes.append("per_s is requests or tokens per second. Weights are random.")
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
