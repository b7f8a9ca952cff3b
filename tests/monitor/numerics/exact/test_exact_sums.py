"""Sums, means and scatters: the FP32 number nearest to the exact sum, whatever the order."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from firmware_sim.errors import CallerError, DeviceError
from monitor.numerics.engines.eager.exact import sums as eager
from monitor.numerics.exact import mean, scatter_rows
from monitor.numerics.exact import sum as exact_sum
from monitor.numerics.reference.resolution import round_fraction

INF, NAN = float("inf"), float("nan")


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(bits(a), bits(b))


def nearest(values: list[float], divisor: int = 1) -> float:
    return round_fraction(sum((Fraction(v) for v in values), Fraction(0)) / divisor)


finite = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.sampled_from([0.0, -0.0, 1e-45, -1e-45, 2.0**-126, 1.0, -1.0, 2.0**24, -(2.0**24), 3.4028234663852886e38]),
    st.integers(-3, 3).map(float),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(finite, min_size=1, max_size=40), st.randoms(use_true_random=False))
def test_any_order_gives_the_nearest_number_to_the_exact_sum(values: list[float], random: object) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    values = x.tolist()
    total, average = nearest(values), nearest(values, len(values))
    shuffled = list(values)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    for order in (x, torch.tensor(shuffled, dtype=torch.float32)):
        for got in (
            exact_sum(order),
            eager.sum_rows(order[None], 1)[0],
            exact_sum(order[:, None, None].expand(-1, 2, 3), [0])[1, 2],
        ):
            assert same(got, torch.tensor(total, dtype=torch.float32))
        for got in (mean(order), eager.sum_rows(order[None], len(values))[0]):
            assert same(got, torch.tensor(average, dtype=torch.float32))


CASES = ["gaussian", "heavy", "cancelling", "subnormal", "ties"]


def sample(kind: str, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    x = torch.randn(shape, generator=generator)
    if kind == "heavy":
        return torch.sign(x) * torch.exp(18 * x.abs())
    if kind == "cancelling":
        flat = x.reshape(-1)
        half = flat.numel() // 2
        flat[half : 2 * half] = -flat[:half]
        return flat.reshape(shape)
    if kind == "subnormal":
        return torch.round(x * 2) * 2.0**-149
    if kind == "ties":
        return torch.where(x > 0, 2.0**24, 1.0)
    return x


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize(
    ("shape", "dims"),
    [
        ((4, 3000), [1]),
        ((3000, 4), [0]),
        ((5, 7, 9), [0, 2]),
        ((5, 7, 9), [0, 1]),
        ((6, 5, 4), [1]),
        ((3, 4), None),
        ((), None),
    ],
)
def test_dimensions(kind: str, shape: tuple[int, ...], dims: list[int] | None) -> None:
    x = sample(kind, shape)
    reduced = dims if dims is not None else list(range(len(shape)))
    kept = [d for d in range(len(shape)) if d not in reduced]
    rows = x.permute(kept + reduced).reshape([x.shape[d] for d in kept] + [-1])
    total = exact_sum(x, dims)
    wanted = torch.tensor([nearest(row) for row in rows.reshape(-1, rows.shape[-1]).tolist()])
    assert same(total.reshape(-1), wanted)
    assert same(exact_sum(x, dims, keepdim=True).reshape(total.shape), total)
    turned = x.permute(list(range(x.dim()))[::-1]).contiguous().permute(list(range(x.dim()))[::-1])
    assert same(exact_sum(turned, dims), total)
    average = torch.tensor([nearest(row, len(row)) for row in rows.reshape(-1, rows.shape[-1]).tolist()])
    assert same(mean(x, dims).reshape(-1), average)


def test_long_sums_do_not_drift() -> None:
    x = torch.full((1 << 21,), 0.1)
    assert exact_sum(x).item() == nearest([x[0].item() * (1 << 21)])
    x[::2] = -0.1
    assert bits(exact_sum(x)).item() == 0


def test_non_finite_values() -> None:
    assert exact_sum(torch.tensor([1.0, INF])).item() == INF
    for values in ([INF, -INF], [1.0, NAN], [-NAN]):
        assert bits(exact_sum(torch.tensor(values))).item() == 0x7FC00000
        assert bits(eager.sum_rows(torch.tensor([values]), 1)).item() == 0x7FC00000
    assert exact_sum(torch.tensor([3e38, 3e38])).item() == INF
    assert mean(torch.tensor([3e38, 3e38])).item() == torch.tensor(3e38).item()


def test_empty_sums() -> None:
    assert exact_sum(torch.zeros(3, 0), [1]).tolist() == [0.0, 0.0, 0.0]
    assert exact_sum(torch.zeros(0, 3), [1]).shape == (0,)
    assert bits(mean(torch.zeros(0))).item() == 0x7FC00000
    assert bits(exact_sum(torch.tensor([-0.0, -0.0]))).item() == 0


def test_misuse_is_the_callers_mistake() -> None:
    x = torch.ones(2, 3)
    for dims in ([2], [0, 0], [1, -1]):
        with pytest.raises(CallerError):
            exact_sum(x, dims)
    with pytest.raises(CallerError):
        exact_sum(x.double())
    with pytest.raises(CallerError):
        scatter_rows(2, torch.tensor([0, 2]), torch.ones(2, 3))
    with pytest.raises(CallerError):
        scatter_rows(2, torch.tensor([0]), torch.ones(2, 3))
    with pytest.raises(CallerError):
        scatter_rows(2, torch.tensor([0.0, 1.0]), torch.ones(2, 3))


def test_flush_to_zero_is_refused() -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor can't flush subnormal numbers")
    try:
        with pytest.raises(DeviceError, match="flush"):
            exact_sum(torch.ones(3))
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("kind", CASES)
def test_scattered_rows_are_exact_sums(kind: str) -> None:
    generator = torch.Generator().manual_seed(1)
    source, index = sample(kind, (200, 3)), torch.randint(0, 7, (200,), generator=generator)
    got = scatter_rows(9, index, source)
    for row in range(9):
        for column in range(3):
            assert got[row, column].item() == nearest(source[index == row, column].tolist())
    order = torch.randperm(200, generator=generator)
    assert same(scatter_rows(9, index[order], source[order]), got)
    assert same(eager.scatter_rows(9, index, source), got)


def test_non_finite_scatter() -> None:
    source = torch.tensor([[1.0, INF], [NAN, -INF], [1e30, 2.0], [-1e30, 2.0]])
    got = scatter_rows(2, torch.tensor([0, 0, 1, 1]), source)
    assert (bits(got[0]) == 0x7FC00000).all()
    assert got[1].tolist() == [0.0, 4.0]
