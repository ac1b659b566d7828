"""A graph segment without CUDA: operators recorded one by one, and run again on the same memory."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import attrs
import torch
from torch.utils._pytree import tree_leaves

from segcapture.backends.works import LOOK_EVERY, Started
from segcapture.errors import CaptureFailedError
from segcapture.operators.composites import names_of, tensor_leaves
from segcapture.tensors import copy_into, storage_id
from segcapture.thread import location


class Tape:
    """The operators of one graph segment."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._started: list[Started] = []
        self._closed = False

    def __del__(self) -> None:
        # What may be the last reference to a process group dies with the entries. torch then joins the
        # threads of gloo while it holds the GIL, for which one may be waiting, to drop a tensor.
        if self._started:
            time.sleep(2 * LOOK_EVERY)

    def add(self, entry: "Entry") -> None:
        """Append one recorded operator."""
        self._entries.append(entry)

    @property
    def operations(self) -> int:
        """Number of operators."""
        return len(self._entries)

    def start(self, func: Any) -> Started:
        """A collective that the code, or else the end of the tape, waits for."""
        self._started.append(Started(func))
        return self._started[-1]

    def wait(self, started: Started) -> None:
        """Wait for a collective, now and whenever the tape runs."""
        if self._closed:
            raise CaptureFailedError(
                f"The Work of `{names_of(started.func)[0]}`, waited for at {location()}, was made in a graph "
                f"segment that has ended: CUDA waits for an event of the same capture alone. The segment's "
                f"end has waited for the collective already: call `wait()` before the break, or make the "
                f"collective an eager segment (`break_on=['c10d::*']`)."
            )
        if started.works:
            started.wait()
            self.add(Entry("c10d::wait", started.wait))

    def close(self) -> None:
        """Wait for what is under way, as the end of a CUDA graph joins all streams."""
        for started in self._started:
            self.wait(started)
        self._closed = True

    def results(self) -> Iterator[torch.Tensor]:
        """The tensors that the operators made."""
        return (tensor for entry in self._entries for tensor in entry.results())

    def launch(self, stream: Any) -> tuple[int]:
        """Run all operators again; the status is always 0."""
        with _below_autograd():
            for entry in self._entries:
                entry.run()
        return (0,)

    def launch_stepwise(self) -> Iterator["Entry"]:
        """The same, stopping after each operator, under the caller's own modes."""
        for entry in self._entries:
            with _below_autograd():
                entry.run()
            yield entry

    def nodes(self) -> list[tuple[str, str]]:
        """`operator` and its name, for each."""
        return [("operator", entry.name) for entry in self._entries]

    def nbytes(self) -> int:
        """Bytes of the results that it keeps, each storage once."""
        storages = {storage_id(t): t.untyped_storage() for t in self.results()}
        return sum(storage.nbytes() for storage in storages.values())

    def kept(self) -> list[torch.Tensor]:
        """The tensors with memory that it keeps, each once."""
        kept = {id(t): t for entry in self._entries for t in (*entry.arguments(), *entry.results())}
        return [tensor for tensor in kept.values() if tensor.layout is torch.strided]


@contextlib.contextmanager
def _below_autograd() -> Iterator[None]:
    """As operators were recorded. Inference mode may write to its own tensors and to others."""
    with torch.inference_mode(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


@attrs.frozen(eq=False)
class Entry:
    """One operator with its arguments and the results that later operators read."""

    name: str
    _call: Callable[..., Any]
    _args: tuple[Any, ...] = ()
    _kwargs: dict[str, Any] = attrs.Factory(dict)
    _fresh: dict[int, torch.Tensor] = attrs.Factory(dict)
    """By their position among the leaves of the output."""
    place: str = attrs.Factory(location)

    def arguments(self) -> list[torch.Tensor]:
        """The tensors that it takes."""
        return tensor_leaves(self._args, self._kwargs)

    def results(self) -> Iterable[torch.Tensor]:
        """The tensors that it made."""
        return self._fresh.values()

    def run(self) -> None:
        """Run it again. Raise CaptureFailedError if it makes something else than at capture."""
        leaves = tree_leaves(self._call(*self._args, **self._kwargs))
        for position, recorded in self._fresh.items():
            new = leaves[position]
            is_tensor = isinstance(new, torch.Tensor)
            if not is_tensor or new.shape != recorded.shape or new.dtype != recorded.dtype:
                raise CaptureFailedError(
                    f"`{self.name}` returned {_described(new)} on replay and {_described(recorded)} at "
                    f"capture: its result depends on more than shapes (on what autograd needs, say), so it "
                    f"belongs into an eager segment."
                )
            if new.data_ptr() != recorded.data_ptr():
                copy_into(recorded, new)


def _described(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else "no tensor"
