"""Operators by name, and those that are made of other operators.

With autograd on the way (also under `no_grad`) a composite operator decomposes before it reaches a
dispatch mode; under inference mode, and below autograd, it arrives whole. Opened in the mode itself, the
same program shows the same operators either way.
"""

import functools
from typing import Any

import torch
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator


def names_of(func: Any) -> tuple[str, str]:
    """`ns::op` and the overload of an operator that reached a dispatch mode."""
    if isinstance(func, HigherOrderOperator):  # takes functions, as flex_attention does; has no schema
        return f"{func.namespace}::{func.name()}", "default"
    return func._schema.name, func._schema.overload_name or "default"


@functools.lru_cache(maxsize=4096)
def body_of(func: Any) -> Any:
    """The function that runs a composite operator in smaller ones, or None for all others."""
    if isinstance(func, HigherOrderOperator):
        return None
    has = functools.partial(torch._C._dispatch_has_kernel_for_dispatch_key, func.name())
    if not has("CompositeImplicitAutograd") or has("CPU") or has("CUDA"):
        return None
    return functools.partial(func._op_dk, DispatchKey.CompositeImplicitAutograd)
