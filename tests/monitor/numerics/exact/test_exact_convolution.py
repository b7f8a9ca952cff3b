"""Convolutions as products of patches: gathered int8 tiles against im2col, and both against the definition."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from monitor.numerics.engines.cpu.exact import convolution as cpu
from monitor.numerics.engines.eager.exact import convolution as eager
from monitor.numerics.exact import convolution

SHAPES = [
    # samples, channels, height, width, filters, kernel, stride, padding, dilation
    (2, 3, 9, 11, 5, (3, 3), (1, 1), (1, 1), (1, 1)),
    (3, 8, 12, 12, 16, (3, 3), (2, 2), (1, 1), (1, 1)),
    (2, 6, 10, 7, 4, (1, 1), (1, 1), (0, 0), (1, 1)),
    (2, 6, 9, 8, 4, (1, 1), (2, 3), (0, 0), (1, 1)),
    (1, 4, 40, 41, 3, (2, 3), (1, 2), (0, 2), (2, 1)),
    (20, 2, 4, 4, 3, (3, 3), (1, 1), (1, 1), (1, 1)),
    (1, 70, 6, 5, 2, (3, 3), (1, 1), (1, 1), (1, 1)),
]


def run(x: Tensor, w: Tensor, grad: Tensor, window: tuple[tuple[int, int], ...]) -> list[Tensor]:
    return [
        convolution.correlate(x, w, *window),
        convolution.grad_input(grad, tuple(x.shape), w, *window),
        convolution.grad_weight(grad, x, tuple(w.shape), *window),
    ]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["gaussian", "relu", "outliers", "broken"])
def test_tiles_of_patches_give_the_bits_of_im2col(
    shape: tuple[int, int, int, int, int, tuple[int, int], tuple[int, int], tuple[int, int], tuple[int, int]],
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    n, c, h, w, filters, kernel, *window = shape
    generator = torch.Generator().manual_seed(n + 7 * c)
    x, weight = torch.randn(n, c, h, w, generator=generator), torch.randn(filters, c, *kernel, generator=generator)
    if kind == "relu":
        x = x.relu()
    if kind == "outliers":
        x[0, 0, h // 2, w // 2], weight[0, 0, 0, 0] = 1e6, -3e5
    if kind == "broken":
        x[-1, -1, 0, 0], weight[-1, 0, 0, 0] = float("inf"), float("nan")
    stride, padding, dilation = window
    truth = torch.conv2d(x.double(), weight.double(), None, stride, padding, dilation)
    grad = torch.randn(truth.shape, generator=generator)
    monkeypatch.setattr(cpu, "INT8_WORK", 1 << 60)
    monkeypatch.setattr(eager, "_TILE_ELEMENTS", 100)
    expected = run(x, weight, grad, tuple(window))
    monkeypatch.setattr(cpu, "INT8_WORK", 0)
    monkeypatch.setattr(cpu, "_GATHERED_ELEMENTS", 1 << 12)
    found = run(x, weight, grad, tuple(window))
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert torch.equal(one.contiguous().view(torch.int32), other.contiguous().view(torch.int32))
    if kind in ("gaussian", "relu"):
        torch.testing.assert_close(found[0].double(), truth, rtol=1e-5, atol=1e-5)
        x64, w64 = x.double().requires_grad_(), weight.double().requires_grad_()
        torch.autograd.backward(torch.conv2d(x64, w64, None, stride, padding, dilation), grad.double())
        for one, leaf in zip(found[1:], (x64, w64), strict=True):
            assert leaf.grad is not None
            torch.testing.assert_close(one.double(), leaf.grad, rtol=1e-5, atol=1e-4)


def test_a_border_that_cuts_more_than_the_image_leaves_zeros() -> None:
    """The gradient's only element reaches no input: padding 5 puts it outside."""
    x, weight = torch.randn(2, 3, 4, 4, requires_grad=True), torch.randn(4, 3, 3, 3)
    truth = torch.nn.functional.conv2d(x, weight, stride=20, padding=5)
    (wanted,) = torch.autograd.grad(truth.sum(), x)
    found = convolution.grad_input(torch.ones_like(truth), x.shape, weight, (20, 20), (5, 5), (1, 1))
    assert torch.equal(found, wanted)


def test_pieces_of_patches_cover_every_place_once_in_order() -> None:
    for samples, height, width, threads in itertools.product((1, 3, 40), (1, 5, 33), (2, 17, 600), (1, 2, 3)):
        x = torch.arange(samples * height * width, dtype=torch.float32).reshape(samples, height, width)
        pieces = [x[part] for part in cpu._parts(samples, height, width, threads)]
        assert torch.equal(torch.cat([piece.reshape(-1) for piece in pieces]), x.reshape(-1))
        assert all(piece.numel() <= 2 * cpu._PATCHES for piece in pieces)
