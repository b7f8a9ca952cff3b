"""Operators whose FP64 results are rounded tile by tile: operands, products and results never leave the cache."""
