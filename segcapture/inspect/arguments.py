"""The arguments of a recorded call by name, for tables and messages."""

import inspect
from typing import Any

import torch

from segcapture.arguments import Call
from segcapture.trees import flatten

_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype)


def named(call: Call) -> list[tuple[str, Any]]:
    """Each argument after the function's own name for it; `args[1]` where that cannot be known."""
    try:
        parameters = list(inspect.signature(call.fn).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    own = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "")
    names = [
        own[i] if i < len(own) else f"{rest}[{i - len(own)}]" if rest else f"args[{i}]"
        for i in range(len(call.args))
    ]
    return [*zip(names, call.args, strict=True), *call.kwargs.items()]


def frozen(call: Call) -> list[tuple[str, Any]]:
    """The plain Python values that capture froze, each after its name."""
    return [
        (name + node.path.removeprefix("out"), node.value)
        for name, value in named(call)
        for node in (flatten(value) if isinstance(value, tuple) else flatten(value)[:1])
        if isinstance(node.value, _PLAIN)
    ]
