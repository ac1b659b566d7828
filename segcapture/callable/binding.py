"""A decorated method: each instance has what belongs to it, for as long as it lives."""

from collections.abc import Callable
from typing import Any

from segcapture.writeback.structure import HELD


class _Held:
    """What an instance holds in its attributes. Copies and pickles of the instance get an empty one."""

    owner: Any = None
    made: dict[int, tuple[Any, Any]]

    def __init__(self) -> None:
        self.made = {}

    def __reduce__(self) -> Any:
        return (_Held, ())

    def __copy__(self) -> "_Held":
        return _Held()

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Held":
        return _Held()


def bound_to(instance: Any, function: Any, make: Callable[[], Any]) -> Any:
    """What was made for an instance and a decorated method of its class; made on first use.

    Raises:
        TypeError: the instance has no `__dict__` to hold it.
    """
    attributes = getattr(instance, "__dict__", None)
    if attributes is None:
        raise TypeError(
            f"{type(instance).__qualname__} has __slots__ and no __dict__, so that its methods cannot hold "
            f"captures: wrap the bound method, GraphedCallable(instance.method)."
        )
    held = attributes.get(HELD)
    if held is None or held.owner is not instance:  # a shallow copy has its original's
        held = attributes[HELD] = _Held()
        held.owner = instance
    if id(function) not in held.made:
        held.made[id(function)] = function, make()  # with it, no other can have its id
    return held.made[id(function)][1]
