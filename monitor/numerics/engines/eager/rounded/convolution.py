"""2-D convolutions in a wide format, and error bounds for each of their results that are equal on every device.

The bound of an output is the product of the norm of what the filter sees and the norm of the filter. Squares are exact
integers, so the sums over a patch may be taken in any order, here by a convolution with ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from monitor.numerics.engines.eager.rounded.norms import norms, quantised_squares, root_above, spans
from monitor.numerics.engines.eager.rounded.result_bounds import ProductBound
from monitor.numerics.geometry import ConvolutionShape

__all__ = ["forward", "forward_bound", "grad_input", "grad_input_bound", "grad_weight", "grad_weight_bound"]


def _convolve(
    x: Tensor, weight: Tensor, shape: ConvolutionShape, groups: int, padding: tuple[int, ...] | None = None
) -> Tensor:
    with torch.backends.cudnn.flags(enabled=False):
        out: Tensor = torch.ops.aten.convolution.default(
            x, weight, None, shape.stride, padding or shape.padding, shape.dilation, False, [0, 0], groups
        )
    return out


def _backward(
    grad: Tensor, x: Tensor, weight: Tensor, shape: ConvolutionShape, groups: int, mask: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.backends.cudnn.flags(enabled=False):
        out: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward.default(
            grad, x, weight, None, shape.stride, shape.padding, shape.dilation, False, [0, 0], groups, mask
        )
    return out


def forward(x: Tensor, weight: Tensor, shape: ConvolutionShape) -> Tensor:
    """Cross-correlation with the device's own kernel, Winograd and FFT variants switched off."""
    return _convolve(x, weight, shape, shape.groups)


def grad_input(grad: Tensor, x_shape: tuple[int, ...], weight: Tensor, shape: ConvolutionShape) -> Tensor:
    """Gradient with respect to the input; the kernel needs the input's shape only."""
    x = torch.empty(x_shape, dtype=grad.dtype, device=grad.device)
    return _backward(grad, x, weight, shape, shape.groups, [True, False, False])[0]


def grad_weight(grad: Tensor, x: Tensor, weight_shape: tuple[int, ...], shape: ConvolutionShape) -> Tensor:
    """Gradient with respect to the weight; the kernel needs the weight's shape only."""
    weight = torch.empty(weight_shape, dtype=grad.dtype, device=grad.device)
    return _backward(grad, x, weight, shape, shape.groups, [False, True, False])[1]


def _by_group(squares: Tensor, groups: int) -> Tensor:
    """(n, c, h, w) → (n, groups, h, w): sums over the channels of each group."""
    n, c, h, w = squares.shape
    return squares.reshape(n, groups, c // groups, h, w).sum(2)


def _spread_spans(x: Tensor, groups: int, right: Tensor) -> Tensor:
    """The span of each whole sample for each of its groups, in the shape of ``right``."""
    whole = spans(x, [1, 2, 3]).reshape(-1, 1)
    return whole.expand(-1, groups).reshape(-1, 1).expand_as(right)


def forward_bound(x: Tensor, weight: Tensor, shape: ConvolutionShape, factor: float, exact_bits: int) -> ProductBound:
    """factor·‖patch‖·‖filter‖ for each output element."""
    squares, scale = quantised_squares(x, [1, 2, 3])
    ones = torch.ones((shape.groups, 1, *weight.shape[2:]), dtype=torch.float64, device=x.device)
    patches = root_above(_convolve(_by_group(squares, shape.groups), ones, shape, shape.groups)) * scale
    filters = weight.reshape(weight.shape[0], -1)
    right = patches.reshape(-1, patches.shape[2] * patches.shape[3])
    return ProductBound(
        left=norms(filters, -1).reshape(-1) * factor,
        right=right,
        left_spans=spans(filters, [-1]).reshape(-1),
        right_spans=_spread_spans(x, shape.groups, right),
        rows_per_right=weight.shape[0] // shape.groups,
        exact_bits=exact_bits,
    )


def grad_input_bound(
    grad: Tensor, x_shape: tuple[int, ...], weight: Tensor, shape: ConvolutionShape, factor: float, exact_bits: int
) -> ProductBound:
    """factor·‖output gradients that an input element reached‖·‖its weights‖."""
    squares, scale = quantised_squares(grad, [1, 2, 3])
    groups = shape.groups
    ones = torch.ones((groups, 1, *weight.shape[2:]), dtype=torch.float64, device=grad.device)
    like = torch.empty((x_shape[0], groups, *x_shape[2:]), dtype=torch.float64, device=grad.device)
    reach = _backward(_by_group(squares, groups), like, ones, shape, groups, [True, False, False])[0]
    by_input = weight.reshape(groups, weight.shape[0] // groups, weight.shape[1], -1).transpose(1, 2)
    columns = by_input.reshape(x_shape[1], -1)
    right = (root_above(reach) * scale).reshape(-1, x_shape[2] * x_shape[3])
    return ProductBound(
        left=norms(columns, -1).reshape(-1) * factor,
        right=right,
        left_spans=spans(columns, [-1]).reshape(-1),
        right_spans=_spread_spans(grad, groups, right),
        rows_per_right=x_shape[1] // groups,
        exact_bits=exact_bits,
    )


def grad_weight_bound(
    grad: Tensor, x: Tensor, weight_shape: tuple[int, ...], shape: ConvolutionShape, factor: float, exact_bits: int
) -> ProductBound:
    """factor·‖gradients of an output channel‖·‖an input channel‖, over samples and places."""
    out_channels, per_group, *kernel = weight_shape
    rows = grad.transpose(0, 1).reshape(out_channels, -1)
    columns = x.transpose(0, 1).reshape(shape.groups * per_group, -1)
    taps = kernel[0] * kernel[1]
    return ProductBound(
        left=norms(rows, -1).reshape(-1) * factor,
        right=norms(columns, -1).expand(-1, taps).reshape(shape.groups, -1),
        left_spans=spans(rows, [-1]).reshape(-1),
        right_spans=spans(columns, [-1]).expand(-1, taps).reshape(shape.groups, -1),
        rows_per_right=out_channels // shape.groups,
        exact_bits=exact_bits,
    )
