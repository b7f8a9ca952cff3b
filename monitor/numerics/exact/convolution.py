"""2-D convolutions as order-free matrix products of filters and patches: sums are exact, so their order is free too.

Rows and columns of the products are scaled as `matmul` says: a patch and a filter each have a scale of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from monitor.numerics.engines import engine_of
from monitor.numerics.engines.eager.exact.convolution import Borders, Correlation, Pair, bordered
from monitor.numerics.exact.matmul import matmul

__all__ = ["correlate", "grad_input", "grad_weight"]


def correlate(x: Tensor, weight: Tensor, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
    """Cross-correlation of FP32 x (n, c, h, w) and weight (o, c, kh, kw), as (n, o, oh, ow)."""
    return _correlate(x, weight, stride, _even(padding), dilation)


def _even(padding: Pair) -> Borders:
    return padding[0], padding[0], padding[1], padding[1]


def _correlate(x: Tensor, weight: Tensor, stride: Pair, borders: Borders, dilation: Pair) -> Tensor:
    task = Correlation(x=x, weight=weight, stride=stride, borders=borders, dilation=dilation)
    return engine_of(x.device).correlate(task)


def grad_input(
    grad: Tensor, x_shape: Sequence[int], weight: Tensor, stride: Pair, padding: Pair, dilation: Pair
) -> Tensor:
    """Gradient of `correlate` in x: the spread-out gradient correlated with the turned filters."""
    kernel = weight.shape[2:]
    turned = weight.flip(2, 3).transpose(0, 1)
    if tuple(kernel) == (1, 1) and not any(padding):
        product = _correlate(grad, turned, (1, 1), (0, 0, 0, 0), (1, 1))
        return product if tuple(stride) == (1, 1) else _spread(product, stride, x_shape[2:])
    size = [(size - 1) * step + 1 for size, step in zip(grad.shape[2:], stride, strict=True)]
    before = [gap * (k - 1) - pad for gap, k, pad in zip(dilation, kernel, padding, strict=True)]
    after = [
        whole + gap * (k - 1) - first - have
        for whole, gap, k, first, have in zip(x_shape[2:], dilation, kernel, before, size, strict=True)
    ]
    spread = grad if tuple(stride) == (1, 1) else _spread(grad, stride, size)
    return _correlate(spread, turned, (1, 1), (before[0], after[0], before[1], after[1]), dilation)


def _spread(x: Tensor, stride: Pair, size: Pair) -> Tensor:
    """x (n, c, h, w) at every stride-th place of zeros (n, c, *size)."""
    out = x.new_zeros((*x.shape[:2], *size))
    out[:, :, :: stride[0], :: stride[1]] = x
    return out


def grad_weight(
    grad: Tensor, x: Tensor, weight_shape: Sequence[int], stride: Pair, padding: Pair, dilation: Pair
) -> Tensor:
    """Gradient of `correlate` in the weight: a product over samples and places."""
    filters, channels, *kernel = weight_shape
    if tuple(kernel) == (1, 1) and not any(padding):
        image = x[:, :, :: stride[0], :: stride[1]][:, :, : grad.shape[2], : grad.shape[3]]
        left, right = grad.transpose(0, 1).reshape(filters, -1), image.transpose(0, 1).reshape(channels, -1).t()
        return matmul(left, right).reshape(tuple(weight_shape))
    return engine_of(x.device).weight_sums(grad, bordered(x, _even(padding)), weight_shape, stride, dilation)
