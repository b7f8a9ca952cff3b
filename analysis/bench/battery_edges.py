"""Calls of every class of operators over two equal matrices, for operands of odd shapes, layouts and values."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from monitor.numerics.arguments import Arguments, Keywords

__all__ = ["EdgeCall", "edge_calls", "layouts"]

EdgeCall = tuple[str, Arguments, Keywords]
"""Operator without its namespace, arguments and keyword arguments."""

_UNARY = """
neg abs relu sqrt reciprocal exp log log1p expm1 tanh erf erfc sigmoid rsqrt sin cos silu gelu floor ceil trunc round
sign leaky_relu elu softplus hardtanh hardswish hardsigmoid mish celu log_sigmoid_forward sinc isnan isinf signbit clone
sum mean norm.Scalar nan_to_num any all
"""
_BINARY = """
add.Tensor sub.Tensor mul.Tensor div.Tensor maximum minimum eq.Tensor lt.Tensor rsub.Tensor clamp_min.Tensor
clamp_max.Tensor sigmoid_backward tanh_backward silu_backward gelu_backward hardswish_backward mish_backward mse_loss
smooth_l1_loss huber_loss binary_cross_entropy_with_logits logaddexp xlogy.Tensor pow.Tensor_Tensor
"""


def _elementwise(x: Tensor, y: Tensor) -> Iterator[EdgeCall]:
    for name in _UNARY.split():
        yield name, (x,), {}
    for name in _BINARY.split():
        yield name, (x, y), {}
    for name, args in (
        ("add.Scalar", (0.1, 0.7)),
        ("mul.Scalar", (0.1,)),
        ("div.Scalar", (3.0,)),
        ("pow.Tensor_Scalar", (1.3,)),
        ("pow.Tensor_Scalar", (-0.5,)),
        ("pow.Tensor_Scalar", (3,)),
        ("clamp", (-1.0, 1.0)),
        ("threshold_backward", (y, 0)),
        ("lerp.Scalar", (y, 0.3)),
        ("lerp.Tensor", (y, y)),
    ):
        yield name, (x, *args), {}
    yield "add.Tensor", (x, y), {"alpha": 0.3}
    yield "addcmul", (x, y, x), {"value": 0.3}
    yield "addcdiv", (x, y, x), {"value": -0.3}
    yield "where.self", (x > y, x, y), {}
    yield "_foreach_add.List", ([x, y], [y, x]), {}
    yield "_foreach_norm.Scalar", ([x, y], 2), {}
    yield "_foreach_addcmul.Scalar", ([x], [y], [x], 0.3), {}


def _rows(x: Tensor, y: Tensor) -> Iterator[EdgeCall]:
    """Operators along a dimension."""
    for dim in (0, 1):
        for name in ("sum.dim_IntList", "mean.dim", "var.correction", "std.correction", "amax", "amin", "logsumexp"):
            yield name, (x, [dim]), {}
        for name in ("max.dim", "min.dim", "argmax", "sort", "cumsum"):
            yield name, (x, dim), {}
        yield "linalg_vector_norm", (x, 2, [dim]), {}
        yield "topk", (x, min(2, x.shape[dim]), dim), {}
        for name in ("_softmax", "_log_softmax"):
            yield name, (x, dim, False), {}
        yield "_softmax_backward_data", (x, y, dim, torch.float32), {}
        yield "_log_softmax_backward_data", (x, y, dim, torch.float32), {}
    columns = x.shape[1]
    yield "native_layer_norm", (x, [columns], y[0] if len(y) else None, None, 1e-5), {}
    if columns:
        yield "native_batch_norm", (x, y[0] if len(y) else None, None, None, None, True, 0.1, 1e-5), {}


def _products(x: Tensor, y: Tensor) -> Iterator[EdgeCall]:
    rows = x.shape[0]
    yield "mm", (x, y.t()), {}
    yield "mm", (x.t(), y), {}
    yield "addmm", (y[:, 0] if y.shape[1] else y.new_ones(rows), x, y.t()), {"beta": 0.5, "alpha": 1.5}
    yield "bmm", (x.expand(2, *x.shape), y.t().expand(2, *y.t().shape)), {}
    yield "baddbmm", (x.new_ones(2, rows, rows), x.expand(2, *x.shape), y.t().expand(2, *y.t().shape)), {"alpha": 1.5}
    yield "mv", (x, y[0] if len(y) else y.new_ones(x.shape[1])), {}
    yield "dot", (x.reshape(-1), y.reshape(-1)), {}
    if x.numel():
        image, filters = x[None, None], y[:1, :1].expand(2, 1, 1, 1)
        yield "convolution", (image, filters, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1), {}
        yield "avg_pool2d", (image, [1, 1]), {}
        yield "max_pool2d_with_indices", (image, [1, 1]), {}


def _indexed(x: Tensor, y: Tensor) -> Iterator[EdgeCall]:
    """Operators that gather and scatter; every second row goes to row 0."""
    index = torch.arange(x.shape[0]) % 2
    if x.shape[0] >= 2:
        yield "index_add", (x, 0, index, y), {}
        yield "index_put", (x, [index], y, True), {}
        yield "scatter_add", (x, 0, index[:, None].expand(x.shape), y), {}
        yield "index_select", (x, 0, index), {}
        yield "index.Tensor", (x, [index]), {}
        yield "gather", (x, 0, index[:, None].expand(x.shape)), {}
    yield "embedding_dense_backward", (x, index, 3, -1, False), {}
    if x.shape[1] >= 2:
        yield "nll_loss_forward", (x, index, None, 1, -100), {}
        yield "nll_loss_forward", (x, index, None, 2, 0), {}
    yield "tril", (x,), {}
    yield "cat", ([x, y],), {}


def edge_calls(x: Tensor, y: Tensor) -> Iterator[EdgeCall]:
    """Calls over FP32 matrices of one shape; those on matrices without elements included."""
    yield from _elementwise(x, y)
    yield from _rows(x, y)
    yield from _products(x, y)
    yield from _indexed(x, y)


def layouts(x: Tensor) -> dict[str, Tensor]:
    """The same matrix in memory of other strides."""
    spread = x.new_full((2 * x.shape[0], 2 * x.shape[1]), 7.0)
    spread[::2, ::2] = x
    return {"columns": x.t().contiguous().t(), "strided": spread[::2, ::2]}
