"""The few primitives to which every controlled operator comes down; one implementation for each numerics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, Self

import torch
from torch import Tensor

from monitor.numerics.errors import UnsupportedOperator
from monitor.numerics.geometry import ConvolutionShape
from monitor.numerics.kernels.pointers import is_host

__all__ = ["Backend", "CountedBackend", "draw_key"]


class Backend(Protocol):
    """Operators whose result depends on an order of summation or on a mathematical library.

    All tensors are FP32 unless stated; every method returns the same bits on every device (``rounded``: given its log).

    Attributes:
        keys: gives random operators their keys, in [0, 2^63); with None torch's CPU generator does.
    """

    keys: Callable[[], int] | None

    def begin_call(self, index: int, operator: str) -> None:
        """The next primitives belong to this ATen call of the step."""

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """(m, k) × (k, n) → (m, n), or the same with one equal leading batch dimension."""

    def sum(self, x: Tensor, dims: list[int], keepdim: bool) -> Tensor:
        """Sum over the listed dimensions, none of them negative, at least one."""

    def scatter_rows(self, rows: int, index: Tensor, source: Tensor) -> Tensor:
        """Row i of the (rows, d) result is the sum of the rows of ``source`` (n, d) whose ``index`` (n,) is i."""

    def unary(self, name: str, x: Tensor) -> Tensor:
        """exp, log, log1p, expm1, tanh, erf, erfc, sigmoid, rsqrt, sin, cos, silu, gelu or gelu_tanh."""

    def power(self, x: Tensor, y: Tensor | float) -> Tensor:
        """x^y for a constant y, or one of x's type that broadcasts with it."""

    def convolution(self, x: Tensor, weight: Tensor, shape: ConvolutionShape) -> Tensor:
        """2-D cross-correlation of (n, c, h, w) with (o, c/groups, kh, kw), no bias."""

    def convolution_grad_input(
        self, grad: Tensor, x_shape: tuple[int, ...], weight: Tensor, shape: ConvolutionShape
    ) -> Tensor:
        """Gradient with respect to the input of ``convolution``."""

    def convolution_grad_weight(
        self, grad: Tensor, x: Tensor, weight_shape: tuple[int, ...], shape: ConvolutionShape
    ) -> Tensor:
        """Gradient with respect to the weight of ``convolution``."""

    def random_bits(self, seed: int, count: int, like: Tensor) -> Tensor:
        """``count`` uniform 32-bit numbers as int64 in [0, 2^32), a function of the seed, on ``like``'s device."""


class CountedBackend(Backend, Protocol):
    """A backend that a fused kernel tells what it has rounded."""

    def count(self, elements: int) -> None:
        """Elements that a fused kernel of the current operator has rounded."""

    def uncounted(self) -> Self:
        """The same functions without the counts, for what a fused kernel counts itself."""


def draw_key(backend: Backend, generator: torch.Generator | None) -> int:
    """The next 63-bit key: from the session's own source, whichever generator is named; or from torch's on the CPU.

    The state of a generator from which a key is taken moves on.
    """
    if backend.keys is not None:
        return backend.keys()
    if generator is not None and not is_host(generator.device):
        raise UnsupportedOperator("a CUDA generator", "pass a CPU generator or none")
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator))
