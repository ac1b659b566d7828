"""Operators as a dispatch mode sees them: which are breaks, composite, collective or compiled."""
