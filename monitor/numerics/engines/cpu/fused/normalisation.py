"""Fused softmax and normalisation for ``exact``; the row's own code serves where a kernel leaves a rounding open."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from monitor.numerics.arguments import Arguments, Direct, Keywords
from monitor.numerics.backend import CountedBackend
from monitor.numerics.engines.cpu.fused import norm_kernels, softmax_kernels
from monitor.numerics.engines.cpu.fused.elementwise import canonical_in_place, fresh, in_place
from monitor.numerics.engines.cpu.fused.form import exact
from monitor.numerics.kernels.pointers import is_plain
from monitor.numerics.kernels.workers import run_pieces

__all__ = [
    "batch_norm",
    "batch_norm_slope",
    "layer_norm",
    "layer_norm_slope",
    "log_softmax",
    "log_softmax_slope",
    "softmax",
    "softmax_slope",
]

Code = Callable[..., Any]

_EXP_WORK = 16
"""Elements of an addition that take as long as one of an exponential."""


def _plain_or_none(x: Tensor | None, shape: Sequence[int] | None = None) -> bool:
    return x is None or (is_plain(x) and (shape is None or tuple(x.shape) == tuple(shape)))


def _at(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _last(x: Tensor, dim: int) -> bool:
    """Whether `dim` is the last dimension of `x`, which has elements."""
    return x.dim() > 0 and x.numel() > 0 and dim in (-1, x.dim() - 1)


def _softmax(logarithm: bool, backend: CountedBackend, code: Code) -> Direct:
    kernel = softmax_kernels.log_softmax_rows if logarithm else softmax_kernels.softmax_rows

    def call(args: Arguments, kwargs: Keywords) -> Any:
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
            replaced = code(backend.uncounted(), x.view(rows, width)[places], 1)
            out.view(rows, width)[places] = canonical_in_place(replaced)
        backend.count(x.numel() + (2 * rows if logarithm else rows))
        return out

    return call


def _softmax_slope(logarithm: bool, backend: CountedBackend, code: Code) -> Direct:
    kernel = softmax_kernels.log_softmax_slope_rows if logarithm else softmax_kernels.softmax_slope_rows

    def call(args: Arguments, kwargs: Keywords) -> Any:
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
            replaced = code(backend.uncounted(), *parts, 1, torch.float32)
            out.view(rows, width)[places] = canonical_in_place(replaced)
        backend.count(y.numel() + rows if logarithm else rows)
        return out

    return call


softmax = exact(functools.partial(_softmax, False))
log_softmax = exact(functools.partial(_softmax, True))
softmax_slope = exact(functools.partial(_softmax_slope, False))
log_softmax_slope = exact(functools.partial(_softmax_slope, True))


@exact
def layer_norm(backend: CountedBackend, _: Code) -> Direct:
    def call(args: Arguments, kwargs: Keywords) -> Any:
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
        if any(run_pieces(norm_kernels.layer_norm_rows, rows, 4 * x.numel(), *addresses)):
            return NotImplemented
        backend.count(2 * rows)
        return out, centre, scale

    return call


@exact
def layer_norm_slope(backend: CountedBackend, _: Code) -> Direct:
    def call(args: Arguments, kwargs: Keywords) -> Any:
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
            undecided += sum(run_pieces(norm_kernels.layer_norm_slope_rows, rows, 4 * x.numel(), *where))
        if mask[1] or mask[2]:
            grad_weight, grad_bias = x.new_empty(tuple(shape)), x.new_empty(tuple(shape))
            where = (*map(_at, (grad, x)), rows, width, *map(_at, (centre, scale, grad_weight, grad_bias)))
            undecided += sum(run_pieces(norm_kernels.layer_norm_slope_columns, width, 4 * x.numel(), *where))
        if undecided:
            return NotImplemented
        backend.count(2 * rows * mask[0] + width * mask[1] + width * mask[2])
        return grad_x, grad_weight if mask[1] else None, grad_bias if mask[2] else None

    return call


def _blend(running: Tensor, new: Tensor, momentum: float) -> None:
    kept = fresh("mul_constant", running, None, None, 1.0 - momentum)
    running.copy_(in_place("add", kept, fresh("mul_constant", new, None, None, momentum)))


@exact
def batch_norm(backend: CountedBackend, _: Code) -> Direct:
    def call(args: Arguments, kwargs: Keywords) -> Any:
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
        if any(run_pieces(norm_kernels.batch_norm_channels, channels, 4 * x.numel(), *where)):
            return NotImplemented
        if running_mean is not None and running_var is not None:
            scaled = in_place("mul_constant", variance, None, None, float(count))
            unbiased = in_place("div_constant", scaled, None, None, float(max(count - 1, 0)))
            _blend(running_mean, centre, momentum)
            _blend(running_var, unbiased, momentum)
        backend.count(2 * channels)
        return out, centre, scale

    return call


@exact
def batch_norm_slope(backend: CountedBackend, _: Code) -> Direct:
    def call(args: Arguments, kwargs: Keywords) -> Any:
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
        if any(run_pieces(norm_kernels.batch_norm_slope_channels, channels, 4 * x.numel(), *where)):
            return NotImplemented
        backend.count(2 * channels)
        return grad_x, grad_weight if mask[1] else None, grad_bias if mask[2] else None

    return call
