"""Direct forms of normalisations and activations for the ``exact`` backend: one kernel instead of many operators.

Each gives the bits of its row in the operator table, whose code serves wherever a form declines or a kernel leaves a
rounding undecided.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._ops import OpOverload

from monitor.numerics.backend import Backend, draw_key
from monitor.numerics.engines.cpu.exact.philox import fill_mask
from monitor.numerics.engines.cpu.fused import norm_kernels as _norm_kernels
from monitor.numerics.engines.cpu.fused import softmax_kernels as _softmax_kernels
from monitor.numerics.engines.cpu.fused.elementwise import (
    add_row_in_place,
    canonical_in_place,
    fresh,
    in_place,
    is_plain,
)
from monitor.numerics.engines.cpu.fused.losses import LOSS_MAKERS
from monitor.numerics.engines.cpu.fused.pointwise import Direct, elementwise_forms
from monitor.numerics.exact.backend import ExactBackend
from monitor.numerics.kernels.workers import run_pieces
from monitor.numerics.operators import normalisation

__all__ = ["direct_forms"]

_aten = torch.ops.aten
_EXP_WORK = 16
"""Elements of an addition that take as long as one of an exponential."""


def _plain_or_none(x: Tensor | None, shape: Sequence[int] | None = None) -> bool:
    return x is None or (is_plain(x) and (shape is None or tuple(x.shape) == tuple(shape)))


def _at(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _last(x: Tensor, dim: int) -> bool:
    """Whether `dim` is the last dimension of `x`, which has elements."""
    return x.dim() > 0 and x.numel() > 0 and dim in (-1, x.dim() - 1)


def _softmax(backend: ExactBackend, logarithm: bool) -> Direct:
    kernel = _softmax_kernels.log_softmax_rows if logarithm else _softmax_kernels.softmax_rows
    row = normalisation.log_softmax if logarithm else normalisation.softmax

    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, dim, to_float = args
        if kwargs or to_float or not is_plain(x) or not _last(x, dim):
            return NotImplemented
        out = x.new_empty(x.shape)
        width = x.shape[-1]
        rows = x.numel() // width
        undecided = np.empty(rows, np.bool_)
        run_pieces(kernel, rows, x.numel() * _EXP_WORK, x.data_ptr(), width, out.data_ptr(), undecided)
        if undecided.any():
            places = torch.from_numpy(np.flatnonzero(undecided))
            replaced = row(backend.uncounted(), x.view(rows, width)[places], 1)
            out.view(rows, width)[places] = canonical_in_place(replaced)
        backend.count(x.numel() + (2 * rows if logarithm else rows))
        return out

    return call


def _softmax_slope(backend: ExactBackend, logarithm: bool) -> Direct:
    kernel = _softmax_kernels.log_softmax_slope_rows if logarithm else _softmax_kernels.softmax_slope_rows
    row: Any = normalisation.log_softmax_backward if logarithm else normalisation.softmax_backward

    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        grad, y, dim, dtype = args
        if kwargs or dtype is not torch.float32 or not is_plain(grad) or not is_plain(y) or not _last(y, dim):
            return NotImplemented
        if grad.shape != y.shape:
            return NotImplemented
        out = y.new_empty(y.shape)
        width = y.shape[-1]
        rows = y.numel() // width
        undecided = np.empty(rows, np.bool_)
        work = y.numel() * (_EXP_WORK if logarithm else 2)
        run_pieces(kernel, rows, work, grad.data_ptr(), y.data_ptr(), width, out.data_ptr(), undecided)
        if undecided.any():
            places = torch.from_numpy(np.flatnonzero(undecided))
            parts = (value.view(rows, width)[places] for value in (grad, y))
            replaced = row(backend.uncounted(), *parts, 1, torch.float32)
            out.view(rows, width)[places] = canonical_in_place(replaced)
        backend.count(y.numel() + rows if logarithm else rows)
        return out

    return call


def _layer_norm(backend: ExactBackend) -> Direct:
    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, shape, weight, bias, eps = args
        if kwargs or not is_plain(x) or x.numel() == 0 or tuple(x.shape[x.dim() - len(shape) :]) != tuple(shape):
            return NotImplemented
        if not _plain_or_none(weight, shape) or not _plain_or_none(bias, shape):
            return NotImplemented
        width = math.prod(shape)
        rows = x.numel() // width
        outer = (*x.shape[: x.dim() - len(shape)], *(1,) * len(shape))
        out, centre, scale = x.new_empty(x.shape), x.new_empty(outer), x.new_empty(outer)
        addresses = (x.data_ptr(), width, _at(weight), _at(bias), eps, *map(_at, (out, centre, scale)))
        if any(run_pieces(_norm_kernels.layer_norm_rows, rows, 4 * x.numel(), *addresses)):
            return NotImplemented
        backend.count(2 * rows)
        return out, centre, scale

    return call


def _layer_norm_slope(backend: ExactBackend) -> Direct:
    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        grad, x, shape, centre, scale, weight, _, mask = args
        if kwargs or not all(map(is_plain, (grad, x, centre, scale))) or grad.shape != x.shape or x.numel() == 0:
            return NotImplemented
        if tuple(x.shape[x.dim() - len(shape) :]) != tuple(shape):
            return NotImplemented
        width = math.prod(shape)
        rows = x.numel() // width
        # Without outer dimensions there is nothing to sum, and even a negative zero passes through.
        if len(shape) == x.dim() or centre.numel() != rows or scale.numel() != rows:
            return NotImplemented
        if not _plain_or_none(weight, shape):
            return NotImplemented
        undecided = 0
        grad_x = grad_weight = grad_bias = None
        if mask[0]:
            grad_x = x.new_empty(x.shape)
            where = (*map(_at, (grad, x)), width, *map(_at, (centre, scale, weight, grad_x)))
            undecided += sum(run_pieces(_norm_kernels.layer_norm_slope_rows, rows, 4 * x.numel(), *where))
        if mask[1] or mask[2]:
            grad_weight, grad_bias = x.new_empty(tuple(shape)), x.new_empty(tuple(shape))
            where = (*map(_at, (grad, x)), rows, width, *map(_at, (centre, scale, grad_weight, grad_bias)))
            undecided += sum(run_pieces(_norm_kernels.layer_norm_slope_columns, width, 4 * x.numel(), *where))
        if undecided:
            return NotImplemented
        backend.count(2 * rows * mask[0] + width * mask[1] + width * mask[2])
        return grad_x, grad_weight if mask[1] else None, grad_bias if mask[2] else None

    return call


def _blend(running: Tensor, new: Tensor, momentum: float) -> None:
    kept = fresh("mul_constant", running, None, None, 1.0 - momentum)
    running.copy_(in_place("add", kept, fresh("mul_constant", new, None, None, momentum)))


def _batch_norm(backend: ExactBackend) -> Direct:
    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, weight, bias, running_mean, running_var, training, momentum, eps = args
        if kwargs or not training or not is_plain(x) or x.dim() < 2 or x.numel() == 0:
            return NotImplemented
        samples, channels = x.shape[:2]
        if not all(_plain_or_none(v, (channels,)) for v in (weight, bias, running_mean, running_var)):
            return NotImplemented
        count = x.numel() // channels
        out = x.new_empty(x.shape)
        centre, variance, scale = (x.new_empty((channels,)) for _ in range(3))
        sizes = (samples, channels, count // samples)
        where = (x.data_ptr(), *sizes, _at(weight), _at(bias), eps, *map(_at, (out, centre, variance, scale)))
        if any(run_pieces(_norm_kernels.batch_norm_channels, channels, 4 * x.numel(), *where)):
            return NotImplemented
        if running_mean is not None and running_var is not None:
            scaled = in_place("mul_constant", variance, None, None, float(count))
            unbiased = in_place("div_constant", scaled, None, None, float(max(count - 1, 0)))
            _blend(running_mean, centre, momentum)
            _blend(running_var, unbiased, momentum)
        backend.count(2 * channels)
        return out, centre, scale

    return call


def _batch_norm_slope(backend: ExactBackend) -> Direct:
    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        grad, x, weight, _, _, centre, scale, training, _, mask = args
        if kwargs or not training or not all(map(is_plain, (grad, x, centre, scale))) or grad.shape != x.shape:
            return NotImplemented
        if x.dim() < 2 or x.numel() == 0 or not all(_plain_or_none(v, x.shape[1:2]) for v in (weight, centre, scale)):
            return NotImplemented
        samples, channels = x.shape[:2]
        factor = scale if weight is None else fresh("mul", scale, weight)
        grad_x = x.new_empty(x.shape) if mask[0] else None
        grad_weight, grad_bias = x.new_empty((channels,)), x.new_empty((channels,))
        sizes = (samples, channels, x.numel() // (samples * channels))
        results = (grad_x, grad_weight, grad_bias)
        where = (grad.data_ptr(), x.data_ptr(), *sizes, *map(_at, (centre, scale, factor, *results)))
        if any(run_pieces(_norm_kernels.batch_norm_slope_channels, channels, 4 * x.numel(), *where)):
            return NotImplemented
        backend.count(2 * channels)
        return grad_x, grad_weight if mask[1] else None, grad_bias if mask[2] else None

    return call


_ROOT_HALF = math.sqrt(0.5)
_DENSITY = math.sqrt(2.0 / math.pi) * 0.5


def _gelu_slope(backend: ExactBackend) -> Direct:
    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        grad, x = args
        if not is_plain(grad) or not is_plain(x) or grad.shape != x.shape:
            return NotImplemented
        if kwargs.get("approximate", "none") == "tanh":
            t = backend.unary("tanh", fresh("gelu_tanh_inner", x))
            return fresh("gelu_tanh_slope", grad, x, t)
        twice = backend.unary("erfc", fresh("mul_constant", x, None, None, -_ROOT_HALF))
        bell = backend.unary("exp", fresh("scaled_square", x, None, None, -0.5))
        return in_place("gelu_slope", twice, fresh("mul_scaled", x, bell, None, _DENSITY), grad)

    return call


def _silu_slope(backend: ExactBackend) -> Direct:
    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        grad, x = args
        if kwargs or not is_plain(grad) or not is_plain(x) or grad.shape != x.shape:
            return NotImplemented
        return fresh("silu_slope", grad, x, backend.unary("sigmoid", x))

    return call


def _addmm(backend: ExactBackend) -> Direct:
    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bias, a, b = args
        if kwargs or not is_plain(bias) or bias.dim() != 1 or a.dim() != 2 or b.dim() != 2:
            return NotImplemented
        if a.dtype is not torch.float32 or b.dtype is not torch.float32 or bias.shape[0] != b.shape[1]:
            return NotImplemented
        product = backend.matmul(a, b)
        return add_row_in_place(product, bias) if is_plain(product) else product + bias

    return call


def _bernoulli(backend: ExactBackend) -> Direct:
    """Overwrite x by 1 with probability p, else by 0."""

    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = args[0]
        p = args[1] if len(args) > 1 else 0.5
        if kwargs.keys() - {"generator"} or not is_plain(x) or type(p) is not float or not 0.0 <= p <= 1.0:
            return NotImplemented
        fill_mask(x, draw_key(backend, kwargs.get("generator")), 0, int(p * 2.0**32))
        return x

    return call


_MAKERS: dict[OpOverload, Callable[[ExactBackend], Direct]] = {
    _aten._softmax.default: lambda backend: _softmax(backend, logarithm=False),
    _aten._log_softmax.default: lambda backend: _softmax(backend, logarithm=True),
    _aten._softmax_backward_data.default: lambda backend: _softmax_slope(backend, logarithm=False),
    _aten._log_softmax_backward_data.default: lambda backend: _softmax_slope(backend, logarithm=True),
    _aten.native_layer_norm.default: _layer_norm,
    _aten.native_layer_norm_backward.default: _layer_norm_slope,
    _aten.native_batch_norm.default: _batch_norm,
    _aten.native_batch_norm_backward.default: _batch_norm_slope,
    _aten.gelu_backward.default: _gelu_slope,
    _aten.silu_backward.default: _silu_slope,
    _aten.addmm.default: _addmm,
    _aten.bernoulli_.float: _bernoulli,
}


def direct_forms(backend: Backend | None) -> Mapping[OpOverload, Direct]:
    """The direct forms of a session's calls; none without controlled numerics."""
    if backend is None:
        return {}
    if not isinstance(backend, ExactBackend):
        return elementwise_forms()
    makers = {**_MAKERS, **LOSS_MAKERS}
    return elementwise_forms() | {overload: make(backend) for overload, make in makers.items()}
