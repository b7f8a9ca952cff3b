"""Matrix products and convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from monitor.numerics.backend import Backend
from monitor.numerics.errors import UnsupportedOperator
from monitor.numerics.geometry import ConvolutionShape
from monitor.numerics.operators import volumes
from monitor.numerics.operators.elementwise import combine

__all__ = ["addmm", "baddbmm", "convolution", "convolution_backward", "dot", "grouped", "mv", "product"]

Number = int | float


def product(backend: Backend, a: Tensor, b: Tensor) -> Tensor:
    return backend.matmul(a, b)


def addmm(backend: Backend, bias: Tensor, a: Tensor, b: Tensor, *, beta: Number = 1, alpha: Number = 1) -> Tensor:
    product = backend.matmul(a, b)
    if alpha != 1:
        product = product * alpha
    return product if beta == 0 else product + (bias if beta == 1 else bias * beta)


def grouped(
    backend: Backend,
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """One product for each group; ``offs`` are the ends of the groups among rows, columns or what is summed over.

    Shapes are (m, k) × (g, k, n) → (m, n), (g, m, k) × (k, n) → (m, n), (m, k) × (k, n) → (g, m, n), where rows or
    columns of no group are zeros, and (g, m, k) × (g, k, n) → (g, m, n).
    """
    if bias is not None:
        raise UnsupportedOperator("aten._grouped_mm", "add the bias afterwards")
    if offs is None:
        return backend.matmul(a, b)
    ends = offs.tolist()
    spans = list(zip([0, *ends], ends, strict=False))
    if a.dim() == 2 and b.dim() == 3:
        parts = [backend.matmul(a[i:j], b[g]) for g, (i, j) in enumerate(spans) if j > i]
        rest = a.new_zeros((len(a) - (ends[-1] if ends else 0), b.shape[2]))
        return torch.cat([*parts, rest])
    if a.dim() == 3:
        parts = [backend.matmul(a[g], b[:, i:j]) for g, (i, j) in enumerate(spans) if j > i]
        rest = a.new_zeros((a.shape[1], b.shape[1] - (ends[-1] if ends else 0)))
        return torch.cat([*parts, rest], 1)
    empty = a.new_zeros((len(a), b.shape[1]))
    return torch.stack([backend.matmul(a[:, i:j], b[i:j]) if j > i else empty for i, j in spans])


def mv(backend: Backend, a: Tensor, b: Tensor) -> Tensor:
    return backend.matmul(a, b[:, None])[:, 0]


def dot(backend: Backend, a: Tensor, b: Tensor) -> Tensor:
    return backend.matmul(a[None], b[:, None])[0, 0]


def _require_plane(x: Tensor) -> None:
    if x.dim() not in (3, 4, 5):
        raise UnsupportedOperator("aten.convolution", "only 1-D, 2-D and 3-D convolutions are built")


class _Kernels(Protocol):
    """What a convolution and its gradients are made of."""

    def convolution(self, x: Tensor, weight: Tensor, shape: ConvolutionShape) -> Tensor: ...

    def convolution_grad_input(
        self, grad: Tensor, x_shape: tuple[int, ...], weight: Tensor, shape: ConvolutionShape
    ) -> Tensor: ...

    def convolution_grad_weight(
        self, grad: Tensor, x: Tensor, weight_shape: tuple[int, ...], shape: ConvolutionShape
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class _Volumes:
    """Those of three dimensions."""

    backend: Backend

    def convolution(self, x: Tensor, weight: Tensor, shape: ConvolutionShape) -> Tensor:
        return volumes.convolution(self.backend, x, weight, shape)

    def convolution_grad_input(
        self, grad: Tensor, x_shape: tuple[int, ...], weight: Tensor, shape: ConvolutionShape
    ) -> Tensor:
        return volumes.convolution_grad_input(self.backend, grad, x_shape, weight, shape)

    def convolution_grad_weight(
        self, grad: Tensor, x: Tensor, weight_shape: tuple[int, ...], shape: ConvolutionShape
    ) -> Tensor:
        return volumes.convolution_grad_weight(self.backend, grad, x, weight_shape, shape)


def _kernels(backend: Backend, x: Tensor) -> _Kernels:
    return _Volumes(backend) if x.dim() == 5 else backend


def convolution(
    backend: Backend,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    _require_plane(x)
    shape, kernels = ConvolutionShape.of(x.dim() - 2, stride, padding, dilation, groups), _kernels(backend, x)
    flat = x.dim() == 3
    if flat:
        x, weight, shape = x[:, :, None], weight[:, :, None], shape.lifted()
    if transposed:
        size = shape.in_size(x.shape[2:], weight.shape[2:], output_padding)
        out = kernels.convolution_grad_input(x, (len(x), weight.shape[1] * groups, *size), weight, shape)
    else:
        out = kernels.convolution(x, weight, shape)
    # The strides are part of an operator's result: later operators, and a trace of the step, depend on them.
    out = (out[:, :, 0] if flat else out).contiguous()
    return out if bias is None else out + bias.reshape(1, -1, *(1,) * (out.dim() - 2))


def convolution_backward(
    backend: Backend,
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    _require_plane(x)
    shape, kernels = ConvolutionShape.of(x.dim() - 2, stride, padding, dilation, groups), _kernels(backend, x)
    grad_bias = backend.sum(grad, [0, *range(2, x.dim())], False) if output_mask[2] else None
    flat = x.dim() == 3
    if flat:
        grad, x, weight, shape = grad[:, :, None], x[:, :, None], weight[:, :, None], shape.lifted()
    grad_x = grad_weight = None
    if output_mask[0] and transposed:
        grad_x = kernels.convolution(grad, weight, shape)  # an output's padding may make room for more places
        for axis, size in enumerate(x.shape[2:]):
            grad_x = grad_x.narrow(axis + 2, 0, size)
    elif output_mask[0]:
        grad_x = kernels.convolution_grad_input(grad, tuple(x.shape), weight, shape)
    if output_mask[1]:
        above, below = (x, grad) if transposed else (grad, x)
        grad_weight = kernels.convolution_grad_weight(above, below, tuple(weight.shape), shape)
    if flat:
        grad_x = None if grad_x is None else grad_x[:, :, 0]
        grad_weight = None if grad_weight is None else grad_weight[:, :, 0]
    grad_x = None if grad_x is None else grad_x.contiguous()
    return grad_x, None if grad_weight is None else grad_weight.contiguous(), grad_bias


def baddbmm(backend: Backend, bias: Tensor, a: Tensor, b: Tensor, *, beta: Number = 1, alpha: Number = 1) -> Tensor:
    product = backend.matmul(a, b)
    if beta == 0:
        return product if alpha == 1 else product * alpha
    return combine(bias if beta == 1 else bias * beta, product, alpha, 1)
