"""One training step on many processes, to the bits of one process.

The program that is declared, replayed and disputed is the one-process program whose unit of rounding is the
micro-batch. How many processes compute it, and how they cut the state, is no part of it.
"""
