"""Fused losses over classes, and max pooling's gradient, for ``exact``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from monitor.numerics.arguments import Arguments, Direct, Keywords
from monitor.numerics.backend import CountedBackend
from monitor.numerics.engines.cpu.fused import gather_kernels
from monitor.numerics.engines.cpu.fused.elementwise import canonical_in_place
from monitor.numerics.engines.cpu.fused.form import exact
from monitor.numerics.kernels.arrays import array
from monitor.numerics.kernels.pointers import is_index, is_plain
from monitor.numerics.kernels.workers import run_pieces

__all__ = ["max_pool_slope", "nll", "nll_slope"]

Code = Callable[..., Any]
_MEAN, _SUM = 1, 2


def _classes(x: Tensor, target: Tensor, weight: Tensor | None) -> bool:
    """Whether these are plain rows of classes without weights, each with its target."""
    return weight is None and is_plain(x) and x.dim() == 2 and is_index(target) and target.shape == x.shape[:1]


def _require_in_range(bad: int) -> None:
    if bad:
        raise IndexError("target is outside the classes")


@exact
def nll(backend: CountedBackend, _: Code) -> Direct:
    def call(args: Arguments, kwargs: Keywords) -> Any:
        x, target, weight, reduction, ignored = args
        if kwargs or reduction not in (_MEAN, _SUM) or not _classes(x, target, weight):
            return NotImplemented
        picked = x.new_empty(x.shape[:1])
        places = (*x.shape, array(target), ignored, picked.data_ptr())
        kept, bad = gather_kernels.pick_negative(x.data_ptr(), *places)
        _require_in_range(bad)
        total, mass = backend.sum(picked, [0], False), torch.full((), float(kept))
        backend.count(1)
        return (canonical_in_place(torch.div(total, mass)) if reduction == _MEAN else total), mass

    return call


@exact
def nll_slope(_: CountedBackend, __: Code) -> Direct:
    def call(args: Arguments, kwargs: Keywords) -> Any:
        grad, x, target, weight, reduction, ignored, mass = args
        if kwargs or not _classes(x, target, weight) or not is_plain(grad) or not is_plain(mass):
            return NotImplemented
        expected = () if reduction in (_MEAN, _SUM) else target.shape
        if tuple(grad.shape) != tuple(expected) or mass.dim():
            return NotImplemented
        share = array((torch.div(grad, mass) if reduction == _MEAN else grad).detach().reshape(-1))
        out = torch.zeros_like(x)
        places = (*x.shape, array(target), ignored, share, 1 if grad.dim() else 0)
        _require_in_range(gather_kernels.put_in_rows(out.data_ptr(), *places))
        return out

    return call


@exact
def max_pool_slope(backend: CountedBackend, _: Code) -> Direct:
    def call(args: Arguments, kwargs: Keywords) -> Any:
        grad, x, index = args[0], args[1], args[-1]
        if kwargs or len(args) != 8 or not is_plain(grad) or not is_plain(x) or not is_index(index):
            return NotImplemented
        if x.dim() < 3 or x.shape[:-2] != grad.shape[:-2] or grad.shape != index.shape or not grad.numel():
            return NotImplemented
        planes, places, size = x.shape[:-2].numel(), grad.shape[-2:].numel(), x.shape[-2:].numel()
        out = x.new_empty(x.shape)
        where = (grad.data_ptr(), places, array(index).reshape(planes, places), out.data_ptr(), size)
        if any(run_pieces(gather_kernels.scatter_in_planes, planes, 4 * x.numel(), *where)):
            return NotImplemented
        backend.count(x.numel())
        return out

    return call
