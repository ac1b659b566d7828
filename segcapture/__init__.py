"""Capture a PyTorch forward pass as CUDA graph segments and eager segments, and replay it."""

from segcapture.arguments import Live
from segcapture.breaks import break_graph, eager_break_during_capture, is_capturing
from segcapture.callable import Bucket, GraphedCallable
from segcapture.capture import BreakableCUDAGraphCapture
from segcapture.distributed import check_same_segments
from segcapture.errors import (
    CaptureFailedError,
    CaptureStateError,
    FrozenValueWarning,
    OutputMismatchError,
    SegcaptureError,
)
from segcapture.inspect.find_breaks import find_breaks
from segcapture.segments import EagerSegment, GraphSegment

__version__ = "0.1.0"

__all__ = [
    "BreakableCUDAGraphCapture",
    "Bucket",
    "CaptureFailedError",
    "CaptureStateError",
    "EagerSegment",
    "FrozenValueWarning",
    "GraphSegment",
    "GraphedCallable",
    "Live",
    "OutputMismatchError",
    "SegcaptureError",
    "break_graph",
    "check_same_segments",
    "eager_break_during_capture",
    "find_breaks",
    "is_capturing",
]
