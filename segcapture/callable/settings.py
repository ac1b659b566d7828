"""The options of a `GraphedCallable`: which of them a capture takes, and whether they make sense."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from segcapture.callable.bucket import Bucket

logger = logging.getLogger("segcapture.callable")

_OF_A_CAPTURE = ("mode", "stream", "breaks", "break_on", "capture_error_mode", "generators", "barrier")


def for_captures(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that each capture gets."""
    passed_on = {option: options[option] for option in _OF_A_CAPTURE}
    breaks = passed_on["breaks"]
    if breaks is not None and not callable(breaks) and not isinstance(breaks, str):
        passed_on["breaks"] = Names(breaks)
    return passed_on


class Names:
    """A predicate on the names of breaks. A capture refuses names that it does not meet; others may here."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self._called: set[str] = set()
        self._told = False

    def __call__(self, name: str) -> bool:
        self._called.add(name)
        return name in self._names

    def tell_missing(self, title: str) -> None:
        """Say once in the log which names no function had that was called so far."""
        missing = self._names - self._called
        if missing and not self._told:
            self._told = True
            logger.warning(
                "%s: breaks names %s, and no decorated function of that name was called yet; called were: %s",
                title,
                ", ".join(map(repr, sorted(missing))),
                ", ".join(map(repr, sorted(self._called))) or "none",
            )


def check(warmup: int, max_captures: int, on_error: str, weights: str, bucket: Any) -> None:
    """Raise ValueError for an option out of its range, and TypeError for what is no bucket."""
    if bucket is not None and not isinstance(bucket, Bucket):
        raise TypeError(f"bucket takes a Bucket(sizes=..., dims=...), got {bucket!r}")
    if warmup < 0 or max_captures < 1:
        raise ValueError(f"warmup is from 0 and max_captures from 1, got {warmup} and {max_captures}")
    if on_error not in ("raise", "eager"):
        raise ValueError(f"on_error={on_error!r} is unknown: choose 'raise' or 'eager'")
    if weights not in ("raise", "recapture", "ignore"):
        raise ValueError(f"weights={weights!r} is unknown: choose 'raise', 'recapture' or 'ignore'")
