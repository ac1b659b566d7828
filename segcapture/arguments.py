"""What a recorded call keeps so that it can be made again (contract C3)."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
import torch

from segcapture.errors import CaptureFailedError
from segcapture.writeback.memory import changes, view_of
from segcapture.writeback.structure import rebuild


class Live:
    """An argument of an eager break that is asked anew at each call.

    `attention(q, k, Live(lambda: ctx.step))` passes the value that `ctx.step` has at capture, at
    each replay, and in a plain call outside of a capture. Everything else that is not a tensor or a
    mutable object is frozen at capture.

    Args:
        fn: A function of no arguments.

    Raises:
        TypeError: `fn` is not callable.
    """

    def __init__(self, fn: Callable[[], Any]) -> None:
        if not callable(fn):
            raise TypeError(f"Live takes a function of no arguments, got {fn!r}")
        self.fn = fn

    def __repr__(self) -> str:
        return f"Live({getattr(self.fn, '__qualname__', self.fn)})"


def _ask(value: Any) -> Any:
    return value.fn() if type(value) is Live else value


def resolve(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with each `Live` (at top level or in a tuple) replaced by its value of now."""
    return (
        tuple(rebuild(value, _ask) for value in args),
        {key: rebuild(value, _ask) for key, value in kwargs.items()},
    )


def has_live(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether any argument is a `Live`, at top level or in a tuple."""
    return any(
        type(value) is Live or (isinstance(value, tuple) and has_live(value, {}))
        for value in (*args, *kwargs.values())
    )


def _check_holds_no_live(container: list[Any] | dict[Any, Any]) -> None:
    items = container.values() if isinstance(container, dict) else container
    if any(type(item) is Live for item in items):
        raise TypeError(
            f"A Live is in a {type(container).__qualname__}, which goes to the function as it is, so that "
            f"nobody asks it. Pass it by itself or in a tuple, or put new values into the container."
        )


@attrs.frozen(eq=False)
class Call:
    """A function and the arguments of a break, as they are used at replay."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    live: bool

    @classmethod
    def record(
        cls,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        alias: Callable[[torch.Tensor], torch.Tensor | None],
        aliases: dict[int, torch.Tensor],
    ) -> "Call":
        """Keep a call.

        `alias` gives the tensor to keep instead of one, or None to keep it itself. What is kept goes into
        `aliases`, by the id of the tensor that was passed.
        """

        def keep(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                if isinstance(value, list | dict):
                    _check_holds_no_live(value)
                return value
            if id(value) not in aliases:
                made = alias(value)
                aliases[id(value)] = value if made is None else made
            return aliases[id(value)]

        return cls(
            fn,
            tuple(rebuild(value, keep) for value in args),
            {key: rebuild(value, keep) for key, value in kwargs.items()},
            has_live(args, kwargs),
        )

    def invoke(self) -> Any:
        """Call the function again."""
        if not self.live:
            return self.fn(*self.args, **self.kwargs)
        args, kwargs = resolve(self.args, self.kwargs)
        return self.fn(*args, **kwargs)

    def references_to(self, tensor: torch.Tensor) -> int:
        """How many references to this very tensor object the call itself keeps."""
        return _count(self.args, tensor) + _count(tuple(self.kwargs.values()), tensor)


def check_views(where: str, tensors: Iterable[torch.Tensor], aliases: Mapping[int, torch.Tensor]) -> None:
    """Raise CaptureFailedError if a function changed in place how an argument shows the capture's memory."""
    for tensor in tensors:
        before = aliases.get(id(tensor), tensor)
        if before is not tensor and (what := changes(view_of(before), view_of(tensor))):
            raise CaptureFailedError(
                f"{where} changed an argument in place ({what}), and a replay would go on from that. Work on "
                f"a view of it, and return that."
            )


def _count(value: Any, tensor: torch.Tensor) -> int:
    """How often a tensor object occurs in nested tuples."""
    if isinstance(value, tuple):
        return sum(_count(item, tensor) for item in value)
    return int(value is tensor)
