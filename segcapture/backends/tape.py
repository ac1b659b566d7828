"""A graph segment without CUDA: operators recorded one by one, and run again on the same memory."""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

import attrs
import torch

from segcapture.errors import CaptureFailedError
from segcapture.operators.collectives import LOOK_EVERY, Collective, handle
from segcapture.operators.composites import names_of, tensor_leaves
from segcapture.tensors import copy_into, storage_id
from segcapture.thread import location


class Tape:
    """The operators of one graph segment."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._started: list[Collective] = []
        self._closed = False

    def __del__(self) -> None:
        # What may be the last reference to a process group dies with the entries. torch then joins the
        # threads of gloo while it holds the GIL, for which one may be waiting, to drop a tensor.
        if self._started:
            time.sleep(2 * LOOK_EVERY)

    @property
    def operations(self) -> int:
        """Number of operators."""
        return len(self.entries)

    def started(self, collective: Collective, out: Any) -> Any:
        """A collective was called, for which its caller waits, or else the end; what the caller gets."""
        self._started.append(collective)
        return handle(out, functools.partial(self.wait, collective))

    def wait(self, collective: Collective) -> None:
        """Wait for a collective, now and whenever the tape runs."""
        if self._closed:
            name = names_of(collective.func)[0]
            raise CaptureFailedError(
                f"The Work of `{name}`, waited for at {location()}, was made in a graph segment that has "
                f"ended: CUDA waits for an event of the same capture alone. Call `wait()` before the break, "
                f"or make the collective an eager segment (`break_on=['c10d::*']`).",
                operator=name,
            )
        if collective.wait():
            self.entries.append(Entry("c10d::wait", collective.wait))

    def close(self) -> None:
        """Wait for what is under way, as the end of a CUDA graph joins all streams."""
        for collective in self._started:
            self.wait(collective)
        self._closed = True

    def launch(self, stream: Any) -> tuple[int]:
        """Run all operators again, as they were recorded; the status is always 0."""
        # Inference mode may write to its own tensors and to others.
        with torch._C._InferenceMode(True), torch._C._DisableAutocast():
            for entry in self.entries:
                entry.run()
        return (0,)

    def launch_stepwise(self) -> Iterator["Entry"]:
        """The same, stopping after each operator, under the caller's own modes."""
        for entry in self.entries:
            with torch._C._InferenceMode(True), torch._C._DisableAutocast():
                entry.run()
            yield entry

    def nodes(self) -> list[tuple[str, str]]:
        """`operator` and its name, for each."""
        return [("operator", entry.name) for entry in self.entries]

    def nbytes(self) -> int:
        """Bytes of the results that it keeps, each storage once."""
        results = (tensor for entry in self.entries for tensor in entry.results())
        return sum({storage_id(t): t.untyped_storage().nbytes() for t in results}.values())

    def kept(self) -> list[torch.Tensor]:
        """The tensors with memory that it keeps, each once."""
        kept = [t for e in self.entries for t in tensor_leaves(e._args, e._kwargs, e._results)]
        return list({id(t): t for t in kept if t.layout is torch.strided}.values())


@attrs.frozen(eq=False)
class Entry:
    """One operator with its arguments and the results that later operators read."""

    name: str
    _call: Callable[..., Any]
    _args: tuple[Any, ...] = ()
    _kwargs: dict[str, Any] = attrs.Factory(dict)
    _results: Sequence[torch.Tensor | None] = ()
    """One for each tensor of the output; None where it is memory that the operator was given."""
    place: str = attrs.Factory(location)

    def results(self) -> list[torch.Tensor]:
        """The tensors that it made."""
        return tensor_leaves(self._results)

    def run(self) -> None:
        """Run it again. Raise CaptureFailedError if it makes something else than at capture."""
        out = self._call(*self._args, **self._kwargs)
        if not self._results:
            return
        for recorded, new in zip_longest(self._results, tensor_leaves(out)):
            if recorded is None:
                continue
            if new is None or new.shape != recorded.shape or new.dtype != recorded.dtype:
                found = "no tensor" if new is None else f"{new.dtype} {list(new.shape)}"
                raise CaptureFailedError(
                    f"`{self.name}` returned {found} on replay and {recorded.dtype} {list(recorded.shape)} "
                    f"at capture: its result depends on more than shapes. Make it an eager segment.",
                    operator=self.name,
                )
            if new.data_ptr() != recorded.data_ptr():
                recorded.copy_(new) if recorded.is_contiguous() else copy_into(recorded, new)


class Draw:
    """An operator that draws random numbers, and the generator's states around its last run."""

    def __init__(self, func: Any, generator: torch.Generator) -> None:
        self._func, self._generator = func, generator
        self.states: tuple[torch.Tensor, ...] = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before = self._generator.get_state()
        out = self._func(*args, **kwargs)
        self.states = before, self._generator.get_state()
        return out


class Draws(list[Draw]):
    """What draws in a capture, so that a tape sets the generator where the code does.

    `torch.utils.checkpoint` sets it back to where dropout drew from, to draw the same again.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._generator: torch.Generator = torch.default_generator
        if device.type != "cpu":
            self._generator = torch.get_device_module(device).default_generators[device.index]
        self._begun: torch.Tensor | None = None

    def begin(self) -> None:
        """A graph segment begins."""
        self._begun = self._generator.get_state()

    def add(self, tape: Tape, func: Any) -> Draw:
        """An operator is about to draw."""
        self.follow(tape)
        self._begun = None
        self.append(Draw(func, self._generator))
        return self[-1]

    def follow(self, tape: Tape) -> None:
        """Put it on the tape if the code has set the generator; raise CaptureFailedError if it seeded it."""
        generator = self._generator
        state = generator.get_state()
        if torch.equal(state, self[-1].states[1] if self._begun is None else self._begun):
            return
        for draw in reversed(self):
            for i in (1, 0):
                if torch.equal(state, draw.states[i]):
                    again = functools.partial(_restore, generator, draw, i)
                    tape.entries.append(Entry("generator::set_state", again))
                    return
        # Else something has drawn unseen, in another thread say, or:
        seeded = torch.Generator(generator.device).manual_seed(generator.initial_seed())
        if torch.equal(state, seeded.get_state()):
            raise CaptureFailedError(
                f"A random generator was seeded before {location()} in a graph segment: a replay would not "
                f"seed it. Seed it before the replay, or in an `@eager_break_during_capture`.",
                operator="torch.manual_seed",
                reason="(or another seed before this line) would not be repeated by a replay",
            )


def _restore(generator: torch.Generator, draw: Draw, i: int) -> None:
    generator.set_state(draw.states[i])
