"""The engine for processors: compiled kernels over ranges of rows, and GEMMs, in tiles that stay in the cache.

What kernels leave undecided, or decline, the eager primitives compute.
"""

from __future__ import annotations

from monitor.numerics.engines.cpu.exact import bf16, convolution, functions, matmul, philox, sums
from monitor.numerics.engines.cpu.rounded import patches
from monitor.numerics.engines.cpu.rounded.functions import apply
from monitor.numerics.engines.cpu.rounded.products import multiply
from monitor.numerics.engines.cpu.rounded.sums import order_free_total
from monitor.numerics.engines.engine import Engine, Tiles

__all__ = ["CPU"]

CPU = Engine(
    matmul=matmul.cpu_matmul,
    bf16_matmul=bf16.cpu_bf16_matmul,
    correlate=convolution.correlate,
    weight_sums=convolution.weight_sums,
    sum=sums.sum_blocks,
    scatter_rows=sums.scatter_rows,
    unary=functions.unary,
    power=functions.power,
    bits=philox.bits,
    order_free_total=order_free_total,
    clamps=True,
    tiles=Tiles(
        multiply=multiply,
        apply=apply,
        has=patches.has,
        forward=patches.forward,
        grad_input=patches.grad_input,
        grad_weight=patches.grad_weight,
    ),
)
