"""Rows of operators that move data or work on each element by itself; and how rows are written."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from monitor.numerics.engines.cpu.fused import activations as fused_activations
from monitor.numerics.engines.cpu.fused import pointwise as fused
from monitor.numerics.operators import (
    compositions,
    division,
    elementwise,
    limits,
    polynomials,
    sampling,
    tiles,
    windows,
)
from monitor.numerics.operators.row import Code, Kind, Row

__all__ = ["Section", "arithmetic_rows", "coded", "decomposed_rows", "elementwise_rows", "exact_rows", "rows_of"]


Section = tuple[Iterator[Row], ...]


def _name(short: str) -> str:
    return f"aten.{short}" if "." in short else f"aten.{short}.default"


def rows_of(names: str, kind: Kind, **facts: Any) -> Iterator[Row]:
    """Rows of these overloads, those without a name being ``.default``; all share the facts."""
    return (Row(name=_name(short), kind=kind, **facts) for short in names.split())


def coded(names: str, code: Code, **facts: Any) -> Iterator[Row]:
    return rows_of(names, "implemented", code=code, **facts)


def exact_rows() -> Section:
    """Data movement, comparisons, single operations: exact on every device."""
    views = """
        view _unsafe_view t permute expand slice.Tensor select.int unsqueeze squeeze squeeze.dim squeeze.dims
        split.Tensor split_with_sizes unbind.int unsafe_split.Tensor diagonal unfold
    """
    movement = """
        cat stack as_strided
        im2col constant_pad_nd flip roll repeat tril triu slice_backward select_backward
        slice_scatter diagonal_copy view.dtype zeros ones full new_zeros new_ones
        new_full scalar_tensor eye nonzero is_same_size _has_same_storage_numel
        alias_copy as_strided_copy expand_copy permute_copy squeeze_copy squeeze_copy.dim
        squeeze_copy.dims t_copy transpose_copy.int unbind_copy.int unfold_copy unsqueeze_copy
        view_copy view_copy.dtype narrow_copy split_copy.Tensor split_with_sizes_copy slice_copy.Tensor select_copy.int
        diagonal_scatter as_strided_scatter diag_embed diagonal_backward block_diag channel_shuffle rot90 take eye.m
        masked_select masked_scatter index_fill.int_Tensor reflection_pad1d reflection_pad2d reflection_pad3d
        replication_pad1d replication_pad2d replication_pad3d _chunk_cat frexp.Tensor _linalg_check_errors
        repeat_interleave.Tensor nonzero_static view_as_real view_as_complex complex _pack_padded_sequence
    """
    pointwise = """
        lift_fresh lift_fresh_copy clone zeros_like ones_like full_like fill.Scalar fill.Tensor zero where.self
        masked_fill.Scalar masked_fill.Tensor
        eq.Scalar eq.Tensor ne.Scalar ne.Tensor lt.Scalar lt.Tensor le.Scalar le.Tensor gt.Scalar gt.Tensor ge.Scalar
        ge.Tensor logical_and logical_or logical_not logical_xor bitwise_and.Tensor bitwise_and.Scalar bitwise_or.Tensor
        bitwise_or.Scalar bitwise_xor.Tensor bitwise_xor.Scalar bitwise_not isnan isinf isfinite isneginf isposinf
        signbit
    """
    logic = """
        all all.dim any any.dim any.dims all.dims _is_all_true _is_any_true isin.Tensor_Tensor isin.Tensor_Scalar
        isin.Scalar_Tensor count_nonzero count_nonzero.dim_IntList searchsorted.Tensor searchsorted.Scalar
        bucketize.Tensor bucketize.Scalar unique_consecutive hash_tensor
    """
    return (
        rows_of("alias detach detach_", "exact", counted=False),
        rows_of(
            "empty.memory_format empty_like empty_strided empty_permuted new_empty new_empty_strided",
            "exact",
            unset=True,
        ),
        rows_of(movement + logic, "exact"),
        rows_of(pointwise, "exact", tile=tiles.elements),
        rows_of(views, "exact", tile=tiles.view),
        rows_of("transpose.int", "exact", in_place="aten.transpose_.default", tile=tiles.view),
        rows_of("gather", "exact", tile=tiles.gathered),
        rows_of("index_select", "exact", tile=tiles.selected),
        rows_of("embedding", "exact", tile=tiles.rows_by_number),
    )


def arithmetic_rows() -> Section:
    return (
        rows_of(
            "leaky_relu floor ceil trunc round sign sgn frac copysign.Tensor copysign.Scalar heaviside nextafter "
            "threshold",
            "arithmetic",
            tile=tiles.elements,
        ),
        rows_of("threshold_backward neg abs", "arithmetic", fused=fused.native(), tile=tiles.elements),
        rows_of("mul.Tensor mul.Scalar", "arithmetic", fused=fused.binary("mul"), tile=tiles.elements),
    )


def decomposed_rows() -> Section:
    by_pytorch = """
        binary_cross_entropy_with_logits binary_cross_entropy binary_cross_entropy_backward smooth_l1_loss
        smooth_l1_loss_backward huber_loss huber_loss_backward xlogy.Tensor elu_backward softplus_backward
        leaky_relu_backward hardtanh_backward hardswish hardswish_backward hardsigmoid hardsigmoid_backward mish
        mish_backward log_sigmoid_forward log_sigmoid_backward glu glu_backward _adaptive_avg_pool2d pixel_shuffle addr
        _prelu_kernel _prelu_kernel_backward pixel_unshuffle _weight_norm_interface multi_margin_loss
        addmv celu logaddexp unfold_backward select_scatter nan_to_num sinc
        std_mean.correction nansum deg2rad rad2deg trace logit logit_backward softshrink hardshrink
        soft_margin_loss soft_margin_loss_backward
        logaddexp2 linalg_cross dist round.decimals
        _native_batch_norm_legit _native_batch_norm_legit.no_stats _batch_norm_with_update batch_norm_backward
        reflection_pad1d_backward
        reflection_pad2d_backward reflection_pad3d_backward special_entr special_xlog1py
        _unsafe_masked_index_put_accumulate special_log_ndtr rrelu_with_noise_backward affine_grid_generator mvlgamma
    """
    return (
        rows_of("_fused_rms_norm", "decomposed", code=compositions.rms_norm),
        rows_of("_fused_rms_norm_backward", "decomposed", code=compositions.rms_norm_backward),
        rows_of(by_pytorch, "decomposed"),
        rows_of("ldexp.Tensor", "decomposed", in_place="aten.ldexp_.default"),
        rows_of("_weight_norm_interface_backward", "decomposed", code=compositions.weight_norm_backward),
        rows_of("addbmm", "decomposed", code=compositions.addbmm),
        rows_of("angle", "decomposed", code=compositions.angle),
        rows_of("index_copy", "decomposed", code=compositions.index_copy),
        rows_of("index_fill.int_Scalar", "decomposed", code=compositions.index_fill),
        rows_of("_unsafe_masked_index", "decomposed", code=compositions.masked_index),
        rows_of("col2im", "decomposed", code=compositions.from_columns),
        rows_of("renorm", "decomposed", code=compositions.renorm),
        rows_of("grid_sampler_2d grid_sampler_3d", "decomposed", code=sampling.grid_sample),
        rows_of("grid_sampler_2d_backward grid_sampler_3d_backward", "decomposed", code=sampling.grid_sample_backward),
        rows_of("softshrink_backward hardshrink_backward", "decomposed", code=compositions.shrink_backward),
        rows_of("masked_scatter_backward", "decomposed", code=compositions.masked_scatter_backward),
        rows_of("multilabel_margin_loss_forward", "decomposed", code=compositions.multilabel_margin),
        rows_of("multilabel_margin_loss_backward", "decomposed", code=compositions.multilabel_margin_backward),
        rows_of("_amp_update_scale", "decomposed", code=compositions.next_scale),
        rows_of("_adaptive_avg_pool3d", "decomposed", code=compositions.adaptive_average_3d),
        rows_of("_adaptive_avg_pool3d_backward", "decomposed", code=compositions.adaptive_average_3d_backward),
        rows_of("_cdist_forward _euclidean_dist", "decomposed", code=compositions.distances),
        rows_of("_cdist_backward", "decomposed", code=compositions.distances_backward),
        rows_of("_pdist_forward", "decomposed", code=compositions.own_distances),
        rows_of("_pdist_backward", "decomposed", code=compositions.own_distances_backward),
        rows_of(
            "replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward",
            "decomposed",
            code=compositions.replication_backward,
        ),
    )


_FUNCTIONS = """
log1p expm1 erfc rsqrt sin cos tan asin acos atan sinh cosh asinh acosh atanh exp2 log2 log10 i0 special_i0e special_i1
special_i1e special_erfcx erfinv lgamma digamma
"""


_WINDOWS = {
    each.__name__: each for each in (windows.hann, windows.hamming, windows.blackman, windows.bartlett, windows.kaiser)
}


def elementwise_rows() -> Section:
    e, code = elementwise, functools.partial(coded, tile=tiles.elements)
    free, made = functools.partial(code, formats="any"), functools.partial(coded, formats="any")
    return (
        free("add.Tensor add.Scalar", e.add, fused=fused.total),
        free("sub.Tensor sub.Scalar", e.sub, fused=fused.binary("sub")),
        free("rsub.Scalar", e.rsub, fused=fused.from_constant),
        free("rsub.Tensor", e.rsub),
        free("div.Tensor div.Scalar", e.div, fused=fused.binary("div")),
        free("div.Tensor_mode div.Scalar_mode floor_divide.Scalar", division.quotient_towards),
        free("floor_divide", division.quotient_towards, in_place="aten.floor_divide_.Tensor"),
        free("remainder.Scalar remainder.Tensor remainder.Scalar_Tensor", division.remainder),
        free("fmod.Scalar fmod.Tensor", division.fmod),
        free("fmax", e.extreme_number(True)),
        free("fmin", e.extreme_number(False)),
        code("hypot", e.hypot),
        code("atan2", e.angle_of),
        made("linspace linspace.Tensor_Tensor linspace.Tensor_Scalar linspace.Scalar_Tensor", e.linspace),
        made("logspace logspace.Tensor_Tensor logspace.Tensor_Scalar logspace.Scalar_Tensor", e.logspace),
        *(made(f"{name}_window {name}_window.periodic", code) for name, code in _WINDOWS.items()),
        made("hamming_window.periodic_alpha hamming_window.periodic_alpha_beta", windows.hamming),
        made("kaiser_window.beta", windows.kaiser),
        free("reciprocal", e.reciprocal, fused=fused.unary("constant_over", 1.0)),
        code("sqrt", e.sqrt, fused=fused.unary("sqrt")),
        code("lerp.Scalar", e.lerp, fused=fused.lerp),
        code("lerp.Tensor", e.lerp),
        code("addcmul", e.addcmul, fused=fused.with_product("addcmul")),
        code("addcdiv", e.addcdiv, fused=fused.with_product("addcdiv")),
        code("pow.Tensor_Scalar", e.power, in_place="aten.pow_.Scalar", fused=fused.square),
        code("pow.Tensor_Tensor", e.power_of_tensor, in_place="aten.pow_.Tensor"),
        code("pow.Scalar", e.power_of_constant),
        free("maximum", e.ordered(True)),
        free("minimum", e.ordered(False)),
        free("__rshift__.Scalar", e.integer("__rshift__.Scalar")),
        made("arange arange.start arange.start_step", e.arange),
        code("_to_copy", e.cast, formats="own"),
        code("copy", e.copy, formats="own", fused=fused.copy),
        *(code(short, e.function(short), settled=True) for short in ("exp", "log", "tanh", "erf", "sigmoid", "silu")),
        *(code(short, e.function(short)) for short in _FUNCTIONS.split()),
        code("polygamma", e.polygamma),
        code("special_modified_bessel_i0", e.function("i0")),
        code("special_modified_bessel_i1", e.function("special_i1")),
        *(code(f"{short} {short}.x_scalar {short}.n_scalar", it) for short, it in polynomials.POLYNOMIALS.items()),
        code("gelu", e.gelu, settled=True),
        code("gelu_backward", e.gelu_backward, fused=fused_activations.gelu_slope),
        code("silu_backward", e.silu_backward, fused=fused_activations.silu_slope),
        code("sigmoid_backward", e.sigmoid_backward, fused=fused.slope("sigmoid_slope")),
        code("tanh_backward", e.tanh_backward, fused=fused.slope("tanh_slope")),
        code("elu", e.elu),
        code("softplus", e.softplus),
        free("relu", limits.relu, fused=fused.native("both")),
        free("clamp clamp.Tensor clamp_min clamp_min.Tensor", limits.clamp),
        free("clamp_max clamp_max.Tensor", limits.clamp_max),
        free("hardtanh", limits.hardtanh),
    )
