"""Times of several contenders: interleaved rounds, host and GPU time apart.

* host: what a call costs the calling thread, measured on an idle GPU, so that no full queue is waited for.
* gpu: CUDA events around calls enqueued behind a sleeping kernel, so that the host is ahead. Where it cannot
  get ahead, the number is an upper bound and marked `<=`.
* step: calls back to back until the GPU is done, divided by their number.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import attrs
import torch

Call = Callable[[], object]

_SLEEP_CYCLES_PER_US = 2000  # no GPU of today is faster than that


@attrs.frozen
class Spread:
    """Median, and the tenth and ninetieth percentile."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Of one value a round."""
        deciles = statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else [*values] * 9
        return cls(statistics.median(values), deciles[0], deciles[-1])

    def __str__(self) -> str:
        return f"{self.median:.1f} ({self.p10:.1f}-{self.p90:.1f})"


@attrs.frozen
class Measured:
    """Microseconds per call."""

    host_us: Spread
    gpu_us: Spread | None = None
    step_us: Spread | None = None
    ahead: bool = True
    """Whether the host was ahead of the GPU in all GPU samples."""

    @property
    def bound(self) -> str:
        """What limits calls back to back."""
        if self.gpu_us is None or self.step_us is None:
            return "-"
        return "host" if not self.ahead or self.step_us.median > 1.1 * self.gpu_us.median else "gpu"


@attrs.define
class Clock:
    """How one contender is timed, and its samples: one of each kind a round."""

    call: Call
    calls: int
    """Host samples a round."""
    burst: int
    """Calls to a host sample."""
    gpu_too: bool
    """Whether GPU and step times are taken."""
    fresh: bool
    """Whether cached memory is freed before each host sample."""
    host: list[float] = attrs.field(factory=list)
    gpu: list[float] = attrs.field(factory=list)
    step: list[float] = attrs.field(factory=list)
    ahead: bool = True
    depth: int = 1
    """Calls to a GPU sample: more than one where the queue holds them."""

    def warm_up(self) -> None:
        """Run some, and find the depth."""
        host = [self._host() for _ in range(3)]
        if self.gpu_too:
            self.depth = next((depth for depth in (4, 2) if self._gpu(depth, host[-1])[1]), 1)

    def round(self) -> None:
        """Take one sample of each kind."""
        self.host.append(statistics.median(self._host() for _ in range(self.calls)))
        if self.gpu_too:
            found = [self._gpu(self.depth, self.host[-1]) for _ in range(3)]
            self.gpu.append(statistics.median(us for us, _ in found))
            self.ahead = self.ahead and sum(was_ahead for _, was_ahead in found) >= 2
            self.step.append(self._step(max(self.calls, self.burst)))

    def measured(self) -> Measured:
        """Over all rounds."""
        gpu, step = (Spread.of(samples) if samples else None for samples in (self.gpu, self.step))
        return Measured(Spread.of(self.host), gpu, step, self.ahead)

    def _host(self) -> float:
        if self.fresh and torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        _sync()
        start = time.perf_counter_ns()
        for _ in range(self.burst):
            kept = self.call()
        took = time.perf_counter_ns() - start
        del kept  # what a call returns is dropped after the clock has stopped
        return took / 1e3 / self.burst

    def _step(self, calls: int) -> float:
        _sync()
        start = time.perf_counter_ns()
        for _ in range(calls):
            self.call()
        _sync()
        return (time.perf_counter_ns() - start) / 1e3 / calls

    def _gpu(self, calls: int, host_us: float) -> tuple[float, bool]:
        """Microseconds per call, and whether all was enqueued before the first of it ran."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        _sync()
        torch.cuda._sleep(int(_SLEEP_CYCLES_PER_US * (50 + 2 * calls * host_us)))
        start.record()
        for _ in range(calls):
            self.call()
        end.record()
        ahead = not start.query()
        _sync()
        return start.elapsed_time(end) * 1e3 / calls, ahead


def _sync() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def interleaved(
    clocks: Mapping[str, Clock],
    rounds: int,
    failed: Callable[[str, Exception], None],
    *,
    collector: bool = False,
) -> dict[str, Measured]:
    """Give each contender its turn in each round, from another start each time.

    One that raises is passed to `failed` and left out from then on. With `collector`, garbage is collected
    as in any program: where contenders run collections of their own, a frozen heap would hide their cost.
    """
    live = dict(clocks)
    with nullcontext() if collector else quiet():
        for turn in range(-1, rounds):
            names = list(live)
            gc.collect()
            first = turn % max(1, len(names))
            for name in names[first:] + names[:first]:
                try:
                    if turn < 0:
                        live[name].warm_up()
                    else:
                        live[name].round()
                except Exception as error:
                    failed(name, error)
                    del live[name]
    return {name: clock.measured() for name, clock in live.items()}


@contextmanager
def quiet() -> Iterator[None]:
    """No garbage collection but the one that is asked for."""
    enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()


def ratio(results: Mapping[str, Measured], name: str, reference: str) -> float | None:
    """Of the host times of two contenders, where both were measured."""
    if name not in results or reference not in results:
        return None
    return results[name].host_us.median / results[reference].host_us.median


def _gpu(call: Call, calls: int, host_us: float) -> tuple[float, bool]:
    """Microseconds per call, and whether all was enqueued before the first of it ran."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(int(_SLEEP_CYCLES_PER_US * (50 + 2 * calls * host_us)))
    start.record()
    for _ in range(calls):
        call()
    end.record()
    ahead = not start.query()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3 / calls, ahead
