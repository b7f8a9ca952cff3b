"""Windows of signals, as PyTorch defines them: cosines, two straight lines, and Kaiser's Bessel function."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from monitor.numerics.backend import Backend
from monitor.numerics.errors import UnsupportedOperator
from monitor.numerics.operators.elementwise import square_root

__all__ = ["bartlett", "blackman", "hamming", "hann", "kaiser"]

Shape = Callable[[Backend, Tensor, int], Tensor]
"""Values of a window at its places, of which there are so many in all."""


def _window(backend: Backend, shape: Shape, length: int, periodic: bool, options: dict[str, Any]) -> Tensor:
    """A periodic window is a longer one without its last value."""
    kind = options.get("dtype") or torch.get_default_dtype()
    if kind != torch.float32:
        raise UnsupportedOperator("a window function", f"{kind}; make it in float32 and convert it")
    if (layout := options.get("layout") or torch.strided) != torch.strided:
        raise UnsupportedOperator("a window function", f"{layout}; make it dense and convert it")
    places = torch.arange(length, dtype=kind, device=options.get("device"))
    return torch.ones_like(places) if length < 2 else shape(backend, places, length + periodic)


def _cosine(backend: Backend, places: Tensor, count: int, turns: float) -> Tensor:
    return backend.unary("cos", places * (turns * math.pi / (count - 1)))


def hamming(
    backend: Backend, length: int, periodic: bool = True, alpha: float = 0.54, beta: float = 0.46, **options: Any
) -> Tensor:
    def shape(backend: Backend, places: Tensor, count: int) -> Tensor:
        return _cosine(backend, places, count, 2.0) * -beta + alpha

    return _window(backend, shape, length, periodic, options)


def hann(backend: Backend, length: int, periodic: bool = True, **options: Any) -> Tensor:
    return hamming(backend, length, periodic, 0.5, 0.5, **options)


def blackman(backend: Backend, length: int, periodic: bool = True, **options: Any) -> Tensor:
    def shape(backend: Backend, places: Tensor, count: int) -> Tensor:
        single, double = (_cosine(backend, places, count, turns) for turns in (2.0, 4.0))
        return double * 0.08 - single * 0.5 + 0.42

    return _window(backend, shape, length, periodic, options)


def bartlett(backend: Backend, length: int, periodic: bool = True, **options: Any) -> Tensor:
    def shape(_: Backend, places: Tensor, count: int) -> Tensor:
        rising = places * (2.0 / (count - 1))
        return torch.where(places <= (count - 1) // 2, rising, 2.0 - rising)

    return _window(backend, shape, length, periodic, options)


def kaiser(backend: Backend, length: int, periodic: bool = True, beta: float = 12.0, **options: Any) -> Tensor:
    def shape(backend: Backend, places: Tensor, count: int) -> Tensor:
        middle = places * (2.0 / (count - 1)) - 1.0
        inside = square_root((1.0 - middle * middle).clamp(min=0.0)) * beta
        return torch.div(backend.unary("i0", inside), backend.unary("i0", torch.full_like(inside, beta)))

    return _window(backend, shape, length, periodic, options)
