"""Order-free matrix products: the specification fixes the bits, engines differ in speed only."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from firmware_sim.errors import CallerError
from monitor.numerics.engines import engine_of
from monitor.numerics.exact.bf16 import bf16_matmul, has_two_digits
from monitor.numerics.exact.operands import operand

__all__ = ["matmul"]


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Product of FP32 matrices whose bits depend on no order of additions.

    Specification. Row scale s_i: the largest integer with |RNE(a_ik·2^s_i)| ≤ 0x7F7F7F for all k, 0 for a zero row;
    q_ik = RNE(a_ik·2^s_i); t_j and r_kj likewise for the columns of b; l(q) the lowest balanced base-256 digit.
    V_ij = Σ_k (q_ik·r_kj - l(q_ik)·l(r_kj))/256, an integer, and C_ij = FP32(FP64(V_ij)·2^(8-s_i-t_j)); V = 0 gives +0.
    Where row i or column j is wide, C_ij is instead the correctly rounded dot product. A row is wide when more than
    seven eighths of its non-zero elements have 6·|q| < max|q|: one large element would starve the rest of digits. A NaN
    or an infinity in row i or column j gives 0x7FC00000.

    Law: |C_ij - Σ_k a_ik·b_kj| ≤ K·2^-21·A_i·B_j + ½ulp(C_ij), with A_i = max_k|a_ik| and B_j = max_k|b_kj|,
    wherever C_ij is finite.
    Proof. s_i + 1 would exceed 0x7F7F7F, so A_i·2^(s_i+1) ≥ 0x7F7F7F + ½ and 2^-s_i ≤ A_i·2^-21.994; likewise t_j.
    Write a = (q + δ)·2^-s and b = (r + ε)·2^-t with |δ|, |ε| ≤ ½. Then
    |a·b - q·r·2^(-s-t)| ≤ ½·2^-s·|b| + ½·2^-t·|q|·2^-s, and |q|·2^-s ≤ A + ½·2^-s ≤ A·(1 + 2^-22.9): together at most
    A·B·2^-21.994·(1 + 2^-23.9). The dropped product is at most 2^14·2^(-s-t) ≤ A·B·2^-29.98. Each term is thus off by
    less than A·B·2^-21.98. FP64(V) is off by at most |V|·2^-53, and only beyond K = 32,768; as |V|·2^(8-s-t) is at most
    1.01·K·A·B, this fits into the gap between 2^-21.98 and 2^-21. The last rounding adds ½ulp. A wide element has the
    last term alone.

    Args:
        a: (…, M, K), FP32 (BF16 and FP16 are taken as the FP32 numbers they are), any strides. Large products of two
            BF16 matrices are ``bf16_matmul``.
        b: (…, K, N); leading dimensions broadcast.

    Returns:
        FP32 tensor (…, M, N).

    Raises:
        CallerError: shapes or dtypes that do not fit.
        DeviceError: the device flushes subnormal numbers or computes wrong sums.
    """
    a, b = operand(a, "matmul"), operand(b, "matmul")
    if a.dim() < 2 or b.dim() < 2 or a.shape[-1] != b.shape[-2]:
        raise CallerError(f"matmul can't multiply shapes {tuple(a.shape)} and {tuple(b.shape)}")
    if a.device != b.device:
        raise CallerError(f"matmul operands lie on {a.device} and {b.device}")
    if a.dim() == 2 and b.dim() == 2:
        batch: tuple[int, ...] = ()
    else:
        try:
            batch = np.broadcast_shapes(tuple(a.shape[:-2]), tuple(b.shape[:-2]))
        except ValueError:
            raise CallerError(f"matmul can't broadcast {tuple(a.shape)} with {tuple(b.shape)}") from None
    shape = (*batch, a.shape[-2], b.shape[-1])
    if a.shape[-1] == 0 or 0 in shape:
        return torch.zeros(shape, dtype=torch.float32, device=a.device)
    if b.dim() == 2 and batch:
        return matmul(a.reshape(-1, a.shape[-1]), b).reshape(shape)
    left = a.expand(*batch, *a.shape[-2:]).reshape(-1, *a.shape[-2:]) if batch else a[None]
    right = b.expand(*batch, *b.shape[-2:]).reshape(-1, *b.shape[-2:]) if batch else b[None]
    if has_two_digits(left, right):
        return bf16_matmul(left, right).reshape(shape)
    left, right = left.to(torch.float32), right.to(torch.float32)
    return engine_of(a.device).matmul(left, right).reshape(shape)
