"""Where the time of a boundary goes while a capture records: parts of it, timed from outside."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from timing import Call, Spread

from segcapture import recorder as recording
from segcapture.backends.cuda.driver import CudaDriver
from segcapture.backends.cuda.graph import CudaGraph
from segcapture.backends.cuda.streams import Forks

WHOLE = "a boundary, with its function"
PARTS: list[tuple[str, Any, str]] = [
    (WHOLE, recording.Recorder, "record_break"),
    ("of it: torch begins, ends, instantiates and first launches the graph", CudaGraph, "_call"),
    ("of it: which of torch's 128 streams are forked", Forks, "find"),
    ("of it: joining by the nodes of the graph", CudaDriver, "join"),
    ("of it: keeping the arguments", recording, "Arguments"),
    ("of it: analysing the output", recording, "bridge"),
]


@contextmanager
def _timed(owner: Any, name: str, log: list[float]) -> Iterator[None]:
    found: Callable[..., Any] = getattr(owner, name)
    bound = isinstance(vars(owner).get(name), classmethod)

    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter_ns()
        try:
            return found(*args, **kwargs)
        finally:
            log.append((time.perf_counter_ns() - start) / 1e3)

    with mock.patch.object(owner, name, staticmethod(call) if bound else call):
        yield


def profile(capture: Call, boundaries: int, rounds: int) -> dict[str, Spread]:
    """Microseconds per boundary of each part. `capture` captures once; being watched costs a few each."""
    capture()
    found: dict[str, list[float]] = {label: [] for label, _, _ in PARTS}
    for _ in range(rounds):
        logs: dict[str, list[float]] = {label: [] for label, _, _ in PARTS}
        with ExitStack() as stack:
            for label, owner, name in PARTS:
                stack.enter_context(_timed(owner, name, logs[label]))
            capture()
        for label, log in logs.items():
            found[label].append(sum(log) / boundaries)
    return {label: Spread.of(values) for label, values in found.items() if statistics.median(values) > 0}
