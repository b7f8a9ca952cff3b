"""The operator table: one row for each ATen overload that may run under controlled numerics, with every fact about it.

To add an operator, add its row here, or to ``element_rows`` (``row.Row`` says what the fields mean), its code to the
module of its kind, and a case to the battery (``analysis.bench.battery_cases``).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from monitor.numerics.engines.cpu.fused import activations as fused_activations
from monitor.numerics.engines.cpu.fused import losses as fused_losses
from monitor.numerics.engines.cpu.fused import normalisation as fused_norms
from monitor.numerics.operators import (
    bags,
    bins,
    complex_numbers,
    elementwise,
    fourier,
    indexing,
    linear,
    linear_algebra,
    lists,
    losses,
    normalisation,
    random,
    reductions,
    resampling,
    selections,
    temporal_classification,
    tiles,
    tilings,
    volumes,
)
from monitor.numerics.operators.element_rows import (
    Section,
    arithmetic_rows,
    coded,
    decomposed_rows,
    elementwise_rows,
    exact_rows,
)
from monitor.numerics.operators.row import Row

__all__ = ["operator_table"]


def _reductions() -> Section:
    r, s, free = reductions, selections, functools.partial(coded, formats="any")
    reduced = functools.partial(coded, tile=tiles.reduction)
    return (
        coded("sum", r.sum_over, formats="any"),
        reduced("sum.dim_IntList", r.sum_over, formats="any"),
        coded("mean", r.mean),
        reduced("mean.dim", r.mean),
        reduced("var.correction", r.var),
        reduced("std.correction", r.std),
        reduced("var_mean.correction", r.var_mean),
        coded("norm.Scalar", r.vector_norm),
        reduced("linalg_vector_norm", r.vector_norm),
        reduced("amax", r.extreme(True)),
        reduced("amin", r.extreme(False)),
        coded("max", r.extreme_all(True)),
        coded("min", r.extreme_all(False)),
        coded("aminmax", r.smallest_and_largest),
        coded("histc", r.histogram),
        coded("histogram.bin_ct", bins.histogram),
        coded("histogram.bins_tensor", bins.histogram_of_edges),
        coded("_histogramdd_bin_edges", bins.histogramdd_edges),
        coded("_histogramdd_from_bin_cts", bins.histogramdd),
        coded("_histogramdd_from_bin_tensors", bins.histogramdd_of_edges),
        coded("segment_reduce", bins.segment_reduce),
        coded("_segment_reduce_backward", bins.segment_reduce_backward),
        coded("prod", r.product_of_all),
        coded("prod.dim_int", r.product_along),
        coded("cumprod", r.cumprod),
        coded("norm.ScalarOpt_dim norm.ScalarOpt_dim_dtype", r.norm_along),
        reduced("logsumexp", r.logsumexp, native_if_empty=True),
        reduced("max.dim", r.along(True)),
        reduced("min.dim", r.along(False)),
        reduced("argmax", r.arg(True)),
        reduced("argmin", r.arg(False)),
        coded("sort sort.stable", r.sort),
        coded("topk", r.topk),
        coded("cumsum", r.cumsum),
        free("kthvalue", s.kthvalue),
        free("median.dim", s.median(False)),
        free("nanmedian.dim", s.median(True)),
        free("median", s.median_of_all(False)),
        free("nanmedian", s.median_of_all(True)),
        free("mode", s.mode),
        free("cummax", s.running(True)),
        free("cummin", s.running(False)),
        coded("logcumsumexp", s.logcumsumexp),
        coded("bincount", s.bincount, formats="own"),
        *(coded(name, s.unique(name), formats="own") for name in ("_unique2", "_unique", "unique_dim")),
    )


def _products() -> Section:
    product = functools.partial(coded, native_if_empty=True)
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
        coded("linalg_cholesky_ex", a.cholesky_ex),
        coded("cholesky", a.cholesky),
        coded("cholesky_solve", a.cholesky_solve),
        coded("cholesky_inverse", a.cholesky_inverse),
        coded("linalg_lu_factor_ex", a.lu_factor_ex),
        coded("linalg_lu", a.lu),
        coded("lu_unpack", a.lu_unpack),
        coded("linalg_lu_solve", a.lu_solve),
        coded("_linalg_solve_ex", a.solve_ex),
        coded("linalg_inv_ex", a.inverse_ex),
        coded("linalg_solve_triangular", a.solve_triangular),
        coded("triangular_solve", a.triangular_solve),
        coded("_linalg_det", a.determinant),
        coded("_linalg_slogdet", a.log_determinant),
        coded("linalg_qr", a.qr),
        coded("linalg_householder_product", a.householder_product),
        coded("_linalg_eigh", a.eigh),
        coded("_linalg_svd", a.svd),
        coded("linalg_pinv.atol_rtol_tensor", a.pseudo_inverse),
        coded("linalg_lstsq", a.least_squares),
        coded("linalg_matrix_exp", a.matrix_exponential),
    )


def _complex() -> Section:
    """What only complex numbers have; how other rows take them is in ``complex_numbers.COMPLEX``."""
    c, t = complex_numbers, fourier
    return (
        coded("conj_physical _conj_physical", c.conjugate),
        coded("polar", c.polar),
        coded("_efficientzerotensor", c.zeros, formats="any"),
        coded("_fft_r2c", t.real_to_complex),
        coded("_fft_c2c", t.complex_to_complex),
        coded("_fft_c2r", t.complex_to_real),
    )


def _normalisations() -> Section:
    n, f = normalisation, fused_norms
    line = functools.partial(coded, tile=tiles.lines)
    return (
        line("_softmax", n.softmax, native_if_empty=True, fused=f.softmax),
        line("_log_softmax", n.log_softmax, native_if_empty=True, fused=f.log_softmax),
        line("_softmax_backward_data", n.softmax_backward, fused=f.softmax_slope),
        line("_log_softmax_backward_data", n.log_softmax_backward, fused=f.log_softmax_slope),
        line("_safe_softmax", n.safe_softmax),
        coded("native_group_norm", n.group_norm, typed_by=(0, 1)),
        coded("native_group_norm_backward", n.group_norm_backward, typed_by=(1, 4)),
        coded("native_layer_norm", n.layer_norm, typed_by=(0, 2), fused=f.layer_norm),
        coded(
            "native_layer_norm_backward",
            n.layer_norm_backward,
            typed_by=(1, 5),
            fused=f.layer_norm_slope,
            tile=tiles.layer_norm_slope,
        ),
        coded("native_batch_norm", n.batch_norm, typed_by=(0, 1), writes=(3, 4), fused=f.batch_norm),
        coded("native_batch_norm_backward", n.batch_norm_backward, typed_by=(1, 2), fused=f.batch_norm_slope),
    )


def _indexing() -> Section:
    i = indexing
    pool = fused_losses.max_pool_slope
    return (
        coded("embedding_dense_backward", i.embedding_backward, native_if_empty=True, settled=True),
        coded("scatter_add", i.scatter_add),
        coded("index_add", i.index_add),
        coded("scatter.src", i.scatter_src, formats="own"),
        coded("scatter.value", i.scatter_value, formats="own"),
        coded("index.Tensor _unsafe_index.Tensor", i.index, formats="own"),
        coded("index_put _unsafe_index_put", i.index_put),
        coded("scatter_reduce.two", selections.scatter_reduce),
        coded("index_reduce", selections.index_reduce),
        coded("put", selections.put),
        coded("avg_pool2d", volumes.mean_pool(2)),
        coded("avg_pool2d_backward", volumes.mean_pool_backward(2)),
        coded("avg_pool3d", volumes.mean_pool(3)),
        coded("avg_pool3d_backward", volumes.mean_pool_backward(3)),
        coded("max_pool3d_with_indices", i.max_pool_3d),
        coded("max_pool3d_with_indices_backward", i.largest_backward(3), settled=True),
        coded("adaptive_max_pool3d_backward", i.largest_backward(3), settled=True),
        coded("fractional_max_pool2d", volumes.fractional_largest(2)),
        coded("fractional_max_pool3d", volumes.fractional_largest(3)),
        coded("fractional_max_pool2d_backward", i.largest_backward(2)),
        coded("fractional_max_pool3d_backward", i.largest_backward(3), typed_by=(0,)),
        coded("max_unpool2d", i.unpool(2)),
        coded("max_unpool3d", i.unpool(3)),
        coded("adaptive_max_pool2d", i.adaptive_max_pool(torch.ops.aten.adaptive_max_pool2d.default)),
        coded("adaptive_max_pool3d", i.adaptive_max_pool(torch.ops.aten.adaptive_max_pool3d.default)),
        coded("adaptive_max_pool2d_backward", i.largest_backward(2), settled=True),
        coded("_embedding_bag _embedding_bag_forward_only", bags.bag),
        coded("_embedding_bag_backward", bags.bag_backward, settled=True),
        coded("_embedding_bag_per_sample_weights_backward", bags.bag_weights_backward),
        coded("_adaptive_avg_pool2d_backward", i.adaptive_pool_backward),
        coded("max_pool2d_with_indices", i.max_pool),
        coded("max_pool2d_with_indices_backward", i.largest_backward(2), settled=True, fused=pool),
    )


def _resamplings() -> Section:
    found: list[Iterator[Row]] = []
    for kind, names in _RESAMPLED.items():
        for rank, name in names.items():
            found.append(coded(name, resampling.upsample(kind, rank)))
            found.append(coded(f"{name}_backward", resampling.downsample(kind, rank)))
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
        coded("nll_loss_forward", losses.nll, fused=fused_losses.nll),
        coded("nll_loss_backward", losses.nll_backward, fused=fused_losses.nll_slope, tile=tiles.loss_slope),
        coded("nll_loss2d_forward", losses.nll),
        coded("nll_loss2d_backward", losses.nll_backward),
        coded("mse_loss", losses.mse),
        coded("_ctc_loss _ctc_loss.Tensor", temporal_classification.ctc),
        coded("_ctc_loss_backward _ctc_loss_backward.Tensor", temporal_classification.ctc_backward),
        coded("mse_loss_backward", losses.mse_backward),
        coded("multi_margin_loss_backward", losses.multi_margin_backward),
        coded("_local_scalar_dense", losses.item),
    )


def _random() -> Section:
    r = random
    return (
        coded("uniform", r.uniform),
        coded("normal normal_functional", r.normal),
        coded("normal.Tensor_Tensor normal.Tensor_float normal.float_Tensor", r.normal_of),
        coded("normal.float_float", r.normal_sized),
        coded("exponential", r.exponential),
        coded("geometric", r.geometric),
        coded("cauchy", r.cauchy),
        coded("log_normal", r.log_normal),
        coded("multinomial", r.multinomial),
        coded("_standard_gamma", r.gamma),
        coded("_sample_dirichlet", r.dirichlet),
        coded("rrelu_with_noise", r.leaky_noise, writes=(1,)),
        coded("randint_like", r.randint_like),
        coded("randint_like.low_dtype", r.randint_like_low),
        coded("bernoulli", r.bernoulli),
        coded("bernoulli.p", r.bernoulli_p),
        coded("bernoulli.float", r.bernoulli_p, fused=fused_activations.bernoulli),
        coded("native_dropout", r.dropout, formats="own"),
        coded("native_dropout_backward", r.dropout_backward, formats="own", tile=tiles.elements),
        coded("randint randint.generator", r.randint),
        coded("randint.low randint.low_generator", r.randint_low),
        coded("random.from", r.random_between),
        coded("random.to", r.random_to),
        coded("rand rand.generator", r.rand),
        coded("randn randn.generator", r.randn),
        coded("rand_like", r.rand_like),
        coded("randn_like", r.randn_like),
        coded("randperm randperm.generator", r.randperm),
    )


def _lists() -> Section:
    """Operators over lists of tensors, by what they do with one."""
    e, native = elementwise, lists.native
    return (
        coded("_foreach_norm.Scalar", lists.norms),
        *(
            coded(
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


def _completed(row: Row) -> Row:
    short = row.name.removeprefix("aten.").removesuffix(".default")
    tile, parts = row.tile or tilings.tilings().get(short), row.parts or tilings.PARTS.get(short)
    reason = row.whole or tilings.WHOLE.get(short, "" if tile else "no tile is built")
    return replace(
        row, complex=row.complex or complex_numbers.COMPLEX.get(row.name), tile=tile, parts=parts, whole=reason
    )


@functools.cache
def operator_table() -> dict[str, Row]:
    """Rows by functional overload name, such as ``aten.add.Tensor``; in-place and ``out=`` overloads share them."""
    sections = (
        exact_rows,
        arithmetic_rows,
        decomposed_rows,
        elementwise_rows,
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
    table = {row.name: _completed(row) for row in rows}
    if len(table) != len(rows):
        raise ValueError("an operator has two rows in the operator table")
    if not complex_numbers.COMPLEX.keys() <= table.keys():
        raise ValueError("an operator on complex numbers has no row in the operator table")
    return table
