"""Rounding logs (Srivastava 2024) with error bounds, an adaptive grid and a sparse code."""
