"""Reading a call: its tensors, its signature, and where it is captured."""

import inspect
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch

from segcapture.ambient import Ambient
from segcapture.callable.bucket import Bucket, Padded
from segcapture.callable.places import contents, described, named
from segcapture.callable.signature import (
    Reading,
    Share,
    clashes_among,
    shared_memory,
    twins_among,
    typed,
)
from segcapture.callable.weights import Weights, modules_in, modules_of, training_flags, with_children
from segcapture.errors import CaptureFailedError
from segcapture.writeback.aliases import storage_id


@attrs.define(eq=False, kw_only=True)  # frozen would take 1 us more for each call
class Call:
    """One call, read."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    key: Hashable
    tensors: list[torch.Tensor]
    storages: list[int]
    """Identities of their storages; empty for a single tensor that is not padded, as none compares it."""
    shares: tuple[Share, ...]
    twins: tuple[tuple[int, int], ...]
    """Positions of padded tensors that are the same as an earlier one, and that one's position."""
    clashes: tuple[int, ...]
    """Positions of tensors that overlap where one of the two is padded."""
    padded: Mapping[int, tuple[Padded, int]]
    device: torch.device
    ambient: Ambient
    training: bool | tuple[bool, ...] | None
    extra: Hashable
    """What the user's `key` returned."""
    length: int = 0
    """Of the padded dimension."""
    overlaps_objects: bool = False
    """Whether an argument shares memory with a tensor in an object among the arguments."""

    @property
    def grad(self) -> bool:
        """Whether autograd records."""
        return self.ambient.grad

    def check_can_be_captured(self) -> None:
        """Raise CaptureFailedError for arguments that no replay can serve."""
        if self.grad and any(tensor.requires_grad for tensor in self.tensors):
            raise CaptureFailedError(
                "An argument requires grad, and a replay makes no autograd graph. Call it under "
                "`torch.no_grad()` or `torch.inference_mode()`, or pass it detached."
            )
        _check_no_graph_between([tensor for tensor in self.tensors if tensor.requires_grad])
        if self.overlaps_objects:
            raise CaptureFailedError(
                "An argument shares memory with a tensor in an object among the arguments. Arguments are "
                "copied, and objects are used as they are: pass it in the object alone."
            )


class TooLongError(Exception):
    """The call is above the largest bucket."""


class Reader:
    """Reads the calls of one function."""

    def __init__(
        self,
        fn: Callable[..., Any],
        bucket: Bucket | None,
        key: Callable[..., Hashable] | None,
        modules: Sequence[torch.nn.Module],
        device: torch.device | None,
    ) -> None:
        self._fn, self._bucket, self._key, self._device = fn, bucket, key, device
        self._given = modules
        self._names, self._parameters = _parameter_names(fn)
        self._ambient: Ambient | None = None
        self._roots: list[torch.nn.Module] | None = None
        self._modules: list[torch.nn.Module] = []
        if bucket is not None:
            bucket.check_names(fn, self._names)

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The call and its signature.

        Raises:
            TooLongError: above the largest bucket.
            CaptureFailedError: an argument that cannot be compared with another call's, or copied.
            ValueError: the arguments of a bucket differ in length.
            TypeError: what `key` returned has no hash.
        """
        padded: dict[int, tuple[Padded, int]] = {}
        places = length = 0
        if self._bucket is not None:
            found, places, length = self._bucket.find(named(args, kwargs, self._names))
            size = self._bucket.size_for(length)
            if size is None:
                raise TooLongError(f"{length} is above the largest bucket, {self._bucket.sizes[-1]}")
            padded = {tensor_id: (how, size) for tensor_id, how in found.items()}
        reading = Reading(padded)
        reading.read(args, kwargs, self._parameters)
        tensors = reading.tensors
        storages = list(map(storage_id, tensors)) if len(tensors) > 1 or reading.padded else []
        if len(reading.padded) != places:
            raise CaptureFailedError(
                "A tensor that the bucket pads is an argument in another place too, which is not named in "
                "dims. Name it there, or pass a view of it, `x[:]`."
            )
        shares = shared_memory(tensors, storages, reading.padded) if len(tensors) > 1 else ()
        twins = twins_among(tensors, reading.padded) if len(reading.padded) > 1 else ()
        clashes = clashes_among(tensors, reading.padded, twins) if reading.padded else ()
        if self._roots is None:
            self.look_for_modules()
        device = self._device_of(tensors)
        if device.type != "cpu":
            # The value of a scalar on the host goes into a kernel's arguments.
            reading.key += [t.item() for t in tensors if t.device.type == "cpu" and t.dim() == 0]
        ambient = self._ambient
        if ambient is None or ambient.device_type != device.type or not ambient.is_current():
            self._ambient = ambient = Ambient.current(device)
        training = training_flags(self._modules)
        extra = None if self._key is None else self._key(*args, **kwargs)
        try:
            typed_extra = typed(extra)
        except CaptureFailedError:
            raise TypeError(f"key= returned {extra!r}, which has no hash: return a tuple, say") from None
        return Call(
            args=args,
            kwargs=kwargs,
            key=(tuple(reading.key), shares, twins, clashes, ambient, training, typed_extra),
            training=training,
            extra=extra,
            tensors=tensors,
            storages=storages,
            shares=shares,
            twins=twins,
            clashes=clashes,
            padded=reading.padded,
            device=device,
            ambient=ambient,
            length=length,
            overlaps_objects=bool(reading.in_place) and reading.overlaps_objects(),
        )

    def look_for_modules(self) -> None:
        """Find the modules that the function uses, and all in them, as they are now."""
        self._roots = [*modules_of(self._fn), *self._given]
        self._modules = with_children(self._roots)

    def weights(self, call: Call) -> Weights:
        """The weights that the function reads in a call, as they are now."""
        return Weights(with_children([*self._modules, *modules_in(call.args), *modules_in(call.kwargs)]))

    def check_weights(self, call: Call, option: str, *, first: bool = False) -> Callable[[], None]:
        """To be called after the function: raises CaptureFailedError if it has replaced weights.

        Modules are looked for anew; at the `first` call lazy ones may set themselves up.
        """
        self.look_for_modules()
        before = None if first or option == "ignore" else self.weights(call)

        def check() -> None:
            change = None if before is None else before.change()
            if change is not None:
                raise CaptureFailedError(
                    f"{change} by the function, which is Python's doing and no replay "
                    f"does it again. Write into what is there (`copy_`, `mul_`), or pass weights='ignore'."
                )

        return check

    def describe(self, call: Call) -> dict[str, dict[str, str]]:
        """The signature of a call in words, by place."""
        places = contents(named(call.args, call.kwargs, self._names))
        sizes = {id(call.tensors[i]): (how.dim, size) for i, (how, size) in call.padded.items()}
        return {
            **described(places, sizes),
            "(ambient)": {name: str(value) for name, value in attrs.asdict(call.ambient).items()},
            "(training)": {"modules": str(call.training)},
            "(key)": {"returned": repr(call.extra)},
        }

    def _device_of(self, tensors: Iterable[torch.Tensor]) -> torch.device:
        if self._device is not None:
            return self._device
        for tensor in tensors:
            if tensor.device.type != "cpu":
                return tensor.device
        for module in self._roots or ():
            for weight in module.parameters():
                return weight.device
        return torch.device("cpu")


def as_arguments(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a user's function made for a call: a tuple, or a dict of keyword arguments."""
    if not isinstance(given, tuple | dict):
        raise TypeError(f"inputs takes a function that returns a tuple or dict, got {type(given)}")
    return ((), given) if isinstance(given, dict) else (given, {})


def check_function(fn: Any) -> None:
    """Raise TypeError if `fn` is not callable, or does its work after the call."""
    if not callable(fn):
        raise TypeError(f"GraphedCallable takes a function, got {fn!r}")
    for body in (fn, type(fn).__call__):
        if inspect.iscoroutinefunction(body) or inspect.isgeneratorfunction(body):
            raise TypeError(f"{fn!r} is a coroutine or generator function: its body runs after the call.")


def _parameter_names(fn: Callable[..., Any]) -> tuple[list[str], Collection[str] | None]:
    """Names of the parameters that may be passed by position, and those whose order no function sees.

    Of the latter None stands for all that it takes: it has no `**kwargs`.
    """
    body = fn.forward if isinstance(fn, torch.nn.Module) else fn
    try:
        parameters = inspect.signature(body).parameters.values()
    except (TypeError, ValueError):  # some builtins have none
        return [], ()
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if all(p.kind is not p.VAR_KEYWORD for p in parameters):
        return positional, None
    return positional, {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def _check_no_graph_between(tensors: Sequence[torch.Tensor]) -> None:
    """Raise CaptureFailedError if autograd made one of the tensors from another."""
    if len(tensors) < 2:
        return
    ends: set[Any] = {tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None}
    leaves = {id(tensor) for tensor in tensors if tensor.is_leaf}
    todo = [before for node in ends for before, _ in node.next_functions]
    seen = {None}
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in ends or id(getattr(node, "variable", None)) in leaves:
            raise CaptureFailedError(
                "An argument that requires grad was computed from another one, and the static inputs are "
                "separate leaves between which no gradient flows. Pass one of them detached."
            )
        todo += [before for before, _ in node.next_functions]
