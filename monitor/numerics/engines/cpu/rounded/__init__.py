"""Operators whose FP64 results are rounded tile by tile: operands, products and results never leave the cache."""

from __future__ import annotations

from monitor.numerics.engines.cpu.rounded.functions import apply
from monitor.numerics.engines.cpu.rounded.patches import forward, grad_input, grad_weight, has
from monitor.numerics.engines.cpu.rounded.products import multiply

__all__ = ["apply", "forward", "grad_input", "grad_weight", "has", "multiply"]
