"""Operators by name, and those that are made of other operators.

With autograd on the way (also under `no_grad`) a composite operator decomposes before it reaches a
dispatch mode; under inference mode, and below autograd, it arrives whole. Opened in the mode itself, the
same program shows the same operators either way.
"""

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_ABOVE_MODES = (DispatchKey.ADInplaceOrView, DispatchKey.AutocastCPU, DispatchKey.AutocastCUDA)


def names_of(func: Any) -> tuple[str, str]:
    """`ns::op` and the overload of an operator that reached a dispatch mode."""
    if isinstance(func, HigherOrderOperator):  # takes functions, as flex_attention does; has no schema
        return f"{func.namespace}::{func.name()}", "default"
    return func._schema.name, func._schema.overload_name or "default"


def tensor_leaves(*trees: Any) -> list[torch.Tensor]:
    """The tensors among the arguments or the results of an operator."""
    return [leaf for leaf in tree_leaves(trees) if isinstance(leaf, torch.Tensor)]


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


def run_in_parts(mode: TorchDispatchMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Run a composite operator that reached `mode`, so that the mode sees its parts."""
    with mode, as_called(func):
        return func._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


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


def has_own_dispatch(types: Any) -> bool:
    """Whether a tensor subclass among the arguments says itself which operators it consists of."""
    plain = torch._C._disabled_torch_dispatch_impl  # a Parameter's, say
    return any(kind.__torch_dispatch__ is not plain for kind in types)


@functools.lru_cache(maxsize=4096)
def _has(func: Any, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)
