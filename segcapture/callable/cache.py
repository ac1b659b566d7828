"""The signatures of one `GraphedCallable`: which are kept, and which goes when there are too many."""

import functools
import logging
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import torch

from segcapture.callable.bucket import Bucket
from segcapture.callable.calls import Call
from segcapture.callable.entry import Entry
from segcapture.callable.places import explain
from segcapture.callable.settings import Names, logger
from segcapture.capture import BreakableCUDAGraphCapture
from segcapture.thread import warn

_SIGNATURES_PER_CAPTURE = 4  # that are kept for each capture that may be
_COMPARED = 8  # signatures, those used last, with which a new one is compared


class Captures:
    """Entries by signature, the least recently used first, on one pool for each device."""

    def __init__(
        self,
        name: str,
        options: Mapping[str, Any],
        pool: Any,
        device: torch.device | None,
        bucket: Bucket | None,
        limit: int,
    ) -> None:
        self._name, self._options, self._pool = name, options, pool
        self._device, self._bucket, self._limit = device, bucket, limit
        self._entries: OrderedDict[Hashable, Entry] = OrderedDict()
        self._pools: dict[torch.device, Any] = {}
        self._made = 0
        self._said = False
        self.evictions = 0

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def find(self, key: Hashable) -> Entry | None:
        """The entry of a signature, which counts as used now."""
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def add(self, call: Call, places: Mapping[str, Mapping[str, str]]) -> Entry:
        """An entry for a signature that was not seen before; it says why no other one fits."""
        self._made += 1
        name = f"#{self._made}"
        latest = list(self)[::-1]
        others = [e for e in latest if e.captured][:_COMPARED] or latest[:_COMPARED]
        why = functools.partial(explain, places, [(other.name, other.places) for other in others])
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("%s: signature %s, %s", self._name, name, why())
        capture = BreakableCUDAGraphCapture(
            **self._options,
            pool=self._pools.get(call.device, self._pool),
            # Without a GPU the capture itself says that it is emulated.
            device=self._device or (call.device if torch.accelerator.is_available() else None),
            name=f"{self._name} {name}",
        )
        entry = self._entries[call.key] = Entry(name, places, why, capture, self._bucket)
        while len(self._entries) > _SIGNATURES_PER_CAPTURE * self._limit:
            oldest = next(iter(self._entries))
            if not self._entries[oldest].captured:
                self._say_once(entry)
            self._evict(oldest)
        return entry

    def _say_once(self, entry: Entry) -> None:
        if not self._said:
            self._said = True
            warn(
                f"{self._name} was called with {len(self._entries)} signatures, and the oldest is dropped "
                f"before it was captured. The newest is {entry.why}. Pass what changes with each call as a "
                f"tensor, or raise max_captures."
            )

    def ran(self, entry: Entry, call: Call) -> None:
        """An entry has warmed up or captured: others share its pool, and there may be too many captures."""
        self._pools.setdefault(call.device, entry.capture.pool)
        breaks = self._options["breaks"]
        if entry.captured and isinstance(breaks, Names):
            breaks.tell_missing(self._name)
        captured = [key for key, other in self._entries.items() if other.captured]
        for key in captured[: max(0, len(captured) - self._limit)]:
            self._evict(key)

    def drop(self, key: Hashable) -> None:
        """Free what is kept for a signature."""
        self._entries.pop(key).release()

    def clear(self) -> None:
        """Free everything, the pools too."""
        for key in list(self._entries):
            self.drop(key)
        self._pools.clear()

    def pool_bytes(self) -> int:
        """Bytes of the memory of all captures."""
        owned = {s.data_ptr(): s.nbytes() for entry in self for s in entry.capture.storages()}
        return sum(owned.values())

    def _evict(self, key: Hashable) -> None:
        self.evictions += 1
        logger.debug("%s: %s is dropped, the least recently used", self._name, self._entries[key].name)
        self.drop(key)
