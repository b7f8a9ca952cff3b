"""Accuracy of the matrix product beside native FP32, and the error bound that its docstring proves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from monitor.numerics.engines.cpu.exact.matmul import cpu_matmul
from monitor.numerics.exact import matmul

LENGTHS = (64, 256, 1024, 8192)
ROWS, COLUMNS = 48, 40


def truth(a: Tensor, b: Tensor) -> Tensor:
    return a.to(torch.float64) @ b.to(torch.float64)


def error(c: Tensor, exact: Tensor) -> float:
    return float((c.to(torch.float64) - exact).abs().max() / exact.abs().max())


def ratio(c: Tensor, a: Tensor, b: Tensor) -> float:
    exact = truth(a, b)
    return error(c, exact) / error(a @ b, exact)


@pytest.mark.parametrize("k", LENGTHS)
@pytest.mark.parametrize("kind", ["gaussian", "uniform", "relu"])
def test_ordinary_operands_are_within_twice_native(kind: str, k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    a, b = torch.randn(ROWS, k, generator=generator), torch.randn(k, COLUMNS, generator=generator)
    if kind == "uniform":
        a, b = torch.rand(ROWS, k, generator=generator), torch.rand(k, COLUMNS, generator=generator) - 0.5
    if kind == "relu":
        a = a.relu()
    assert ratio(matmul(a, b), a, b) <= 2.0


def heavy(kind: str, k: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(k + 1)
    a, b = torch.randn(ROWS, k, generator=generator), torch.randn(k, COLUMNS, generator=generator)
    if kind == "softmax":
        return torch.softmax(3 * a, dim=1), b
    if kind == "softmax - one-hot":
        hot = torch.nn.functional.one_hot(torch.randint(0, k, (ROWS,), generator=generator), k)
        return torch.softmax(a, dim=1) - hot, b
    if kind == "lognormal token scale":
        return a * torch.exp(1.5 * torch.randn(1, k, generator=generator)), b
    a[:, 3] *= 1000.0
    if kind == "dead channel":
        b[3] = 0.0
    return a, b


@pytest.mark.parametrize("k", LENGTHS)
@pytest.mark.parametrize(
    "kind", ["softmax", "softmax - one-hot", "lognormal token scale", "massive channel", "dead channel"]
)
def test_heavy_tailed_operands_are_within_four_times_native(kind: str, k: int) -> None:
    a, b = heavy(kind, k)
    assert ratio(matmul(a, b), a, b) <= 4.0


@pytest.mark.parametrize("k", LENGTHS)
def test_without_the_wide_path_a_dead_channel_starves_the_rest(k: int) -> None:
    a, b = heavy("dead channel", k)
    assert ratio(cpu_matmul(a[None], b[None], wide=False)[0], a, b) > 30.0


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("k", [1, 7, 300])
def test_error_bound_of_the_docstring(k: int, wide: bool) -> None:
    generator = torch.Generator().manual_seed(k)
    for spread in (0.0, 1.0, 6.0):
        a = torch.randn(30, k, generator=generator) * torch.exp(spread * torch.randn(30, k, generator=generator))
        b = torch.randn(k, 30, generator=generator) * torch.exp(spread * torch.randn(k, 30, generator=generator))
        c = cpu_matmul(a[None], b[None], wide=wide)[0]
        ulp = torch.nextafter(c.abs(), torch.tensor(torch.inf)).to(torch.float64) - c.abs().to(torch.float64)
        largest = a.abs().amax(1).to(torch.float64)[:, None] * b.abs().amax(0).to(torch.float64)[None]
        bound = k * 2.0**-21 * largest + ulp / 2
        assert ((c.to(torch.float64) - truth(a, b)).abs() <= bound * (1 + 2.0**-40)).all()
