"""Capture a PyTorch forward pass as CUDA graph segments and eager segments, and replay it."""

from segcapture.arguments import Live
from segcapture.breaks import break_graph, eager_break_during_capture, is_capturing
from segcapture.capture import BreakableCUDAGraphCapture
from segcapture.errors import (
    CaptureFailedError,
    CaptureStateError,
    FrozenValueWarning,
    OutputMismatchError,
    SegcaptureError,
)
from segcapture.segments import EagerSegment, GraphSegment

__version__ = "0.1.0"

__all__ = [
    "BreakableCUDAGraphCapture",
    "CaptureFailedError",
    "CaptureStateError",
    "EagerSegment",
    "FrozenValueWarning",
    "GraphSegment",
    "Live",
    "OutputMismatchError",
    "SegcaptureError",
    "break_graph",
    "eager_break_during_capture",
    "is_capturing",
]
