"""Scalar laws of the adaptive grid, and compiled kernels against their eager references, bit for bit."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from monitor.numerics.rounding._fast import column_norm_parts, order_free_sum_64, row_norm_parts, settle
from monitor.numerics.rounding.bounds import ProductBound, RelativeBound
from monitor.numerics.rounding.grid import decide, round_to_grid
from monitor.numerics.rounding.norms import norms, quantised_squares
from monitor.numerics.rounding.sums import order_free_cumsum, order_free_scatter, order_free_sum

EDGES = [0.0, -0.0, 2.0**-149, 2.0**-150, 3 * 2.0**-150, 2.0**-126, 2.0**-127 * 1.1, 1.0, -1.0, 1 + 2.0**-24]
EDGES += [1 + 3 * 2.0**-24, 3.4028235677973366e38, 3.5e38, 2.0**127 * 1.9999999, math.inf, -math.inf, math.nan]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int32)


@pytest.mark.parametrize("grid_bits", [24, 8])
@pytest.mark.parametrize("multiple", [2.0, 4.0])
def test_settling_equals_its_reference(grid_bits: int, multiple: float) -> None:
    generator = torch.Generator().manual_seed(4)
    v = torch.randn(24, 301, generator=generator, dtype=torch.float64)
    v[::3] = v[::3].float().double() + v[::3].float().double() * 2.0**-24
    v[1, : len(EDGES)] = torch.tensor(EDGES, dtype=torch.float64)
    left = torch.rand(6, generator=generator, dtype=torch.float64) * 2.0 ** -(6 + grid_bits)
    left[2] = 0.0
    right = torch.rand(8, 301, generator=generator, dtype=torch.float64)
    right[:, ::7] = 2.0**10
    bound = ProductBound(left=left, right=right, rows_per_right=3)
    for error in (bound, RelativeBound(factor=2.0 ** -(6 + grid_bits))):
        reference = round_to_grid(v, error.dense(v), grid_bits, multiple)
        fast = settle(v, error, grid_bits, multiple)
        assert torch.equal(bits(fast[0]), bits(reference[0]))
        assert torch.equal(fast[1], reference[1])
        assert torch.equal(fast[2], reference[2])
        assert len(fast[1]) > 50
        picked = fast[1][::5]
        assert torch.equal(error.at(picked, v.reshape(-1)[picked]), error.dense(v).reshape(-1)[picked])


@given(st.floats(width=64, allow_nan=False, allow_infinity=False, min_value=-3e38, max_value=3e38))
@settings(max_examples=300, deadline=None)
def test_without_a_bound_the_grid_is_fp32(value: float) -> None:
    out = round_to_grid(torch.tensor([value], dtype=torch.float64), torch.zeros(1, dtype=torch.float64), 24, 4.0)[0]
    with np.errstate(over="ignore"):
        expected = np.float32(value) + np.float32(0.0)
    assert bits(out).item() == int(np.float32(expected).view(np.int32))


@given(
    st.floats(min_value=-(2.0**40), max_value=2.0**40),
    st.floats(min_value=2.0**-60, max_value=2.0**20),
)
@settings(max_examples=300, deadline=None)
def test_one_midpoint_at_most_is_in_reach(value: float, beta: float) -> None:
    """g ≥ 32β and g ≥ ulp: 6β to a midpoint leaves the neighbouring midpoints 26β away."""
    found = decide(torch.tensor([value], dtype=torch.float64), torch.tensor([beta], dtype=torch.float64), 24)
    spacing = Fraction(found.spacing.item())
    assert spacing >= 32 * Fraction(beta)
    middle = (Fraction(found.floor.item()) + Fraction(1, 2)) * spacing
    assert abs(abs(Fraction(value)) - middle) - Fraction(found.distance.item()) <= spacing / 2**53
    assert found.distance.item() <= spacing / 2


@pytest.mark.parametrize("shape", [(5, 7), (3, 4, 33), (1, 1), (2, 600, 3)])
def test_norm_kernels_equal_their_reference_and_bound_the_norm(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(8)) * 1e-3
    x.view(-1)[0] = 1e-42
    if x.numel() > 20:
        x.view(-1)[7], x.view(-1)[-1] = float("inf"), float("nan")
        x[..., -2, :-1] = 0.0
    for dim, fast in ((-1, row_norm_parts), (-2, column_norm_parts)):
        squares, scale = quantised_squares(x, [dim])
        total, fast_scale = fast(x)
        assert torch.equal(total, squares.sum(dim, keepdim=True))
        good = x.abs().amax(dim, keepdim=True).isfinite()
        assert torch.equal(fast_scale[good], scale[good])
        true = x.double().norm(dim=dim, keepdim=True)
        assert bool((norms(x, dim)[good] >= true[good] * (1 - 2.0**-40)).all())
        assert bool((norms(x, dim)[good] <= true[good] + x.shape[dim] ** 0.5 * 2.0**-13 * scale[good] * 2.0**15).all())


@pytest.mark.parametrize("dims", [[0], [1], [2], [0, 1], [0, 2], [1, 2], [0, 1, 2]])
def test_sums_are_the_same_in_any_order_and_near_the_truth(dims: list[int]) -> None:
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(9, 17, 21, generator=generator) * torch.randn(9, 17, 21, generator=generator).exp()
    out = order_free_sum(x, dims, False)
    fast = order_free_sum_64(x, dims)
    assert fast is not None
    assert torch.equal(fast.squeeze(dims).float(), out)
    shuffled = x
    for dim in dims:
        shuffled = shuffled.index_select(dim, torch.randperm(x.shape[dim], generator=generator))
    assert torch.equal(bits(order_free_sum(shuffled, dims, False)), bits(out))
    torch.testing.assert_close(out.double(), x.double().sum(dims), rtol=1e-6, atol=1e-5)
    x[2, 3, 4] = float("nan")
    assert order_free_sum_64(x, dims) is None
    poisoned = x.isnan()
    for dim in dims:
        poisoned = poisoned.any(dim, keepdim=True)
    assert torch.equal(order_free_sum(x, dims, True).isnan(), poisoned)


def test_scatter_does_not_depend_on_the_order_of_rows() -> None:
    generator = torch.Generator().manual_seed(1)
    source = torch.randn(500, 6, generator=generator) * 1e4
    index = torch.randint(0, 40, (500,), generator=generator)
    order = torch.randperm(500, generator=generator)
    one = order_free_scatter(41, index, source)
    assert torch.equal(bits(one), bits(order_free_scatter(41, index[order], source[order])))
    assert bool((one[40] == 0).all())
    torch.testing.assert_close(one.double(), torch.zeros(41, 6).double().index_add(0, index, source.double()))


def test_running_sums_end_in_the_sum() -> None:
    x = torch.randn(5, 300, generator=torch.Generator().manual_seed(2))
    assert torch.equal(order_free_cumsum(x, 1)[:, -1], order_free_sum(x, [1], False))
