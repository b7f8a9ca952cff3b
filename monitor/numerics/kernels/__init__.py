"""What every compiled kernel is made with: numba without fast-math, threads and memory of our own, IEEE bit patterns.

A kernel takes a range of rows and plain arrays; which of them computes what is for the engines to say.
"""
