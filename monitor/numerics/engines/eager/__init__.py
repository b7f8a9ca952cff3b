"""The engine for any device: each primitive in eager PyTorch, from operations that every device rounds alike."""

from __future__ import annotations

from monitor.numerics.engines.eager.exact import bf16, convolution, functions, matmul, philox, sums
from monitor.numerics.engines.eager.rounded.sums import order_free_total
from monitor.numerics.engines.engine import Engine

__all__ = ["EAGER"]

EAGER = Engine(
    matmul=matmul.eager_matmul,
    bf16_matmul=bf16.eager_bf16_matmul,
    correlate=convolution.correlate,
    weight_sums=convolution.weight_sums,
    sum=sums.sum_blocks,
    scatter_rows=sums.scatter_rows,
    unary=functions.unary,
    power=functions.power,
    bits=philox.bits,
    order_free_total=order_free_total,
)
