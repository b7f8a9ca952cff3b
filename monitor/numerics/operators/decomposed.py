"""Operators that are reduced to rows of this table, most of them by PyTorch's own decompositions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from monitor.numerics.operators.rule import Rule

__all__ = ["decomposition", "rules"]

_DECOMPOSED = """
binary_cross_entropy_with_logits binary_cross_entropy binary_cross_entropy_backward
smooth_l1_loss smooth_l1_loss_backward huber_loss huber_loss_backward
xlogy.Tensor elu_backward softplus_backward leaky_relu_backward hardtanh_backward hardswish hardswish_backward
hardsigmoid hardsigmoid_backward mish mish_backward log_sigmoid_forward log_sigmoid_backward glu glu_backward
_adaptive_avg_pool2d pixel_shuffle addr addmv celu logaddexp unfold_backward
select_scatter index_copy index_fill.int_Scalar
nan_to_num sinc
"""


def _rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    """What torch composes where a device has no kernel for it; here for those that have."""
    dims = list(range(x.dim() - len(shape), x.dim()))
    added = torch.finfo(x.dtype).eps if eps is None else eps
    inverse = torch.rsqrt(torch.pow(x, 2).mean(dims, keepdim=True) + added)
    normal = x * inverse
    return (normal if weight is None else normal * weight), inverse


def _rms_norm_backward(
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


_OWN: dict[str, Callable[..., Any]] = {
    "aten._fused_rms_norm.default": _rms_norm,
    "aten._fused_rms_norm_backward.default": _rms_norm_backward,
}


def _name(short: str) -> str:
    return f"aten.{short}" if "." in short else f"aten.{short}.default"


def rules() -> dict[str, Rule]:
    """Rows of the operator table for this file."""
    return {name: Rule(kind="decomposed") for name in (*map(_name, _DECOMPOSED.split()), *_OWN)}


def decomposition(func: Any) -> Callable[..., Any] | None:
    """The decomposition of an overload: this file's, or PyTorch's."""
    from torch._decomp import decomposition_table

    return _OWN.get(str(func)) or decomposition_table.get(func)
