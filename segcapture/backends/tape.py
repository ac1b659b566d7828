"""A graph segment without CUDA: operators recorded one by one, and run again on the same memory."""

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch

from segcapture.errors import CaptureFailedError
from segcapture.operators.collectives import LOOK_EVERY, Collective
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

    def start(self, collective: Collective) -> Callable[..., Any]:
        """How to call a collective for whose end the code, or else the end of the tape, waits."""
        self._started.append(collective)
        return collective.start

    def wait(self, collective: Collective) -> None:
        """Wait for a collective, now and whenever the tape runs."""
        if self._closed:
            raise CaptureFailedError(
                f"The Work of `{names_of(collective.func)[0]}`, waited for at {location()}, was made in a "
                f"graph segment that has ended: CUDA waits for an event of the same capture alone. The "
                f"segment's end has waited for the collective already: call `wait()` before the break, or "
                f"make the collective an eager segment (`break_on=['c10d::*']`).",
                operator=names_of(collective.func)[0],
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
        kept = {id(t): t for entry in self.entries for t in (*entry.arguments(), *entry.results())}
        return [tensor for tensor in kept.values() if tensor.layout is torch.strided]


@attrs.frozen(eq=False)
class Entry:
    """One operator with its arguments and the results that later operators read."""

    name: str
    _call: Callable[..., Any]
    _args: tuple[Any, ...] = ()
    _kwargs: dict[str, Any] = attrs.Factory(dict)
    _results: tuple[torch.Tensor | None, ...] = ()
    """One for each tensor of the output; None where it is memory that the operator was given."""
    place: str = attrs.Factory(location)

    def arguments(self) -> list[torch.Tensor]:
        """The tensors that it takes."""
        return tensor_leaves(self._args, self._kwargs)

    def results(self) -> list[torch.Tensor]:
        """The tensors that it made."""
        return [tensor for tensor in self._results if tensor is not None]

    def run(self) -> None:
        """Run it again. Raise CaptureFailedError if it makes something else than at capture."""
        out = self._call(*self._args, **self._kwargs)
        if not self._results:
            return
        found = tensor_leaves(out)
        for i, recorded in enumerate(self._results):
            if recorded is None:
                continue
            now = found[i] if i < len(found) else None
            if now is None or now.shape != recorded.shape or now.dtype != recorded.dtype:
                raise CaptureFailedError(
                    f"`{self.name}` returned {_described(now)} on replay and {_described(recorded)} at "
                    f"capture: its result depends on more than shapes (on what autograd needs, say), so it "
                    f"belongs into an eager segment.",
                    operator=self.name,
                )
            if now.data_ptr() != recorded.data_ptr():
                copy_into(recorded, now)


def _described(value: Any) -> str:
    return "no tensor" if value is None else f"{value.dtype} {list(value.shape)}"


class Draw:
    """An operator that draws random numbers, and the generator's states around its last run."""

    def __init__(self, func: Any, generator: torch.Generator) -> None:
        self._func, self._generator = func, generator
        self.states: list[torch.Tensor] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it again."""
        return self.run(functools.partial(self._func, *args, **kwargs))

    def run(self, call: Callable[[], Any]) -> Any:
        """Run it by another call."""
        before = self._generator.get_state()
        out = call()
        self.states = [before, self._generator.get_state()]
        return out

    def restore(self, side: int) -> None:
        """Set the generator to where the last run began (0) or ended (1)."""
        self._generator.set_state(self.states[side])


class Draws:
    """What draws in a capture, so that a tape sets the generator where the code does.

    `torch.utils.checkpoint` sets it back to where dropout drew from, to draw the same again.
    """

    def __init__(self, device: torch.device) -> None:
        self._generator: torch.Generator = torch.default_generator
        if device.type != "cpu":
            self._generator = torch.get_device_module(device).default_generators[device.index]
        self._begun: torch.Tensor | None = None
        self._draws: list[Draw] = []

    def begin(self) -> None:
        """A graph segment begins."""
        self._begun = self._generator.get_state()

    def add(self, tape: Tape, func: Any) -> Draw:
        """An operator is about to draw."""
        self.follow(tape)
        self._begun = None
        self._draws.append(Draw(func, self._generator))
        return self._draws[-1]

    def clear(self) -> None:
        """The capture has ended."""
        self._draws.clear()

    def follow(self, tape: Tape) -> None:
        """Put it on the tape if the code has set the generator; raise CaptureFailedError if it seeded it."""
        state = self._generator.get_state()
        if torch.equal(state, self._draws[-1].states[1] if self._begun is None else self._begun):
            return
        for draw in reversed(self._draws):
            for side in (1, 0):
                if torch.equal(state, draw.states[side]):
                    again = functools.partial(draw.restore, side)
                    tape.entries.append(Entry("generator::set_state", again))
                    return
        # Else something has drawn unseen, in another thread say, or:
        seed, device = self._generator.initial_seed(), self._generator.device
        if torch.equal(state, torch.Generator(device).manual_seed(seed).get_state()):
            raise CaptureFailedError(
                f"A random generator was seeded before {location()} in a graph segment: a replay would not "
                f"seed it. Seed it outside of the capture, or in a function marked "
                f"`@eager_break_during_capture`."
            )
