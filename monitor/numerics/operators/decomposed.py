"""Operators that PyTorch's own decompositions reduce to rows of this table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .rule import Rule

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


def _name(short: str) -> str:
    return f"aten.{short}" if "." in short else f"aten.{short}.default"


def rules() -> dict[str, Rule]:
    """Rows of the operator table for this file."""
    return {_name(short): Rule(kind="decomposed") for short in _DECOMPOSED.split()}


def decomposition(func: Any) -> Callable[..., Any] | None:
    """PyTorch's decomposition of an overload."""
    from torch._decomp import decomposition_table

    found: Callable[..., Any] | None = decomposition_table.get(func)
    return found
