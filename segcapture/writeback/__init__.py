"""What an eager function returns: walked, bridged at capture, and written back at replay (contract C4)."""
