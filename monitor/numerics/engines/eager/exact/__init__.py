"""Exact sums and correctly rounded functions by FP64 with an error bound; what it leaves open, integers decide."""
