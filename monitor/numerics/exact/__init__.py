"""Order-free kernels: pure functions of tensors with one and the same result on every device.

A result is either the correctly rounded value of an exact mathematical expression, which is unique, or an expression in
exact integers. The functions know nothing of dispatch modes; a caller inside one disables it first.
"""

from __future__ import annotations

from monitor.numerics.exact import convolution, philox
from monitor.numerics.exact.bf16 import bf16_matmul, has_two_digits
from monitor.numerics.exact.matmul import matmul
from monitor.numerics.exact.sums import mean, scatter_rows, sum
from monitor.numerics.exact.unary import UNARY_FUNCTIONS, power, unary

__all__ = [
    "UNARY_FUNCTIONS",
    "bf16_matmul",
    "convolution",
    "has_two_digits",
    "matmul",
    "mean",
    "philox",
    "power",
    "scatter_rows",
    "sum",
    "unary",
]
