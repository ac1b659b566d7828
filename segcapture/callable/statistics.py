"""What a `GraphedCallable` has done so far."""

import attrs


@attrs.frozen(kw_only=True)
class SignatureStats:
    """One signature that was called."""

    name: str
    """`#3`, as messages call it."""
    arguments: str
    """Its tensors and values, in words."""
    state: str
    """`warming up`, `captured`, or `eager: ...` with the reason."""
    calls: int
    nbytes: int
    """Bytes of its static inputs and outputs."""
    why: str
    """What differed from the nearest signature when it first came."""


@attrs.frozen(kw_only=True)
class Stats:
    """Counts of calls by what happened, and the signatures that are held."""

    calls: int
    warmups: int
    captures: int
    replays: int
    eager: int
    """Calls that ran eagerly and were no warm-up: above the largest bucket, or after a failed capture."""
    failures: int
    """Captures that failed."""
    evictions: int
    pool_bytes: int
    """Bytes of the pools of all captures."""
    signatures: tuple[SignatureStats, ...]

    def __str__(self) -> str:
        head = ", ".join(f"{getattr(self, name)} {name}" for name in (*Counts.names(), "evictions"))
        lines = [
            f"  {s.name} {s.state}, {s.calls} calls, {s.nbytes} B: {s.arguments}\n      {s.why}"
            for s in self.signatures
        ]
        return "\n".join([f"{head}, pool {self.pool_bytes} B", *lines])


@attrs.define
class Counts:
    """The counters behind `Stats`."""

    calls: int = 0
    warmups: int = 0
    captures: int = 0
    replays: int = 0
    eager: int = 0
    failures: int = 0

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of the counters."""
        return tuple(field.name for field in attrs.fields(cls))
