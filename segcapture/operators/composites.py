"""Operators by name, and those that are made of other operators.

With autograd on the way (also under `no_grad`) a composite operator decomposes before it reaches a
dispatch mode; under inference mode, and below autograd, it arrives whole. Opened in the mode itself, the
same program shows the same operators either way.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator

_SEQUENCES = (tuple, list)
_ABOVE_MODES = (DispatchKey.ADInplaceOrView, DispatchKey.AutocastCPU, DispatchKey.AutocastCUDA)


@functools.lru_cache(maxsize=4096)
def names_of(func: Any) -> tuple[str, str]:
    """`ns::op` and the overload of an operator that reached a dispatch mode."""
    if isinstance(func, HigherOrderOperator):  # takes functions, as flex_attention does; has no schema
        return f"{func.namespace}::{func.name()}", "default"
    return func._schema.name, func._schema.overload_name or "default"


# Not torch's pytree, which takes most of the time that an operator takes on a tape: arguments of operators
# are tensors and plain containers.
def tensor_leaves(*trees: Any) -> list[torch.Tensor]:
    """The tensors among the arguments or the results of an operator."""
    found: list[torch.Tensor] = []
    for tree in trees:
        if isinstance(tree, torch.Tensor):
            found.append(tree)
        elif isinstance(tree, _SEQUENCES):
            found += tensor_leaves(*tree)
        elif isinstance(tree, dict):
            found += tensor_leaves(*tree.values())
    return found


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """The arguments of an operator with `fn(tensor)` for each tensor."""
    if isinstance(tree, torch.Tensor):
        return fn(tree)
    if isinstance(tree, _SEQUENCES):
        return type(tree)(map_tensors(fn, item) for item in tree)
    if isinstance(tree, dict):
        return {key: map_tensors(fn, item) for key, item in tree.items()}
    return tree


@functools.lru_cache(maxsize=4096)
def is_composite(func: Any) -> bool:
    """Whether an operator has no kernel of its own, on the CPU and on CUDA."""
    return (
        not isinstance(func, HigherOrderOperator)
        and torch._C._dispatch_has_kernel(func.name())  # not an overload of TorchScript alone
        and _has(func, "CompositeImplicitAutograd")
        and not _has(func, "CPU")
        and not _has(func, "CUDA")
    )


@functools.lru_cache(maxsize=4096)
def has_python_body(func: Any) -> bool:
    """Whether one Python function is an operator's kernel on all devices (`torch.library.custom_op`)."""
    name, overload = names_of(func)
    where = name.replace("::", "/") + ("" if overload == "default" else f".{overload}")
    everywhere = f"{where}/CompositeExplicitAutograd" in torch.library._impls
    return everywhere and not _has(func, "CPU") and not _has(func, "CUDA")


@contextmanager
def as_called(func: Any) -> Iterator[None]:
    """Let a composite operator that reached a mode run as it would have run without the mode.

    In a mode, views do not know their base, and autocast is off. But `matmul` picks its kernel by whether
    a view of a weight requires grad, and autocast is for the parts, unless it knows the whole.
    """
    excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
    with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
        outside = {key: excluded(key) or _has(func, key.name) for key in _ABOVE_MODES}
    with ExitStack() as stack:
        for key, without in outside.items():
            stack.enter_context(torch._C._SetExcludeDispatchKeyGuard(key, without))
        yield


@functools.lru_cache(maxsize=4096)
def _has(func: Any, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)
