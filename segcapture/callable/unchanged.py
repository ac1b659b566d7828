"""What a function must leave as it is in its arguments, as no replay changes it again."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from segcapture.callable.places import contents
from segcapture.callable.signature import PLAIN
from segcapture.errors import CaptureFailedError
from segcapture.writeback.memory import changes, view_of


class Before:
    """The arguments of a call before the function runs: what is in each place, and each tensor's view.

    Args:
        args: The arguments by position.
        kwargs: And by name.
        copied: The tensors among them that a replay copies: their gradients must stay too.
    """

    def __init__(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], copied: Sequence[torch.Tensor]
    ) -> None:
        self._args, self._kwargs, self._copied = args, kwargs, copied
        self._values = self._now()
        self._views = {path: view_of(value) for path, value in self._values.items()}
        self._gradients = list(map(_gradient, copied))

    def _now(self) -> dict[str, Any]:
        return contents([("args", self._args), ("kwargs", self._kwargs)])

    def check(self) -> None:
        """Compare with what there is now.

        Raises:
            CaptureFailedError: another object, value, shape, stride, address or gradient in some place.
        """
        after = self._now()
        path = _changed_place(self._values, after)
        if path is not None:
            raise CaptureFailedError(
                f"The function put something else at `{path}` of its arguments, which is Python's doing and "
                f"no replay does it again. Return it instead, or write into the tensor that is there."
            )
        for path, view in self._views.items():
            if what := changes(view, view_of(after[path])):
                raise CaptureFailedError(
                    f"The function changed `{path}` of its arguments in place ({what}), and a replay writes "
                    f"values alone. Work on a view or a copy of it, and return that."
                )
        if list(map(_gradient, self._copied)) != self._gradients:
            raise CaptureFailedError(
                "The function accumulated into `.grad` of an argument, and a replay does so for the static "
                "input alone. Use `torch.autograd.grad` and return what it gives."
            )


def _changed_place(before: Mapping[str, Any], after: Mapping[str, Any]) -> str | None:
    """A place where a function put another object or value, or None."""
    for path in [*before, *after]:
        if path not in before or path not in after:
            return path
        old, new = before[path], after[path]
        if old is not new and not (type(old) is type(new) and type(old) in PLAIN and old == new):
            return path
    return None


def _gradient(tensor: torch.Tensor) -> tuple[int, int] | None:
    if not (tensor.requires_grad and tensor.is_leaf) or tensor.grad is None:
        return None
    return id(tensor.grad), tensor.grad._version
