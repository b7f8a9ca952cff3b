"""Compositions of operators of the table: PyTorch's own, and two that it has for some devices only."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload

from monitor.numerics.operators.row import Code, Row

__all__ = ["composition", "rms_norm", "rms_norm_backward", "weight_norm_backward"]


def rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    """PyTorch's composition for devices without a kernel, used on all."""
    dims = list(range(x.dim() - len(shape), x.dim()))
    added = torch.finfo(x.dtype).eps if eps is None else eps
    inverse = torch.rsqrt(torch.pow(x, 2).mean(dims, keepdim=True) + added)
    normal = x * inverse
    return (normal if weight is None else normal * weight), inverse


def rms_norm_backward(
    grad: Tensor, x: Tensor, shape: Sequence[int], inverse: Tensor, weight: Tensor | None, output_mask: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of that composition, operator by operator as autograd takes them."""
    split = x.dim() - len(shape)
    scaled = grad if weight is None else grad * weight
    slope = (scaled * x).sum(list(range(split, x.dim())), keepdim=True) * -0.5 * inverse.pow(3)
    grad_x = scaled * inverse + torch.div(slope.expand(x.shape), math.prod(shape)) * (x * 2.0)
    grad_weight = None
    if weight is not None and output_mask[1]:
        grad_weight = grad * (x * inverse)
        if split:
            grad_weight = grad_weight.sum(list(range(split)))
    return grad_x if output_mask[0] else None, grad_weight


def weight_norm_backward(grad: Tensor, v: Tensor, g: Tensor, norms: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Gradients of v · g / ‖v‖, the norm over all dimensions but one (Salimans and Kingma 2016, equation 3)."""
    others = [each for each in range(v.dim()) if each != dim % v.dim()]
    along = (grad * v).sum(others, keepdim=True)
    inner = grad - v * torch.div(along, norms * norms)
    return torch.div(g, norms) * inner, torch.div(along, norms)


def composition(row: Row, func: OpOverload) -> Code | None:
    """Composition of an overload of a ``decomposed`` row: the row's own code, or PyTorch's decomposition."""
    from torch._decomp import decomposition_table

    return row.code or decomposition_table.get(func)
