"""Fourier transforms of FP32 tensors: in FP64 in a stated order (``kernels.fourier``), each number rounded once.

Dimensions are transformed one after another, the last of the list first; a real tensor as a complex one without
imaginary parts; a Hermitian half is completed first, and the imaginary parts of what must be real do not count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from firmware_sim.errors import CallerError
from monitor.numerics.backend import Backend
from monitor.numerics.kernels.fourier import transform_lines

__all__ = ["complex_to_complex", "complex_to_real", "real_to_complex"]

Numbers = np.ndarray[Any, Any]


def _parts(x: Tensor) -> tuple[Numbers, Numbers]:
    """Real and imaginary parts in FP64, C-ordered."""
    host = x.detach().cpu()
    if not host.is_complex():
        real = np.array(host.to(torch.float64).numpy(), order="C")
        return real, np.zeros_like(real)
    pairs = torch.view_as_real(host).to(torch.float64).numpy()
    return np.array(pairs[..., 0], order="C"), np.array(pairs[..., 1], order="C")


def _transform(real: Numbers, imag: Numbers, dims: Sequence[int], forward: bool) -> None:
    """Along these dimensions, in place."""
    for dim in reversed(dims):
        shape = (math.prod(real.shape[:dim]), real.shape[dim], math.prod(real.shape[dim + 1 :]))
        pair = real.reshape(shape), imag.reshape(shape)
        transform_lines(*(pair if forward else pair[::-1]))


def _scaled(part: Numbers, normalization: int, sizes: Sequence[int], like: Tensor) -> Tensor:
    """Divided by the product of the sizes (2) or by its root (1), and rounded to FP32."""
    size = math.prod(sizes)
    divisor = (1.0, math.sqrt(size), float(size))[normalization]
    found = torch.from_numpy(np.ascontiguousarray(part / divisor if normalization else part))
    return found.to(torch.float32).to(like.device)


def _checked(x: Tensor, dims: Sequence[int], kinds: tuple[torch.dtype, ...], normalization: int) -> list[int]:
    if x.dtype not in kinds or not 0 <= normalization <= 2:
        raise CallerError(f"a Fourier transform of {x.dtype} with normalization {normalization}")
    found = [dim % max(x.dim(), 1) for dim in dims]
    if len(set(found)) < len(found) or any(not -x.dim() <= dim < x.dim() for dim in dims):
        raise CallerError(f"a Fourier transform along dimensions {list(dims)} of {x.dim()}")
    return found


def complex_to_complex(_: Backend, x: Tensor, dims: Sequence[int], normalization: int, forward: bool) -> Tensor:
    dims = _checked(x, dims, (torch.complex64,), normalization)
    real, imag = _parts(x)
    _transform(real, imag, dims, forward)
    sizes = [x.shape[dim] for dim in dims]
    return torch.complex(_scaled(real, normalization, sizes, x), _scaled(imag, normalization, sizes, x))


def real_to_complex(_: Backend, x: Tensor, dims: Sequence[int], normalization: int, onesided: bool) -> Tensor:
    dims = _checked(x, dims, (torch.float32,), normalization)
    real, imag = _parts(x)
    _transform(real, imag, dims, True)
    sizes = [x.shape[dim] for dim in dims]
    if onesided and dims:
        half = (slice(None),) * dims[-1] + (slice(0, x.shape[dims[-1]] // 2 + 1),)
        real, imag = real[half], imag[half]
    return torch.complex(_scaled(real, normalization, sizes, x), _scaled(imag, normalization, sizes, x))


def complex_to_real(_: Backend, x: Tensor, dims: Sequence[int], normalization: int, last_dim_size: int) -> Tensor:
    dims = _checked(x, dims, (torch.complex64,), normalization)
    if not dims or x.shape[dims[-1]] != last_dim_size // 2 + 1:
        raise CallerError(
            f"a real Fourier transform of length {last_dim_size} needs {last_dim_size // 2 + 1} numbers in its last "
            f"dimension, but the shape is {tuple(x.shape)}"
        )
    real, imag = _parts(x)
    _transform(real, imag, dims[:-1], False)
    last = dims[-1]
    real, imag = np.moveaxis(real, last, -1), np.moveaxis(imag, last, -1).copy()
    imag[..., 0] = 0.0
    if last_dim_size % 2 == 0:
        imag[..., -1] = 0.0
    rest = slice(1, (last_dim_size + 1) // 2)
    whole = [
        np.ascontiguousarray(np.moveaxis(np.concatenate([part, sign * part[..., rest][..., ::-1]], -1), -1, last))
        for part, sign in ((real, 1.0), (imag, -1.0))
    ]
    _transform(whole[0], whole[1], [last], False)
    sizes = [*(x.shape[dim] for dim in dims[:-1]), last_dim_size]
    return _scaled(whole[0], normalization, sizes, x)
