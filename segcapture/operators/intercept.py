"""What a thread calls, operators and functions of torch, given to whoever watches."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import attrs
import torch
from torch._C import DispatchKey
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from segcapture.operators.composites import as_called, has_python_body, is_composite
from segcapture.thread import location

Invoke = Callable[[], Any]
Watcher = Callable[[Any, tuple[Any, ...], dict[str, Any], Invoke], Any]
"""Takes what is called, its arguments, and a function that makes the call, and returns the result."""


@attrs.frozen
class Use:
    """One call of an operator."""

    operator: str
    place: str = attrs.field(factory=location)

    def __str__(self) -> str:
        return f"`{self.operator}` at {self.place}"


@contextmanager
def watching(
    operator: Watcher, function: Watcher | None = None, *, in_parts: bool = True, bodies: bool = False
) -> Iterator[None]:
    """For the block, what this thread calls is called by these. They are not watched themselves.

    Functions of torch show what no operator does: conversions to Python, and composite operators above
    autograd. An operator that is composite comes as such and, `in_parts`, when it is called its parts come
    too; so does, with `bodies`, what an operator calls that is written in Python.
    """
    functions = nullcontext() if function is None else _Functions(function)
    unchanged = replaced(torch.overrides, "has_torch_function", _has_torch_function)
    with _uncompiled(), unchanged, functions, _Operators(operator, functions, in_parts, bodies):
        yield


def aside() -> AbstractContextManager[None]:
    """For the block, no mode sees what this thread does: for work that is not the user's.

    Costs a microsecond; under a mode, each attribute of a tensor that is read costs more. Code of the user's
    is called outside of it.
    """
    watched = torch._C._len_torch_dispatch_stack() or torch._C._is_torch_function_mode_enabled()
    return _Aside() if watched else nullcontext()


class _Aside(AbstractContextManager[None]):
    def __enter__(self) -> None:
        self._functions = torch._C.DisableTorchFunction()
        self._functions.__enter__()
        self._told = torch._C._dispatch_tls_is_dispatch_key_included(DispatchKey.Python)
        _tell_modes(False)

    def __exit__(self, *failure: Any) -> None:
        _tell_modes(self._told)
        self._functions.__exit__(*failure)


def _tell_modes(told: bool) -> None:
    # Of operators on tensor subclasses they are told as ever: those have the key themselves.
    torch._C._dispatch_tls_set_dispatch_key_included(DispatchKey.Python, told)
    torch._C._dispatch_tls_set_dispatch_key_included(DispatchKey.PythonTLSSnapshot, told)


_process = threading.Lock()
_replaced: dict[tuple[Any, str], tuple[Any, list[tuple[int, Callable[..., Any]]]]] = {}
"""What stood there, and what stands there now for which thread."""
_stances: list[Any] = []
"""The stance of torch.compile, once for each block that has set it."""


@contextmanager
def replaced(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """For the block, and in this thread alone, calls of `owner.name` go to `function`.

    It takes what stood there as its first argument.
    """
    key, entry = (owner, name), (threading.get_ident(), function)
    with _process:
        if key not in _replaced:
            original, entries = _replaced[key] = getattr(owner, name), []

            def call(*args: Any, **kwargs: Any) -> Any:
                for thread, instead in reversed(entries):
                    if thread == threading.get_ident():
                        return instead(original, *args, **kwargs)
                return original(*args, **kwargs)

            setattr(owner, name, call)
        _replaced[key][1].append(entry)
    try:
        yield
    finally:
        with _process:
            original, entries = _replaced[key]
            entries.remove(entry)
            if not entries:
                setattr(owner, name, original)
                del _replaced[key]


def capture_reported(capturing: Callable[[], bool]) -> AbstractContextManager[None]:
    """For the block, libraries that ask in this thread whether CUDA is capturing are told `capturing()`."""
    cuda = torch.get_device_module("cuda")
    return replaced(cuda, "is_current_stream_capturing", lambda original: capturing())


def _has_torch_function(original: Any, tensors: Any) -> bool:
    """As without us: modules of torch ask, and leave their fast path where somebody overrides functions."""
    modes = torch.overrides._get_current_function_mode_stack()
    plain = (torch.Tensor, torch.nn.Parameter, type(None))
    alone = all(isinstance(mode, _Functions) for mode in modes) and all(type(t) in plain for t in tensors)
    return not alone and bool(original(tensors))


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Dynamo does not compile under a mode, and says so in errors; told before, it runs code as written."""
    if "torch._dynamo" not in sys.modules:
        yield  # Nothing is compiled, and the import takes seconds.
        return
    with _process:  # the stance is the whole process's: the last one out takes it back
        _stances.append(_stances[0] if _stances else torch.compiler.set_stance("force_eager"))
    try:
        yield
    finally:
        with _process:
            stance = _stances.pop()
            if not _stances:
                stance.__exit__(None, None, None)


class _Operators(TorchDispatchMode):
    supports_higher_order_operators = True  # they come whole

    def __init__(self, watcher: Watcher, functions: Any, in_parts: bool, bodies: bool) -> None:
        super().__init__()
        self._watcher, self._functions = watcher, functions
        self._in_parts, self._bodies = in_parts, bodies

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__torch_dispatch__ is not _PLAIN for kind in types):
            return NotImplemented  # The operators that the subclass makes of this one come here.
        kwargs = kwargs or {}

        def call() -> Any:
            if self._in_parts and is_composite(func):
                with self, as_called(func):
                    return func._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
            if self._bodies and has_python_body(func):
                with self, self._functions:
                    return func.redispatch(_ANY_DEVICE, *args, **kwargs)
            return func(*args, **kwargs)

        return self._watcher(func, tuple(args), kwargs, call)


_ANY_DEVICE = torch._C.DispatchKeySet(DispatchKey.CPU)  # such a body is the same on all
_PLAIN = torch._C._disabled_torch_dispatch_impl  # a Parameter's, say


class _Functions(TorchFunctionMode):
    def __init__(self, watcher: Watcher) -> None:
        super().__init__()
        self._watcher = watcher

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return self._watcher(func, args, kwargs, lambda: func(*args, **kwargs))
