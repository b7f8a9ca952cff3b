"""A run folder as storage: bytes per step, and a check of everything by independent code."""
