"""Operators that only move values, and operators that make values out of nothing."""

from __future__ import annotations

__all__ = ["FILLS", "LOOKUPS", "MOVES", "SHAPE_ONLY", "ZEROS"]

_MOVES = """
alias detach lift_fresh lift_fresh_copy view _unsafe_view t transpose permute expand slice select unsqueeze squeeze
clone cat stack split split_with_sizes unbind as_strided diagonal diagonal_copy unfold im2col constant_pad_nd flip
roll repeat tril triu slice_scatter select_scatter unsafe_split copy _to_copy pixel_shuffle pixel_unshuffle
slice_backward select_backward view_as_real view_as_complex complex
"""
_LOOKUPS = "index _unsafe_index index_select gather embedding"
_ZEROS = (
    "_efficientzerotensor zeros zeros_like new_zeros zero empty empty_like empty_strided new_empty new_empty_strided"
)
_SHAPE_ONLY = """
ones ones_like new_ones full_like new_full rand rand_like randn randn_like is_same_size normal_functional uniform
random arange eye randint randperm
"""

MOVES = frozenset(_MOVES.split())
"""Which element goes where does not depend on values; zeros may lie between them."""

LOOKUPS = frozenset(_LOOKUPS.split())
"""Which element goes where is read from the other arguments."""

ZEROS = frozenset(_ZEROS.split())
"""What these make is zero; memory without a value reads as zeros."""

SHAPE_ONLY = ZEROS | frozenset(_SHAPE_ONLY.split())
"""What these make depends on a tensor argument's shape at most, never on its values."""

FILLS = SHAPE_ONLY | {"full", "fill", "scalar_tensor"}
"""What these make holds no more than numbers."""
