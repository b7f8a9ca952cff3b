"""Calls of operators on complex numbers, and of Fourier transforms: special parts, odd lengths, lazy conjugates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["complex_calls"]

Call = Callable[..., Any]

_UNARY = """
neg abs angle sgn reciprocal exp conj_physical _conj_physical sum mean isnan eq.Tensor view_as_real clone
"""
_PAIRS = "add.Tensor sub.Tensor rsub.Tensor mul.Tensor div.Tensor"
_LENGTHS = (1, 2, 3, 4, 5, 7, 8, 12, 13, 17, 30, 31, 64, 91, 97, 128, 210, 256, 1009)


def complex_calls(call: Call, x: Tensor, y: Tensor, grid: Tensor) -> None:
    """Make them all.

    Args:
        call: makes one, given its name without its namespace, and its arguments.
        x: special values and ordinary ones, flat, an even number of them.
        y: as many others.
        grid: an ordinary (8, 8) matrix.
    """
    _elementwise(call, call("complex", x, y), call("complex", y, x.flip(0)), y)
    _moves(call, call("view_as_complex", grid.reshape(8, 4, 2)), grid)
    _products(call, grid)
    _transforms(call, grid.reshape(-1), x)


def _elementwise(call: Call, z: Tensor, w: Tensor, real: Tensor) -> None:
    for name in _UNARY.split():
        call(name, z, *([w] if name == "eq.Tensor" else []))
    for name in _PAIRS.split():
        for pair in ((z, w), (z, real), (real, w)):
            call(name, *pair)
    for name in ("add", "sub", "rsub", "mul", "div"):
        call(f"{name}.Scalar", z, 0.3)
        call(f"{name}.Tensor", z, torch.complex(real[1], real[2]))
    call("mul.Scalar", real, 1.5 - 2j)
    call("add.Tensor", z, w, alpha=0.3)
    call("addcmul", z, w, z, value=0.3)
    call("addcdiv", z, w, z, value=-0.3)
    for exponent in (0, 1, 2, 3, -1, -2, 11):
        call("pow.Tensor_Scalar", z, exponent)
    call("polar", real, real.flip(0))
    call("_to_copy", real, dtype=torch.complex64)
    call("_efficientzerotensor", (2, 3), dtype=torch.float32)
    call("linalg_vector_norm", z[8:], 2)
    for name in ("add", "sub", "mul", "div"):
        call(f"_foreach_{name}.List", [z, real], [w, real])
        call(f"_foreach_{name}.Scalar", [z, real], 0.3)
        call(f"_foreach_{name}.ScalarList", [z, real], [0.3, 0.7])
    for name in ("abs", "neg", "zero"):
        call(f"_foreach_{name}", [z, real])
    call("_foreach_mul.Tensor", [z], torch.complex(real[1], real[2]))
    call("_foreach_copy", [z], [w])
    call("_foreach_addcmul.Scalar", [z], [w], [z], 0.3)
    call("_foreach_addcdiv.Scalar", [z], [w], [z], 0.3)
    call("mul.Tensor", z.conj(), w)
    call("mul.Scalar", z.conj().imag, 0.3)


def _moves(call: Call, z: Tensor, grid: Tensor) -> None:
    places = torch.tensor([3, 3, 1])
    for dims in ([0], [1], [0, 1]):
        call("sum.dim_IntList", z, dims)
        call("mean.dim", z, dims, True)
    call("cumsum", z, 0)
    call("norm.Scalar", z)
    call("norm.ScalarOpt_dim", z, 2, [0])
    call("_foreach_norm.Scalar", [z, grid], 2)
    call("_unsafe_index_put", z, [places], z[:3], True)
    call("index.Tensor", z, [places])
    call("index_put", z, [places], z[:3], True)
    call("index_put", z, [places], z[:3])
    call("index_add", z, 1, places, z[:, :3])
    call("scatter_add", z, 0, torch.tensor([[0, 2, 2, 1]]).expand(3, 4), z[:3])
    call("copy_", z.clone().conj(), z)
    call("copy_", z.clone(), grid[:, :4])
    call("cat", [z, z.conj()])
    call("select.int", z.conj(), 0, 1)


def _products(call: Call, grid: Tensor) -> None:
    a, b = (torch.view_as_complex(part.reshape(4, 4, 2)) for part in (grid[:4], grid[4:]))
    for left in (a, a.mT, a.conj(), a.mH):
        call("mm", left, b)
        call("bmm", torch.stack([left, b]), torch.stack([b, left]))
        call("addmm", b, left, b, beta=0.5, alpha=2)
        call("mv", left, b[0])
    call("baddbmm", torch.stack([a, b]), torch.stack([a, b]), torch.stack([b, a]))
    call("dot", a[0], b[0])
    call("vdot", a[0], b[0])


def _transforms(call: Call, values: Tensor, special: Tensor) -> None:
    for length in _LENGTHS:
        real = values.repeat(-(-3 * length // len(values)))[: 3 * length].reshape(3, length)
        z = call("complex", real, real.flip(0))
        for normalization in range(3):
            call("_fft_c2c", z, [1], normalization, True)
            call("_fft_c2c", z, [1], normalization, False)
            half = call("_fft_r2c", real, [1], normalization, True)
            call("_fft_c2r", half, [1], normalization, length)
    cube = values[:60].reshape(3, 4, 5)
    whole = call("_fft_r2c", cube, [0, 2], 1, False)
    call("_fft_c2c", whole, [0, 1, 2], 0, False)
    call("_fft_c2c", whole.transpose(0, 2), [1, 0], 2, True)
    call("_fft_c2r", call("_fft_r2c", cube, [2, 1], 0, True), [2, 1], 2, 4)
    call("_fft_r2c", special[:1030].reshape(2, -1), [1], 0, True)
    call("_fft_c2c", call("complex", special, special.flip(0)).conj(), [0], 0, True)
