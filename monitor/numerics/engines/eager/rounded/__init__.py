"""Rounding to a grid, and bounds of FP64's errors: quantities that are equal on every device, but for the result."""
