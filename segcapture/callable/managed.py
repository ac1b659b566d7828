"""What a user does with the captures of a `GraphedCallable`, besides calling it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from segcapture.callable.bucket import Bucket, with_progress
from segcapture.callable.cache import Captures
from segcapture.callable.calls import Reader, as_arguments
from segcapture.callable.statistics import Counts, Stats
from segcapture.errors import CaptureStateError


class Managed:
    """A base of `GraphedCallable`, which is called with its arguments."""

    name: str
    _bucket: Bucket | None
    _captures: Captures
    _counts: Counts
    _invalid: str
    _lock: AbstractContextManager[Any]
    _options: dict[str, Any]
    _reader: Reader
    _turn: Callable[[], AbstractContextManager[Any]]
    __call__: Callable[..., Any]

    def precapture(
        self,
        sizes: Sequence[Any] | None = None,
        *,
        inputs: Callable[[Any], tuple[Any, ...] | dict[str, Any]],
    ) -> None:
        """Capture before the first request: call the function for each size, the largest first.

        The function runs `warmup` times and once more for each size, as in any calls, so reset what
        advances (caches, counters) after. Shows a progress bar where tqdm or rich is installed.

        Args:
            sizes: What `inputs` is called with. Left out: the sizes of the bucket.
            inputs: Makes the arguments of a call: a tuple, or a dict of keyword arguments. Tensors that are
                different ones in a request must be different ones here: sharing is part of a signature.

        Raises:
            ValueError: no sizes and no bucket.
            TypeError: `inputs` returned something else. All that a call raises comes through.
        """
        if sizes is None:
            if self._bucket is None:
                raise ValueError("precapture takes sizes where there is no bucket")
            sizes = self._bucket.sizes
        for size in with_progress(sorted(sizes, reverse=True), f"capturing {self.name}"):
            args, kwargs = as_arguments(inputs(size))
            for _ in range(self._options["warmup"] + 1):
                self(*args, **kwargs)

    def static_arguments(self, /, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call with the static inputs in place of its tensors.

        Write into those and pass them: what already is in the static input is not copied.

        Raises:
            CaptureStateError: this signature is not captured yet.
        """
        with self._lock:
            call = self._reader.read(args, kwargs)
            entry = self._captures.find(call.key)
            if entry is None or not entry.captured:
                after = f"{self._options['warmup'] + 1} calls"
                raise CaptureStateError(f"{self.name} is not captured for these arguments: {after} do it.")
            return entry.static_arguments(call)

    def invalidate(self, reason: str) -> None:
        """Let calls refuse with this reason until `clear()`: weights are offloaded, the pool sleeps, say."""
        with self._lock:
            self._invalid = reason
            for entry in self._captures:
                entry.capture.invalidate(reason)

    def clear(self) -> None:
        """Drop all captures and signatures. The counts stay, the function can be captured again."""
        with self._lock:
            self._captures.clear()
            self._invalid = ""
            self._reader.look_for_modules()

    def stats(self) -> Stats:
        """What was done so far, and the signatures that are held; also as text by `print`."""
        with self._lock:
            return Stats(
                **{name: getattr(self._counts, name) for name in Counts.names()},
                evictions=self._captures.evictions,
                pool_bytes=self._captures.pool_bytes(),
                signatures=tuple(entry.stats() for entry in self._captures),
            )
