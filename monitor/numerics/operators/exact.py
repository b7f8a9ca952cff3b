"""Operators that run natively because they are exact on every device: data movement, comparisons, single operations."""

from __future__ import annotations

from monitor.numerics.operators.rule import Rule

__all__ = ["rules"]

# Overloads without a name stand for ``.default``.
_EXACT = """
alias detach lift_fresh lift_fresh_copy view _unsafe_view t transpose.int permute expand
slice.Tensor select.int unsqueeze squeeze squeeze.dim squeeze.dims clone cat stack split.Tensor split_with_sizes
unbind.int as_strided diagonal unfold im2col constant_pad_nd flip roll repeat tril triu slice_backward select_backward
unsafe_split.Tensor slice_scatter diagonal_copy view.dtype
empty.memory_format empty_like empty_strided new_empty new_empty_strided zeros zeros_like ones ones_like full full_like
new_zeros new_ones new_full scalar_tensor fill.Scalar fill.Tensor zero eye
where.self masked_fill.Scalar masked_fill.Tensor gather index_select embedding
eq.Scalar eq.Tensor ne.Scalar ne.Tensor lt.Scalar lt.Tensor le.Scalar le.Tensor gt.Scalar gt.Tensor ge.Scalar ge.Tensor
logical_and logical_or logical_not logical_xor bitwise_and.Tensor bitwise_and.Scalar bitwise_or.Tensor bitwise_or.Scalar
bitwise_xor.Tensor bitwise_xor.Scalar bitwise_not isnan isinf isfinite isneginf isposinf all all.dim any any.dim nonzero
is_same_size signbit
"""

_ARITHMETIC = """
mul.Tensor mul.Scalar neg abs leaky_relu threshold_backward floor ceil trunc round sign sgn
"""


def _name(short: str) -> str:
    return f"aten.{short}" if "." in short else f"aten.{short}.default"


def rules() -> dict[str, Rule]:
    """Rows of the operator table for this file."""
    table = {_name(short): Rule(kind="exact") for short in _EXACT.split()}
    table.update({_name(short): Rule(kind="arithmetic") for short in _ARITHMETIC.split()})
    return table
