"""Cost of writing an output of eight tensors back, beyond the function that makes them."""

import sys
from collections.abc import Callable, Sequence

import torch
from contenders import EAGER, OURS, PEER, TORCH, Break, capture_ours, capture_peer, capture_torch, peer
from harness import Bench, Factory
from timing import Call, Measured

from segcapture import eager_break_during_capture

KEYS = [f"k{i}" for i in range(8)]
BASE = f"{OURS}, output dropped"
BY_HAND = f"{OURS}, eight copy_"
ALONE = "the function alone"
FOREACH = f"{OURS}, one _foreach_copy_"

Tensors = list[torch.Tensor]
Outputs = Callable[[Tensors, Tensors], Tensors]
"""From inputs and buffers: what the next segment reads."""


def produce(xs: Tensors) -> dict[str, torch.Tensor]:
    """Eight fresh tensors, made by one kernel so that little hides the write-back."""
    return dict(zip(KEYS, torch._foreach_mul(xs, 2.0), strict=True))


def drop(xs: Tensors) -> None:
    """The same work and the same segments, without an output."""
    produce(xs)


def copy_each(xs: Tensors, buffers: Tensors) -> None:
    """What a user writes by hand: one `copy_` a tensor."""
    for buffer, value in zip(buffers, produce(xs).values(), strict=True):
        buffer.copy_(value)


def copy_at_once(xs: Tensors, buffers: Tensors) -> None:
    """The least that eight separate tensors need."""
    torch._foreach_copy_(buffers, list(produce(xs).values()))


def returned(break_: Break) -> Outputs:
    """The break returns its output."""
    call = break_(produce)
    return lambda xs, buffers: list(call(xs).values())


def dropped(break_: Break) -> Outputs:
    """The next segment reads the inputs instead."""
    call = break_(drop)

    def outputs(xs: Tensors, buffers: Tensors) -> Tensors:
        call(xs)
        return xs

    return outputs


def copied(copy: Callable[[Tensors, Tensors], None], break_: Break) -> Outputs:
    """The break writes into buffers of the caller."""
    call = break_(copy)

    def outputs(xs: Tensors, buffers: Tensors) -> Tensors:
        call(xs, buffers)
        return buffers

    return outputs


class Work:
    """`breaks` times the function, and one kernel that reads its eight outputs."""

    def __init__(self, device: torch.device, breaks: int) -> None:
        self.breaks = breaks
        self.xs = [torch.full((64, 64), float(i + 1), device=device) for i in range(8)]
        self.buffers = [torch.zeros_like(x) for x in self.xs]
        self.sums = [torch.zeros_like(x) for x in self.xs]

    def body(self, outputs: Outputs) -> Call:
        """The work with one way to bring the outputs on."""

        def run() -> None:
            for _ in range(self.breaks):
                torch._foreach_add_(self.sums, outputs(self.xs, self.buffers))

        run()  # warm-up
        return run

    def alone(self) -> None:
        """The function as often as a replay calls it."""
        for _ in range(self.breaks):
            produce(self.xs)

    def check(self, name: str, call: Call) -> None:
        """The sums must be those of fresh inputs."""
        if name == ALONE:
            return
        torch._foreach_zero_(self.sums)
        torch._foreach_add_(self.xs, 1.0)
        call()
        times = self.breaks * (1 if name == BASE else 2)
        for x, total in zip(self.xs, self.sums, strict=True):
            if not torch.equal(total, x * times):
                raise AssertionError(f"{name}: {total[0, 0].item()} instead of {x[0, 0].item() * times}")


def contenders(bench: Bench, work: Work) -> dict[str, Factory]:
    """Everyone who can run the work here."""

    def ours(outputs: Outputs) -> Call:
        return capture_ours(work.body(outputs), bench.device).replay

    def plain(function: Break) -> Break:
        return function

    mark = eager_break_during_capture
    found: dict[str, Factory] = {
        OURS: lambda: ours(returned(mark)),
        BASE: lambda: ours(dropped(mark)),
        BY_HAND: lambda: ours(copied(copy_each, mark)),
        FOREACH: lambda: ours(copied(copy_at_once, mark)),
        EAGER: lambda: work.body(returned(plain)),
    }
    if bench.cuda:
        found[TORCH] = lambda: capture_torch(work.body(returned(plain))).replay
        if peer is not None:
            found[f"{PEER}, eight copy_"] = lambda: (
                capture_peer(work.body(copied(copy_each, peer.no_graph))).replay
            )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the case."""
    bench, _ = Bench.from_arguments("write-back of eight tensors", argv)
    breaks = 4 if bench.small else 32
    with torch.no_grad():
        work = Work(bench.device, breaks)
        case = f"{breaks} breaks, a dict of eight"
        factories = contenders(bench, work) | {ALONE: lambda: work.alone}
        found = bench.run(case, factories, check=work.check, calls=20)
    beyond_base = _beyond(found, BASE, breaks)
    beyond_function = _beyond(found, ALONE, breaks)
    for name in beyond_base:
        bench.add(
            f"{case}, per break",
            name,
            write_back_us=beyond_base[name],
            beyond_function_us=beyond_function.get(name),
        )
    value = beyond_base[OURS] / beyond_base[BY_HAND] if {OURS, BY_HAND} <= beyond_base.keys() else None
    bench.target("write-back of eight tensors, host, against eight copy_", value, 0.15)
    bench.notes.append(
        "write_back_us is the host time a break above the same segments whose function drops its output; "
        "beyond_function_us is that above calling the function alone, so graph launches count too."
    )
    return bench.finish()


def _beyond(found: dict[str, Measured], base: str, breaks: int) -> dict[str, float]:
    """Host time per break that those with a write-back take beyond another contender."""
    names = [name for name in (OURS, BY_HAND, FOREACH) if name in found and base in found]
    return {name: (found[name].host_us.median - found[base].host_us.median) / breaks for name in names}


if __name__ == "__main__":
    sys.exit(main())
