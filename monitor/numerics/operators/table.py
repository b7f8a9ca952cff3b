"""The operator table: one row for each ATen overload that may run under controlled numerics, with every fact about it.

To add an operator, add its row here (``row.Row`` says what the fields mean), its code to the module of its kind, and a
case to the battery (``analysis.bench.battery_cases``).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from monitor.numerics.engines.cpu.fused import activations as fused_activations
from monitor.numerics.engines.cpu.fused import losses as fused_losses
from monitor.numerics.engines.cpu.fused import normalisation as fused_norms
from monitor.numerics.engines.cpu.fused import pointwise as fused
from monitor.numerics.operators import (
    bags,
    bins,
    complex_numbers,
    compositions,
    division,
    elementwise,
    fourier,
    indexing,
    limits,
    linear,
    linear_algebra,
    lists,
    losses,
    normalisation,
    polynomials,
    random,
    reductions,
    resampling,
    sampling,
    selections,
    temporal_classification,
    tiles,
    volumes,
)
from monitor.numerics.operators.row import Code, Kind, Row

__all__ = ["operator_table"]

Section = tuple[Iterator[Row], ...]


def _name(short: str) -> str:
    return f"aten.{short}" if "." in short else f"aten.{short}.default"


def _rows(names: str, kind: Kind, **facts: Any) -> Iterator[Row]:
    """Rows of these overloads, those without a name being ``.default``; all share the facts."""
    return (Row(name=_name(short), kind=kind, **facts) for short in names.split())


def _code(names: str, code: Code, **facts: Any) -> Iterator[Row]:
    return _rows(names, "implemented", code=code, **facts)


def _exact() -> Section:
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
        _rows("alias detach", "exact", counted=False),
        _rows(
            "empty.memory_format empty_like empty_strided empty_permuted new_empty new_empty_strided",
            "exact",
            unset=True,
        ),
        _rows(movement + logic, "exact"),
        _rows(pointwise, "exact", tile=tiles.elements),
        _rows(views, "exact", tile=tiles.view),
        _rows("transpose.int", "exact", in_place="aten.transpose_.default", tile=tiles.view),
        _rows("gather", "exact", tile=tiles.gathered),
        _rows("index_select", "exact", tile=tiles.selected),
        _rows("embedding", "exact", tile=tiles.rows_by_number),
    )


def _arithmetic() -> Section:
    return (
        _rows(
            "leaky_relu floor ceil trunc round sign sgn frac copysign.Tensor copysign.Scalar heaviside nextafter "
            "threshold",
            "arithmetic",
            tile=tiles.elements,
        ),
        _rows("threshold_backward neg abs", "arithmetic", fused=fused.native(), tile=tiles.elements),
        _rows("mul.Tensor mul.Scalar", "arithmetic", fused=fused.binary("mul"), tile=tiles.elements),
    )


def _decomposed() -> Section:
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
        _unsafe_masked_index_put_accumulate special_log_ndtr rrelu_with_noise_backward affine_grid_generator
    """
    return (
        _rows("_fused_rms_norm", "decomposed", code=compositions.rms_norm),
        _rows("_fused_rms_norm_backward", "decomposed", code=compositions.rms_norm_backward),
        _rows(by_pytorch, "decomposed"),
        _rows("ldexp.Tensor", "decomposed", in_place="aten.ldexp_.default"),
        _rows("_weight_norm_interface_backward", "decomposed", code=compositions.weight_norm_backward),
        _rows("addbmm", "decomposed", code=compositions.addbmm),
        _rows("angle", "decomposed", code=compositions.angle),
        _rows("index_copy", "decomposed", code=compositions.index_copy),
        _rows("index_fill.int_Scalar", "decomposed", code=compositions.index_fill),
        _rows("_unsafe_masked_index", "decomposed", code=compositions.masked_index),
        _rows("col2im", "decomposed", code=compositions.from_columns),
        _rows("renorm", "decomposed", code=compositions.renorm),
        _rows("grid_sampler_2d grid_sampler_3d", "decomposed", code=sampling.grid_sample),
        _rows("grid_sampler_2d_backward grid_sampler_3d_backward", "decomposed", code=sampling.grid_sample_backward),
        _rows("softshrink_backward hardshrink_backward", "decomposed", code=compositions.shrink_backward),
        _rows("masked_scatter_backward", "decomposed", code=compositions.masked_scatter_backward),
        _rows("multilabel_margin_loss_forward", "decomposed", code=compositions.multilabel_margin),
        _rows("multilabel_margin_loss_backward", "decomposed", code=compositions.multilabel_margin_backward),
        _rows("_amp_update_scale", "decomposed", code=compositions.next_scale),
        _rows("_adaptive_avg_pool3d", "decomposed", code=compositions.adaptive_average_3d),
        _rows("_adaptive_avg_pool3d_backward", "decomposed", code=compositions.adaptive_average_3d_backward),
        _rows("_cdist_forward _euclidean_dist", "decomposed", code=compositions.distances),
        _rows("_cdist_backward", "decomposed", code=compositions.distances_backward),
        _rows("_pdist_forward", "decomposed", code=compositions.own_distances),
        _rows("_pdist_backward", "decomposed", code=compositions.own_distances_backward),
        _rows(
            "replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward",
            "decomposed",
            code=compositions.replication_backward,
        ),
    )


_FUNCTIONS = """
log1p expm1 erfc rsqrt sin cos tan asin acos atan sinh cosh asinh acosh atanh exp2 log2 log10 i0 special_i0e special_i1
special_i1e special_erfcx erfinv
"""


def _elementwise() -> Section:
    e, code = elementwise, functools.partial(_code, tile=tiles.elements)
    free, made = functools.partial(code, formats="any"), functools.partial(_code, formats="any")
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


def _reductions() -> Section:
    r, s, free = reductions, selections, functools.partial(_code, formats="any")
    reduced = functools.partial(_code, tile=tiles.reduction)
    return (
        _code("sum", r.sum_over, formats="any"),
        reduced("sum.dim_IntList", r.sum_over, formats="any"),
        _code("mean", r.mean),
        reduced("mean.dim", r.mean),
        reduced("var.correction", r.var),
        reduced("std.correction", r.std),
        reduced("var_mean.correction", r.var_mean),
        _code("norm.Scalar", r.vector_norm),
        reduced("linalg_vector_norm", r.vector_norm),
        reduced("amax", r.extreme(True)),
        reduced("amin", r.extreme(False)),
        _code("max", r.extreme_all(True)),
        _code("min", r.extreme_all(False)),
        _code("aminmax", r.smallest_and_largest),
        _code("histc", r.histogram),
        _code("histogram.bin_ct", bins.histogram),
        _code("histogram.bins_tensor", bins.histogram_of_edges),
        _code("_histogramdd_bin_edges", bins.histogramdd_edges),
        _code("_histogramdd_from_bin_cts", bins.histogramdd),
        _code("_histogramdd_from_bin_tensors", bins.histogramdd_of_edges),
        _code("segment_reduce", bins.segment_reduce),
        _code("_segment_reduce_backward", bins.segment_reduce_backward),
        _code("prod", r.product_of_all),
        _code("prod.dim_int", r.product_along),
        _code("cumprod", r.cumprod),
        _code("norm.ScalarOpt_dim norm.ScalarOpt_dim_dtype", r.norm_along),
        reduced("logsumexp", r.logsumexp, native_if_empty=True),
        reduced("max.dim", r.along(True)),
        reduced("min.dim", r.along(False)),
        reduced("argmax", r.arg(True)),
        reduced("argmin", r.arg(False)),
        _code("sort sort.stable", r.sort),
        _code("topk", r.topk),
        _code("cumsum", r.cumsum),
        free("kthvalue", s.kthvalue),
        free("median.dim", s.median(False)),
        free("nanmedian.dim", s.median(True)),
        free("median", s.median_of_all(False)),
        free("nanmedian", s.median_of_all(True)),
        free("mode", s.mode),
        free("cummax", s.running(True)),
        free("cummin", s.running(False)),
        _code("logcumsumexp", s.logcumsumexp),
        _code("bincount", s.bincount, formats="own"),
        *(_code(name, s.unique(name), formats="own") for name in ("_unique2", "_unique", "unique_dim")),
    )


def _products() -> Section:
    product = functools.partial(_code, native_if_empty=True)
    tiled = functools.partial(product, has_two_digits=True, tile=tiles.matrix_product)
    return (
        tiled("mm bmm", linear.product, factors=(0, 1), settled=True),
        tiled("addmm", linear.addmm, factors=(1, 2), fused=fused_activations.addmm),
        tiled("baddbmm", linear.baddbmm, factors=(1, 2)),
        product("_grouped_mm", linear.grouped, factors=(0, 1), settled=True),
        product("mv", linear.mv, factors=(0, 1)),
        product("dot vdot", linear.dot, factors=(0, 1)),
        product("convolution", linear.convolution, factors=(0, 1)),
        product("convolution_backward", linear.convolution_backward, factors=(0, 1, 2)),
    )


def _linear_algebra() -> Section:
    a = linear_algebra
    return (
        _code("linalg_cholesky_ex", a.cholesky_ex),
        _code("cholesky", a.cholesky),
        _code("cholesky_solve", a.cholesky_solve),
        _code("cholesky_inverse", a.cholesky_inverse),
        _code("linalg_lu_factor_ex", a.lu_factor_ex),
        _code("linalg_lu", a.lu),
        _code("lu_unpack", a.lu_unpack),
        _code("linalg_lu_solve", a.lu_solve),
        _code("_linalg_solve_ex", a.solve_ex),
        _code("linalg_inv_ex", a.inverse_ex),
        _code("linalg_solve_triangular", a.solve_triangular),
        _code("triangular_solve", a.triangular_solve),
        _code("_linalg_det", a.determinant),
        _code("_linalg_slogdet", a.log_determinant),
        _code("linalg_qr", a.qr),
        _code("linalg_householder_product", a.householder_product),
        _code("_linalg_eigh", a.eigh),
        _code("_linalg_svd", a.svd),
        _code("linalg_pinv.atol_rtol_tensor", a.pseudo_inverse),
        _code("linalg_lstsq", a.least_squares),
        _code("linalg_matrix_exp", a.matrix_exponential),
    )


def _complex() -> Section:
    """What only complex numbers have; how other rows take them is in ``complex_numbers.COMPLEX``."""
    c, t = complex_numbers, fourier
    return (
        _code("conj_physical _conj_physical", c.conjugate),
        _code("polar", c.polar),
        _code("_efficientzerotensor", c.zeros, formats="any"),
        _code("_fft_r2c", t.real_to_complex),
        _code("_fft_c2c", t.complex_to_complex),
        _code("_fft_c2r", t.complex_to_real),
    )


def _normalisations() -> Section:
    n, f = normalisation, fused_norms
    line = functools.partial(_code, tile=tiles.lines)
    return (
        line("_softmax", n.softmax, native_if_empty=True, fused=f.softmax),
        line("_log_softmax", n.log_softmax, native_if_empty=True, fused=f.log_softmax),
        line("_softmax_backward_data", n.softmax_backward, fused=f.softmax_slope),
        line("_log_softmax_backward_data", n.log_softmax_backward, fused=f.log_softmax_slope),
        line("_safe_softmax", n.safe_softmax),
        _code("native_group_norm", n.group_norm, typed_by=(0, 1)),
        _code("native_group_norm_backward", n.group_norm_backward, typed_by=(1, 4)),
        _code("native_layer_norm", n.layer_norm, typed_by=(0, 2), fused=f.layer_norm, tile=tiles.layer_norm),
        _code(
            "native_layer_norm_backward",
            n.layer_norm_backward,
            typed_by=(1, 5),
            fused=f.layer_norm_slope,
            tile=tiles.layer_norm_slope,
        ),
        _code("native_batch_norm", n.batch_norm, typed_by=(0, 1), writes=(3, 4), fused=f.batch_norm),
        _code("native_batch_norm_backward", n.batch_norm_backward, typed_by=(1, 2), fused=f.batch_norm_slope),
    )


def _indexing() -> Section:
    i = indexing
    pool = fused_losses.max_pool_slope
    return (
        _code("embedding_dense_backward", i.embedding_backward, native_if_empty=True, settled=True),
        _code("scatter_add", i.scatter_add),
        _code("index_add", i.index_add),
        _code("scatter.src", i.scatter_src, formats="own"),
        _code("scatter.value", i.scatter_value, formats="own"),
        _code("index.Tensor _unsafe_index.Tensor", i.index, formats="own"),
        _code("index_put _unsafe_index_put", i.index_put),
        _code("scatter_reduce.two", selections.scatter_reduce),
        _code("index_reduce", selections.index_reduce),
        _code("put", selections.put),
        _code("avg_pool2d", volumes.mean_pool(2)),
        _code("avg_pool2d_backward", volumes.mean_pool_backward(2)),
        _code("avg_pool3d", volumes.mean_pool(3)),
        _code("avg_pool3d_backward", volumes.mean_pool_backward(3)),
        _code("max_pool3d_with_indices", i.max_pool_3d),
        _code("max_pool3d_with_indices_backward", i.largest_backward(3), settled=True),
        _code("adaptive_max_pool3d_backward", i.largest_backward(3), settled=True),
        _code("fractional_max_pool2d", volumes.fractional_largest(2)),
        _code("fractional_max_pool3d", volumes.fractional_largest(3)),
        _code("fractional_max_pool2d_backward", i.largest_backward(2)),
        _code("fractional_max_pool3d_backward", i.largest_backward(3), typed_by=(0,)),
        _code("max_unpool2d", i.unpool(2)),
        _code("max_unpool3d", i.unpool(3)),
        _code("adaptive_max_pool2d", i.adaptive_max_pool(torch.ops.aten.adaptive_max_pool2d.default)),
        _code("adaptive_max_pool3d", i.adaptive_max_pool(torch.ops.aten.adaptive_max_pool3d.default)),
        _code("adaptive_max_pool2d_backward", i.largest_backward(2), settled=True),
        _code("_embedding_bag _embedding_bag_forward_only", bags.bag),
        _code("_embedding_bag_backward", bags.bag_backward, settled=True),
        _code("_embedding_bag_per_sample_weights_backward", bags.bag_weights_backward),
        _code("_adaptive_avg_pool2d_backward", i.adaptive_pool_backward),
        _code("max_pool2d_with_indices", i.max_pool),
        _code("max_pool2d_with_indices_backward", i.largest_backward(2), settled=True, fused=pool),
    )


def _resamplings() -> Section:
    found: list[Iterator[Row]] = []
    for kind, names in _RESAMPLED.items():
        for rank, name in names.items():
            found.append(_code(name, resampling.upsample(kind, rank)))
            found.append(_code(f"{name}_backward", resampling.downsample(kind, rank)))
    return tuple(found)


_RESAMPLED: Mapping[resampling.Kind, Mapping[int, str]] = {
    "nearest": {1: "upsample_nearest1d", 2: "upsample_nearest2d", 3: "upsample_nearest3d"},
    "nearest exact": {
        1: "_upsample_nearest_exact1d",
        2: "_upsample_nearest_exact2d",
        3: "_upsample_nearest_exact3d",
    },
    "linear": {1: "upsample_linear1d", 2: "upsample_bilinear2d", 3: "upsample_trilinear3d"},
    "cubic": {2: "upsample_bicubic2d"},
    "linear smooth": {2: "_upsample_bilinear2d_aa"},
    "cubic smooth": {2: "_upsample_bicubic2d_aa"},
}


def _losses() -> Section:
    return (
        _code("nll_loss_forward", losses.nll, fused=fused_losses.nll),
        _code("nll_loss_backward", losses.nll_backward, fused=fused_losses.nll_slope, tile=tiles.loss_slope),
        _code("nll_loss2d_forward", losses.nll),
        _code("nll_loss2d_backward", losses.nll_backward),
        _code("mse_loss", losses.mse),
        _code("_ctc_loss _ctc_loss.Tensor", temporal_classification.ctc),
        _code("_ctc_loss_backward _ctc_loss_backward.Tensor", temporal_classification.ctc_backward),
        _code("mse_loss_backward", losses.mse_backward),
        _code("multi_margin_loss_backward", losses.multi_margin_backward),
        _code("_local_scalar_dense", losses.item),
    )


def _random() -> Section:
    r = random
    return (
        _code("uniform", r.uniform),
        _code("normal normal_functional", r.normal),
        _code("normal.Tensor_Tensor normal.Tensor_float normal.float_Tensor", r.normal_of),
        _code("normal.float_float", r.normal_sized),
        _code("exponential", r.exponential),
        _code("geometric", r.geometric),
        _code("cauchy", r.cauchy),
        _code("log_normal", r.log_normal),
        _code("multinomial", r.multinomial),
        _code("_standard_gamma", r.gamma),
        _code("_sample_dirichlet", r.dirichlet),
        _code("rrelu_with_noise", r.leaky_noise, writes=(1,)),
        _code("randint_like", r.randint_like),
        _code("randint_like.low_dtype", r.randint_like_low),
        _code("bernoulli", r.bernoulli),
        _code("bernoulli.p", r.bernoulli_p),
        _code("bernoulli.float", r.bernoulli_p, fused=fused_activations.bernoulli),
        _code("native_dropout", r.dropout, formats="own"),
        _code("native_dropout_backward", r.dropout_backward, formats="own", tile=tiles.elements),
        _code("randint randint.generator", r.randint),
        _code("randint.low randint.low_generator", r.randint_low),
        _code("random.from", r.random_between),
        _code("random.to", r.random_to),
        _code("rand rand.generator", r.rand),
        _code("randn randn.generator", r.randn),
        _code("rand_like", r.rand_like),
        _code("randn_like", r.randn_like),
        _code("randperm randperm.generator", r.randperm),
    )


def _lists() -> Section:
    """Operators over lists of tensors, by what they do with one."""
    e, native = elementwise, lists.native
    return (
        _code("_foreach_norm.Scalar", lists.norms),
        *(
            _code(
                " ".join(f"_foreach_{name}.{o}" for o in overloads.split()),
                lists.each(name, code),
                tile=tiles.list_elements,
            )
            for name, overloads, code in (
                ("add", "List Scalar ScalarList Tensor", e.add),
                ("sub", "List Scalar ScalarList", e.sub),
                ("mul", "List Scalar ScalarList Tensor", native(torch.mul)),
                ("div", "List Scalar ScalarList Tensor", e.div),
                ("maximum", "List", e.ordered(True)),
                ("minimum", "List", e.ordered(False)),
                ("clamp_min", "Scalar", native(torch.clamp_min)),
                ("clamp_max", "Scalar", native(torch.clamp_max)),
                ("lerp", "List Scalar ScalarList", e.lerp),
                ("addcmul", "Scalar ScalarList Tensor", e.addcmul),
                ("addcdiv", "Scalar ScalarList Tensor", e.addcdiv),
                ("pow", "Scalar", e.power),
                ("sqrt", "default", e.sqrt),
                ("rsqrt", "default", e.function("rsqrt")),
                ("neg", "default", native(torch.neg)),
                ("sign", "default", native(torch.sign)),
                ("abs", "default", native(torch.abs)),
                ("reciprocal", "default", e.reciprocal),
                ("exp", "default", e.function("exp")),
                ("copy", "default", e.copy),
                ("zero", "default", native(torch.zeros_like)),
            )
        ),
    )


@functools.cache
def operator_table() -> dict[str, Row]:
    """Rows by functional overload name, such as ``aten.add.Tensor``; in-place and ``out=`` overloads share them."""
    sections = (
        _exact,
        _arithmetic,
        _decomposed,
        _elementwise,
        _reductions,
        _products,
        _linear_algebra,
        _complex,
        _normalisations,
    )
    rows = [
        row
        for section in (*sections, _indexing, _resamplings, _losses, _random, _lists)
        for group in section()
        for row in group
    ]
    table = {row.name: replace(row, complex=complex_numbers.COMPLEX.get(row.name)) for row in rows}
    if len(table) != len(rows):
        raise ValueError("an operator has two rows")
    if not complex_numbers.COMPLEX.keys() <= table.keys():
        raise ValueError("an operator on complex numbers has no row")
    return table
