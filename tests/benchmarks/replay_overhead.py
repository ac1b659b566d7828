"""Host cost of a replay: no-op breaks between one-kernel segments, and no break at all."""

import functools
import sys
from collections.abc import Sequence

import torch
from contenders import (
    BARE,
    C_LOOP,
    EAGER,
    OURS,
    PEER,
    TORCH,
    Break,
    bare_loop,
    c_loop,
    capture_ours,
    capture_peer,
    capture_torch,
    has_compiler,
    peer,
)
from harness import Bench, Factory
from timing import Call, Measured, ratio

from segcapture import BreakableCUDAGraphCapture, eager_break_during_capture


def nothing(x: torch.Tensor) -> None:
    """The function that breaks."""


class Work:
    """`groups` times one kernel and `breaks` breaks; with `tail`, one kernel more at the end."""

    def __init__(self, device: torch.device, groups: int, breaks: int, *, tail: bool = True) -> None:
        self.x = torch.zeros(1024, device=device)
        self.groups, self.breaks, self.tail = groups, breaks, tail

    def body(self, break_: Break) -> Call:
        """The work, with a break of someone's making."""
        x, groups, breaks, tail = self.x, self.groups, self.breaks, self.tail

        def run() -> None:
            for _ in range(groups):
                x.add_(1.0)
                for _ in range(breaks):
                    break_(x)
            if tail:
                x.add_(1.0)

        run()  # warm-up
        return run

    def check(self, name: str, call: Call) -> None:
        """Each kernel must have run once."""
        self.x.zero_()
        call()
        expected = self.groups + self.tail
        if not bool((self.x == expected).all()):
            raise AssertionError(f"{name} ran {self.x[0].item():.0f} of {expected} kernels")


def contenders(bench: Bench, work: Work) -> dict[str, Factory]:
    """Everyone who can run the work here."""

    @functools.cache
    def ours() -> BreakableCUDAGraphCapture:
        return capture_ours(work.body(eager_break_during_capture(nothing)), bench.device)

    found: dict[str, Factory] = {
        OURS: lambda: ours().replay,
        EAGER: lambda: work.body(nothing),
        BARE: lambda: bare_loop(ours()),
    }
    if bench.cuda:
        found[TORCH] = lambda: capture_torch(work.body(nothing)).replay
        if has_compiler():
            found[C_LOOP] = lambda: c_loop(ours())
        if peer is not None:
            found[PEER] = lambda: capture_peer(work.body(peer.no_graph(nothing))).replay
    return found


def flat(bench: Bench, sizes: Sequence[int]) -> None:
    """Host cost per segment, graph and eager ones in turn, at growing sizes; and the C loop's growth."""
    factories: dict[str, Factory] = {}
    works: dict[str, tuple[Work, int]] = {}
    for size in sizes:
        work = Work(bench.device, size // 2, 1, tail=False)
        made = contenders(bench, work)
        for name in (OURS, C_LOOP):
            if name in made:
                label = f"{name}, {size} segments"
                factories[label], works[label] = made[name], (work, size)

    def columns(label: str, measured: Measured) -> dict[str, float]:
        return {"host_us_per_segment": measured.host_us.median / works[label][1]}

    results = bench.run(
        "many segments",
        factories,
        check=lambda label, call: works[label][0].check(label, call),
        columns=columns,
    )
    first, last = sizes[0], sizes[-1]

    def cost(name: str, size: int) -> float | None:
        return ratio(results, f"{name}, {size} segments", f"{name}, {first} segments")

    ours, floor = cost(OURS, last), cost(C_LOOP, last)
    what = f"host per segment, {last} against {first} segments"
    bench.target(what, None if ours is None else ours * first / last, 1.10)
    if ours is not None and floor is not None:
        bench.target(f"{what}, beyond the growth of the C loop", ours / floor, 1.10)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all cases."""
    bench, _ = Bench.from_arguments("replay overhead", argv)
    small = bench.small
    with torch.no_grad():
        breaks = 4 if small else 64
        work = Work(bench.device, breaks, 1)
        case = f"{breaks} breaks of a no-op"
        found = bench.run(case, contenders(bench, work), check=work.check, calls=20)
        bench.target(f"{case}, host, against the C loop", ratio(found, OURS, C_LOOP), 1.10)
        bench.target(f"{case}, host, against a bare Python loop of the same", ratio(found, OURS, BARE), 1.10)

        work = Work(bench.device, 1, 0, tail=False)
        found = bench.run("no break", contenders(bench, work), check=work.check, burst=5 if small else 100)
        bench.target("no break, host, against CUDAGraph.replay", ratio(found, OURS, TORCH), 1.0)

        groups = 2 if small else 32
        work = Work(bench.device, groups, 3)
        case = f"{groups} x three breaks in a row"
        found = bench.run(case, contenders(bench, work), check=work.check, calls=20)
        bench.target(f"{case}, host, against {PEER}", ratio(found, OURS, PEER), 0.40)

        sizes = (8, 16) if small else (100, 300, 1000)
        flat(bench, sizes)
    bench.notes.append("The C loop launches the graphs of segcapture's own capture, and calls no break.")
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
