"""A call in words: its places, what is there, and why no other signature fits."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from segcapture.writeback.structure import children, is_plain_object, walk


def named(args: tuple[Any, ...], kwargs: Mapping[str, Any], names: Sequence[str]) -> list[tuple[str, Any]]:
    """The arguments with the names that the function gives them."""
    positional = [(names[i] if i < len(names) else f"args[{i}]", value) for i, value in enumerate(args)]
    return [*positional, *sorted(kwargs.items())]


def contents(arguments: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Each place in the arguments, and what is there."""
    return {
        name + node.path.removeprefix("out"): node.value for name, value in arguments for node in walk(value)
    }


def described(places: Mapping[str, Any], padded: Mapping[int, tuple[int, int]]) -> dict[str, dict[str, str]]:
    """The places of a call in words, to be compared with another call's.

    `padded` has the dimension of a tensor that is padded, and its size after, by the tensor's id.
    """
    return {path: _in_words(value, padded.get(id(value))) for path, value in places.items()}


def _in_words(value: Any, padded: tuple[int, int] | None) -> dict[str, str]:
    if isinstance(value, torch.Tensor):
        shape = list(value.shape)
        if padded is not None:
            shape[padded[0]] = padded[1]
        words = {"dtype": str(value.dtype).removeprefix("torch."), "shape": str(shape)}
        if value.layout is torch.strided and padded is None:
            words["stride"] = str(list(value.stride()))
        words |= {"device": str(value.device), "requires_grad": str(value.requires_grad)}
        words["class"] = type(value).__qualname__
        return words
    if isinstance(value, torch.nn.Module):
        return {"value": _short(repr(value)), "training": str(value.training)}
    if (content := children(value)) is None:
        return {"value": _short(repr(value))}
    words = {"type": type(value).__qualname__}
    return words | ({"object": hex(id(value))} if is_plain_object(value) else {"items": str(len(content))})


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def difference(new: Mapping[str, Mapping[str, str]], old: Mapping[str, Mapping[str, str]]) -> list[str]:
    """In which places two described calls differ, the few most telling words of each."""
    found = []
    for path in [*old, *(path for path in new if path not in old)]:
        if path not in new or path not in old:
            found.append(f"{path}: {'absent' if path not in new else 'present'} here")
            continue
        a, b = new[path], old[path]
        aspects = [k for k in {**b, **a} if a.get(k) != b.get(k)]
        if "shape" in aspects and "stride" in aspects:
            aspects.remove("stride")  # it follows
        if aspects:
            words = (f"{k} {a.get(k, 'none')}, not {b.get(k, 'none')}" for k in aspects)
            found.append(f"{path}: {'; '.join(words)}")
    return found


def explain(
    new: Mapping[str, Mapping[str, str]], others: Sequence[tuple[str, Mapping[str, Mapping[str, str]]]]
) -> str:
    """Why no other signature fits: what differs from the nearest."""
    if not others:
        return "the first signature"
    measure: Callable[[tuple[str, list[str]]], int] = lambda pair: len(pair[1])  # noqa: E731
    name, found = min(((name, difference(new, old)) for name, old in others), key=measure)
    more = f"; and {len(found) - 3} more" if len(found) > 3 else ""
    # Memory at other addresses, or shared in another way, is not in the words, nor what is in a module.
    hidden = "which tensors are the same or share memory, an address, a `.grad`, or `training` of a module"
    what = "; ".join(found[:3]) + more if found else hidden
    return f"nearest to {name}, which differs in {what}"
