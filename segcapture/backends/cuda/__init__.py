"""CUDA graphs: their capture, memory, streams and launches."""
