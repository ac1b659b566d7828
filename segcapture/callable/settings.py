"""The options of a `GraphedCallable`: which of them a capture takes, and whether they make sense."""

from collections.abc import Mapping
from typing import Any

_OF_A_CAPTURE = ("mode", "stream", "breaks", "break_on", "capture_error_mode", "generators", "barrier")


def for_captures(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that each capture gets."""
    passed_on = {option: options[option] for option in _OF_A_CAPTURE}
    breaks = passed_on["breaks"]
    if breaks is not None and not callable(breaks) and not isinstance(breaks, str):
        # A capture refuses names that it does not meet, and here another signature may.
        passed_on["breaks"] = frozenset(breaks).__contains__
    return passed_on


def check(warmup: int, max_captures: int, on_error: str, weights: str) -> None:
    """Raise ValueError for an option out of its range."""
    if warmup < 0 or max_captures < 1:
        raise ValueError(f"warmup is from 0 and max_captures from 1, got {warmup} and {max_captures}")
    if on_error not in ("raise", "eager"):
        raise ValueError(f"on_error={on_error!r} is unknown: choose 'raise' or 'eager'")
    if weights not in ("raise", "recapture", "ignore"):
        raise ValueError(f"weights={weights!r} is unknown: choose 'raise', 'recapture' or 'ignore'")
