"""Which operators a referee computes in tiles, and why of others it computes all.

Operators that are not named here are in the table with their tile, where many share it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from monitor.numerics.operators import boxes, partial_sums, patches, places, tiles
from monitor.numerics.operators.partial_sums import Reduction
from monitor.numerics.operators.tiles import Tile

__all__ = ["PARTS", "WHOLE", "tilings"]

_TILES: tuple[tuple[Tile, str], ...] = (
    (
        tiles.elements,
        """
        _prelu_kernel _prelu_kernel_backward angle celu deg2rad elu_backward hardshrink hardshrink_backward hardsigmoid
        hardsigmoid_backward hardswish hardswish_backward hardtanh_backward ldexp.Tensor leaky_relu_backward
        log_sigmoid_backward log_sigmoid_forward logaddexp logaddexp2 logit logit_backward mish mish_backward nan_to_num
        rad2deg round.decimals rrelu_with_noise_backward sinc softplus_backward softshrink softshrink_backward
        special_entr special_log_ndtr special_xlog1py xlogy.Tensor binary_cross_entropy
        binary_cross_entropy_with_logits huber_loss smooth_l1_loss soft_margin_loss mse_loss frexp.Tensor complex polar
        conj_physical _conj_physical
        """,
    ),
    (
        places.moved,
        """
        cat stack _chunk_cat constant_pad_nd flip roll repeat tril triu slice_backward select_backward diagonal_backward
        slice_scatter select_scatter diagonal_scatter diagonal_copy alias_copy expand_copy permute_copy squeeze_copy
        squeeze_copy.dim squeeze_copy.dims t_copy transpose_copy.int unbind_copy.int unfold_copy unsqueeze_copy
        view_copy narrow_copy split_copy.Tensor split_with_sizes_copy slice_copy.Tensor select_copy.int diag_embed
        block_diag channel_shuffle rot90 take masked_select masked_scatter pixel_shuffle pixel_unshuffle
        repeat_interleave.Tensor _pack_padded_sequence index.Tensor _unsafe_index.Tensor _unsafe_masked_index
        masked_scatter_backward zeros ones full new_zeros new_ones new_full scalar_tensor eye eye.m max_unpool2d
        max_unpool3d empty.memory_format empty_like empty_strided empty_permuted new_empty new_empty_strided
        """,
    ),
    (places.scattered, "scatter.src scatter.value"),
    (
        places.in_shape,
        """
        uniform normal normal_functional normal.Tensor_Tensor normal.Tensor_float normal.float_Tensor normal.float_float
        exponential geometric cauchy log_normal randint_like randint_like.low_dtype bernoulli bernoulli.p
        bernoulli.float native_dropout randint randint.generator randint.low randint.low_generator random.from random.to
        rand rand.generator randn randn.generator rand_like randn_like randperm randperm.generator linspace
        linspace.Tensor_Tensor linspace.Tensor_Scalar linspace.Scalar_Tensor logspace logspace.Tensor_Tensor
        logspace.Tensor_Scalar logspace.Scalar_Tensor arange arange.start arange.start_step mse_loss_backward
        hann_window hann_window.periodic hamming_window hamming_window.periodic hamming_window.periodic_alpha
        hamming_window.periodic_alpha_beta blackman_window blackman_window.periodic bartlett_window
        bartlett_window.periodic kaiser_window kaiser_window.periodic kaiser_window.beta
        smooth_l1_loss_backward huber_loss_backward binary_cross_entropy_backward soft_margin_loss_backward
        """,
    ),
    (places.rows_added, "embedding_dense_backward"),
    (places.added_by_number, "index_add index_reduce index_copy index_fill.int_Scalar index_fill.int_Tensor"),
    (places.values_put, "index_put _unsafe_index_put"),
    (places.put, "put"),
    (
        tiles.lines,
        """
        sort sort.stable topk cumsum cumprod cummax cummin logcumsumexp glu glu_backward linalg_cross scatter_add
        scatter_reduce.two
        """,
    ),
    (
        tiles.reduction,
        """
        all.dim any.dim any.dims all.dims count_nonzero.dim_IntList prod.dim_int norm.ScalarOpt_dim
        norm.ScalarOpt_dim_dtype kthvalue median.dim nanmedian.dim mode aminmax nansum std_mean.correction
        """,
    ),
    (patches.convolution, "convolution"),
    (patches.convolution_slope, "convolution_backward"),
    (
        boxes.by_channel,
        """
        native_batch_norm native_batch_norm_backward _native_batch_norm_legit _native_batch_norm_legit.no_stats
        _batch_norm_with_update batch_norm_backward
        """,
    ),
    (boxes.by_group, "native_group_norm"),
    (boxes.by_group_slope, "native_group_norm_backward"),
    (boxes.by_row, "native_layer_norm _fused_rms_norm _fused_rms_norm_backward"),
    (
        boxes.by_part(1),
        """
        mv upsample_linear1d upsample_linear1d_backward upsample_nearest1d upsample_nearest1d_backward
        _upsample_nearest_exact1d _upsample_nearest_exact1d_backward reflection_pad1d replication_pad1d
        reflection_pad1d_backward replication_pad1d_backward
        """,
    ),
    (
        boxes.by_part(2),
        """
        avg_pool2d avg_pool2d_backward fractional_max_pool2d fractional_max_pool2d_backward adaptive_max_pool2d
        adaptive_max_pool2d_backward _adaptive_avg_pool2d _adaptive_avg_pool2d_backward max_pool2d_with_indices
        max_pool2d_with_indices_backward upsample_nearest2d upsample_nearest2d_backward _upsample_nearest_exact2d
        _upsample_nearest_exact2d_backward upsample_bilinear2d upsample_bilinear2d_backward upsample_bicubic2d
        upsample_bicubic2d_backward _upsample_bilinear2d_aa _upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa
        _upsample_bicubic2d_aa_backward reflection_pad2d replication_pad2d reflection_pad2d_backward
        replication_pad2d_backward col2im _cdist_forward _cdist_backward _euclidean_dist linalg_cholesky_ex cholesky
        cholesky_solve cholesky_inverse linalg_lu_factor_ex linalg_lu linalg_inv_ex linalg_solve_triangular
        triangular_solve _linalg_det _linalg_slogdet linalg_qr linalg_householder_product
        """,
    ),
    (
        boxes.by_part(3),
        """
        avg_pool3d avg_pool3d_backward max_pool3d_with_indices max_pool3d_with_indices_backward adaptive_max_pool3d
        adaptive_max_pool3d_backward fractional_max_pool3d fractional_max_pool3d_backward _adaptive_avg_pool3d
        _adaptive_avg_pool3d_backward upsample_nearest3d upsample_nearest3d_backward _upsample_nearest_exact3d
        _upsample_nearest_exact3d_backward upsample_trilinear3d upsample_trilinear3d_backward reflection_pad3d
        replication_pad3d reflection_pad3d_backward replication_pad3d_backward im2col grid_sampler_2d
        grid_sampler_2d_backward
        """,
    ),
    (boxes.by_part(4), "grid_sampler_3d grid_sampler_3d_backward"),
)

_PARTED: tuple[tuple[Reduction, str], ...] = (
    (partial_sums.product, "mm bmm addmm baddbmm"),
    (partial_sums.summed, "sum sum.dim_IntList"),
    (partial_sums.averaged, "mean mean.dim"),
    (partial_sums.norm, "norm.Scalar norm.ScalarOpt_dim linalg_vector_norm _foreach_norm.Scalar"),
    (partial_sums.loss, "nll_loss_forward"),
)

PARTS: Mapping[str, Reduction] = {name: parts for parts, names in _PARTED for name in names.split()}
"""By the short name of an overload: what gives an element of FP32 in parts, where a tile would take too much."""

_REASONS: Mapping[str, str] = {
    "each result depends on all elements": """
        sum mean norm.Scalar max min histc histogram.bin_ct histogram.bins_tensor _histogramdd_bin_edges
        _histogramdd_from_bin_cts _histogramdd_from_bin_tensors prod median nanmedian dot vdot nll_loss_forward
        nll_loss2d_forward all any _is_all_true _is_any_true count_nonzero hash_tensor dist trace bincount renorm
        multi_margin_loss multilabel_margin_loss_forward _foreach_norm.Scalar _weight_norm_interface
        _weight_norm_interface_backward
        """,
    "a loss that is reduced depends on all elements": """
        binary_cross_entropy binary_cross_entropy_with_logits huber_loss smooth_l1_loss soft_margin_loss mse_loss
        """,
    "large products of BF16 have outlier places, which all rows and columns decide": "mm bmm addmm baddbmm",
    "it has as many results as the values say": "_unique2 _unique unique_dim unique_consecutive nonzero nonzero_static",
    "each result depends on all elements of a matrix or line": """
        linalg_lu_solve _linalg_solve_ex _linalg_eigh _linalg_svd linalg_pinv.atol_rtol_tensor linalg_lstsq
        linalg_matrix_exp lu_unpack _fft_r2c _fft_c2c _fft_c2r
        """,
    "each result depends on a whole sequence": """
        _ctc_loss _ctc_loss.Tensor _ctc_loss_backward _ctc_loss_backward.Tensor
        """,
    "a dispute reads it in its input's memory": "as_strided as_strided_copy",
    "it writes by absolute places of memory, so that it is not executed": "as_strided_scatter",
    "it has no elements, or one number": """
        alias detach is_same_size _has_same_storage_numel _linalg_check_errors _local_scalar_dense _amp_update_scale
        """,
}

WHOLE: Mapping[str, str] = {name: reason for reason, names in _REASONS.items() for name in names.split()}
"""By the short name of an overload: why all of it is computed, or when."""


@functools.cache
def tilings() -> Mapping[str, Tile]:
    """Tiles by the short name of an overload, such as ``cat`` or ``sort.stable``."""
    return {name: tile for tile, names in _TILES for name in names.split()}
