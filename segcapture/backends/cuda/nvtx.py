"""NVTX ranges around segments, for Nsight."""

import os
from contextlib import AbstractContextManager
from typing import Any

import torch

from segcapture.replay import Watch
from segcapture.segments import Segment


def nvtx_ranges() -> Watch | None:
    """A range with the name of each segment if `SEGCAPTURE_NVTX=1`, or if a tool that shows them runs us.

    Nsight tools set `NVTX_INJECTION64_PATH` (https://nvidia.github.io/NVTX, "Tool injection").
    `SEGCAPTURE_NVTX=0` switches them off there too.
    """
    flag = os.environ.get("SEGCAPTURE_NVTX", "")
    wanted = flag not in ("", "0") or (not flag and "NVTX_INJECTION64_PATH" in os.environ)
    return _range if wanted else None


def _range(segment: Segment) -> AbstractContextManager[Any]:
    return torch.cuda.nvtx.range("{}", str(segment))
