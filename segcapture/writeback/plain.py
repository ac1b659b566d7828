"""Values of an output that are no tensors: replaced in mutable containers, frozen elsewhere (contract C4)."""

from collections.abc import Container
from typing import Any

import attrs

from segcapture.errors import FrozenValueWarning, OutputMismatchError
from segcapture.thread import warn
from segcapture.writeback.reading import other_kind
from segcapture.writeback.structure import Node, get_item, has_item, is_plain, set_item


@attrs.define(eq=False)
class Plain:
    """One value, as later segments were recorded for it."""

    node: Node
    """Its place; the value in it is that of the capture, or the one that replaced it last."""
    container: Any
    """The captured container, if the value can be replaced there: else None, as in a tuple."""
    owned: bool
    """Whether nobody but the output owned the container."""
    length: int
    """Of the container, at capture."""
    warned: bool = False

    @classmethod
    def of(cls, node: Node, nodes: list[Node], owned: set[int]) -> "Plain":
        """The plain value at a node of an output, of which the nodes in `owned` belong to it alone."""
        above = nodes[node.parent].value if node.parent >= 0 else ()
        length = len(above) if isinstance(above, list) else 0
        return cls(node, None if isinstance(above, tuple) else above, node.parent in owned, length)

    def check(self, new: Any, walked: Container[int], where: str) -> None:
        """Raise OutputMismatchError for what is no plain value; `walked` are the ids of the containers."""
        if id(new) in walked or not is_plain(new, self.node.in_object):
            raise other_kind(where, self.node.path, type(self.node.value), new)

    def store(self, new: Any, container: Any, where: str) -> None:
        """Replace it with the one of a new container; where that cannot be done, warn once if it differs."""
        captured, old = self.container, self.node.value
        if captured is not None and (captured is container or self.owned):
            if isinstance(captured, list) and len(captured) != self.length:
                raise OutputMismatchError(
                    f"{where} returned {new!r} at `{self.node.path}`, and {old!r} at capture, in a list that "
                    f"has become longer or shorter since, so its place is not known. Return a tuple."
                )
            if has_item(captured, self.node.key):  # else the captured code has taken it out
                self._check_place(get_item(captured, self.node.key), where)
                set_item(captured, self.node.key, new)
            self.node.value = new
        elif not self.warned and not _equal(old, new):
            self.warned = True
            warn(
                f"{where} returned {new!r} at `{self.node.path}`, and {old!r} at capture. Later segments "
                f"were recorded for the old value. Return it as a tensor, or in a new list, dict or object "
                f"that a later eager segment reads.",
                FrozenValueWarning,
            )

    def _check_place(self, now: Any, where: str) -> None:
        if not is_plain(now, self.node.in_object):
            raise OutputMismatchError(
                f"{where} returned a new value at `{self.node.path}`, where other code has put a "
                f"{type(now).__qualname__} since: it would be overwritten. Return a tuple, or put that "
                f"elsewhere."
            )


def _equal(old: Any, new: Any) -> bool:
    if type(old) is not type(new):
        return False
    try:
        return bool(old == new or (old != old and new != new))  # nan
    except Exception:
        return False
