"""Calls of operators that few models take: copies of views, selections, functions, linear algebra, random draws."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from monitor.numerics.operators.polynomials import POLYNOMIALS

__all__ = ["suite_calls"]

Call = Callable[..., Any]

_FUNCTIONS = """
tan asin acos atan sinh cosh asinh acosh atanh exp2 log2 log10 frac deg2rad rad2deg special_entr i0 special_i1
special_i0e special_i1e special_modified_bessel_i0 special_modified_bessel_i1 special_erfcx erfinv special_log_ndtr
"""
_PAIRS = """
copysign.Tensor heaviside nextafter fmax fmin fmod.Tensor remainder.Tensor floor_divide hypot atan2 ldexp.Tensor
logaddexp2 special_xlog1py soft_margin_loss
"""


def suite_calls(call: Call, x: Tensor, y: Tensor, grid: Tensor) -> None:
    """Make them all.

    Args:
        call: makes one, given its name without its namespace, and its arguments.
        x: special values and ordinary ones, flat.
        y: as many others.
        grid: an ordinary (8, 8) matrix.
    """
    _elementwise(call, x, y)
    _moves(call, grid)
    _selections(call, x, y, grid)
    _compositions(call, grid)
    _pieces(call, grid)
    _linear_algebra(call, grid)
    _random(call, grid)


def _elementwise(call: Call, x: Tensor, y: Tensor) -> None:
    for name in _FUNCTIONS.split():
        call(name, x)
    for name in _PAIRS.split():
        call(name, x, y)
    degrees = (torch.arange(len(x)) % 12).to(x.dtype)
    for name in POLYNOMIALS:
        call(name, x, degrees)
        call(f"{name}.x_scalar", 0.25, degrees)
        call(f"{name}.n_scalar", x, 7)
    for name, args in (
        ("copysign.Scalar", (-1.0,)),
        ("fmod.Scalar", (0.3,)),
        ("remainder.Scalar", (-0.3,)),
        ("floor_divide.Scalar", (0.3,)),
        ("threshold", (0.5, 7.0)),
        ("softshrink", (0.5,)),
        ("hardshrink", (0.5,)),
        ("logit", (0.1,)),
        ("nan_to_num", ()),
        ("round.decimals", ()),
    ):
        call(name, x, *args, **({"decimals": 1} if name == "round.decimals" else {}))
    call("remainder.Scalar_Tensor", 7.5, y)
    for rounding_mode in ("floor", "trunc"):
        call("div.Tensor_mode", x, y, rounding_mode=rounding_mode)
        call("div.Scalar_mode", x, 0.3, rounding_mode=rounding_mode)
    for name in ("softshrink_backward", "hardshrink_backward"):
        call(name, x, y, 0.5)
    call("logit_backward", x, y.sigmoid(), 0.1)
    call("soft_margin_loss_backward", x, y, y, 1)
    for low, high in ((0.1, torch.tensor(0.9)), (torch.tensor(0.1), 0.9), (torch.tensor(0.1), torch.tensor(0.9))):
        kind = "_".join("Tensor" if isinstance(each, Tensor) else "Scalar" for each in (low, high))
        call(f"linspace.{kind}", low, high, 7)
        call(f"logspace.{kind}", low, high, 7)
    for name in ("lgamma", "digamma"):
        call(name, x)
    call("polygamma", 1, x.abs())  # PyTorch's own is wrong at poles
    call("mvlgamma", x.abs() + 2, 2)
    for name in ("bartlett", "blackman", "hamming", "hann", "kaiser"):
        call(f"{name}_window", 13)
        call(f"{name}_window.periodic", 12, False)
    call("hamming_window.periodic_alpha", 13, True, 0.6)
    call("hamming_window.periodic_alpha_beta", 13, True, 0.6, 0.4)
    call("kaiser_window.beta", 13, True, 9.0)
    call("linspace", -0.3, 1.7, 13)
    call("logspace", -0.3, 1.7, 13)


def _moves_of(m: Tensor) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    """Calls that take one tensor first, and their other arguments."""
    return (
        ("alias_copy", ()),
        ("as_strided_copy", ((3, 4), (2, 5))),
        ("expand_copy", ((2, 8, 8),)),
        ("permute_copy", ((1, 0),)),
        ("squeeze_copy", ()),
        ("squeeze_copy.dim", (0,)),
        ("squeeze_copy.dims", ((0, 1),)),
        ("t_copy", ()),
        ("transpose_copy.int", (0, 1)),
        ("unbind_copy.int", (1,)),
        ("unfold_copy", (0, 3, 2)),
        ("unsqueeze_copy", (1,)),
        ("view_copy", ((4, 16),)),
        ("view_copy.dtype", (torch.int32,)),
        ("narrow_copy", (0, 2, 3)),
        ("split_copy.Tensor", (3,)),
        ("split_with_sizes_copy", ((3, 5),)),
        ("slice_copy.Tensor", (0, 1, 7, 2)),
        ("select_copy.int", (0, 2)),
        ("diagonal_scatter", (m[0],)),
        ("as_strided_scatter", (m[:3, :4], (3, 4), (2, 5))),
        ("diag_embed", ()),
        ("channel_shuffle", (2,)),
        ("rot90", (1, (0, 1))),
        ("take", (torch.tensor([3, 60, -1]),)),
        ("masked_select", (m > 0,)),
        ("masked_scatter", (m > 0, m.flip(0))),
        ("masked_scatter_backward", (m > 0, (8, 8))),
        ("index_fill.int_Tensor", (0, torch.tensor([1, 5]), torch.tensor(0.3))),
        ("frexp.Tensor", ()),
        ("_pack_padded_sequence", (torch.tensor([8, 5, 5, 3, 1, 1, 1, 1]), True)),
        ("_is_all_true", ()),
        ("_is_any_true", ()),
        ("any.dims", ((0,),)),
        ("all.dims", ((0,),)),
        ("isin.Tensor_Tensor", (m[0],)),
        ("isin.Tensor_Scalar", (0.5,)),
        ("count_nonzero", ()),
        ("count_nonzero.dim_IntList", ((0,),)),
        ("unique_consecutive", (True, True)),
        ("hash_tensor", ()),
        ("nansum", ()),
        ("trace", ()),
        ("angle", ()),
        ("nonzero_static", ()),
        ("renorm", (2, 0, 1.5)),
    )


def _moves(call: Call, m: Tensor) -> None:
    for name, args in _moves_of(m):
        operand = m.reshape(1, 8, 8, 1) if name == "channel_shuffle" else m > 0 if name.endswith("_true") else m
        call(name, operand, *args, **({"size": 5} if name == "nonzero_static" else {}))
    call("isin.Scalar_Tensor", 0.5, m)
    call("diagonal_backward", m[0], (8, 8), 0, 0, 1)
    call("block_diag", [m, m[:2]])
    call("repeat_interleave.Tensor", torch.tensor([1, 0, 3]))
    call("col2im", m[None, :, :4], (3, 3), (2, 2), (1, 1), (0, 0), (1, 1))
    call("_chunk_cat", [m, m[:2]], 0, 2)
    call("eye.m", 3, 4)
    call("empty_permuted", (0, 3), (1, 0))
    call("_linalg_check_errors", torch.zeros(2, dtype=torch.int32), "linalg.inv", is_matrix=False)
    ends = m[0].sort().values
    for side in (False, True):
        call("searchsorted.Tensor", ends, m, right=side)
        call("searchsorted.Scalar", ends, 0.3, right=side)
        call("bucketize.Tensor", m, ends, right=side)
        call("bucketize.Scalar", 0.3, ends, right=side)
    for rank, lead in ((1, m.reshape(1, 8, 8)), (2, m.reshape(1, 1, 8, 8)), (3, m.reshape(1, 1, 4, 4, 4))):
        pads = (1, 2) * rank
        for kind in ("reflection", "replication"):
            out = call(f"{kind}_pad{rank}d", lead, pads)
            call(f"{kind}_pad{rank}d_backward", out, lead, pads)


def _selections(call: Call, x: Tensor, y: Tensor, m: Tensor) -> None:
    tied = torch.cat([m, m.flip(1), torch.zeros_like(m), torch.full_like(m, -0.0)], 1)
    tied[3, 5] = torch.nan
    for values in (tied, x.reshape(1, -1)):
        call("kthvalue", values, 3, 1)
        for name in ("median.dim", "nanmedian.dim", "mode", "cummax", "cummin"):
            call(name, values, 1)
        for name in ("median", "nanmedian"):
            call(name, values)
        for name, args in (("_unique2", (True, True, True)), ("_unique", (True, True)), ("unique_dim", (1,))):
            call(name, values[:, :40], *args)
        call("logcumsumexp", values, 1)
    places = torch.tensor([[0, 2, 2, 1, 7, 7, 7, 0]]).expand(8, 8)
    for how in ("sum", "prod", "mean", "amax", "amin"):
        for include_self in (True, False):
            call("scatter_reduce.two", m, 0, places, tied[:, 8:16], how, include_self=include_self)
            if how != "sum":
                call("index_reduce", m, 0, places[0], m.flip(0), how, include_self=include_self)
    call("put", m, torch.tensor([3, 3, -1]), m[0, :3])
    call("put", m, torch.tensor([3, 3, -1]), m[0, :3], True)
    call("scatter.src", m, 0, places, m.flip(0))
    call("index_put", m, [torch.tensor([3, 3, 1])], m[:3])
    call("bincount", places.reshape(-1))
    call("bincount", places.reshape(-1), m.reshape(-1))
    call("std_mean.correction", m, [0])


def _compositions(call: Call, m: Tensor) -> None:
    cube = m.reshape(4, 4, 4)
    call("addbmm", m[:4, :4], cube, cube)
    call("linalg_cross", m[:, :3], m[:, 3:6])
    call("dist", m, m.flip(0), 3)
    call("soft_margin_loss", m, m.flip(0))
    for order in (0.0, 1.0, 2.0, 3.0, float("inf")):
        length = call("_cdist_forward", m, m[:3], order, None)
        call("_cdist_backward", length, m, m[:3], order, length)
        length = call("_pdist_forward", m, order)
        call("_pdist_backward", length, m, order, length)
        call("linalg_vector_norm", m, order)
    call("_euclidean_dist", m, m[:3])
    call("_adaptive_avg_pool3d", cube[None], (2, 3, 2))
    call("_adaptive_avg_pool3d_backward", cube[None, :2, :3, :2], cube[None])
    out, index = call("adaptive_max_pool3d", cube[None], (2, 3, 2))
    call("adaptive_max_pool3d_backward", out, cube[None], index)
    call("max_unpool2d", m[:2, :4].reshape(1, 2, 4), torch.tensor([[[0, 5, 5, 9], [15, 3, 2, 1]]]), (4, 4))
    call("max_unpool3d", cube[None, :1, :2, :2], torch.tensor([[[[0, 9], [9, 63]]]]), (4, 4, 4), (2, 2, 2), (0, 0, 0))
    labels = torch.tensor([[0, 3, -1, 5, 0, 0, 0, 0]]).expand(8, 8)
    _, mine = call("multilabel_margin_loss_forward", m, labels, 1)
    call("multilabel_margin_loss_backward", m[0, 0], m, labels, 1, mine)
    _samples(call, m)
    call("_unsafe_masked_index", m, m[:3] > 0, [torch.tensor([0, 2, 1])], 0.5)
    call("_unsafe_masked_index_put_accumulate", m, m[:3] > 0, [torch.tensor([0, 2, 2])], m[:3])
    kept = [m[0].clone(), m[1].abs()]
    call("_native_batch_norm_legit", m, m[2], m[3], *kept, True, 0.1, 1e-5)
    call("_native_batch_norm_legit.no_stats", m, m[2], m[3], True, 0.1, 1e-5)
    out = call("_batch_norm_with_update", m, m[2], m[3], *kept, 0.1, 1e-5)
    call("batch_norm_backward", m, m, m[2], *kept, out[1], out[2], True, 1e-5, [True, True, True], out[3])
    F.conv_transpose2d(m.reshape(1, 4, 4, 4), m[:4].reshape(4, 2, 2, 2), stride=2, output_padding=1)


def _samples(call: Call, m: Tensor) -> None:
    flat, cube, grid = m.reshape(1, 2, 8, 4), m.reshape(1, 2, 4, 4, 2), m.flip(1).reshape(-1)[:60] * 1.5
    for image, places, modes in ((flat, grid.reshape(1, 6, 5, 2), 3), (cube, grid.reshape(1, 2, 5, 2, 3), 2)):
        name = f"grid_sampler_{places.shape[-1]}d"
        for how in itertools.product(range(modes), range(3), (False, True)):
            out = call(name, image, places, *how)
            call(f"{name}_backward", out, image, places, *how, [True, True])
    for align in (False, True):
        call("affine_grid_generator", m[:4, :3].reshape(2, 2, 3), (2, 1, 4, 5), align)
    for kind in ("bilinear", "bicubic"):
        for size in ((3, 7), (11, 2)):
            out = call(f"_upsample_{kind}2d_aa", flat, size, False)
            call(f"_upsample_{kind}2d_aa_backward", out, size, flat.shape, False)


def _pieces(call: Call, m: Tensor) -> None:
    weight, ends = m.abs(), torch.tensor([-1.5, -0.2, 0.4, 1.7])
    for density in (False, True):
        call("histogram.bin_ct", m, 7, weight=weight, density=density)
        call("histogram.bins_tensor", m, ends, density=density)
        call("_histogramdd_from_bin_cts", m[:, :2], (3, 4), weight=weight[:, 0], density=density)
        call("_histogramdd_from_bin_tensors", m[:, :2], (ends, ends), density=density)
    call("_histogramdd_bin_edges", m[:, :2], (3, 4))
    lengths, tied = torch.tensor([3, 0, 5]), torch.where(m.abs() < 0.4, 0.0, m)
    for how in ("sum", "mean", "prod", "max", "min"):
        for initial in (None, 0.3):
            out = call("segment_reduce", tied, how, lengths=lengths, initial=initial)
            call("_segment_reduce_backward", out, out, tied, how, lengths=lengths, initial=initial)
    drawn = m.reshape(-1)[:6].abs() * 0.5
    for rank, image in ((2, m.reshape(1, 1, 8, 8)), (3, m.reshape(1, 1, 4, 4, 4))):
        window, size = (2,) * rank, (2,) * rank
        out, index = call(f"fractional_max_pool{rank}d", image, window, size, drawn[:rank].reshape(1, 1, rank))
        call(f"fractional_max_pool{rank}d_backward", out, image, window, size, index)
    for driver in ("gelsy", "gelss"):
        call("linalg_lstsq", m[:, :3], m[:, 3:5], driver=driver)
    noise = torch.empty_like(m)
    for training in (False, True):
        call("rrelu_with_noise", m, noise, training=training)
    call("rrelu_with_noise_backward", m.flip(0), m, noise, 0.125, 0.3, True, False)


def _linear_algebra(call: Call, m: Tensor) -> None:
    square = torch.stack([m[:4, :4], m[4:, 4:]])
    positive = (square[:, :, None] * square[:, None]).sum(-1) + torch.eye(4) * 0.5
    factor, _ = call("linalg_cholesky_ex", positive)
    call("cholesky", positive, True)
    call("cholesky_solve", square, factor)
    call("cholesky_inverse", factor)
    packed, pivots, _ = call("linalg_lu_factor_ex", square)
    call("linalg_lu", m[:3])
    call("lu_unpack", packed, pivots)
    call("linalg_lu_solve", packed, pivots, square)
    call("_linalg_solve_ex", square, square)
    call("linalg_inv_ex", square)
    call("linalg_solve_triangular", square, square, upper=True)
    call("triangular_solve", square, square)
    for name in ("_linalg_det", "_linalg_slogdet", "linalg_matrix_exp"):
        call(name, square)
    for shape in (m, m[:3], m[:, :3]):
        call("linalg_qr", shape, "complete")
        call("_linalg_svd", shape, True)
        call("linalg_pinv.atol_rtol_tensor", shape)
    call("linalg_householder_product", m[:, :3], m[0, :3])
    call("_linalg_eigh", positive)


def _random(call: Call, m: Tensor) -> None:
    likely = m.abs()
    for name in ("_standard_gamma", "_sample_dirichlet"):
        call(name, likely + 0.05)
    call("multinomial", likely, 3)
    call("multinomial", likely, 20, True)
    for name, args in (("exponential", (1.3,)), ("geometric", (0.3,)), ("cauchy", ()), ("log_normal", ())):
        call(name, m, *args)
    call("randint_like", m, 7)
    call("randint_like.low_dtype", m, -3, 7)
    call("normal.Tensor_Tensor", m, likely)
    call("normal.Tensor_float", m, 0.3)
    call("normal.float_Tensor", 0.3, likely)
    call("normal.float_float", 0.3, 1.2, (5,))
