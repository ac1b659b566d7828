"""Functions that are captured once for each signature of their arguments, then replayed."""

from segcapture.callable.bucket import Bucket
from segcapture.callable.graphed import GraphedCallable

__all__ = ["Bucket", "GraphedCallable"]
