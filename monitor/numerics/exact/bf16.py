"""The order-free product of BF16 matrices: two digits a side where FP32's has three."""

from __future__ import annotations

import torch
from torch import Tensor

from monitor.numerics.engines import engine_of
from monitor.numerics.reference.bf16 import MOST_TERMS

__all__ = ["bf16_matmul", "has_two_digits"]

_LEAST_WORK = 1 << 21


def has_two_digits(a: Tensor, b: Tensor) -> bool:
    """Whether this product has the specification below: BF16 on both sides, and large enough to gain by it.

    It is decided by types and shapes alone: M·N·K from 2^21 on, of each matrix of a batch, and K up to 2^22.
    """
    if a.dtype != torch.bfloat16 or b.dtype != torch.bfloat16:
        return False
    m, k = a.shape[-2:]
    return m * k * b.shape[-1] >= _LEAST_WORK and k <= MOST_TERMS


def bf16_matmul(a: Tensor, b: Tensor) -> Tensor:
    """FP32 (B, M, N), the product of BF16 a (B, M, K) and b (B, K, N), whose bits depend on no order of additions.

    Specification, for each matrix. Place k of K is set apart where the bits of max_i|a_ik| are at least 512 above
    those of the (c+1)-th largest such maximum, about sixteenfold, c = min(⌊K/64⌋, 512); likewise for the rows of b.
    None is where a or b holds a number that is not finite.
    Over the other places: row scale s_i is the largest integer with |RNE(a_ik·2^s_i)| ≤ 127·256 for all k, 0 for a zero
    row; q_ik = RNE(a_ik·2^s_i) = 255·h_ik + l_ik with |l_ik| ≤ 127; t_j and r_kj likewise for the columns of b. The
    density of a row is ⌊16·Σ_k h_ik²/n_i⌋, n_i being how many of its elements are not zero; it is DENSE where none is.
    V_ij = Σ_k q_ik·r_kj, less Σ_k l(q_ik)·l(r_kj) where the densities of row i and column j multiply to THIN or more.
    Over the places set apart: u_ik and w_kj are a and b rounded to 2^-21 of the next power of two above the largest
    of the row or column, and E_ij = Σ u_ik·w_kj.
    C_ij = FP32(FP64(V_ij·2^(-s_i-t_j) + E_ij)). Where the density of row i or column j is below SPARSE, C_ij is instead
    the correctly rounded dot product over all places. A NaN or an infinity in row i or column j gives 0x7FC00000.
    Digits are of base 255, not 256: those of -q are those of q negated, so that what is dropped has no bias.

    Law: |C_ij - Σ_k a_ik·b_kj| ≤ K·2^-12·A_i·B_j + |S|·2^-19·A'_i·B'_j + ulp(C_ij), A_i and B_j being the largest
    magnitudes of row and column over the places not set apart, A'_i and B'_j over the |S| ones set apart.
    Proof. s_i + 1 would exceed 32,512, so A_i·2^(s_i+1) ≥ 32,512.5 and 2^-s_i ≤ A_i·2^-13.98; likewise t_j. Rounding
    a and b to q and r moves a term by at most ½·2^-s_i·B_j + ½·2^-t_j·A_i·(1 + 2^-14.9) ≤ A_i·B_j·2^-13.97, and the
    product of low digits by at most 127²·2^(-s_i-t_j) ≤ A_i·B_j·2^-13.98: together less than A_i·B_j·2^-12.9. V and E
    are exact in FP64: |V| ≤ 2^22·32,512² < 2^53, and E adds at most 2·512 products below 2^42 on one grid. Elements
    set apart move by at most half their grid, 2^-21·A'_i. The one addition in FP64 and the last rounding give the rest.

    Args:
        a: (B, M, K), BF16, any strides, K at most 2^22.
        b: (B, K, N).

    Raises:
        DeviceError: the device flushes subnormal numbers or computes wrong sums.
    """
    return engine_of(a.device).bf16_matmul(a, b)
