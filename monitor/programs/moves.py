"""Operators that only move values: what they return are elements of their first tensor argument, or of several."""

from __future__ import annotations

__all__ = ["FILLS", "LOOKUPS", "MOVES", "SHAPE_ONLY", "ZEROS"]

MOVES = frozenset(
    """
    alias detach lift_fresh lift_fresh_copy view _unsafe_view t transpose permute expand slice select unsqueeze squeeze
    clone cat stack split split_with_sizes unbind as_strided diagonal diagonal_copy unfold im2col constant_pad_nd flip
    roll repeat tril triu slice_scatter select_scatter unsafe_split copy _to_copy pixel_shuffle slice_backward select_backward
    """.split()
)
"""Which element goes where does not depend on values; zeros may stand between them."""

LOOKUPS = frozenset("index _unsafe_index index_select gather embedding".split())
"""Which element goes where is read from the other arguments."""

ZEROS = frozenset("zeros zeros_like new_zeros zero empty empty_like empty_strided new_empty new_empty_strided".split())
"""What these make is zero; memory without a value reads as zeros."""

SHAPE_ONLY = ZEROS | frozenset(
    """
    ones ones_like new_ones full_like new_full rand rand_like randn randn_like is_same_size normal_functional uniform
    random arange eye randint randperm
    """.split()
)
"""What these make depends on a tensor argument's shape at most, never on its values."""

FILLS = SHAPE_ONLY | frozenset("full fill scalar_tensor".split())
