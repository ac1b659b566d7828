"""NVTX ranges around segments, for Nsight."""

import os
from contextlib import AbstractContextManager
from typing import Any

import torch

from segcapture.replay import ProfilerRanges
from segcapture.segments import Segment


def nvtx_ranges() -> "NvtxRanges | None":
    """Ranges if `SEGCAPTURE_NVTX=1`, or if a tool that shows them has started this process.

    Nsight tools set `NVTX_INJECTION64_PATH` (https://nvidia.github.io/NVTX, "Tool injection").
    `SEGCAPTURE_NVTX=0` switches them off there too.
    """
    flag = os.environ.get("SEGCAPTURE_NVTX", "")
    wanted = flag not in ("", "0") or (not flag and "NVTX_INJECTION64_PATH" in os.environ)
    return NvtxRanges() if wanted else None


class NvtxRanges(ProfilerRanges):
    """Each segment is a range with its name."""

    def segment(self, segment: Segment) -> AbstractContextManager[Any]:
        """A range on this thread."""
        return torch.cuda.nvtx.range("{}", str(segment))
