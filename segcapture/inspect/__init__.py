"""See inside of a capture: the segment table, stepping, comparison with eager, times and memory."""
