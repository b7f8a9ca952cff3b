"""Known answers of convolutions over one channel: the result and both gradients, for batches of 1 to 128 samples.

One channel, few samples and many are where kernels take different paths and lay out results differently. The operands
are whole numbers, so that every sum is one below 2^53; the answers are those sums, taken in int64 over the elements of
the filter and rounded once to FP32.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from monitor.numerics.backend import Backend
from monitor.numerics.geometry import ConvolutionShape
from monitor.numerics.reference.convolution import convolution_by_integers

__all__ = ["BATCHES", "one_channel_is_exact"]

BATCHES = (1, 2, 7, 50, 64, 100, 128)
"""Samples; the products of the largest batch are large enough for the engines that large ones take."""

_SIZE, _FILTERS, _KERNEL, _PADDING = 12, 10, 5, 2
_BOUND = 1 << 11
_PLANE = ConvolutionShape(stride=(1, 1), padding=(_PADDING, _PADDING), dilation=(1, 1), groups=1)


@lru_cache(maxsize=1)
def _operands() -> tuple[Tensor, Tensor, Tensor]:
    """Images, filters and gradients of the largest batch, as whole numbers in FP32."""
    generator = torch.Generator().manual_seed(13)
    shapes = (
        (BATCHES[-1], 1, _SIZE, _SIZE),
        (_FILTERS, 1, _KERNEL, _KERNEL),
        (BATCHES[-1], _FILTERS, _SIZE, _SIZE),
    )
    x, w, grad = (torch.randint(-_BOUND, _BOUND, shape, generator=generator).to(torch.float32) for shape in shapes)
    return x, w, grad


@lru_cache(maxsize=1)
def _answers() -> tuple[Tensor, Tensor, Tensor]:
    """Results (n, o, h, w), and gradients in images (n, 1, h, w) and in filters, sample by sample (n, o, 1, k, k)."""
    x, w, grad = (value.to(torch.int64) for value in _operands())
    return convolution_by_integers(x, w, grad, stride=1, padding=_PADDING)


def one_channel_is_exact(backend: Backend, device: torch.device) -> bool:
    """Whether a backend's convolution and both its gradients give the known answers for every batch size."""
    x, w, grad = (value.to(device) for value in _operands())
    out, to_x, to_w = _answers()
    for samples in BATCHES:
        images, gradients = x[:samples], grad[:samples]
        pairs = (
            (backend.convolution(images, w, _PLANE), out[:samples]),
            (backend.convolution_grad_input(gradients, tuple(images.shape), w, _PLANE), to_x[:samples]),
            (backend.convolution_grad_weight(gradients, images, tuple(w.shape), _PLANE), to_w[:samples].sum(0)),
        )
        if not all(torch.equal(found.cpu(), expected.to(torch.float32)) for found, expected in pairs):
            return False
    return True
