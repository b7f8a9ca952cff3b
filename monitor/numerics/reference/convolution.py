"""Convolutions of whole numbers, by the elements of the filter in int64."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

__all__ = ["convolution_by_integers"]


def convolution_by_integers(
    x: Tensor, weight: Tensor, grad: Tensor, stride: int, padding: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Result (n, o, oh, ow), and gradients in x (n, c, h, w) and, sample by sample, in the weight (n, o, c, kh, kw).

    All int64: x, weight (o, c, kh, kw) and grad (n, o, oh, ow).
    """
    padded = torch.constant_pad_nd(x, [padding] * 4)
    out, to_padded = torch.zeros_like(grad), torch.zeros_like(padded)
    to_weight = torch.zeros((len(x), *weight.shape), dtype=torch.int64)
    height, width = (stride * (size - 1) + 1 for size in grad.shape[2:])
    for i, j in itertools.product(*map(range, weight.shape[2:])):
        seen = (slice(None), slice(None), slice(i, i + height, stride), slice(j, j + width, stride))
        taps, images, gradients = weight[:, :, i, j, None, None], padded[seen].unsqueeze(1), grad.unsqueeze(2)
        out += (images * taps).sum(2)
        to_padded[seen] += (gradients * taps).sum(1)
        to_weight[..., i, j] = (gradients * images).sum((3, 4))
    rows, columns = (slice(padding, padding + size) for size in x.shape[2:])
    return out, to_padded[:, :, rows, columns], to_weight
