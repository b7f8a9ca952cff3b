"""How many floating-point operations an operator is: products, decompositions, solvers, transforms, samples.

A product of m·k by k·n is 2mkn. Decompositions and solvers count by Golub and Van Loan, Matrix Computations (4th ed.),
and by LAPACK Working Note 41, appendix C, to the leading orders; transforms as 5 N log2 n for N numbers in lines of n.
Sums of rows of a table and samples of an image count two for each element that is weighed. On complex numbers all but
transforms count four times. Whatever works on each element of what it reads or returns a number of times that no shape
raises counts as none, however much that is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any

__all__ = ["COUNTS", "UNCOUNTED", "per_complex"]

Shapes = Sequence[Sequence[int]]
Count = Callable[[Shapes, Shapes, Any], int]
"""Given the shapes of what it reads and makes, and whether a convolution is transposed or how long a transform is."""


def _matrices(at: int) -> Count:
    """Products whose left factor is the input number `at`: each of its elements meets each column of the other one."""

    def count(inputs: Shapes, outputs: Shapes, transposed: bool) -> int:
        left, right = inputs[at], inputs[at + 1]
        return 2 * prod(left) * (right[-1] if len(right) > 1 else 1)

    return count


def _grouped(inputs: Shapes, outputs: Shapes, transposed: bool) -> int:
    """Products of parts of one matrix with matrices of their own, or of a batch of them."""
    left, right = inputs[0], inputs[1]
    batch = left[0] if len(left) == len(right) == 3 else 1
    return 2 * batch * prod(left[-2:]) * right[-1]


def _convolution(inputs: Shapes, outputs: Shapes, transposed: bool) -> int:
    held, weight = (inputs if transposed else outputs)[0], inputs[1]
    return 2 * prod(held) * prod(weight[1:])


def _convolution_backward(inputs: Shapes, outputs: Shapes, transposed: bool) -> int:
    """Gradients of input and weight are as much as the product itself; that of the bias, of rank 1, is a sum."""
    gradient, held, weight = inputs
    products = sum(len(shape) > 1 for shape in outputs)
    return 2 * prod(held if transposed else gradient) * prod(weight[1:]) * products


def _attention(inputs: Shapes, outputs: Shapes, transposed: bool) -> int:
    """Two products for each query and key, one of them with the values."""
    query, key, value = inputs[:3]
    return 2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _distances(at: int) -> Count:
    """A difference, a power and a sum for each pair of rows and each of their elements."""

    def count(inputs: Shapes, outputs: Shapes, transposed: bool) -> int:
        return 3 * prod((inputs if at else outputs)[0]) * inputs[at][-1]

    return count


def _pairs(inputs: Shapes, outputs: Shapes, transposed: bool) -> int:
    """A difference, a power and a sum for each pair of elements, of two operands that a call spreads and reduces."""
    spread = prod(_broadcast(inputs[0], inputs[1]))
    return 3 * spread if spread > max(map(prod, (*inputs[:2], *outputs))) else 0


def _broadcast(a: Sequence[int], b: Sequence[int]) -> list[int]:
    """The shape over which two are spread."""
    rank = max(len(a), len(b))
    wide = ([1] * (rank - len(each)) + list(each) for each in (a, b))
    return [high if low == 1 else low for low, high in zip(*wide, strict=True)]


def _labels(at: int) -> Count:
    """At most a difference, a comparison and a sum for each two classes of a sample."""

    def count(inputs: Shapes, outputs: Shapes, transposed: bool) -> int:
        return 3 * prod(inputs[at]) * (inputs[at][-1] if inputs[at] else 1)

    return count


def _rows(at: int) -> Count:
    """Products of a matrix that holds a few numbers a row with a table of rows: the indices are input ``at``."""

    def count(inputs: Shapes, outputs: Shapes, transposed: bool) -> int:
        return 2 * prod(inputs[at]) * inputs[0][-1]

    return count


def _combinations(inputs: Shapes, outputs: Shapes, transposed: bool) -> int:
    return 2 * prod(inputs[1]) * prod(inputs[0][1:])


def _samples(taps: int, at: int = 0) -> Count:
    """At most ``taps`` along each dimension of the grid; a gradient of the image and one of the grid are two products.

    Args:
        at: number of the input that is the image; the grid is the next one.
    """

    def count(inputs: Shapes, outputs: Shapes, transposed: bool) -> int:
        *batch, rank = inputs[at + 1]
        corners: int = taps**rank
        return 2 * (at + 1) * corners * inputs[at][1] * prod(batch)

    return count


def _resampled(taps: int, smooth: bool = False, backward: bool = False) -> Count:
    """So many taps along each resampled dimension, and with smoothing as many more as a dimension shrinks."""

    def count(inputs: Shapes, outputs: Shapes, transposed: bool) -> int:
        small, large = (inputs[0], outputs[0]) if not backward else (outputs[0], inputs[0])
        along = 1
        for size, made in zip(small[2:], large[2:], strict=True):
            along *= min(size, taps * max(1, -(-size // max(made, 1)))) if smooth else taps
        return 2 * along * prod(large)

    return count


def _of_matrix(operations: Callable[[int, int], int], at: int = 0) -> Count:
    """What a decomposition takes, given both sizes of each matrix, the larger one first."""

    def count(inputs: Shapes, outputs: Shapes, transposed: bool) -> int:
        *batch, rows, columns = inputs[at]
        return prod(batch) * operations(max(rows, columns), min(rows, columns))

    return count


def _solved(per_number: int, operations: Callable[[int, int], int] = lambda m, n: 0, at: int = 0) -> Count:
    """A decomposition, and for each number of the solution some products along the matrix."""

    def count(inputs: Shapes, outputs: Shapes, transposed: bool) -> int:
        of_matrix = _of_matrix(operations, at)(inputs, outputs, transposed)
        return of_matrix + per_number * inputs[at][-1] * prod(outputs[0])

    return count


def _least_squares(inputs: Shapes, outputs: Shapes, transposed: bool) -> int:
    """A decomposition; then all reflections and a triangle for each right-hand side, in the batch of both operands."""
    rows, columns = inputs[0][-2:]
    m, n = max(rows, columns), min(rows, columns)
    sides = prod(outputs[0]) // max(columns, 1)
    return _of_matrix(_householder)(inputs, outputs, transposed) + (4 * m * n - n * n) * sides


def _reflected(inputs: Shapes, outputs: Shapes, transposed: bool) -> int:
    """Each of the reflections meets each number of the other matrix."""
    return 4 * inputs[1][-1] * prod(inputs[2])


def _lu(m: int, n: int) -> int:
    return m * n * n - n**3 // 3


def _householder(m: int, n: int) -> int:
    return 2 * m * n * n - 2 * n**3 // 3


def _qr(inputs: Shapes, outputs: Shapes, transposed: bool) -> int:
    """The triangle, then each column of the orthogonal factor that is returned."""
    *batch, rows, columns = inputs[0]
    low, made = min(rows, columns), outputs[0][-1]
    factor = 4 * rows * made * low - 2 * (rows + made) * low**2 + 4 * low**3 // 3 if prod(outputs[0]) else 0
    return prod(batch) * (_householder(max(rows, columns), low) + factor)


def _symmetric_eigen(inputs: Shapes, outputs: Shapes, transposed: bool) -> int:
    *batch, size = inputs[0][:-1]
    has_vectors = len(outputs) > 1 and prod(outputs[1]) > 0
    return prod(batch) * (9 * size**3 if has_vectors else 4 * size**3 // 3)


def _singular(inputs: Shapes, outputs: Shapes, transposed: bool) -> int:
    *batch, rows, columns = inputs[0]
    m, n = max(rows, columns), min(rows, columns)
    if not prod(outputs[0]):
        return prod(batch) * (4 * m * n * n - 4 * n**3 // 3)
    is_full = outputs[0][-1] > n
    return prod(batch) * (4 * m * m * n + 8 * m * n * n + 9 * n**3 if is_full else 14 * m * n * n + 8 * n**3)


def _transform(inputs: Shapes, outputs: Shapes, length: int) -> int:
    """Lines of this length; 0 means all dimensions."""
    numbers = max(prod(inputs[0]), prod(outputs[0]))
    return 5 * numbers * max((length or numbers) - 1, 0).bit_length()


def per_complex(operator: str, kinds: Iterable[str]) -> int:
    """How often an operator counts, by its name without overload, on tensors of these types."""
    return 4 if not operator.startswith("_fft_") and any(kind.startswith("complex") for kind in kinds) else 1


_PRODUCTS: dict[str, Count] = {
    "mm": _matrices(0),
    "bmm": _matrices(0),
    "mv": _matrices(0),
    "dot": _matrices(0),
    "vdot": _matrices(0),
    "_grouped_mm": _grouped,
    "addmm": _matrices(1),
    "addmv": _matrices(1),
    "baddbmm": _matrices(1),
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention": _attention,
    "_scaled_dot_product_efficient_attention": _attention,
    "_scaled_dot_product_cudnn_attention": _attention,
}
"""By ATen's name without overload and mark of those in place.

Fused attention occurs outside recorded steps alone; these take its plain operators."""

_BESIDE: dict[str, Count] = {
    "addbmm": _matrices(1),
    "_int_mm": _matrices(0),
    "_scaled_mm": _matrices(0),
    "_cdist_forward": _distances(0),
    "_euclidean_dist": _distances(0),
    "_pdist_forward": _distances(0),
    "_cdist_backward": _distances(1),
    "_pdist_backward": _distances(1),
    "cholesky": _of_matrix(lambda m, n: n**3 // 3),
    "linalg_cholesky_ex": _of_matrix(lambda m, n: n**3 // 3),
    "linalg_ldl_factor_ex": _of_matrix(lambda m, n: n**3 // 3),
    "cholesky_inverse": _of_matrix(lambda m, n: 2 * n**3 // 3),
    "linalg_inv_ex": _of_matrix(lambda m, n: 2 * n**3),
    "_linalg_det": _of_matrix(_lu),
    "_linalg_slogdet": _of_matrix(_lu),
    "linalg_lu": _of_matrix(_lu),
    "linalg_lu_factor_ex": _of_matrix(_lu),
    "geqrf": _of_matrix(_householder),
    "linalg_qr": _qr,
    "linalg_householder_product": _of_matrix(_householder),
    "ormqr": _reflected,
    "_linalg_eigh": _symmetric_eigen,
    "linalg_eig": _of_matrix(lambda m, n: 25 * n**3),
    "linalg_eigvals": _of_matrix(lambda m, n: 10 * n**3),
    "_linalg_eigvals": _of_matrix(lambda m, n: 10 * n**3),
    "_linalg_svd": _singular,
    "linalg_matrix_exp": _of_matrix(lambda m, n: 32 * n**3),
    "linalg_pinv": _of_matrix(lambda m, n: 16 * m * n * n + 8 * n**3),
    "linalg_lstsq": _least_squares,
    "_linalg_solve_ex": _solved(2, _lu),
    "linalg_lu_solve": _solved(2),
    "linalg_ldl_solve": _solved(2),
    "_cholesky_solve_helper": _solved(2, at=1),
    "cholesky_solve": _solved(2, at=1),
    "linalg_solve_triangular": _solved(1),
    "triangular_solve": _solved(1, at=1),
    "_fft_c2c": _transform,
    "_fft_c2r": _transform,
    "_fft_r2c": _transform,
    "dist": _pairs,
    "multilabel_margin_loss_forward": _labels(0),
    "multilabel_margin_loss_backward": _labels(1),
    "_compute_linear_combination": _combinations,
    "_embedding_bag": _rows(1),
    "_embedding_bag_forward_only": _rows(1),
    "_embedding_bag_backward": _rows(1),
    "_embedding_bag_dense_backward": _rows(1),
    "_embedding_bag_per_sample_weights_backward": _rows(2),
    "grid_sampler_2d": _samples(4),
    "grid_sampler_2d_backward": _samples(4, 1),
    "_grid_sampler_2d_cpu_fallback": _samples(2),
    "_grid_sampler_2d_cpu_fallback_backward": _samples(2, 1),
    "grid_sampler_3d": _samples(2),
    "grid_sampler_3d_backward": _samples(2, 1),
}
"""Decompositions, solvers, distances, transforms and samples; an exponential as sixteen terms of its series."""

for _name, _taps in {"linear1d": 2, "bilinear2d": 2, "trilinear3d": 2, "bicubic2d": 4}.items():
    _BESIDE[f"upsample_{_name}"] = _resampled(_taps)
    _BESIDE[f"upsample_{_name}_backward"] = _resampled(_taps, backward=True)
for _name, _taps in {"bilinear2d": 2, "bicubic2d": 4, "lanczos2d": 6}.items():
    _BESIDE[f"_upsample_{_name}_aa"] = _resampled(_taps, smooth=True)
    _BESIDE[f"_upsample_{_name}_aa_backward"] = _resampled(_taps, smooth=True, backward=True)

COUNTS: Mapping[str, Count] = _PRODUCTS | _BESIDE

UNCOUNTED = frozenset(
    {
        "_addmm_activation",
        "_convolution",
        "_dyn_quant_matmul_4bit",
        "_foreach_mm",
        "_native_multi_head_attention",
        "_nnpack_spatial_convolution",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        "_scaled_dot_product_fused_attention_overrideable",
        "_scaled_dot_product_fused_attention_overrideable_backward",
        "_scaled_grouped_mm",
        "_scaled_mm_v2",
        "_slow_conv2d_backward",
        "_slow_conv2d_forward",
        "_sparse_addmm",
        "_sparse_sparse_matmul",
        "_transformer_encoder_layer_fwd",
        "_triton_multi_head_attention",
        "_triton_scaled_dot_attention",
        "_trilinear",
        "_weight_int4pack_mm_for_cpu",
        "_weight_int8pack_mm",
        "conv_depthwise3d",
        "conv_tbc",
        "convolution_backward_overrideable",
        "convolution_overrideable",
        "linear",
        "linear_backward",
        "matmul_backward",
        "mkldnn_convolution",
        "mkldnn_linear",
        "mkldnn_linear_backward",
        "mkldnn_linear_backward_input",
        "mkldnn_linear_backward_weights",
        "mkldnn_rnn_layer",
        "mkldnn_rnn_layer_backward",
        "quantized_gru",
        "quantized_lstm",
        "slow_conv3d_forward",
        "slow_conv_dilated2d",
        "slow_conv_dilated3d",
        "slow_conv_transpose2d",
        "slow_conv_transpose3d",
        "sspaddmm",
    }
)
"""Operators that multiply, and of which nothing counts how often: between steps they are refused."""
