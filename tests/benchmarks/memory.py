"""Memory of four token buckets in one pool, each contender in a process of its own."""

import gc
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from contenders import EAGER, OURS, PEER, TORCH, Break, capture_ours, capture_peer, capture_torch, peer
from harness import Bench
from timing import Call

from segcapture import eager_break_during_capture

FRESH = f"{OURS}, fresh tensors"
BUFFER = f"{OURS}, into a buffer"

Mix = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def mix(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The function that breaks: returns a fresh tensor."""
    return torch.tanh(h) * x


def mix_into(out: torch.Tensor, h: torch.Tensor, x: torch.Tensor) -> None:
    """The same, into a buffer of the caller."""
    torch.mul(torch.tanh(h), x, out=out)


def through_buffer(break_: Break) -> Mix:
    """Make the buffer before the break."""
    call = break_(mix_into)

    def mixed(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(h)
        call(out, h, x)
        return out

    return mixed


class Model:
    """Layers of a mixing function and an MLP, with static input and output. All layers share weights:
    what is measured is what a capture adds."""

    def __init__(self, device: torch.device, tokens: int, hidden: int, layers: int) -> None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.layers = layers
        self.x = torch.randn(tokens, hidden, device=device, dtype=dtype)
        self.out = torch.zeros_like(self.x)
        self.proj = torch.randn(hidden, hidden, device=device, dtype=dtype) / hidden**0.5
        self.up = torch.randn(hidden, 4 * hidden, device=device, dtype=dtype) / hidden**0.5
        self.down = torch.randn(4 * hidden, hidden, device=device, dtype=dtype) / (4 * hidden) ** 0.5

    def body(self, mixed: Mix, tokens: int) -> Call:
        """One bucket."""

        def run() -> None:
            x = self.x[:tokens]
            for _ in range(self.layers):
                h = torch.rms_norm(x, x.shape[-1:])
                x = x + mixed(h @ self.proj, h)
                h = torch.rms_norm(x, x.shape[-1:])
                x = x + torch.nn.functional.gelu(h @ self.up) @ self.down
            self.out[:tokens].copy_(x)

        return run


def capture(name: str, model: Model, tokens: int, device: torch.device, pool: Any) -> tuple[Any, Call, Any]:
    """Capture one bucket: what is to be kept, its replay, and its pool."""
    if name == EAGER:
        return None, model.body(mix, tokens), None
    if name == TORCH:
        graph: Any = capture_torch(model.body(mix, tokens), pool)
        return graph, graph.replay, graph.pool()
    if name == PEER:
        assert peer is not None
        graph = capture_peer(model.body(through_buffer(peer.no_graph), tokens), pool)
        return graph, graph.replay, graph.pool()
    mark = eager_break_during_capture
    mixed = through_buffer(mark) if name == BUFFER else mark(mix)
    graph = capture_ours(model.body(mixed, tokens), device, pool=pool)
    return graph, graph.replay, graph.pool


def contender(bench: Bench, name: str) -> dict[str, float]:
    """In the process of one contender: the memory that its captures added, in MiB."""
    buckets, hidden, layers = ((8, 4, 2, 1), 16, 2) if bench.small else ((2048, 1024, 512, 256), 2048, 32)
    model = Model(bench.device, buckets[0], hidden, layers)
    for tokens in buckets:
        model.body(mix, tokens)()  # warm-up
    before = _memory(bench)
    kept, pool = [], None
    for tokens in buckets:
        graph, replay, pool = capture(name, model, tokens, bench.device, pool)
        kept.append((tokens, graph, replay))
    after = _memory(bench)
    for _, _, replay in kept:
        replay()
    cached = torch.cuda.memory_reserved() / 2**20 - before["reserved_mib"] if bench.cuda else 0.0
    for tokens, _, replay in kept:
        model.x.normal_()
        model.body(mix, tokens)()
        expected = model.out[:tokens].clone()
        model.out.zero_()
        replay()
        error = (model.out[:tokens] - expected).abs().max().item()
        if not error <= 0.05 * expected.abs().max().item():
            raise AssertionError(f"{name} with {tokens} tokens differs from eager by {error}")
    added = {key: after[key] - before[key] for key in after}
    return added | {"reserved_after_replay_mib": cached}


def _memory(bench: Bench) -> dict[str, float]:
    gc.collect()
    if not bench.cuda:
        return {"reserved_mib": 0.0, "allocated_mib": 0.0, "device_mib": 0.0}
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return {
        "reserved_mib": torch.cuda.memory_reserved() / 2**20,
        "allocated_mib": torch.cuda.memory_allocated() / 2**20,
        "device_mib": (total - free) / 2**20,
    }


def run_apart(bench: Bench, name: str) -> dict[str, float]:
    """Run one contender in a new process."""
    here, device = str(Path(__file__).resolve()), str(bench.device)
    command = [sys.executable, here, "--contender", name, "--device", device, *["--small"] * bench.small]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "died")
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run all contenders, or with `--contender` one of them in this process."""
    bench, options = Bench.from_arguments("memory of four buckets", argv, ("--contender", {}))
    if options.contender:
        with torch.no_grad():
            print(json.dumps(contender(bench, options.contender)))
        return 0
    names = [EAGER, FRESH]
    if bench.cuda:
        names = [EAGER, TORCH, FRESH, BUFFER, *([PEER] if peer is not None else [])]
    found: dict[str, dict[str, float]] = {}
    for name in names:
        print(f"memory: {name}", file=sys.stderr, flush=True)
        try:
            found[name] = run_apart(bench, name)
            bench.add("four buckets, one pool", name, **found[name])
        except Exception as error:
            bench.failed("four buckets, one pool", name, error)
    value = None
    if FRESH in found and found.get(TORCH, {}).get("reserved_mib"):
        value = found[FRESH]["reserved_mib"] / found[TORCH]["reserved_mib"]
    bench.target("memory reserved, fresh tensors, against monolithic graphs", value, 1.02)
    bench.notes.append(
        "MiB that capturing added, the cache emptied before each reading but reserved_after_replay: that one "
        "includes what the allocator keeps from eager functions. device_mib is the driver's view, with the "
        "graphs themselves; other programs on the GPU disturb it. cuBLAS workspaces of capture streams count."
    )
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
