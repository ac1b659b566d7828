"""What a recorded call keeps so that it can be made again (contract C3)."""

from collections.abc import Callable, Collection
from typing import Any

import attrs
import torch

from segcapture.errors import CaptureFailedError
from segcapture.tensors import View, has_own_aliases, own_alias, shows_memory_alone
from segcapture.trees import OPAQUE, PLAIN, Place, attributes_besides, children, flatten, map_tuples


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
        tuple([map_tuples(value, _ask) for value in args]),
        {key: map_tuples(value, _ask) for key, value in kwargs.items()},
    )


@attrs.frozen(eq=False)
class Call:
    """A function and the arguments of a break, as they are used at replay."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    live: bool = False
    """Whether a `Live` is among the arguments."""

    def invoke(self) -> Any:
        """Call the function again."""
        if not self.live:
            return self.fn(*self.args, **self.kwargs)
        args, kwargs = resolve(self.args, self.kwargs)
        return self.fn(*args, **kwargs)


class Arguments:
    """The arguments of a break that is called now: for this call, and for those at replay.

    Args:
        call: What was called. Attribute `now` has its arguments of now, and `kept` what a replay uses.
        alias: The non-owning alias to keep of a tensor of this capture; None for any other tensor.
        grad: Whether autograd would record what the function does.

    Raises:
        TypeError: a `Live` is in a list or dict, where nobody asks it.
    """

    def __init__(
        self, call: Call, alias: Callable[[torch.Tensor], torch.Tensor | None], *, grad: bool
    ) -> None:
        self._alias = alias
        self._aliases: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By the identity of a tensor: itself, and what is kept instead."""
        self._live = self._mutable = False
        args = tuple([map_tuples(value, self._keep) for value in call.args])
        kwargs = {key: map_tuples(value, self._keep) for key, value in call.kwargs.items()}
        self.kept = Call(call.fn, args, kwargs, self._live)
        self.now = Call(call.fn, *resolve(call.args, call.kwargs)) if self._live else call
        places = [] if not grad else flatten((self.now.args, self.now.kwargs))
        # What an object holds, an optimizer say, is its own affair.
        given = [p.value for p in places if isinstance(p.value, torch.Tensor) and not p.in_object]
        self._versions = [(tensor, tensor._version) for tensor in given if tensor.requires_grad]
        self._items = self._items_of() if self._mutable else {}
        """What lists, dicts and objects hold, to compare once the function has returned."""

    @property
    def given(self) -> Collection[int]:
        """Identities of the tensors that were passed, by themselves or in tuples."""
        return self._aliases.keys()

    def _keep(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in self._aliases:
                self._aliases[id(value)] = value, self._kept_for(value)
            return self._aliases[id(value)][1]
        self._mutable |= not isinstance(value, (Live, *PLAIN, *OPAQUE))
        if type(value) is Live:
            self._live = True
        elif isinstance(value, list | dict):
            items = value.values() if isinstance(value, dict) else value
            if any(type(item) is Live for item in items):
                raise TypeError(
                    f"A Live is in a {type(value).__qualname__}, which goes to the function as it is, so "
                    f"that nobody asks it. Pass it by itself or in a tuple, or put new values into the "
                    f"container."
                )
        return value

    def _kept_for(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad and not tensor.is_leaf:
            tensor = tensor.detach()  # else its graph would be kept
        alias = self._alias(tensor)
        if alias is None and shows_memory_alone(tensor) and tensor.layout is torch.strided:
            # Memory that a break has returned: what we keep must not count as an owner of it.
            alias = own_alias(tensor) if has_own_aliases(tensor.untyped_storage()) else None
        return tensor if alias is None else alias

    def _items_of(self, containers: Collection[int] | None = None) -> dict[tuple[int, str], Place]:
        """Tensors by list, dict or object and path: in these, or in all that hold one of this capture."""
        places = flatten({**dict(enumerate(self.now.args)), **self.now.kwargs}, "args")
        besides = [
            Place(f"{place.path}.{name}", i, name, item)
            for i, place in enumerate(places)
            if place.inside is not None
            for name, item in attributes_besides(place.value, children(place.value) or ())
        ]
        items = {}
        for place in (*places, *besides):
            parent = place.parent
            while parent > 0 and isinstance(places[parent].value, tuple):
                parent = places[parent].parent
            if parent > 0 and isinstance(place.value, torch.Tensor):
                items[id(places[parent].value), place.path] = place
        if containers is None:
            containers = {key for (key, _), p in items.items() if self._alias(p.value) is not None}
        return {key: place for key, place in items.items() if key[0] in containers}

    def check_unchanged(self, segment: int, where: str) -> None:
        """Raise CaptureFailedError if the function did to an argument what a replay cannot repeat.

        That is: it changed in place how a tensor of this capture shows its memory, it wrote to a tensor that
        requires grad, or it took a tensor of this capture out of a list, dict or object, or added one there:
        the next replay would begin with that.
        """
        for tensor, kept in self._aliases.values():
            if kept is tensor or tensor.requires_grad:
                continue
            if (
                tensor.shape != kept.shape
                or tensor.stride() != kept.stride()
                or tensor.data_ptr() != kept.data_ptr()
            ):
                changes = View.of(kept).changes(View.of(tensor))
                raise CaptureFailedError(
                    f"{where} changed an argument in place ({changes}), and a replay would go on from that. "
                    f"Work on a view of it, and return that.",
                    segment=segment,
                )
        before, self._items = self._items, {}
        now = self._items_of({container for container, _ in before}) if before else {}
        for key, place in {**now, **before}.items():
            new = now[key].value if key in before and key in now else None
            if new is not place.value and id(new) not in self._aliases:
                raise CaptureFailedError(
                    f"{where} put another tensor at `{place.path}`, or took one out, where tensors of this "
                    f"capture are: a replay would begin with that. Return it, or put it into a copy.",
                    segment=segment,
                    path=place.path,
                )
        if any(tensor._version != version for tensor, version in self._versions):
            raise CaptureFailedError(
                f"{where} wrote to an argument that requires grad. An eager break is opaque to autograd: it "
                f"may only read such a tensor. {WAYS_AROUND_AUTOGRAD}",
                segment=segment,
            )


WAYS_AROUND_AUTOGRAD = (
    "Capture under `torch.no_grad()` or `torch.inference_mode()`; or, to train through it, call the function "
    "in the `forward` and `backward` of a `torch.autograd.Function`."
)


def has_live(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether any argument is a `Live`, at top level or in a tuple."""
    return any(
        type(value) is Live or (isinstance(value, tuple) and has_live(value, {}))
        for value in (*args, *kwargs.values())
    )
