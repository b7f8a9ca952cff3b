"""FP64 sums of FP32 numbers that no order can change, on any device: see ``rounding.sums``."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from monitor.numerics.engines.eager.rounded.rounding_rule import exponent
from monitor.numerics.kernels.bits import power_of_two

__all__ = ["order_free_total", "quantised"]


def quantised(x: Tensor, largest: Tensor, terms: int) -> Tensor:
    """Round FP64 ``x`` to multiples of 2^(⌊log2 largest⌋ + ⌈log2 terms⌉ − 52) by adding and subtracting a constant.

    What belongs to a ``largest`` that is not finite stays as it is.
    The constant 1.5·2^p needs p ≥ ⌊log2 largest⌋ + 2, or a sum could leave its binade and keep a finer bit.
    """
    width = max((terms - 1).bit_length(), 2)
    magic = power_of_two(exponent(largest).clamp(min=-200, max=200) + width) * 1.5
    exact = (x + magic) - magic
    return exact if bool(largest.isfinite().all()) else torch.where(largest.isfinite(), exact, x)


def order_free_total(x: Tensor, dims: list[int]) -> Tensor:
    """FP64 sums of FP32 ``x`` over ``dims``, which are kept with length 1."""
    largest = x.abs().amax(dims, keepdim=True).to(torch.float64)
    terms = math.prod(x.shape[dim] for dim in dims)
    return quantised(x.to(torch.float64), largest, terms).sum(dims, keepdim=True)
