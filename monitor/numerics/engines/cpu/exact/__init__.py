"""Twins of the eager exact primitives: compiled kernels for most elements, the eager ones for what they leave open."""
