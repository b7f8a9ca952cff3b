"""Loss functions that ATen keeps whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from monitor.numerics.backend import Backend
from monitor.numerics.errors import UnsupportedOperator
from monitor.numerics.kernels.bits import canonical_nan
from monitor.numerics.operators.elementwise import Number, quotient, rsub

__all__ = ["item", "mse", "mse_backward", "multi_margin_backward", "nll", "nll_backward"]

_NONE, _MEAN = 0, 1


def _target_weights(x: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Class index that is safe to gather, and the weight of each sample (0 where ignored)."""
    kept = target != ignore_index
    safe = torch.where(kept, target, torch.zeros_like(target))
    if bool(((safe < 0) | (safe >= x.shape[1 if x.dim() > 1 else 0])).any()):
        raise IndexError("target is outside the classes")
    weights = torch.ones(target.shape, dtype=x.dtype, device=x.device) if weight is None else weight[safe]
    return safe, torch.where(kept, weights, torch.zeros_like(weights))


def nll(
    backend: Backend, x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    single = x.dim() == 1 and target.dim() == 0
    if x.dim() == 1:
        x, target = x[None], target.reshape(1)
    safe, weights = _target_weights(x, target, weight, ignore_index)
    picked = -torch.gather(x, 1, safe.unsqueeze(1)).squeeze(1) * weights
    picked = torch.where(weights == 0, torch.zeros_like(picked), picked)
    if reduction == _NONE:
        return (picked[0] if single else picked), x.new_zeros(())
    dims = list(range(picked.dim()))
    total, mass = backend.sum(picked, dims, False), backend.sum(weights, dims, False)
    return (torch.div(total, mass) if reduction == _MEAN else total), mass


def nll_backward(
    backend: Backend,
    grad: Tensor,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    mass: Tensor,
) -> Tensor:
    """Zeros but for each sample's own class; NaNs are canonical."""
    shape = x.shape
    if x.dim() == 1:
        x, target = x[None], target.reshape(1)
    safe, weights = _target_weights(x, target, weight, ignore_index)
    share = torch.div(grad, mass) if reduction == _MEAN else grad
    value = torch.where(weights == 0, torch.zeros_like(weights), -(share * weights))
    canonical_nan(value)
    return torch.zeros_like(x).scatter_(1, safe.unsqueeze(1), value.unsqueeze(1)).reshape(shape)


def mse(backend: Backend, x: Tensor, target: Tensor, reduction: int = _MEAN) -> Tensor:
    rest = x - target
    squares = rest * rest
    if reduction == _NONE:
        return squares
    total = backend.sum(squares, list(range(squares.dim())), False) if squares.dim() else squares
    return quotient(total, squares.numel()) if reduction == _MEAN else total


def mse_backward(_: Backend, grad: Tensor, x: Tensor, target: Tensor, reduction: int) -> Tensor:
    slope = (x - target) * 2.0
    if reduction == _MEAN:
        slope = quotient(slope, x.numel())
    return slope * grad


def multi_margin_backward(
    backend: Backend,
    grad: Tensor,
    x: Tensor,
    target: Tensor,
    p: Number,
    margin: Number,
    weight: Tensor | None = None,
    reduction: int = _MEAN,
) -> Tensor:
    """Each class that comes within the margin of a sample's own is pushed away, and that one by their sum."""
    rows, target = (x, target) if x.dim() > 1 else (x.reshape(1, -1), target.reshape(1))
    own, weights = _target_weights(rows, target, weight, -1)
    column = own.unsqueeze(1)
    short = rsub(backend, torch.gather(rows, 1, column), margin) + rows
    slope = torch.ones_like(short) if p == 1 else short * 2.0
    if weight is not None:
        slope = slope * weights.unsqueeze(1)
    count = rows.numel() if reduction == _MEAN else rows.shape[1]
    slope = torch.where(short > 0, quotient(slope, count), torch.zeros_like(slope)).scatter_(1, column, 0.0)
    slope = slope.scatter_(1, column, -backend.sum(slope, [1], True))
    return (slope * grad.reshape(-1, 1)).reshape(x.shape)


def item(_: Backend, x: Tensor) -> Any:
    raise UnsupportedOperator(
        "aten._local_scalar_dense", "a program that is replayed must not copy a value to Python, as `.item()` does"
    )
