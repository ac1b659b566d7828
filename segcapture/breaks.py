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

    Arguments (C3). A tensor in memory of this capture is kept without owning it, so that later segments use
    the memory again; every other tensor is kept alive. Tuples are made anew around their tensors. Lists,
    dicts and objects are passed as themselves: the function sees `meta.max_len = 17` that was set between
    replays. Plain Python values are frozen, and the segment table shows them; a `Live` is asked for at each
    replay. A tensor that requires grad, with grad enabled, may only be read.

    Outputs (C4). Tensors are written back in tuples, lists, dicts, dataclasses, attrs classes, plain
    objects and their subclasses, nested. A new tensor gets a bridge, memory of the pool that the code after
    the break receives; each replay compares structure, shape, dtype, device and sharing of memory, and
    copies. Memory that others own (an argument, a cache) stays itself, so the function must return the same
    tensor each time: `h * 2 if hot else h` is an error at the first replay that differs, `.clone()` is the
    way out. Refused are tensors where they cannot be written back: in a set or deque, in an attribute of a
    list, dict or dataclass that is no item or field, in an object inside of an object. Closures,
    `functools.partial`, generators and NumPy arrays are not looked into: what they hold is stale.

    Numbers and other Python values that it returns are frozen for graph segments. If one that stands bare
    or in a tuple changes, a `FrozenValueWarning` says so once. In a list, dict or object the new value is
    put in place, and later breaks read it; code between the breaks that computed with it did so at capture
    alone, of which only `check=True` warns. Return a tensor where graph code or the caller reads it.

    A tensor that the function leaves somewhere (`self.last = h`) instead of returning it, and that a graph
    segment reads, is stale: the graph reads the one of the capture. `check=True` finds that.

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
