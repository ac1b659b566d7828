"""What two calls must have in common to be served by one capture: in values, and in words."""

import contextlib
import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import attrs
import torch

from segcapture.ambient import Ambient
from segcapture.callable.bucket import Bucket, Padding
from segcapture.callable.state import Modules, training_flags, with_children
from segcapture.errors import CaptureFailedError
from segcapture.tensors import View, cannot_be_copied, storage_id
from segcapture.trees import PLAIN, Place, attributes_besides, children, flatten, is_plain_object

_PLAIN = frozenset(PLAIN)
_VARIABLE = inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)
_ALIGNMENT = 16  # bytes: what kernels that read whole words ask of addresses and rows

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

Words = Mapping[str, Mapping[str, str]]
"""A call in words: what is in each place, by aspect."""


class Identity:
    """An object that is compared by identity, and held weakly if it can be."""

    __slots__ = ("_id", "_value")

    def __init__(self, value: Any) -> None:
        self._id = id(value)
        self._value = weak(value)

    def __eq__(self, other: object) -> bool:
        value = self._value()
        return isinstance(other, Identity) and value is not None and value is other._value()

    def __hash__(self) -> int:
        return self._id


def weak(value: Any, *callback: Callable[[Any], None]) -> Callable[[], Any]:
    """What gives an object: a weak reference, where that does no harm."""
    with contextlib.suppress(TypeError):
        if not isinstance(value, torch.Tensor):  # `torch.utils.swap_tensors` refuses those that have one
            return weakref.ref(value, *callback)
    return lambda: value


class Overlap(NamedTuple):
    """Tensors of a call that share memory."""

    positions: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    """Of each, in bytes, in the memory of all. None where one is padded: each has then memory of its own."""
    nbytes: int


class Request:
    """One call, read: what is compared of it, and the tensors that are copied.

    Args:
        arguments: By position and by name.
        names: Of the parameters that may be passed by position.
        ordered: Whether the order of keywords makes a difference: the function sees it in its `**kwargs`.
        paddings: How tensors are padded, by their id.

    Raises:
        CaptureFailedError: an argument that cannot be compared with another call's, or copied.
    """

    ambient: Ambient
    device: torch.device
    key: Hashable
    """The signature."""
    bucket: Bucket | None
    length = 0
    """Of the padded dimension."""
    overlaps: tuple[Overlap, ...] = ()
    extra: Any = None
    """What the user's `key` returned."""

    def __init__(
        self, arguments: Arguments, names: Sequence[str], ordered: bool, paddings: Mapping[int, Padding]
    ) -> None:
        self.arguments, self.names, self._paddings = arguments, names, paddings
        args, kwargs = arguments
        self.tensors: list[torch.Tensor] = []
        """Each once, gradients of others among them."""
        self.gradients: dict[int, int] = {}
        """Position of a tensor that has a gradient, and of that."""
        self.padded: dict[int, Padding] = {}
        """By position."""
        self.padded_places = 0
        self.objects: list[Any] = []
        """What is compared by identity and used where it is."""
        self.parts: list[Any] = [len(args)]
        """What is compared, flattened."""
        self._positions: dict[int, int] = {}
        self._containers: dict[int, int] = {}
        self._met = 0
        self._in_place: set[int] = set()  # storages of the tensors in objects
        for value in args:
            self._visit(value)
        for name in kwargs if ordered else sorted(kwargs):
            self.parts.append(name)
            self._visit(kwargs[name])
        tensors = self.tensors
        # One tensor that is not padded is compared with no other.
        self.storages = list(map(storage_id, tensors)) if len(tensors) > 1 or self.padded else []
        if len(set(self.storages)) < len(self.storages):
            # A view without its address is the same in other calls.
            views = [View.of(tensor)._replace(address=0) for tensor in tensors]
            numbers = map(self.storages.index, self.storages)
            self.overlaps = _overlaps(tuple(zip(numbers, views, strict=True)), frozenset(self.padded))
        if self._in_place and not self._in_place.isdisjoint(map(storage_id, tensors)):
            raise CaptureFailedError(
                "An argument shares memory with a tensor in an object among the arguments. Arguments are "
                "copied, and objects are used as they are: pass it in the object alone."
            )

    def check_can_be_captured(self) -> None:
        """Raise CaptureFailedError for arguments that require grad where no replay can serve them."""
        found = [tensor for tensor in self.tensors if tensor.requires_grad]
        if found and (self.ambient.grad or (len(found) > 1 and not all(tensor.is_leaf for tensor in found))):
            raise CaptureFailedError(
                "An argument requires grad: a replay makes no autograd graph, and no gradient flows between "
                "arguments. Call it under `torch.no_grad()` or `torch.inference_mode()`, or pass it detached "
                "(of several, one that was computed as `x.detach().requires_grad_()`)."
            )

    def _visit(self, value: Any) -> None:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            self._tensor(value)
        elif kind in _PLAIN or kind is slice or kind is set or kind is frozenset:
            self.parts.append(_typed(value))
        elif (first := self._containers.setdefault(id(value), len(self._containers))) < self._met:
            self.parts += ("again", first)
        else:
            self._met += 1
            self._container(kind, value)

    def _tensor(self, tensor: torch.Tensor) -> None:
        tensors, paddings = self.tensors, self._paddings
        padding = paddings.get(id(tensor)) if paddings else None
        if padding is not None:
            self.padded_places += 1
        position = self._positions.setdefault(id(tensor), len(tensors))
        if position < len(tensors):
            self.parts.append(position)
            return
        if what := cannot_be_copied(tensor):
            raise CaptureFailedError(
                f"An argument is a {what}, whose values cannot be copied to a static input. "
                f"Pass a plain dense torch.Tensor, for example the parts that it is made of."
            )
        tensors.append(tensor)
        shape: tuple[int, ...] = tensor.shape
        layout: Hashable = True
        if padding is not None:
            self.padded[position] = padding
            shape, layout = padding.shape(tensor.shape), padding.dim
        elif not tensor.is_contiguous():
            layout = _layout(shape, tensor.stride(), tensor.dtype.itemsize)
        gradient = tensor.grad if tensor.requires_grad and tensor.is_leaf else None
        grad = tensor.requires_grad and (tensor.is_leaf, gradient is None)
        self.parts.append((shape, layout, tensor.dtype, tensor.device, type(tensor), grad))
        if gradient is not None:
            self._visit(gradient)
            self.gradients[position] = self._positions[id(gradient)]

    def _container(self, kind: type, value: Any) -> None:
        parts = self.parts
        if kind is tuple or kind is list:
            parts += (kind, len(value))
            for item in value:
                self._visit(item)
            return
        content = children(value)
        if content is None:
            parts.append(_typed(value))
            if isinstance(parts[-1][1], Identity):
                self.objects.append(value)
            if isinstance(value, torch.nn.Module):
                parts.append(training_flags(with_children([value])))
        elif is_plain_object(value):
            self.objects.append(value)
            parts += (kind, Identity(value))
            for place in flatten(value)[1:]:
                parts += (place.path, _in_place(place))
                if isinstance(parts[-1], View):
                    self._in_place.add(storage_id(place.value))
        else:
            parts += (kind, len(content))
            for name, _, child in content:
                parts.append(_typed(name))
                self._visit(child)
            attributes = attributes_besides(value, content) if kind is not dict else ()
            for place in (place for name, item in attributes for place in flatten(item, f".{name}")):
                parts += (place.path, _in_place(place))
                if isinstance(place.value, torch.Tensor):
                    raise CaptureFailedError(
                        f"An argument is a {kind.__qualname__} with a tensor at `{place.path}`, which is no "
                        f"item or field of it and is not copied: make it one, or pass the tensor by itself."
                    )


def _typed(value: Any) -> tuple[type, Any]:
    """A value that equals another of the same types alone, also inside: 1 is not 1.0, nor True."""
    kind = type(value)
    if isinstance(value, float | complex):  # 0.0 is not -0.0, nan is nan, and a class may print as it likes
        return kind, (float if isinstance(value, float) else complex).__repr__(value)
    if kind in _PLAIN:
        return kind, value
    if kind in (tuple, set, frozenset):
        return kind, tuple(map(_typed, value))  # the order of a set shows when it is walked
    if kind is slice:
        return kind, _typed((value.start, value.stop, value.step))
    equal: Any = kind.__eq__
    if equal is object.__eq__ or isinstance(value, torch.Tensor):
        return kind, Identity(value)
    try:
        hash(value)
    except TypeError:
        raise CaptureFailedError(
            f"An argument is a {kind.__qualname__}, which has no hash, so that no other call can be compared "
            f"with this one. Pass a tensor, or a hashable value."
        ) from None
    return kind, value


def _in_place(place: Place) -> Any:
    """What is compared of an object's contents, which are used where they are."""
    value = place.value
    if isinstance(value, torch.Tensor):
        return View.of(value) if value.layout is torch.strided else Identity(value)
    if place.is_container:
        return type(value)
    if isinstance(value, torch.nn.Module):
        return Identity(value), training_flags(with_children([value]))
    return _typed(value) if type(value) in _PLAIN or isinstance(value, set | frozenset) else Identity(value)


# Memory


@functools.lru_cache(4096)
def _layout(shape: torch.Size, strides: tuple[int, ...], itemsize: int) -> Hashable:
    """What kernels ask of strides to choose how they compute, of which the values of results depend.

    That is, from the innermost dimension on: its place, whether it goes on where the one before ends, and
    where it does not, whether its rows are aligned. Dimensions of size 1 do not count. Tensors whose elements
    repeat keep their strides.
    """
    found: list[tuple[int, bool, bool]] = []
    end = 1
    for stride, size, dim in sorted((s, n, d) for d, (n, s) in enumerate(zip(shape, strides, strict=True))):
        if size == 1:
            continue
        if stride < end:
            return strides
        row = end * itemsize if found else 0
        found.append((dim, stride == end, row < _ALIGNMENT or stride * itemsize % _ALIGNMENT == 0))
        end = stride * size
    return tuple(found)


@functools.lru_cache(4096)
def _overlaps(views: Sequence[tuple[int, View]], padded: frozenset[int]) -> tuple[Overlap, ...]:
    """Which tensors share memory, and how, from the number of the storage of each and its view of that."""
    ranges = sorted((storage, *view.byte_range(), i) for i, (storage, view) in enumerate(views))
    groups: list[list[tuple[int, int, int]]] = []
    end = (-1, 0)
    for storage, low, high, i in ranges:
        if low < high:
            if (storage, low) >= end:
                groups.append([])
            groups[-1].append((i, low, high))
            end = max(end, (storage, high))
    found = []
    for group in groups:
        positions, lows, highs = zip(*sorted(group), strict=True)
        base = min(lows) // _ALIGNMENT * _ALIGNMENT  # what they keep of their addresses
        strides, offsets = (views[i][1].stride for i in positions), (low - base for low in lows)
        if len(group) > 1 and not padded.isdisjoint(positions):
            found.append(Overlap(positions, (), (), 0))
        elif len(group) > 1:
            found.append(Overlap(positions, tuple(strides), tuple(offsets), max(highs) - base))
    return tuple(sorted(found))


# Reading


class RequestReader:
    """Reads the calls of one function.

    Raises:
        ValueError: the bucket names what is none of the function's parameters.
    """

    def __init__(self, fn: Callable[..., Any], options: Mapping[str, Any], modules: Modules) -> None:
        self._bucket: Bucket | None = options["bucket"]
        self._key: Callable[..., Hashable] | None = options["key"]
        self._device: torch.device | None = options["device"]
        self._modules = modules
        body = fn.forward if isinstance(fn, torch.nn.Module) else fn
        try:
            parameters = list(inspect.signature(body).parameters.values())
        except (TypeError, ValueError):  # some builtins have none
            parameters = [_VARIABLE]
        self._names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        by_name = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self._ordered = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._ambient: Ambient | None = None
        if self._bucket is not None and not self._ordered:
            self._bucket.check_names([*self._names, *by_name])

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Request:
        """The call and its signature.

        Raises:
            TooLongError: above the largest bucket.
            CaptureFailedError: an argument that cannot be compared with another call's, or copied.
            ValueError: the arguments of a bucket differ in length.
            TypeError: what `key` returned has no hash.
        """
        paddings: dict[int, Padding] = {}
        places = length = 0
        if self._bucket is not None:
            paddings, places, length = self._bucket.find(named(args, kwargs, self._names))
        request = Request((args, kwargs), self._names, self._ordered, paddings)
        request.bucket, request.length = self._bucket, length
        if request.padded_places != places:
            raise CaptureFailedError(
                "A tensor that the bucket pads is an argument in another place too, which is not named in "
                "dims. Name it there, or pass a view of it, `x[:]`."
            )
        training = self._modules.training()
        device = self._device_of(request.tensors)
        if device.type != "cpu":
            # The value of a scalar on the host goes into a kernel's arguments.
            request.parts += [t.item() for t in request.tensors if t.device.type == "cpu" and t.dim() == 0]
        ambient = self._ambient
        if ambient is None or ambient.device_type != device.type or not ambient.is_current():
            self._ambient = ambient = Ambient.current(device)
        request.ambient, request.device = ambient, device
        extra: Hashable = None
        if self._key is not None:
            request.extra = self._key(*args, **kwargs)
            try:
                extra = _typed(request.extra)
            except CaptureFailedError:
                what = f"key= returned {request.extra!r}, which has no hash: return a tuple, say"
                raise TypeError(what) from None
        request.key = (tuple(request.parts), request.overlaps, ambient, training, extra)
        return request

    def describe(self, request: Request) -> Words:
        """The signature of a call in words, to be compared with another call's."""
        words: dict[str, dict[str, str]] = {}
        paths: dict[int, str] = {}
        sizes = {id(request.tensors[i]): padding for i, padding in request.padded.items()}
        for name, value in named(*request.arguments, self._names):
            for place in flatten(value, name):
                words[place.path] = _in_words(place, sizes.get(id(place.value)))
                if isinstance(place.value, torch.Tensor):
                    words[place.path]["is"] = paths.setdefault(id(place.value), place.path)
            words[name]["passed"] = f"by {'keyword' if name in request.arguments[1] else 'position'}"
        for overlap in request.overlaps:
            found = [paths.get(id(request.tensors[i]), "a gradient") for i in overlap.positions]
            for path in found:
                words.setdefault(path, {})["memory"] = f"shared by {', '.join(found)}"
        words["(ambient)"] = {name: str(value) for name, value in attrs.asdict(request.ambient).items()}
        words["(training)"] = {"modules": str(self._modules.training())}
        words["(key)"] = {"returned": repr(request.extra)}
        return words

    def _device_of(self, tensors: Sequence[torch.Tensor]) -> torch.device:
        if self._device is not None:
            return self._device
        given = (tensor.device for tensor in tensors if tensor.device.type != "cpu")
        read = (weight.device for module in self._modules.roots for weight in module.parameters())
        return next(itertools.chain(given, read), torch.device("cpu"))


def named(args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str]) -> list[tuple[str, Any]]:
    """Arguments with the names that the function gives them."""
    positional = [(names[i] if i < len(names) else f"args[{i}]", value) for i, value in enumerate(args)]
    return [*positional, *sorted(kwargs.items())]


# Words


def _in_words(place: Place, padding: Padding | None) -> dict[str, str]:
    value = place.value
    if isinstance(value, torch.Tensor):
        shape = value.shape if padding is None else padding.shape(value.shape)
        words = {"dtype": str(value.dtype).removeprefix("torch."), "shape": str(list(shape))}
        if value.layout is torch.strided and padding is None:
            words["stride"] = "contiguous" if value.is_contiguous() else str(list(value.stride()))
        words |= {"device": str(value.device), "requires_grad": str(value.requires_grad)}
        return words | {"class": type(value).__qualname__}
    if (content := children(value)) is None:
        text = repr(value)
        words = {"value": text if len(text) <= 60 else f"{text[:57]}..."}
        return words | ({"training": str(value.training)} if isinstance(value, torch.nn.Module) else {})
    words = {"type": type(value).__qualname__}
    return words | ({"object": hex(id(value))} if is_plain_object(value) else {"items": str(len(content))})


def summary(words: Words) -> str:
    """The tensors and values of a call in words."""
    tensors = {path: f"{path} {a['dtype']} {a['shape']}" for path, a in words.items() if "shape" in a}
    values = {path: f"{path}={a['value']}" for path, a in words.items() if "value" in a}
    return ", ".join((tensors | values)[path] for path in words if path in tensors | values) or "no arguments"


def difference(new: Words, old: Words) -> list[str]:
    """In which places two calls differ, the few most telling words of each."""
    found = []
    for path in {**old, **new}:
        a, b = new.get(path, {}), old.get(path, {})
        aspects = [k for k in {**b, **a} if a.get(k) != b.get(k)]
        if "shape" in aspects and "stride" in aspects:
            aspects.remove("stride")  # it follows
        words = (f"{k} {a.get(k, 'none')}, not {b.get(k, 'none')}" for k in aspects)
        if not a or not b:
            found.append(f"{path}: {'present' if a else 'absent'} here")
        elif aspects:
            found.append(f"{path}: {'; '.join(words)}")
    return found


def explain(new: Words, others: Sequence[tuple[str, Words]]) -> str:
    """Why no other signature fits: what differs from the nearest."""
    if not others:
        return "the first signature"
    name, found = min(((name, difference(new, old)) for name, old in others), key=lambda pair: len(pair[1]))
    more = f"; and {len(found) - 3} more" if len(found) > 3 else ""
    # These are not in the words.
    hidden = "an address, a stride, a `.grad`, the order of keywords, or `training` inside of a module"
    return f"nearest to {name}, which differs in {'; '.join(found[:3]) + more if found else hidden}"
