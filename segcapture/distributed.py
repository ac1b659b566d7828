"""What the ranks of a distributed program can check before they replay together."""

from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from segcapture.errors import CaptureStateError
from segcapture.thread import state

if TYPE_CHECKING:
    from segcapture.capture import BreakableCUDAGraphCapture

_Kinds = list[tuple[str, str]]


def check_same_segments(capture: "BreakableCUDAGraphCapture", group: Any = None) -> None:
    """Compare the kinds and names of all segments across ranks: call it before the first replay.

    Ranks that broke in different places wait for each other's collectives forever. This is a collective
    too: all ranks of the group call it, each with its own capture, and either all return or all raise. A
    capture that failed, or that was never begun, counts as one of no segments: so a rank that catches its
    exception and calls this does not keep the others waiting.

    Args:
        capture: The capture of this rank.
        group: `torch.distributed.ProcessGroup`. Left out: the default one.

    Raises:
        CaptureStateError: two ranks differ (the message names the first segment that does, the rank, and
            what it and the first rank captured there), or this thread is recording a graph segment.
        ValueError: there is no process group.
    """
    import torch.distributed as dist

    if state.run is not None and not state.run.inside_eager:
        raise CaptureStateError(
            "check_same_segments in a graph segment would be captured itself: call it after the `with` block."
        )
    mine: _Kinds = [(segment.kind, segment.name) for segment in capture.segments]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group)
    members = dist.get_process_group_ranks(group)
    differing = [
        (_first_difference(found[0], other), i) for i, other in enumerate(found) if other != found[0]
    ]
    if not differing:
        return
    index, i = min(differing)
    title = f"Captures {capture.name!r}" if capture.name else "The captures"
    raise CaptureStateError(
        f"{title} of {len(found)} ranks differ at segment {index}: rank {members[i]} has "
        f"{_named(found[i], index)}, and rank {members[0]} has {_named(found[0], index)} (segments per rank: "
        f"{', '.join(f'{rank}: {len(kinds)}' for rank, kinds in zip(members, found, strict=True))}). Their "
        f"replays would wait for each other forever: break in the same places on every rank."
    )


def _first_difference(one: _Kinds, other: _Kinds) -> int:
    return next(i for i, (a, b) in enumerate(zip_longest(one, other)) if a != b)


def _named(kinds: _Kinds, index: int) -> str:
    if not kinds:
        return "captured nothing"
    return f"{kinds[index][0]} segment `{kinds[index][1]}`" if index < len(kinds) else "no such segment"
