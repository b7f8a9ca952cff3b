"""Softmax, log-softmax, layer, batch and group normalisation, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from monitor.numerics.backend import Backend
from monitor.numerics.errors import UnsupportedOperator
from monitor.numerics.operators.elementwise import quotient, square_root
from monitor.numerics.operators.reductions import mean

__all__ = [
    "batch_norm",
    "batch_norm_backward",
    "group_norm",
    "group_norm_backward",
    "layer_norm",
    "layer_norm_backward",
    "log_softmax",
    "log_softmax_backward",
    "safe_softmax",
    "softmax",
    "softmax_backward",
]


def _shifted(x: Tensor, dim: int) -> tuple[Tensor, list[int]]:
    listed = [dim % x.dim()] if x.dim() else []
    return x - (x.amax(listed, keepdim=True) + 0.0), listed


def softmax(backend: Backend, x: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    """exp(x − max) divided by its sum."""
    if half_to_float:
        x = x.to(torch.float32)
    if x.dim() == 0:
        return torch.ones_like(x)
    shifted, listed = _shifted(x, dim)
    weights = backend.unary("exp", shifted)
    return torch.div(weights, backend.sum(weights, listed, True))


def log_softmax(backend: Backend, x: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    if half_to_float:
        x = x.to(torch.float32)
    if x.dim() == 0:
        return torch.zeros_like(x)
    shifted, listed = _shifted(x, dim)
    return shifted - backend.unary("log", backend.sum(backend.unary("exp", shifted), listed, True))


def softmax_backward(backend: Backend, grad: Tensor, y: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    if y.dim() == 0:
        return torch.zeros_like(y)
    product = grad * y
    return (product - y * backend.sum(product, [dim % y.dim()], True)).to(input_dtype)


def log_softmax_backward(backend: Backend, grad: Tensor, y: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    if y.dim() == 0:
        return torch.zeros_like(y)
    return (grad - backend.unary("exp", y) * backend.sum(grad, [dim % y.dim()], True)).to(input_dtype)


def _inverse_root(x: Tensor, eps: float) -> Tensor:
    """1/√(x + eps) by correctly rounded operations alone."""
    root = square_root(x + eps)
    return torch.div(torch.ones_like(root), root)


def layer_norm(
    backend: Backend, x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    dims = list(range(x.dim() - len(shape), x.dim()))
    centre = mean(backend, x, dims, True)
    rest = x - centre
    rstd = _inverse_root(mean(backend, rest * rest, dims, True), eps)
    out = rest * rstd
    if weight is not None:
        out = out * weight
    return (out if bias is None else out + bias), centre, rstd


def layer_norm_backward(
    backend: Backend,
    grad: Tensor,
    x: Tensor,
    shape: Sequence[int],
    centre: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    outer = list(range(x.dim() - len(shape)))
    dims = list(range(x.dim() - len(shape), x.dim()))
    hat = (x - centre) * rstd
    grad_x = grad_weight = grad_bias = None
    if mask[0]:
        inner = grad if weight is None else grad * weight
        first = mean(backend, inner, dims, True)
        second = mean(backend, inner * hat, dims, True)
        grad_x = ((inner - first) - hat * second) * rstd
    if mask[1]:
        grad_weight = backend.sum(grad * hat, outer, False) if outer else grad * hat
    if mask[2]:
        grad_bias = backend.sum(grad, outer, False) if outer else grad.clone()
    return grad_x, grad_weight, grad_bias


def _per_channel(values: Tensor, x: Tensor) -> Tensor:
    return values.reshape(1, -1, *(1,) * (x.dim() - 2))


def batch_norm(
    backend: Backend,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    if not training:
        if running_mean is None or running_var is None:
            raise UnsupportedOperator("aten.native_batch_norm", "evaluation needs running statistics")
        rest = x - _per_channel(running_mean, x)
        hat = rest * _per_channel(_inverse_root(running_var, eps), x)
        saved, rstd = x.new_empty(0), x.new_empty(0)
    else:
        dims = [0, *range(2, x.dim())]
        centre = mean(backend, x, dims, True)
        rest = x - centre
        variance = mean(backend, rest * rest, dims, True)
        saved, rstd = centre.reshape(-1), _inverse_root(variance, eps).reshape(-1)
        hat = rest * _per_channel(rstd, x)
        if running_mean is not None and running_var is not None:
            count = x.numel() // x.shape[1]
            unbiased = quotient(variance.reshape(-1) * count, max(count - 1, 0))
            running_mean.copy_(running_mean * (1.0 - momentum) + saved * momentum)
            running_var.copy_(running_var * (1.0 - momentum) + unbiased * momentum)
    if weight is not None:
        hat = hat * _per_channel(weight, x)
    return (hat if bias is None else hat + _per_channel(bias, x)), saved, rstd


def batch_norm_backward(
    backend: Backend,
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    saved: Tensor | None,
    rstd: Tensor | None,
    train: bool,
    eps: float,
    mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    dims = [0, *range(2, x.dim())]
    if train:
        centre, scale = saved, rstd
    else:
        centre, scale = running_mean, None if running_var is None else _inverse_root(running_var, eps)
    if centre is None or scale is None:
        raise UnsupportedOperator("aten.native_batch_norm_backward", "evaluation needs running statistics")
    hat = (x - _per_channel(centre, x)) * _per_channel(scale, x)
    projected = backend.sum(grad * hat, dims, False)
    total = backend.sum(grad, dims, False)
    grad_x = None
    if mask[0]:
        factor = scale if weight is None else scale * weight
        rest = grad
        if train:
            count = x.numel() // x.shape[1]
            rest = (grad - _per_channel(quotient(total, count), x)) - hat * _per_channel(quotient(projected, count), x)
        grad_x = rest * _per_channel(factor, x)
    return grad_x, projected if mask[1] else None, total if mask[2] else None


def safe_softmax(backend: Backend, x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    if dtype is not None:
        x = x.to(dtype)
    masked = (x == float("-inf")).all(dim, keepdim=True)
    return torch.where(masked, torch.zeros_like(x), softmax(backend, x, dim))


def _grouped(x: Tensor, n: int, groups: int) -> Tensor:
    return x.reshape(n, groups, x.numel() // max(n * groups, 1))


def group_norm(
    backend: Backend,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    n: int,
    channels: int,
    places: int,
    groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    flat = _grouped(x, n, groups)
    centre = mean(backend, flat, [2], True)
    rest = flat - centre
    rstd = _inverse_root(mean(backend, rest * rest, [2], True), eps)
    out = (rest * rstd).reshape(x.shape)
    if weight is not None:
        out = out * _per_channel(weight, x)
    return (out if bias is None else out + _per_channel(bias, x)), centre.squeeze(2), rstd.squeeze(2)


def group_norm_backward(
    backend: Backend,
    grad: Tensor,
    x: Tensor,
    centre: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    n: int,
    channels: int,
    places: int,
    groups: int,
    mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    hat = (_grouped(x, n, groups) - centre.reshape(n, groups, 1)) * rstd.reshape(n, groups, 1)
    by_channel = hat.reshape(n, channels, places)
    flat = grad.reshape(n, channels, places)
    grad_x = None
    if mask[0]:
        inner = _grouped(grad if weight is None else grad * _per_channel(weight, x), n, groups)
        first = mean(backend, inner, [2], True)
        second = mean(backend, inner * hat, [2], True)
        grad_x = (((inner - first) - hat * second) * rstd.reshape(n, groups, 1)).reshape(x.shape)
    grad_weight = backend.sum(flat * by_channel, [0, 2], False) if mask[1] else None
    return grad_x, grad_weight, backend.sum(flat, [0, 2], False) if mask[2] else None
