"""What a thread calls, operators and functions of torch, given to whoever watches."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from segcapture.operators.compiled import uncompiled
from segcapture.operators.composites import has_own_dispatch, is_composite, run_in_parts

Call = Callable[[], Any]
Watcher = Callable[[Any, tuple[Any, ...], dict[str, Any], Call], Any]
"""Takes what is called, its arguments, and a function that makes the call, and returns the result."""


@contextmanager
def watching(operator: Watcher, function: Watcher | None = None, *, in_parts: bool = True) -> Iterator[None]:
    """For the block, what this thread calls is called by these. They are not watched themselves.

    Functions of torch show what no operator does: conversions to Python, and composite operators above
    autograd. An operator that is composite comes as such and, `in_parts`, when it is called its parts come
    too.
    """
    functions = nullcontext() if function is None else _Functions(function)
    with uncompiled(), functions, _Operators(operator, in_parts):
        yield


class _Operators(TorchDispatchMode):
    supports_higher_order_operators = True  # they come whole

    def __init__(self, watcher: Watcher, in_parts: bool) -> None:
        super().__init__()
        self._watcher, self._in_parts = watcher, in_parts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if has_own_dispatch(types):
            return NotImplemented  # The operators that the subclass makes of this one come here.
        kwargs = kwargs or {}

        def call() -> Any:
            if self._in_parts and is_composite(func):
                return run_in_parts(self, func, args, kwargs)
            return func(*args, **kwargs)

        return self._watcher(func, tuple(args), kwargs, call)


class _Functions(TorchFunctionMode):
    def __init__(self, watcher: Watcher) -> None:
        super().__init__()
        self._watcher = watcher

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return self._watcher(func, args, kwargs, lambda: func(*args, **kwargs))
