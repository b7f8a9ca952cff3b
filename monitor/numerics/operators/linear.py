"""Matrix products, attention and convolutions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._backend import Backend, ConvolutionShape
from ..errors import UnsupportedOperator
from .elementwise import combine
from .normalisation import softmax
from .rule import Rule

__all__ = ["rules"]

Number = int | float


def _mm(backend: Backend, a: Tensor, b: Tensor) -> Tensor:
    return backend.matmul(a, b)


def _addmm(backend: Backend, bias: Tensor, a: Tensor, b: Tensor, *, beta: Number = 1, alpha: Number = 1) -> Tensor:
    product = backend.matmul(a, b)
    if alpha != 1:
        product = product * alpha
    return product if beta == 0 else product + (bias if beta == 1 else bias * beta)


def _mv(backend: Backend, a: Tensor, b: Tensor) -> Tensor:
    return backend.matmul(a, b[:, None])[:, 0]


def _dot(backend: Backend, a: Tensor, b: Tensor) -> Tensor:
    return backend.matmul(a[None], b[:, None])[0, 0]


def _batched(x: Tensor) -> Tensor:
    return x.reshape(-1, *x.shape[-2:])


def _product(backend: Backend, a: Tensor, b: Tensor) -> Tensor:
    """Matrix product over equal leading dimensions."""
    return backend.matmul(_batched(a), _batched(b)).reshape(*a.shape[:-1], b.shape[-1])


def _scores(
    backend: Backend, query: Tensor, key: Tensor, is_causal: bool, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, float]:
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = _product(backend, query, key.transpose(-2, -1)) * factor
    if is_causal:
        keep = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~keep, float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return scores, factor


def _shared_heads(query: Tensor, x: Tensor) -> Tensor:
    """Repeat key or value heads that several query heads share."""
    return x if x.shape[1] == query.shape[1] else x.repeat_interleave(query.shape[1] // x.shape[1], dim=1)


def _attention(
    backend: Backend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    if dropout_p:
        raise UnsupportedOperator("scaled_dot_product_attention with dropout", "the CPU kernel has none either")
    key, value = _shared_heads(query, key), _shared_heads(query, value)
    scores, _ = _scores(backend, query, key, is_causal, attn_mask, scale)
    top = scores.amax(-1, keepdim=True) + 0.0
    top = torch.where(top.isfinite(), top, torch.zeros_like(top))
    weights = backend.unary("exp", scores - top)
    total = backend.sum(weights, [scores.dim() - 1], True)
    out = _product(backend, torch.div(weights, total), value)
    log_total = (backend.unary("log", total) + top).squeeze(-1)
    return _like_vendor(out), log_total


def _like_vendor(x: Tensor) -> Tensor:
    """(b, h, t, d) laid out in memory as (b, t, h, d), as the CPU kernel returns it, so that later views succeed."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _attention_backward(
    backend: Backend,
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    own_heads = key.shape[1]
    key, value = _shared_heads(query, key), _shared_heads(query, value)
    scores, factor = _scores(backend, query, key, is_causal, attn_mask, scale)
    weights = softmax(backend, scores, -1)
    grad_value = _product(backend, weights.transpose(-2, -1), grad)
    grad_weights = _product(backend, grad, value.transpose(-2, -1))
    inner = backend.sum(grad_weights * weights, [scores.dim() - 1], True)
    grad_scores = (weights * (grad_weights - inner)) * factor
    grad_query = _product(backend, grad_scores, key)
    grad_key = _product(backend, grad_scores.transpose(-2, -1), query)
    if key.shape[1] != own_heads:
        grad_key, grad_value = (
            backend.sum(g.reshape(g.shape[0], own_heads, -1, *g.shape[2:]), [2], False) for g in (grad_key, grad_value)
        )
    return _like_vendor(grad_query), _like_vendor(grad_key), _like_vendor(grad_value)


def _shape(
    x: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
) -> ConvolutionShape:
    count = x.dim() - 2
    return ConvolutionShape(
        stride=tuple(stride) if len(stride) == count else tuple(stride) * count,
        padding=tuple(padding) if len(padding) == count else tuple(padding) * count,
        dilation=tuple(dilation) if len(dilation) == count else tuple(dilation) * count,
        groups=groups,
    )


def _lifted(shape: ConvolutionShape) -> ConvolutionShape:
    """A 1-D convolution as a 2-D one of height 1."""
    return ConvolutionShape(
        stride=(1, *shape.stride), padding=(0, *shape.padding), dilation=(1, *shape.dilation), groups=shape.groups
    )


def _require_plane(x: Tensor) -> None:
    if x.dim() not in (3, 4):
        raise UnsupportedOperator("aten.convolution", "only 1-D and 2-D convolutions are built")


def _transposed_shape(
    x: Tensor, weight: Tensor, shape: ConvolutionShape, output_padding: Sequence[int]
) -> tuple[int, ...]:
    """Shape of a transposed convolution's result, which is the input of the convolution whose gradient it is."""
    extra = (
        tuple(output_padding) if len(output_padding) == 2 else (0,) * (2 - len(output_padding)) + tuple(output_padding)
    )
    size = [
        (n - 1) * stride - 2 * pad + step * (k - 1) + 1 + more
        for n, k, stride, pad, step, more in zip(
            x.shape[2:], weight.shape[2:], shape.stride, shape.padding, shape.dilation, extra, strict=True
        )
    ]
    return (x.shape[0], weight.shape[1] * shape.groups, *size)


def _convolution(
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
    shape = _shape(x, stride, padding, dilation, groups)
    flat = x.dim() == 3
    if flat:
        x, weight, shape = x[:, :, None], weight[:, :, None], _lifted(shape)
    if transposed:
        out = backend.convolution_grad_input(x, _transposed_shape(x, weight, shape, output_padding), weight, shape)
    else:
        out = backend.convolution(x, weight, shape)
    # The strides are part of an operator's result: later operators, and a trace of the step, depend on them.
    out = (out[:, :, 0] if flat else out).contiguous()
    return out if bias is None else out + bias.reshape(1, -1, *(1,) * (out.dim() - 2))


def _convolution_backward(
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
    shape = _shape(x, stride, padding, dilation, groups)
    grad_bias = backend.sum(grad, [0, *range(2, x.dim())], False) if output_mask[2] else None
    flat = x.dim() == 3
    if flat:
        grad, x, weight, shape = grad[:, :, None], x[:, :, None], weight[:, :, None], _lifted(shape)
    grad_x = grad_weight = None
    if output_mask[0] and transposed:
        grad_x = backend.convolution(grad, weight, shape)
    elif output_mask[0]:
        grad_x = backend.convolution_grad_input(grad, tuple(x.shape), weight, shape)
    if output_mask[1]:
        above, below = (x, grad) if transposed else (grad, x)
        grad_weight = backend.convolution_grad_weight(above, below, tuple(weight.shape), shape)
    if flat:
        grad_x = None if grad_x is None else grad_x[:, :, 0]
        grad_weight = None if grad_weight is None else grad_weight[:, :, 0]
    grad_x = None if grad_x is None else grad_x.contiguous()
    return grad_x, None if grad_weight is None else grad_weight.contiguous(), grad_bias


def _baddbmm(backend: Backend, bias: Tensor, a: Tensor, b: Tensor, *, beta: Number = 1, alpha: Number = 1) -> Tensor:
    product = backend.matmul(a, b)
    if beta == 0:
        return product if alpha == 1 else product * alpha
    return combine(bias if beta == 1 else bias * beta, product, alpha, 1)


def rules() -> dict[str, Rule]:
    """Rows of the operator table for this file."""
    table: dict[str, Any] = {
        "mm.default": _mm,
        "bmm.default": _mm,
        "addmm.default": _addmm,
        "baddbmm.default": _baddbmm,
        "mv.default": _mv,
        "dot.default": _dot,
        "_scaled_dot_product_flash_attention_for_cpu.default": _attention,
        "_scaled_dot_product_flash_attention_for_cpu_backward.default": _attention_backward,
        "convolution.default": _convolution,
        "convolution_backward.default": _convolution_backward,
    }
    return {f"aten.{name}": Rule(kind="implemented", implementation=code) for name, code in table.items()}
