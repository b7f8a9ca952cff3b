"""Scalar laws of the adaptive grid, and compiled kernels against their eager references, bit for bit."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from monitor.numerics.engines.cpu.rounded import functions, patches, products
from monitor.numerics.engines.cpu.rounded.sums import order_free_sum_64
from monitor.numerics.engines.cpu.rounded.tiles import Bounds, Operand, settle_whole
from monitor.numerics.engines.eager.rounded import convolution
from monitor.numerics.engines.eager.rounded.norms import norms, spans
from monitor.numerics.engines.eager.rounded.result_bounds import ProductBound, exact_bits_of, product_bound
from monitor.numerics.engines.eager.rounded.rounding_rule import decide, round_to_grid
from monitor.numerics.engines.results import Rounding, Settled
from monitor.numerics.geometry import ConvolutionShape
from monitor.numerics.rounding import elements
from monitor.numerics.rounding.sums import order_free_cumsum, order_free_scatter, order_free_sum

EDGES = [0.0, -0.0, 2.0**-149, 2.0**-150, 3 * 2.0**-150, 2.0**-126, 2.0**-127 * 1.1, 1.0, -1.0, 1 + 2.0**-24]
EDGES += [1 + 3 * 2.0**-24, 3.4028235677973366e38, 3.5e38, 2.0**127 * 1.9999999, math.inf, -math.inf, math.nan]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int32)


@pytest.mark.parametrize("grid_bits", [24, 8])
@pytest.mark.parametrize("multiple", [2.0, 4.0, 6.0])
@pytest.mark.parametrize("relative", [0.0, 1.0])
def test_settling_equals_its_reference(grid_bits: int, multiple: float, relative: float) -> None:
    generator = torch.Generator().manual_seed(4)
    v = torch.randn(24, 301, generator=generator, dtype=torch.float64)
    v[::3] = v[::3].float().double() + v[::3].float().double() * 2.0**-24
    v[1, : len(EDGES)] = torch.tensor(EDGES, dtype=torch.float64)
    left = torch.rand(24, generator=generator, dtype=torch.float64) * 2.0 ** -(6 + grid_bits) * (1.0 - relative)
    left[2] = 0.0
    right = torch.rand(8, 301, generator=generator, dtype=torch.float64)
    right[:, ::7] = 2.0**10
    left_spans, right_spans = torch.full((24,), 24), torch.full((8, 301), 24)
    left_spans[5], right_spans[:, 3] = 9, 3
    bound = ProductBound(
        left=left, right=right, left_spans=left_spans, right_spans=right_spans, rows_per_right=3, exact_bits=40
    )
    relative *= 2.0 ** -(6 + grid_bits)
    beta = bound.dense(v) if relative == 0.0 else v.abs() * relative
    rounding = Rounding(
        multiple=multiple, grid_bits=grid_bits, exact_bits=40 if relative == 0.0 else -1, relative=relative
    )
    tile = Bounds(
        left=left.numpy(),
        left_spans=left_spans.int().numpy(),
        right=right.numpy(),
        right_spans=right_spans.int().numpy(),
        rows_per_right=3,
    )
    reference = round_to_grid(v, beta, grid_bits, multiple)
    fast = settle_whole(v, tile, rounding)
    assert torch.equal(bits(fast.out), bits(reference[0]))
    np.testing.assert_array_equal(fast.near.positions, reference[1].numpy())
    np.testing.assert_array_equal(fast.near.upward, reference[2].numpy())
    np.testing.assert_array_equal(fast.near.values, v.reshape(-1)[reference[1]].numpy())
    np.testing.assert_array_equal(fast.near.betas, beta.reshape(-1)[reference[1]].numpy())
    assert len(fast.near.positions) > 50


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


@pytest.mark.parametrize("shape", [(5, 7), (3, 4, 33), (1, 1), (2, 600, 3), (2, 5, 300)])
@pytest.mark.parametrize("by_columns", [False, True])
def test_widened_operands_equal_their_reference_and_bound_the_norm(shape: tuple[int, ...], by_columns: bool) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(8)) * 1e-3
    x.view(-1)[0] = 1e-42
    if x.numel() > 20:
        x.view(-1)[7], x.view(-1)[-1] = float("inf"), float("nan")
        x[..., -2, :-1] = 0.0
    x = x if x.dim() == 3 else x[None]
    vectors = x.mT if by_columns else x
    wide, fast_norms, fast_spans = Operand(vectors).widened((0, vectors.shape[0]), (0, vectors.shape[1]), "test")
    torch.testing.assert_close(wide, vectors.double(), rtol=0, atol=0, equal_nan=True)
    good = vectors.isfinite().all(-1)
    reference = norms(vectors, -1).squeeze(-1)
    assert torch.equal(torch.from_numpy(fast_norms), reference)
    assert torch.equal(torch.from_numpy(fast_spans)[good].long(), spans(vectors, [-1]).squeeze(-1)[good])
    true = vectors.double().norm(dim=-1)
    assert bool((reference[good] >= true[good] * (1 - 2.0**-40)).all())
    largest = vectors.double().abs().amax(-1)
    assert bool(
        (reference[good] <= true[good] * (1 + 2.0**-18) + vectors.shape[-1] ** 0.5 * 2.0**-13 * largest[good]).all()
    )


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=9))
@settings(max_examples=200, deadline=None)
def test_span_counts_bits_from_the_highest_to_the_lowest(values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    integers = [abs(int(Fraction(float(value)) * 2**149)) for value in x]
    lowest = min(((n & -n).bit_length() for n in integers if n), default=1)
    expected = max(max(n.bit_length() for n in integers) - lowest + 1, 0) if any(integers) else 0
    assert spans(x, [0]).item() == expected
    assert Operand(x[None, None]).widened((0, 1), (0, 1), "test")[2].item() == expected


def test_spans_within_the_limit_make_sums_exact_in_any_order() -> None:
    """n = 400 products of random operands at the limit, in 5 random orders, against exact integers."""
    generator = np.random.Generator(np.random.Philox(key=3))
    terms = 64
    budget = exact_bits_of(terms, "float64")
    for _ in range(400):
        s = int(generator.integers(max(1, budget - 24), 25))
        left = generator.integers(-(2**s) + 1, 2**s, terms) * 2.0 ** int(generator.integers(-20, 20))
        right = generator.integers(-(2 ** (budget - s)) + 1, 2 ** (budget - s), terms) * 1.0
        exact = sum(Fraction(float(a)) * Fraction(float(b)) for a, b in zip(left, right, strict=True))
        for _ in range(5):
            total = 0.0
            for k in generator.permutation(terms):
                total += float(left[k]) * float(right[k])
            assert Fraction(total) == exact
    assert exact_bits_of(1, "float64") == 53
    assert exact_bits_of(65, "float64") == 46
    assert exact_bits_of(64, "float32") == -1


def assert_same(fast: Settled, v: torch.Tensor, bound: ProductBound) -> None:
    """A tiled result equals the whole one but for the last bits of FP64: the same bounds and entries."""
    beta = bound.dense(v)
    found = decide(v, beta, 24)
    sure = (found.distance - 4.0 * beta).abs() > 1e-3 * beta
    expected = (found.within(4.0) & sure).reshape(-1).nonzero().reshape(-1).numpy()
    listed = fast.near.positions[sure.reshape(-1).numpy()[fast.near.positions]]
    np.testing.assert_array_equal(listed, expected)
    np.testing.assert_array_equal(fast.near.betas, beta.reshape(-1)[fast.near.positions].numpy())
    np.testing.assert_allclose(fast.near.values, v.reshape(-1)[fast.near.positions].numpy(), rtol=1e-9, atol=1e-12)
    same = fast.out.reshape(-1) == round_to_grid(v, beta, 24, 4.0)[0].reshape(-1)
    assert set((~same).nonzero().reshape(-1).tolist()) <= set(fast.near.positions.tolist())


PRODUCTS = [((5, 7), (7, 3)), ((300, 70), (70, 900)), ((900, 70), (70, 31)), ((6, 33, 20), (6, 20, 17))]
PRODUCTS += [
    ((200, 64, 64), (200, 64, 64)),
    ((2, 300, 200), (2, 200, 100)),
    ((1, 1), (1, 1)),
    ((0, 3), (3, 2)),
    ((2, 0), (0, 3)),
]


@pytest.mark.parametrize(("left", "right"), PRODUCTS)
@pytest.mark.parametrize("turned", [False, True])
def test_tiled_products_equal_whole_ones(left: tuple[int, ...], right: tuple[int, ...], turned: bool) -> None:
    generator = torch.Generator().manual_seed(12)
    a, b = torch.randn(left, generator=generator), torch.randn(right, generator=generator)
    if turned:
        a, b = a.mT.contiguous().mT, b.mT.contiguous().mT
    terms = a.shape[-1]
    factor = terms * 2.0**-40
    rounding = Rounding(multiple=4.0, grid_bits=24, exact_bits=exact_bits_of(max(terms, 1), "float64"))
    fast = products.multiply(a, b, factor, rounding)
    v = torch.matmul(a.double(), b.double())
    assert fast.out.shape == v.shape
    if v.numel():
        bound = product_bound(a, b, factor, rounding.exact_bits)
        assert_same(fast, v, bound)
        for position in range(0, v.numel(), max(v.numel() // 5, 1)):
            assert elements.of_product(a, b, position) == pytest.approx(
                v.reshape(-1)[position].item(), rel=1e-9, abs=1e-12
            )


CONVOLUTIONS = [(3, 4, 6, 9, 3, 1, 1, 1, 1), (2, 4, 6, 10, 3, 2, 1, 1, 2), (2, 6, 6, 11, 3, 2, 2, 2, 3)]
CONVOLUTIONS += [
    (5, 8, 16, 8, 1, 1, 0, 1, 1),
    (4, 8, 8, 9, 1, 2, 0, 1, 1),
    (3, 2, 4, 7, 5, 3, 0, 1, 1),
    (4, 32, 32, 20, 3, 1, 1, 1, 1),
]


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_tiled_convolutions_equal_whole_ones(case: tuple[int, ...]) -> None:
    n, channels, outputs, size, kernel, stride, padding, dilation, groups = case
    generator = torch.Generator().manual_seed(13)
    x = torch.randn(n, channels, size, size + 1, generator=generator)
    weight = torch.randn(outputs, channels // groups, kernel, kernel, generator=generator)
    shape = ConvolutionShape(stride=(stride,) * 2, padding=(padding,) * 2, dilation=(dilation,) * 2, groups=groups)
    rounding = Rounding(multiple=4.0, grid_bits=24)
    factor = 2.0**-38
    v = convolution.forward(x.double(), weight.double(), shape)
    grad = torch.randn(v.shape, generator=generator)
    x_shape, weight_shape = tuple(x.shape), tuple(weight.shape)
    assert_same(
        patches.forward(x, weight, shape, factor, rounding), v, convolution.forward_bound(x, weight, shape, factor, -1)
    )
    back = convolution.grad_input(grad.double(), x_shape, weight.double(), shape)
    fast = patches.grad_input(grad, x_shape, weight, shape, factor, rounding)
    assert_same(fast, back, convolution.grad_input_bound(grad, x_shape, weight, shape, factor, -1))
    filters = convolution.grad_weight(grad.double(), x.double(), weight_shape, shape)
    fast = patches.grad_weight(grad, x, weight_shape, shape, factor, rounding)
    assert_same(fast, filters, convolution.grad_weight_bound(grad, x, weight_shape, shape, factor, -1))
    for whole, element in (
        (v, lambda i: elements.of_convolution(x, weight, tuple(v.shape), shape, i)),
        (back, lambda i: elements.of_grad_input(grad, x_shape, weight, shape, i)),
        (filters, lambda i: elements.of_grad_weight(grad, x, weight_shape, shape, i)),
    ):
        for position in range(0, whole.numel(), max(whole.numel() // 17, 1)):
            assert element(position) == pytest.approx(whole.reshape(-1)[position].item(), rel=1e-9, abs=1e-12)


def test_chunked_functions_equal_whole_ones() -> None:
    x = torch.randn(70_001, generator=torch.Generator().manual_seed(14))
    fast = functions.apply(torch.exp, x, Rounding(multiple=4.0, grid_bits=24, relative=2.0**-36))
    v = torch.exp(x.double())
    out, near, up = round_to_grid(v, v * 2.0**-36, 24, 4.0)
    assert torch.equal(fast.out, out)
    np.testing.assert_array_equal(fast.near.positions, near.numpy())
    np.testing.assert_array_equal(fast.near.upward, up.numpy())
    assert len(near) > 20


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
