"""How model code says where to break."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch

from segcapture.advice import disabled
from segcapture.arguments import has_live, resolve
from segcapture.thread import state

F = TypeVar("F", bound=Callable[..., Any])


@overload
def eager_break_during_capture(fn: F) -> F: ...
@overload
def eager_break_during_capture(
    fn: None = None,
    *,
    enable: bool = True,
    capture_stub: Callable[..., Any] | None = None,
    name: str | None = None,
) -> Callable[[F], F]: ...


def eager_break_during_capture(
    fn: Any = None,
    *,
    enable: bool = True,
    capture_stub: Callable[..., Any] | None = None,
    name: str | None = None,
) -> Any:
    """Mark a function as an eager break: inside a capture it becomes an eager segment.

    Everywhere else (outside of a capture, inside of another eager segment, in `mode="full"`) it is a
    plain call. Under `torch.compile` it is a graph break. Works on functions, methods, static and class
    methods, `nn.Module.forward` and other callables, bare or with options.

    Args:
        fn: The function.
        enable: False returns the function as it is.
        capture_stub: Called with the same arguments instead of `fn`, at capture only.
        name: What `breaks=` and the segment table know it by. Left out: its qualified name.

    Raises:
        TypeError: not callable, or a coroutine or generator function: those run after the call that a
            segment records.
    """
    if fn is None:
        return functools.partial(
            eager_break_during_capture, enable=enable, capture_stub=capture_stub, name=name
        )
    if isinstance(fn, staticmethod | classmethod):
        mark = eager_break_during_capture(enable=enable, capture_stub=capture_stub, name=name)
        return type(fn)(mark(fn.__func__))
    _check_callable(fn)
    if not enable:
        if hasattr(fn, "__code__"):
            disabled.add(fn.__code__)
        return fn
    break_name = name or _name_of(fn)

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        run = state.run
        if run is None or not run.breaks_at(break_name):
            if has_live(args, kwargs):
                args, kwargs = resolve(args, kwargs)
            return fn(*args, **kwargs)
        return run.record_break(fn, args, kwargs, break_name, capture_stub)

    # Without this, torch.compile would trace our own frames.
    disable: Any = torch.compiler.disable
    return disable(call, reason=f"{break_name} is an eager break of segcapture")


def break_graph(name: str = "") -> None:
    """End the graph segment here and begin another; nothing runs in between.

    Outside of a capture and inside of an eager segment it does nothing.
    """
    if state.run is not None:
        state.run.split(name)


def is_capturing() -> bool:
    """Whether the calling thread is inside of a capture, eager breaks included."""
    return state.run is not None


def _name_of(fn: Any) -> str:
    name = getattr(fn, "__qualname__", None) or type(fn).__qualname__
    return str(name).rpartition("<locals>.")[2]


def _check_callable(fn: Any) -> None:
    if not callable(fn):
        hint = f": did you mean name={fn!r}?" if isinstance(fn, str) else ""
        raise TypeError(f"eager_break_during_capture takes a function, got {fn!r}{hint}")
    body = fn.func if isinstance(fn, functools.partial) else fn
    candidates = [body] if inspect.isroutine(body) else [body, getattr(body, "__call__", None)]  # noqa: B004
    for candidate in candidates:
        if inspect.iscoroutinefunction(candidate):
            kind = "coroutine"
        elif inspect.isgeneratorfunction(candidate) or inspect.isasyncgenfunction(candidate):
            kind = "generator"
        else:
            continue
        raise TypeError(
            f"{_name_of(fn)} is a {kind} function: its body runs after the call that a segment records. "
            f"Mark an ordinary function that does the work and returns tensors."
        )
