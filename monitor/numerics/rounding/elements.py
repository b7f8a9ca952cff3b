"""Single elements of products and convolutions, correctly rounded to FP64: the referee between two devices.

A product of two FP32 numbers is exact in FP64 and ``math.fsum`` rounds the sum of such products once.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from monitor.numerics.geometry import ConvolutionShape

__all__ = ["of_convolution", "of_grad_input", "of_grad_weight", "of_product"]


def _dot(left: Tensor, right: Tensor) -> float:
    terms = (left.detach().cpu().to(torch.float64) * right.detach().cpu().to(torch.float64)).reshape(-1).tolist()
    try:
        return math.fsum(terms)
    except (ValueError, OverflowError):  # infinities of both signs: no number, as IEEE addition has it
        return math.nan


def of_product(a: Tensor, b: Tensor, position: int) -> float:
    """Element at a flat position of (m, k) × (k, n), or of a batch of them."""
    rows, column = divmod(position, b.shape[-1])
    batch, row = divmod(rows, a.shape[-2])
    left, right = (a[batch], b[batch]) if a.dim() == 3 else (a, b)
    return _dot(left[row], right[:, column])


def _grid(x: Tensor, lines: list[int], columns: list[int]) -> Tensor:
    """The last two dimensions of ``x`` at those indices."""
    return x[..., lines, :][..., columns]


def _split(pairs: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    return [first for first, _ in pairs], [second for _, second in pairs]


def of_convolution(
    x: Tensor, weight: Tensor, out_shape: tuple[int, ...], shape: ConvolutionShape, position: int
) -> float:
    """Element of a cross-correlation."""
    sample, out, *place = (int(i) for i in np.unravel_index(position, out_shape))
    group, per_group = out // (weight.shape[0] // shape.groups), weight.shape[1]
    axes = shape.axes(x.shape[2:], out_shape[2:], weight.shape[2:])
    (ki, y), (kj, z) = (_split(axis.seen(to)) for axis, to in zip(axes, place, strict=True))
    return _dot(_grid(x[sample, group * per_group : (group + 1) * per_group], y, z), _grid(weight[out], ki, kj))


def of_grad_input(
    grad: Tensor, x_shape: tuple[int, ...], weight: Tensor, shape: ConvolutionShape, position: int
) -> float:
    """Element of the gradient with respect to the input."""
    sample, channel, *at = (int(i) for i in np.unravel_index(position, x_shape))
    group, own = divmod(channel, weight.shape[1])
    outs = slice(group * weight.shape[0] // shape.groups, (group + 1) * weight.shape[0] // shape.groups)
    axes = shape.axes(x_shape[2:], grad.shape[2:], weight.shape[2:])
    (ki, y), (kj, z) = (_split(axis.reached(i)) for axis, i in zip(axes, at, strict=True))
    return _dot(_grid(grad[sample, outs], y, z), _grid(weight[outs, own], ki, kj))


def of_grad_weight(
    grad: Tensor, x: Tensor, weight_shape: tuple[int, ...], shape: ConvolutionShape, position: int
) -> float:
    """Element of the gradient with respect to the weight."""
    out, own, *offset = (int(i) for i in np.unravel_index(position, weight_shape))
    channel = out // (weight_shape[0] // shape.groups) * weight_shape[1] + own
    axes = shape.axes(x.shape[2:], grad.shape[2:], weight_shape[2:])
    (places_y, y), (places_z, z) = (_split(axis.met(k)) for axis, k in zip(axes, offset, strict=True))
    return _dot(_grid(grad[:, out], places_y, places_z), _grid(x[:, channel], y, z))
