"""`GraphedCallable`: a function that is captured once for each signature it is called with."""

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import attrs
import torch

from segcapture.backends.cuda.driver import is_captured
from segcapture.callable.bucket import Bucket, TooLongError
from segcapture.callable.cache import Cache, CacheEntry, SignatureStats, logger
from segcapture.callable.signature import Arguments, Request, RequestReader
from segcapture.callable.state import Modules
from segcapture.errors import CaptureFailedError, CaptureStateError
from segcapture.exclusive import Exclusive
from segcapture.operators.intercept import Use
from segcapture.thread import state, warn
from segcapture.trees import HELD

_FURTHER_WARMUPS = 4  # at most, where state moves in the first ones
_COUNTED = ("calls", "warmups", "captures", "replays", "eager", "failures")
_CHOICES = {"on_error": ("raise", "eager"), "weights": ("raise", "recapture", "ignore")}


@attrs.frozen(kw_only=True)
class Stats:
    """Counts of calls by what happened, and the signatures that are held."""

    calls: int
    warmups: int
    captures: int
    replays: int
    eager: int
    """Calls that ran eagerly and were no warm-up: above the largest bucket, or after a failed capture."""
    failures: int
    """Captures that failed."""
    evictions: int
    pool_bytes: int
    """Bytes of the pools of all captures."""
    signatures: tuple[SignatureStats, ...]

    def __str__(self) -> str:
        head = ", ".join(f"{getattr(self, name)} {name}" for name in (*_COUNTED, "evictions"))
        lines = [
            f"  {s.name} {s.state}, {s.calls} calls, {s.nbytes} B: {s.arguments}\n      {s.why}"
            for s in self.signatures
        ]
        return "\n".join([f"{head}, pool {self.pool_bytes} B", *lines])


class GraphedCallable:
    """Serve a function from captures: one for each signature that it is called with.

    The first `warmup` calls of a signature run eagerly on the capture stream, the next one is captured
    while it runs, later ones replay: state advances and random numbers are drawn as without this. A
    signature is the nesting of the arguments; shape, layout, dtype and device of tensors, and which of them
    share memory; type and value of everything else (of objects: which one, and its attributes); grad and
    inference mode, autocast, `training` of the modules; and what `key` returns. Layout is what kernels ask
    of strides: the order of dimensions, where there are gaps, and whether rows are aligned. Python values
    that the function reads elsewhere (globals, a closure) and that change between calls must be in `key`.

    What the function itself changes by Python alone, no replay changes again. The last warm-up call is
    observed for that: where a tensor is put in another's place, a number moves or a container grows (in
    modules, objects, closures, globals, at any depth up to six), the next call is a further warm-up, and if
    captured code reads what moves in it too, or breaks read what captured code moves, it is refused. State
    that breaks alone change and read is not, nor are counters that no operator depends on.

    Use it as `GraphedCallable(fn)`, or as a decorator, `@GraphedCallable` or `@GraphedCallable(warmup=1)`,
    of functions and methods (each instance then has its own captures).

    Objects among the arguments are held weakly: when one dies, its captures go with the next call. A capture
    with eager breaks keeps those that a break takes or that the function returns.

    Arguments are copied to static inputs, and what the function writes to them is copied back (not what a
    break writes past autograd, through `.data` or NumPy, at some calls only). Objects of your own classes
    are used where they are. Outputs are clones in the function's own structure; an argument that is
    returned comes back as itself.

    Limits:

    * Python runs at capture alone. State must be changed in place. What the watch cannot see is stale without
      an error: state deeper than six levels, in C extensions and files, the time, and a number that changes
      between calls and is turned into another one before it reaches an operator.
    * An argument must not share memory with what the function reads or writes elsewhere: it is copied.
    * A write of a kernel that torch does not know is found by values at capture, so one of the same values
      is missed.
    * `f(x)` and `f(x, k=2)` are two signatures, also where 2 is the default. Each value of a plain argument
      is one: pass what changes at every call as a tensor.
    * Values in the padding of a bucket must not change the rest: mask sums, means and maxima. A Python value
      that is computed from a size is that of the padded one.

    Args:
        fn: A function, method, `nn.Module` or other callable.
        warmup: Eager calls of a signature before it is captured, if no state moves in them. With 0 nothing
            is observed before the first call is captured; if state moved in it, that capture is dropped.
        pool: Memory to share with other captures. Left out: one pool for all signatures.
        max_captures: Captures to keep; the one that was used least recently goes first.
        bucket: A dimension that is padded up to one of a few sizes.
        clone_outputs: False hands out the captured outputs themselves, which the next call overwrites.
        mode: `"breakable"`, `"full"` or `"debug"`, as `BreakableCUDAGraphCapture` takes it.
        key: Called with the arguments; returns a hashable that belongs to the signature.
        on_error: `"raise"`, or `"eager"`: a signature that cannot be captured runs eagerly from then on.
            The call whose capture failed runs the function again from its start.
        weights: What to do when a parameter, buffer or submodule, or another tensor that captured code
            reads where it is (of a cache, say, or a gradient), was replaced or taken away since the capture
            (not updated in place): `"raise"`, `"recapture"`, or `"ignore"`, which does not look.
        modules: Modules that the function reads, besides those that are seen in it, its object, its
            closure and its globals.
        ignore_state: Paths that the function may change by Python alone, as patterns of `fnmatch`:
            `("*.calls", "step.cache.*")`.
        device: Where to capture. Left out: where the tensors of the call and the modules are.
        name: For messages. Left out: the function's.
        stream, breaks, break_on, capture_error_mode, generators, barrier: As `BreakableCUDAGraphCapture`
            takes them.

    Raises:
        TypeError: `fn` is not callable, or is a coroutine or generator function; `bucket` is none;
            `ignore_state` is a string.
        ValueError: an option that is none of the above.
    """

    def __new__(cls, fn: Callable[..., Any] | None = None, **options: Any) -> Any:
        """Without a function: a decorator."""
        return functools.partial(cls, **options) if fn is None else super().__new__(cls)

    def __init__(
        self,
        fn: Callable[..., Any] | None = None,
        *,
        warmup: int = 2,
        pool: Any = None,
        max_captures: int = 64,
        bucket: Bucket | None = None,
        clone_outputs: bool = True,
        mode: str | None = None,
        key: Callable[..., Hashable] | None = None,
        on_error: str = "raise",
        weights: str = "raise",
        modules: Sequence[torch.nn.Module] = (),
        ignore_state: Sequence[str] = (),
        device: torch.device | str | int | None = None,
        name: str | None = None,
        stream: Any = None,
        breaks: Collection[str] | Callable[[str], bool] | None = None,
        break_on: Sequence[Any] = (),
        capture_error_mode: str = "thread_local",
        generators: Sequence[torch.Generator] = (),
        barrier: Callable[[], object] | None = None,
    ) -> None:
        options = {option: value for option, value in locals().items() if option not in ("self", "fn")}
        options["device"] = None if device is None else torch.device(device)
        _check(fn, options)
        assert fn is not None
        self.fn = fn
        self.name = name or getattr(fn, "__qualname__", type(fn).__qualname__).rpartition("<locals>.")[2]
        self._options = options
        self._modules = Modules(fn, modules, watched=weights != "ignore")
        self._reader = RequestReader(fn, options, self._modules)
        self._cache = Cache(self.name, options)
        self._counts = dict.fromkeys(_COUNTED, 0)
        self._invalid = ""
        self._told: set[str] = set()
        self._exclusive = Exclusive()
        if not isinstance(fn, torch.nn.Module):
            functools.update_wrapper(self, fn, updated=())
        disable: Any = torch.compiler.disable  # torch.compile traces none of this
        self._serve = disable(self._serve_call)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """As a method: the `GraphedCallable` of the instance.

        Raises:
            TypeError: the instance has no `__dict__` to hold it.
        """
        if instance is None or not hasattr(self.fn, "__get__"):
            return self
        attributes = getattr(instance, "__dict__", None)
        if attributes is None:
            raise TypeError(
                f"{type(instance).__qualname__} has __slots__ and no __dict__, so that its methods cannot "
                f"hold captures: wrap the bound method, GraphedCallable(instance.method)."
            )
        held = attributes.get(HELD)
        if held is None or held.owner is not instance:  # a shallow copy has its original's
            held = attributes[HELD] = BoundMethods()
            held.owner = instance
        if self not in held:
            held[self] = type(self)(self.fn.__get__(instance), **self._options)
        return held[self]

    def __reduce__(self) -> Any:
        """A decorated function is itself, by its name; other copies and pickles have no captures yet."""
        name = getattr(self, "__qualname__", "")
        found: Any = sys.modules.get(getattr(self, "__module__", ""))
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is self:
            return name
        return _made_anew, (type(self), self.fn, self._options)

    def __repr__(self) -> str:
        return f"GraphedCallable({self.name})"

    # Calls

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function, or replay its capture for these arguments.

        It is a plain call inside of another capture, where the function itself calls this, and where two
        threads would wait for each other because served functions call each other crosswise.

        Raises:
            CaptureFailedError: it cannot be captured, with `on_error="raise"`: an argument is a tensor
                subclass, a conjugate view or has no hash, an argument or output requires grad with grad
                enabled, the function changes containers among its arguments or replaces weights, captured
                code reads what each call changes by Python alone (`path`, `expected` and `found` say where
                and what; the call itself has run), an argument
                is memory that the call overwrites, and all that a capture raises. A weight was replaced by
                others, with `weights="raise"`.
            CaptureStateError: after `invalidate`.
            OutputMismatchError: as `BreakableCUDAGraphCapture.replay`, and all that eager functions raise.
            TypeError: what `key` returned has no hash.
            ValueError: the arguments of a bucket differ in length, one is a container, has no such dimension,
                or is padded in two ways.
        """
        return self._serve(args, kwargs)

    def _serve_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inside = self._exclusive.owner == threading.get_ident()  # its static inputs are in use
        if not inside and (state.run is not None or is_captured()):
            return self.fn(*args, **kwargs)
        self._counts["calls"] += 1
        if inside or not _entered(self._exclusive):
            return self._plain(args, kwargs)
        try:
            return self._serve_exclusively(args, kwargs)
        finally:
            self._exclusive.__exit__(None, None, None)

    def _serve_exclusively(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._invalid:
            raise CaptureStateError(f"{self.name} was invalidated: {self._invalid}. Call clear() first.")
        try:
            request = self._reader.read(args, kwargs)
            entry = self._entry_for(request)
        except (TooLongError, CaptureFailedError) as error:
            return self._refuse(error, args, kwargs)
        entry.calls += 1
        memory = entry.capture.exclusive()
        if entry.failure is not None or not _entered(memory):
            return self._plain(args, kwargs)
        try:
            if not entry.captured:
                return self._first_calls(entry, request)
            try:
                entry.check_free(request)
            except CaptureFailedError as error:
                return self._refuse(error, args, kwargs)
            out = entry.replay(request)
            self._counts["replays"] += 1
            if entry.held is not None and entry.held.dead and (use := entry.held.dead[0][1]) is not None:
                raise self._gone(
                    entry.held.dead[0][0], use
                )  # meanwhile: later segments have read the old one
            return out
        finally:
            memory.__exit__(None, None, None)

    def _plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._counts["eager"] += 1
        return self.fn(*args, **kwargs)

    def _refuse(self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """With these arguments nothing is captured or replayed."""
        too_long = isinstance(error, TooLongError)
        if self._options["on_error"] == "raise" and not too_long:
            raise error
        told, what = len(self._told), "" if too_long else str(error)
        self._told.add(what)
        if len(self._told) > told and too_long:
            warn(f"{self.name} runs eagerly: {error}.")
        elif len(self._told) > told:
            logger.warning("%s runs eagerly with such arguments: %s", self.name, error)
        return self._plain(args, kwargs)

    def _entry_for(self, request: Request) -> CacheEntry:
        entry = self._cache.find(request.key)
        change = entry.weights.change() if entry is not None and entry.weights is not None else None
        if entry is not None and change is not None:
            self._modules.look()
            if self._options["weights"] == "raise":
                raise CaptureFailedError(
                    f"{change} after {self.name} was captured, which reads what was there. Update it "
                    f"in place (`weight.copy_(new)`), call clear(), or pass weights='recapture'."
                )
            logger.info("%s: %s; %s is captured again", self.name, change, entry.name)
            self._cache.drop(request.key)
            entry = None
        if entry is not None and entry.held is not None and (gone := entry.held.change()) is not None:
            self._check_may_capture_again(entry, *gone)
            self._cache.drop(request.key)
            entry = None
        if entry is None:
            request.check_can_be_captured()
            entry = self._cache.add(request, self._reader.describe(request))
        return entry

    def _check_may_capture_again(self, entry: CacheEntry, path: str, use: Use | None) -> None:
        """Raise CaptureFailedError, with `weights="raise"`, for a tensor that graphs read and that went."""
        if self._options["weights"] == "raise" and use is not None:
            raise self._gone(path, use)
        logger.info("%s: the tensor at %s is gone; %s is captured again", self.name, path, entry.name)

    def _gone(self, path: str, use: Use) -> CaptureFailedError:
        return CaptureFailedError(
            f"The tensor at `{path}`, which {use} reads, was replaced or taken away after {self.name} was "
            f"captured. Write into it in place (`copy_`; of gradients, `zero_grad(set_to_none=False)`), call "
            f"clear(), or pass weights='recapture'.",
            path=path,
            operator=use.operator,
        )

    def _first_calls(self, entry: CacheEntry, request: Request) -> Any:
        """Warm up or capture."""
        kind = entry.watch.next_call(entry.warmups)
        warms_up = kind != "capture"
        what = "warmups" if warms_up else "captures"
        eager = self._options["on_error"] == "eager"
        self._modules.look()
        # At the first call lazy modules may set themselves up.
        weights = None if warms_up and entry.warmups == 0 else self._modules.weights(request.arguments)
        problem: Exception | None = None
        try:
            if warms_up:
                out, problem = entry.warm_up(self.fn, request, weights, kind == "observed")
            else:
                out = entry.capture_call(self.fn, request, weights, self._options["clone_outputs"])
                what = "captures" if entry.captured else "warmups"
        except Exception as error:
            self._counts["failures"] += not warms_up
            # A warm-up is the call itself, but for one on padded copies.
            if not eager or (warms_up and not (request.padded and isinstance(error, CaptureFailedError))):
                raise
            out = self.fn(
                *request.arguments[0], **request.arguments[1]
            )  # an error of the function itself comes again
            what, problem = "eager", error
        self._counts[what] += 1
        if what != "eager":
            self._cache.ran(entry, request)
        if what == "captures":
            entry.weights = self._modules.weights(request.arguments)
            logger.debug("%s: captured %s", self.name, entry.name)
        if problem is not None:
            if not eager:
                raise problem
            problem.__cause__ = problem.__context__ = None
            entry.failure = problem.with_traceback(None)  # it would keep what the call had made
            logger.warning("%s runs eagerly for %s: %s", self.name, entry.name, problem)
        return out

    # What else a user does with the captures

    def precapture(self, sizes: Sequence[Any] | None = None, *, inputs: Callable[[Any], Any]) -> None:
        """Capture before the first request: call the function for each size, the largest first.

        The function runs `warmup` times and once more for each size, as in any calls, so reset what
        advances (caches, counters) after. Shows a progress bar where tqdm or rich is installed.

        Args:
            sizes: What `inputs` is called with. Left out: the sizes of the bucket.
            inputs: Makes the arguments of a call: a tuple, or a dict of keyword arguments. Tensors that are
                different ones in a request must be different ones here: sharing is part of a signature.

        Raises:
            ValueError: no sizes and no bucket.
            TypeError: `inputs` returned something else. All that a call raises comes through.
        """
        if sizes is None:
            if self._options["bucket"] is None:
                raise ValueError("precapture takes sizes where there is no bucket")
            sizes = self._options["bucket"].sizes
        for size in _with_progress(sorted(sizes, reverse=True), f"capturing {self.name}"):
            given = inputs(size)
            if not isinstance(given, tuple | dict):
                raise TypeError(f"inputs takes a function that returns a tuple or dict, got {type(given)}")
            args, kwargs = ((), given) if isinstance(given, dict) else (given, {})
            self._cache.latest = None
            for _ in range(self._options["warmup"] + 1 + _FURTHER_WARMUPS):
                self(*args, **kwargs)
                if self._cache.is_done():
                    break

    def static_arguments(self, /, *args: Any, **kwargs: Any) -> Arguments:
        """The arguments of a call with the static inputs in place of its tensors.

        Write into those and pass them: what already is in the static input is not copied.

        Raises:
            CaptureStateError: this signature is not captured yet.
        """
        with self._exclusive:
            request = self._reader.read(args, kwargs)
            entry = self._cache.find(request.key)
            if entry is None or not entry.captured:
                after = f"{self._options['warmup'] + 1} calls"
                raise CaptureStateError(f"{self.name} is not captured for these arguments: {after} do it.")
            return entry.static_arguments(request)

    def invalidate(self, reason: str) -> None:
        """Let calls refuse with this reason until `clear()`: weights are offloaded, the pool sleeps, say."""
        with self._exclusive:
            self._invalid = reason

    def clear(self) -> None:
        """Drop all captures and signatures. The counts stay, the function can be captured again."""
        with self._exclusive:
            self._cache.clear()
            self._invalid = ""
            self._modules.look()

    def stats(self) -> Stats:
        """What was done so far, and the signatures that are held; also as text by `print`."""
        with self._exclusive:
            self._cache.drop_dead()
            return Stats(
                **self._counts,
                evictions=self._cache.evictions,
                pool_bytes=self._cache.pool_bytes(),
                signatures=tuple(entry.stats() for entry in self._cache),
            )


class BoundMethods(dict[GraphedCallable, GraphedCallable]):
    """What an instance holds for its decorated methods. Copies and pickles of it get an empty one."""

    owner: Any = None

    def __reduce__(self) -> Any:
        return BoundMethods, ()


def _check(fn: Any, options: Mapping[str, Any]) -> None:
    """Raise TypeError for what is no function or bucket, and ValueError for an option out of its range."""
    if not callable(fn):
        raise TypeError(f"GraphedCallable takes a function, got {fn!r}")
    for body in (fn, type(fn).__call__):
        if inspect.iscoroutinefunction(body) or inspect.isgeneratorfunction(body):
            raise TypeError(f"{fn!r} is a coroutine or generator function: its body runs after the call.")
    bucket, warmup, max_captures = (options[option] for option in ("bucket", "warmup", "max_captures"))
    if bucket is not None and not isinstance(bucket, Bucket):
        raise TypeError(f"bucket takes a Bucket(sizes=..., dims=...), got {bucket!r}")
    if warmup < 0 or max_captures < 1:
        raise ValueError(f"warmup is from 0 and max_captures from 1, got {warmup} and {max_captures}")
    if isinstance(options["ignore_state"], str):
        raise TypeError(f"ignore_state takes a sequence of patterns, got {options['ignore_state']!r}")
    for option, choices in _CHOICES.items():
        if options[option] not in choices:
            known = ", ".join(map(repr, choices))
            raise ValueError(f"{option}={options[option]!r} is unknown: choose one of {known}")


def _entered(context: AbstractContextManager[Any]) -> bool:
    """Enter a context; False where waiting for it would never end."""
    try:
        context.__enter__()
    except CaptureStateError:
        return False
    return True


def _made_anew(kind: type, fn: Callable[..., Any], options: dict[str, Any]) -> Any:
    return kind(fn, **options)


def _with_progress(items: Sequence[Any], title: str) -> Iterable[Any]:
    """The items behind a progress bar, where tqdm or rich is installed and a person looks."""
    if sys.stderr.isatty():
        with suppress(ImportError):
            from tqdm import tqdm

            return tqdm(items, desc=title)  # type: ignore[no-any-return]
        with suppress(ImportError):
            from rich.progress import track

            return track(items, description=title)  # type: ignore[no-any-return]
    return items
