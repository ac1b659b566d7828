"""`GraphedCallable`: a function that is captured once for each signature it is called with."""

import functools
import sys
import threading
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import torch

from segcapture.backends.cuda.driver import is_captured
from segcapture.callable.binding import bound_to
from segcapture.callable.bucket import Bucket
from segcapture.callable.cache import Captures
from segcapture.callable.calls import Call, Reader, TooLongError, check_function
from segcapture.callable.entry import Entry
from segcapture.callable.managed import Managed
from segcapture.callable.settings import check, for_captures, logger
from segcapture.callable.statistics import Counts
from segcapture.errors import CaptureFailedError, CaptureStateError
from segcapture.exclusive import Exclusive
from segcapture.thread import state, warn


class GraphedCallable(Managed):
    """Serve a function from captures: one for each signature that it is called with.

    The first `warmup` calls of a signature run eagerly on the capture stream, the next one is captured
    while it runs, later ones replay: state advances and random numbers are drawn as without this. A
    signature is the nesting of the arguments; shape, stride, dtype and device of tensors, and which of them
    share memory; type and value of everything else (of objects: which one, and its attributes); grad and
    inference mode, autocast, `training` of the modules; and what `key` returns. Python values that the
    function reads elsewhere (globals, a closure) and that change must be in `key`.

    Use it as `GraphedCallable(fn)`, or as a decorator, `@GraphedCallable` or `@GraphedCallable(warmup=1)`,
    of functions and methods (each instance then has its own captures).

    Args:
        fn: A function, method, `nn.Module` or other callable.
        warmup: Eager calls of a signature before it is captured.
        pool: Memory to share with other captures. Left out: one pool for all signatures.
        max_captures: Captures to keep; the one that was used least recently goes first.
        bucket: A dimension that is padded up to one of a few sizes.
        clone_outputs: False hands out the captured outputs themselves, which the next call overwrites.
        mode: `"breakable"`, `"full"` or `"debug"`, as `BreakableCUDAGraphCapture` takes it.
        key: Called with the arguments; returns a hashable that belongs to the signature.
        on_error: `"raise"`, or `"eager"`: a signature that cannot be captured runs eagerly from then on.
            The call whose capture failed runs the function again from its start.
        weights: What to do when a parameter, buffer or submodule was replaced since the capture (not
            updated in place): `"raise"`, `"recapture"`, or `"ignore"`, which does not look.
        modules: Modules that the function reads, besides those that are seen in it, its object, its
            closure and its globals.
        device: Where to capture. Left out: where the tensors of the call and the modules are.
        name: For messages. Left out: the function's.
        stream, breaks, break_on, capture_error_mode, generators, barrier: As `BreakableCUDAGraphCapture`
            takes them.

    Raises:
        TypeError: `fn` is not callable, or is a coroutine or generator function.
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
        check_function(fn)
        check(warmup, max_captures, on_error, weights, bucket)
        assert fn is not None
        self.fn = fn
        self.name = name or getattr(fn, "__qualname__", type(fn).__qualname__).rpartition("<locals>.")[2]
        self._options, self._bucket = options, bucket
        where = None if device is None else torch.device(device)
        self._reader = Reader(fn, bucket, key, modules, where)
        self._captures = Captures(self.name, for_captures(options), pool, where, bucket, max_captures)
        self._counts = Counts()
        self._invalid = ""
        self._said: set[str] = set()
        self._lock = Exclusive()
        self._inside: int | None = None  # the thread that warms up, captures or replays
        if not isinstance(fn, torch.nn.Module):
            functools.update_wrapper(self, fn, updated=())
        disable: Any = torch.compiler.disable  # torch.compile traces none of this
        self._serve = disable(self._serve_call)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """As a method: the `GraphedCallable` of the instance."""
        if instance is None or not hasattr(self.fn, "__get__"):
            return self
        return bound_to(instance, self, lambda: type(self)(self.fn.__get__(instance), **self._options))

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

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function, or replay its capture for these arguments.

        Inside of another capture it is a plain call, and where the function itself calls this.

        Raises:
            CaptureFailedError: it cannot be captured, with `on_error="raise"`: an argument is a tensor
                subclass or has no hash, an argument or output requires grad with grad enabled,
                the function changes containers among its arguments or replaces weights, and all that a
                capture raises. A weight was replaced by others, with `weights="raise"`.
            CaptureStateError: after `invalidate`.
            OutputMismatchError: as `BreakableCUDAGraphCapture.replay`, and all that eager functions raise.
            TypeError: what `key` returned has no hash.
            ValueError: the arguments of a bucket differ in length, one is a container, has no such dimension,
                or is padded in two ways.
        """
        return self._serve(args, kwargs)

    def _serve_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._inside == threading.get_ident():  # its static inputs are in use
            self._counts.calls += 1
            self._counts.eager += 1
            return self.fn(*args, **kwargs)
        if state.run is not None or is_captured():
            return self.fn(*args, **kwargs)
        with self._lock:
            return self._serve_locked(args, kwargs)

    def _serve_locked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._invalid:
            reason = f"{self.name} was invalidated: {self._invalid}. Call clear() to capture again."
            raise CaptureStateError(reason)
        self._counts.calls += 1
        try:
            call = self._reader.read(args, kwargs)
            entry = self._entry_for(call)
        except (TooLongError, CaptureFailedError) as error:
            if self._options["on_error"] == "raise" and not isinstance(error, TooLongError):
                raise
            self._say_once(error)
            self._counts.eager += 1
            return self.fn(*args, **kwargs)
        entry.calls += 1
        if entry.captured:
            out = self._alone(entry.replay, call)
            self._counts.replays += 1
            return out
        if entry.failure is not None:
            self._counts.eager += 1
            return self.fn(*args, **kwargs)
        if entry.warmups < self._options["warmup"]:
            return self._warm_up(entry, call)
        return self._capture(entry, call)

    def _alone(self, run: Callable[..., Any], *args: Any) -> Any:
        self._inside = threading.get_ident()
        try:
            return run(*args)
        finally:
            self._inside = None

    def _entry_for(self, call: Call) -> Entry:
        entry = self._captures.find(call.key)
        if entry is not None and entry.weights is not None:
            change = entry.weights.change()
            if change is not None:
                self._on_changed_weight(entry, call, change)
                entry = None
        if entry is None:
            call.check_can_be_captured()
            entry = self._captures.add(call, self._reader.describe(call))
        return entry

    def _on_changed_weight(self, entry: Entry, call: Call, change: str) -> None:
        self._reader.look_for_modules()
        if self._options["weights"] == "raise":
            raise CaptureFailedError(
                f"{change} after {self.name} was captured, which reads what was "
                f"there. Update weights in place (`weight.copy_(new)`), call clear(), or pass "
                f"weights='recapture'."
            )
        logger.info("%s: %s; %s is captured again", self.name, change, entry.name)
        self._captures.drop(call.key)

    # Warm-up and capture

    def _warm_up(self, entry: Entry, call: Call) -> Any:
        try:
            check = self._reader.check_weights(call, self._options["weights"], first=entry.warmups == 0)
            out, problem = self._alone(entry.warm_up, self.fn, call, check)
        except CaptureFailedError as error:
            if self._options["on_error"] == "raise" or not call.padded:
                raise
            return self._run_after_failure(entry, call, error)  # it ran on padded copies alone
        self._counts.warmups += 1
        self._captures.ran(entry, call)
        if problem is not None:
            self._failed(entry, problem)
            if self._options["on_error"] == "raise":
                raise problem
        return out

    def _capture(self, entry: Entry, call: Call) -> Any:
        try:
            check = self._reader.check_weights(call, self._options["weights"])
            out = self._alone(entry.capture_call, self.fn, call, self._options["clone_outputs"], check)
        except Exception as error:
            self._counts.failures += 1
            if self._options["on_error"] == "raise":
                raise
            return self._run_after_failure(entry, call, error)
        self._counts.captures += 1
        if self._options["weights"] != "ignore":
            entry.weights = self._reader.weights(call)
        logger.debug("%s: captured %s", self.name, entry.name)
        self._captures.ran(entry, call)
        return out

    def _run_after_failure(self, entry: Entry, call: Call, error: Exception) -> Any:
        out = self.fn(*call.args, **call.kwargs)  # an error of the function itself comes again
        self._failed(entry, error)
        self._counts.eager += 1
        return out

    def _failed(self, entry: Entry, error: BaseException) -> None:
        if self._options["on_error"] == "eager":
            error.__cause__ = error.__context__ = None
            entry.failure = error.with_traceback(None)  # it would keep what the call had made
            logger.warning("%s runs eagerly for %s: %s", self.name, entry.name, error)

    def _say_once(self, error: Exception) -> None:
        """With these arguments nothing is captured."""
        what = "above" if isinstance(error, TooLongError) else str(error)
        if what in self._said:
            return
        self._said.add(what)
        if isinstance(error, TooLongError):
            warn(f"{self.name} runs eagerly: {error}.", UserWarning)
        else:
            logger.warning("%s runs eagerly with such arguments: %s", self.name, error)


def _made_anew(kind: type, fn: Callable[..., Any], options: dict[str, Any]) -> Any:
    return kind(fn, **options)
