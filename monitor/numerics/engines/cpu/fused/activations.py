"""Fused gradients of activations, affine products and dropout masks for ``exact``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from monitor.numerics.arguments import Arguments, Direct, Keywords
from monitor.numerics.backend import CountedBackend, draw_key
from monitor.numerics.engines.cpu.exact.philox import fill_mask
from monitor.numerics.engines.cpu.fused.elementwise import add_row_in_place, fresh, in_place
from monitor.numerics.engines.cpu.fused.form import Fused, exact
from monitor.numerics.kernels.pointers import is_plain

__all__ = ["addmm", "bernoulli", "gelu_slope", "silu_slope"]

Code = Callable[..., Any]

_ROOT_HALF = math.sqrt(0.5)
_DENSITY = math.sqrt(2.0 / math.pi) * 0.5


@exact
def gelu_slope(backend: CountedBackend, _: Code) -> Direct:
    def call(args: Arguments, kwargs: Keywords) -> Any:
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


@exact
def silu_slope(backend: CountedBackend, _: Code) -> Direct:
    def call(args: Arguments, kwargs: Keywords) -> Any:
        grad, x = args
        if kwargs or not is_plain(grad) or not is_plain(x) or grad.shape != x.shape:
            return NotImplemented
        return fresh("silu_slope", grad, x, backend.unary("sigmoid", x))

    return call


@exact
def addmm(backend: CountedBackend, _: Code) -> Direct:
    def call(args: Arguments, kwargs: Keywords) -> Any:
        bias, a, b = args
        if kwargs or not is_plain(bias) or bias.dim() != 1 or a.dim() != 2 or b.dim() != 2:
            return NotImplemented
        if a.dtype is not torch.float32 or b.dtype is not torch.float32 or bias.shape[0] != b.shape[1]:
            return NotImplemented
        product = backend.matmul(a, b)
        return add_row_in_place(product, bias) if is_plain(product) else product + bias

    return call


def _bernoulli(backend: CountedBackend) -> Direct:
    """Overwrite x by 1 with probability p, else by 0."""

    def call(args: Arguments, kwargs: Keywords) -> Any:
        x = args[0]
        p = args[1] if len(args) > 1 else 0.5
        if kwargs.keys() - {"generator"} or not is_plain(x) or type(p) is not float or not 0.0 <= p <= 1.0:
            return NotImplemented
        fill_mask(x, draw_key(backend, kwargs.get("generator")), 0, int(p * 2.0**32))
        return x

    return call


bernoulli = Fused(make=lambda _, backend, __: _bernoulli(backend), spelling="in place", exact=True)
