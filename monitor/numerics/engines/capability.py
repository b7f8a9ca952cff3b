"""Known-answer tests of a device's products on integers: an engine serves only where they pass.

Processors without an int8 dot product (x86 before VNNI) multiply bytes in pairs and saturate the 16-bit sum, so that
all-(-128) operands come out right and mixed signs wrong. Kernels differ by size and layout, so each class is tried.
"""

from __future__ import annotations

import itertools
from functools import lru_cache

import torch
from torch import Tensor

from firmware_sim.errors import DeviceError
from monitor.numerics.engines.int8_product import int8_product
from monitor.numerics.kernels.arrays import array
from monitor.numerics.kernels.pointers import is_host
from monitor.numerics.reference.convolution import convolution_by_integers

__all__ = [
    "INT8_WORK",
    "fp64_convolution_is_exact",
    "fp64_gemm_is_exact",
    "int8_gemm_is_exact",
    "int8_serves",
    "require_fp64",
]

INT8_WORK = 1 << 21
"""Multiplications from which int8 products and their digits beat one FP64 product."""

_EXTREMES = (-128, -127, -1, 0, 1, 127)
_SHAPES = ((1, 8, 8), (8, 1, 40), (17, 40, 33), (64, 64, 64), (16, 512, 96), (256, 32, 768), (130, 130, 1030))
"""(M, N, K) of each tried kernel class."""


def _operands(m: int, n: int, k: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Random digits, and every ordered pair of extreme digits side by side in a row of A and a column of B."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randint(-128, 128, (m, k), generator=generator, dtype=torch.int64)
    b = torch.randint(-128, 128, (k, n), generator=generator, dtype=torch.int64)
    pairs = torch.tensor(list(itertools.product(_EXTREMES, repeat=2)))
    left = pairs[torch.randint(0, len(pairs), (m, (k + 1) // 2), generator=generator)].reshape(m, -1)[:, :k]
    right = pairs[torch.randint(0, len(pairs), (n, (k + 1) // 2), generator=generator)].reshape(n, -1)[:, :k].t()
    large = torch.full((m, k), 127), torch.where(torch.arange(k) % 4 < 3, 127, -128).unsqueeze(1).expand(k, n)
    return [(a, b), (left, right), (large[0], large[1])]


def _layouts(x: Tensor) -> list[Tensor]:
    plain = x.to(torch.int8).contiguous()
    return [plain, plain.t().contiguous().t()]


def _pairs(a: Tensor, b: Tensor, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Operands of `torch._int_mm`: in all layouts on the CPU, elsewhere in the one in use, cut out of wider rows."""
    if is_host(device):
        return list(itertools.product(_layouts(a), _layouts(b)))
    left, right = (x.to(device, torch.int8).repeat(1, 3)[:, x.shape[1] : 2 * x.shape[1]] for x in (a, b.t()))
    return [(left, right.t())]


def int8_gemm_is_exact(device: torch.device) -> bool:
    """Whether `torch._int_mm` returns the exact sums for every kernel class and layout; False where it is missing.

    Accelerators multiply sides that are multiples of 32, so that theirs are rounded up.
    """
    grain = 1 if is_host(device) else 32
    for shape, seed in zip(_SHAPES, itertools.count(), strict=False):
        m, n, k = (-(-size // grain) * grain for size in shape)
        for a, b in _operands(m, n, k, seed):
            expected = torch.from_numpy(array(a) @ array(b)).to(torch.int32)  # numpy's own loops
            for left, right in _pairs(a, b, device):
                try:
                    product = int8_product(left, right)
                except (RuntimeError, NotImplementedError):
                    return False
                if not torch.equal(product.cpu(), expected):
                    return False
    return True


def fp64_gemm_is_exact(device: torch.device) -> bool:
    """Whether the FP64 GEMM adds integers up to 2^53 exactly, as IEEE FP64 must and emulations might not."""
    for m, n, k in ((3, 5, 7), (64, 64, 128), (130, 33, 1030)):
        generator = torch.Generator().manual_seed(k)
        bound = 1 << 26
        a = torch.randint(-bound, bound, (m, k), generator=generator)
        b = torch.randint(-(1 << 53) // (bound * k), (1 << 53) // (bound * k), (k, n), generator=generator)
        expected = (a.unsqueeze(-1) * b.unsqueeze(0)).sum(dim=1)
        product = a.to(device, torch.float64) @ b.to(device, torch.float64)
        if not torch.equal(product.cpu().to(torch.int64), expected):
            return False
    return True


@lru_cache(maxsize=8)
def int8_serves(device: torch.device) -> bool:
    """Whether the device's int8 GEMM passes its known-answer test."""
    return int8_gemm_is_exact(device)


@lru_cache(maxsize=8)
def require_fp64(device: torch.device) -> None:
    """DeviceError unless the device's FP64 GEMM passes its known-answer test."""
    if not fp64_gemm_is_exact(device):
        raise DeviceError(f"the FP64 matrix product of {device} does not add integers exactly")


def fp64_convolution_is_exact(device: torch.device) -> bool:
    """Whether FP64 convolution, with both gradients, adds integers up to 2^53 exactly, strided and padded."""
    generator = torch.Generator().manual_seed(11)
    x = torch.randint(-(1 << 22), 1 << 22, (3, 4, 9, 8), generator=generator)
    w = torch.randint(-(1 << 22), 1 << 22, (6, 4, 3, 3), generator=generator)
    grad = torch.randint(-(1 << 22), 1 << 22, (3, 6, 5, 4), generator=generator)
    out, to_x, to_w = convolution_by_integers(x, w, grad, stride=2, padding=1)
    geometry = ([2, 2], [1, 1], [1, 1], False, [0, 0], 1)
    images, filters, gradients = (value.to(device, torch.float64) for value in (x, w, grad))
    with torch.backends.cudnn.flags(enabled=False):
        found = torch.ops.aten.convolution.default(images, filters, None, *geometry)
        to_images, to_filters, _ = torch.ops.aten.convolution_backward.default(
            gradients, images, filters, None, *geometry, [True, True, False]
        )
    pairs = ((found, out), (to_images, to_x), (to_filters, to_w.sum(0)))
    return all(torch.equal(value.cpu().to(torch.int64), expected) for value, expected in pairs)
