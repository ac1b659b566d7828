"""Time to capture: four buckets of 33 segments, and whether a segment and a bucket cost the same late on."""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import boundary
import torch
from contenders import (
    ALONE,
    OURS,
    PEER,
    TORCH,
    Alone,
    Break,
    capture_ours,
    capture_peer,
    capture_torch,
    peer,
)
from harness import Bench, Factory
from timing import Call, Measured, quiet, ratio

from segcapture import eager_break_during_capture

CaptureInto = Callable[[Call, Any], tuple[object, Any]]
"""From the work and a pool: the capture and its pool."""


def touch(x: torch.Tensor) -> None:
    """The function that breaks: writes in place, as all contenders can run that."""
    x.mul_(0.5)


def halved(x: torch.Tensor) -> torch.Tensor:
    """The same, returned as a new tensor."""
    return x * 0.5


FRESH = f"{OURS}, fresh outputs"


class Layers:
    """A chain of small layers with a break after each but the last."""

    def __init__(self, device: torch.device, rows: int, hidden: int) -> None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.x = torch.randn(rows, hidden, device=device, dtype=dtype)
        self.up = torch.randn(hidden, hidden, device=device, dtype=dtype) / hidden**0.5
        self.down = torch.randn(hidden, hidden, device=device, dtype=dtype) / hidden**0.5

    def body(self, break_: Break, rows: int, layers: int) -> Call:
        """The chain on the first rows."""

        def run() -> torch.Tensor:
            x = self.x[:rows]
            for layer in range(layers):
                x = x + torch.nn.functional.silu(x @ self.up) @ self.down
                if layer < layers - 1:
                    made = break_(x)
                    x = x if made is None else made
            return x

        return run


def makers(bench: Bench) -> dict[str, tuple[Break, CaptureInto]]:
    """By contender: how it marks a break, and how it captures."""

    def ours(body: Call, pool: Any) -> tuple[object, Any]:
        capture = capture_ours(body, bench.device, pool=pool)
        return capture, capture.pool

    def torch_graph(body: Call, pool: Any) -> tuple[object, Any]:
        graph = capture_torch(body, pool)
        return graph, graph.pool()

    def peer_graph(body: Call, pool: Any) -> tuple[object, Any]:
        graph = capture_peer(body, pool)
        return graph, graph.pool()

    found: dict[str, tuple[Break, CaptureInto]] = {
        OURS: (eager_break_during_capture(touch), ours),
        FRESH: (eager_break_during_capture(halved), ours),
    }
    if bench.cuda:
        alone = Alone(touch)
        found[ALONE] = (alone.break_, alone.capture)
        found[TORCH] = (touch, torch_graph)
        if peer is not None:
            found[PEER] = (peer.no_graph(touch), peer_graph)
    return found


def buckets(bench: Bench, work: Layers, rows: Sequence[int], layers: int) -> None:
    """Time of capturing all buckets into one pool."""

    def factory(break_: Break, capture: CaptureInto) -> Call:
        def run() -> object:
            made, pool = [], None
            for count in rows:
                graph, pool = capture(work.body(break_, count, layers), pool)
                made.append(graph)
            bench.sync()
            return made

        for count in rows:
            work.body(touch, count, layers)()  # warm-up
        return run

    factories: dict[str, Factory] = {
        name: lambda maker=maker: factory(*maker) for name, maker in makers(bench).items()
    }
    case = f"capture of {len(rows)} x {layers} graph segments"
    found = bench.run(case, factories, calls=1, host_only=True)
    bench.target(f"{case}, against {ALONE}", ratio(found, OURS, ALONE), 2.0)
    bench.target(f"{case}, fresh outputs, against {ALONE}", ratio(found, FRESH, ALONE), 2.5)
    bench.target(f"{case}, against {PEER}", ratio(found, OURS, PEER), 1.0)


def one_boundary(bench: Bench, work: Layers, layers: int) -> None:
    """What a boundary of ours is made of."""
    mark, capture = makers(bench)[OURS]
    body = work.body(mark, 8, layers)
    body()  # warm-up
    found = boundary.profile(lambda: capture(body, None), layers - 1, bench.rounds)
    for part, took in found.items():
        bench.add("one boundary", part, host_us=took)


def many_segments(bench: Bench, work: Layers, sizes: Sequence[int]) -> None:
    """Time per segment, graph and eager ones in turn, for captures of growing length."""

    def factory(break_: Break, capture: CaptureInto, size: int) -> Call:
        layers = size // 2 + 1

        def run() -> object:
            made = capture(work.body(break_, 1, layers), None)
            bench.sync()
            return made

        work.body(touch, 1, layers)()  # warm-up
        return run

    made = {name: maker for name, maker in makers(bench).items() if name != FRESH}
    names = {f"{name}, {size} segments": (name, size) for name in made for size in sizes}
    factories: dict[str, Factory] = {
        label: lambda name=name, size=size: factory(*made[name], size)
        for label, (name, size) in names.items()
    }

    def columns(label: str, measured: Measured) -> dict[str, float]:
        return {"us_per_segment": measured.host_us.median / names[label][1]}

    found = bench.run("one long capture", factories, calls=1, host_only=True, columns=columns)
    first, last = (f"{OURS}, {size} segments" for size in (sizes[0], sizes[-1]))
    growth = ratio(found, last, first)
    value = None if growth is None else growth * sizes[0] / sizes[-1]
    bench.target(f"capture time per segment, {sizes[-1]} against {sizes[0]} segments", value, 1.10)


def many_buckets(bench: Bench, work: Layers, count: int, layers: int, rounds: int) -> None:
    """Time of each bucket's capture while the pool fills: the late ones against the early ones."""
    made = {name: maker for name, maker in makers(bench).items() if name not in (FRESH, ALONE)}
    early: dict[str, list[float]] = {name: [] for name in made}
    late: dict[str, list[float]] = {name: [] for name in made}
    for rows in range(count, 0, -1):
        work.body(touch, rows, layers)()  # warm-up
    tenth = max(1, count // 10)
    with quiet():
        for _ in range(rounds):
            for name in list(made):
                print(f"{count} buckets: {name}", file=sys.stderr, flush=True)
                try:
                    costs = _bucket_costs(bench, work, *made[name], count, layers)
                except Exception as error:
                    bench.failed(f"{count} buckets in one pool", name, error)
                    del made[name]
                    continue
                early[name].append(statistics.median(costs[tenth : 2 * tenth]))
                late[name].append(statistics.median(costs[-tenth:]))
    for name in made:
        first, last = statistics.median(early[name]), statistics.median(late[name])
        bench.add(f"{count} buckets in one pool", name, early_us=first, late_us=last, growth=last / first)
    value = statistics.median(late[OURS]) / statistics.median(early[OURS]) if OURS in made else None
    bench.target(f"capture time per bucket, late against early of {count}", value, 1.10)


def _bucket_costs(
    bench: Bench, work: Layers, break_: Break, capture: CaptureInto, count: int, layers: int
) -> list[float]:
    kept, pool, costs = [], None, []
    for rows in range(count, 0, -1):
        body = work.body(break_, rows, layers)
        outputs: list[object] = []
        bench.sync()
        start = time.perf_counter_ns()
        graph, pool = capture(lambda body=body, outputs=outputs: outputs.append(body()), pool)
        bench.sync()
        costs.append((time.perf_counter_ns() - start) / 1e3)
        kept.append((graph, outputs))  # as in a server: every bucket stays, with its output
    return costs


def main(argv: Sequence[str] | None = None) -> int:
    """Run all cases."""
    bench, _ = Bench.from_arguments("capture time", argv)
    small = bench.small
    with torch.no_grad():
        work = Layers(bench.device, 8 if small else 256, 32 if small else 512)
        buckets(bench, work, (4, 2) if small else (256, 128, 64, 32), 3 if small else 33)
        one_boundary(bench, work, 3 if small else 33)
        many_segments(bench, work, (8, 16) if small else (100, 300, 1000))
        many_buckets(bench, work, 8 if small else 200, 2 if small else 5, 2 if small else 3)
    bench.notes.append(
        "Segments count eager ones too in `one long capture`. A monolithic graph has no segments: its row is "
        "the same work in one graph. Early and late buckets are the second and the last tenth. "
        "The parts of `one boundary` are timed in its capture, which costs a few microseconds each."
    )
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
