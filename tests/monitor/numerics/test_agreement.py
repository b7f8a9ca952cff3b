"""Controlled operators beside PyTorch's own: types, shapes, zero sizes, memory, and what must be refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from firmware_sim.errors import CallerError
from monitor.numerics import UnsupportedOperator, recording

TYPES = (torch.int8, torch.uint8, torch.int16, torch.int64, torch.bool, torch.float32)
SHAPES = ((), (1,), (5,), (3, 4), (3, 0))


def controlled(call):
    with recording("exact"):
        return call()


def leaves(value):
    return [value] if isinstance(value, Tensor) else [leaf for each in value for leaf in leaves(each)]


def assert_alike(call, *, exact=True):
    """Both results have the same shapes and types, and the same values."""
    ours, theirs = leaves(controlled(call)), leaves(call())
    assert [(each.dtype, each.shape) for each in ours] == [(each.dtype, each.shape) for each in theirs]
    for mine, native in zip(ours, theirs, strict=True):
        wide, bound = torch.complex128 if mine.is_complex() else torch.float64, 0.0 if exact else 1e-4
        assert torch.allclose(mine.to(wide), native.to(wide), bound, bound), call


def made(dtype, shape, *, columns=False):
    count = torch.Size(shape).numel()
    x = (torch.arange(count) * 7 % 5).reshape(shape).to(dtype)
    return x.t().contiguous().t() if columns and len(shape) == 2 else x


def into_first(x, dim):
    return torch.zeros(x.shape, dtype=torch.int64)


def reduced_into_first(x, dim, *, how, own):
    return x.scatter_reduce(dim, into_first(x, dim), x, how, include_self=own)


BY_PLACE: dict[str, Callable[[Any, Any], Any]] = {
    **{
        f"scatter_reduce {how} {own}": partial(reduced_into_first, how=how, own=own)
        for how in ("sum", "prod", "amax", "amin")
        for own in (True, False)
    },
    "scatter_reduce_": lambda x, dim: x.clone().scatter_reduce_(dim, into_first(x, dim), x, "prod"),
    "scatter_add": lambda x, dim: x.scatter_add(dim, into_first(x, dim), x),
    "index_add": lambda x, dim: x.index_add(dim, into_first(x.sum(), 0).expand(x.shape[dim] if x.dim() else 1), x),
    "sum": lambda x, dim: x.sum(dim),
    "prod": lambda x, dim: x.prod(dim),
    "cumsum": lambda x, dim: x.cumsum(dim),
    "cumprod": lambda x, dim: x.cumprod(dim),
    "sort": lambda x, dim: torch.sort(x, dim=dim, stable=True),
    "argsort": lambda x, dim: torch.argsort(x, dim=dim, stable=True),
}
NONEMPTY = {
    "amax": lambda x, dim: x.amax(dim),
    "amin": lambda x, dim: x.amin(dim, keepdim=True),
    "max": lambda x, dim: x.max(dim)[0],
    "cummax": lambda x, dim: x.cummax(dim),
    "cummin": lambda x, dim: x.cummin(dim),
    "aminmax": lambda x, dim: torch.aminmax(x, dim=dim),
    "index_fill": lambda x, dim: x.index_fill(dim, torch.tensor([-1]), 1),
}


@pytest.mark.parametrize("name", [*BY_PLACE, *NONEMPTY])
def test_results_have_the_types_and_shapes_of_pytorch(name):
    call = {**BY_PLACE, **NONEMPTY}[name]
    operands = [made(*each, columns=columns) for each in itertools.product(TYPES, SHAPES) for columns in (False, True)]
    operands = [x for x in operands if x.numel() or name in BY_PLACE]
    assert_alike(lambda: [call(x, dim) for x in operands for dim in (0, -x.dim() or -1, -1)])


@pytest.mark.parametrize("how", ["mean", "prod"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32])
def test_integers_of_a_small_type_wrap_around_by_place(dtype, how):
    x, source = torch.full((2,), 100).to(dtype), torch.tensor([100, 7, -3, 5]).to(dtype)
    assert_alike(lambda: x.scatter_reduce(0, torch.tensor([0, 0, 1, 1]), source, how))


SELECTIONS = {
    "median": lambda x, keep: torch.median(x, 0, keepdim=keep)[0],
    "nanmedian": lambda x, keep: torch.nanmedian(x, -1, keepdim=keep)[0],
    "kthvalue": lambda x, keep: torch.kthvalue(x, 2, 0, keepdim=keep)[0],
    "mode": lambda x, keep: torch.mode(x, 0, keepdim=keep),
    "unique": lambda x, keep: torch.unique(x, return_inverse=True, return_counts=True),
    "put": lambda x, keep: x.put(torch.tensor([-1, 0]), x.flatten()[:2], keep),
    "put_": lambda x, keep: x.clone().put_(torch.tensor([-1]), x.flatten()[:1]),
    "index_put": lambda x, keep: torch.ops.aten.index_put(x, [torch.tensor([-1, 0, -1])], x[:1], keep),
    "floor_divide_": lambda x, keep: x.clone().floor_divide_(torch.full_like(x, 2)),
    "remainder": lambda x, keep: torch.remainder(x, 3),
    "fmod": lambda x, keep: torch.fmod(-x, torch.tensor(3)),
    "alpha": lambda x, keep: torch.sub(x, x.flip(0), alpha=2),
}


@pytest.mark.parametrize("name", SELECTIONS)
@pytest.mark.parametrize("dtype", [each for each in TYPES if each != torch.bool])
def test_selections_and_quotients_keep_small_types(name, dtype):
    each = list(itertools.product((False, True), repeat=2))
    assert_alike(lambda: [SELECTIONS[name](made(dtype, (3, 4), columns=columns), keep) for columns, keep in each])


@pytest.mark.parametrize("name", ["bartlett", "blackman", "hamming", "hann", "kaiser"])
def test_windows_are_pytorch_s(name):
    window = getattr(torch, f"{name}_window")
    each = list(itertools.product((0, 1, 2, 7, 400), (True, False)))
    assert_alike(lambda: [window(length, periodic=periodic) for length, periodic in each], exact=False)


def test_distributions_over_gamma_functions_have_pytorch_s_gradients():
    x = torch.linspace(0.01, 20.0, 60).requires_grad_()

    def gradients():
        beta, gamma = torch.distributions.Beta(x, x + 1), torch.distributions.Gamma(x, x)
        rows = torch.distributions.Dirichlet(x.reshape(6, 10))
        terms = [each.entropy() for each in (beta, gamma, rows)]
        terms += [beta.log_prob(torch.tensor(0.3)), gamma.log_prob(torch.tensor(1.5)), torch.mvlgamma(x + 1, 2)]
        terms.append(torch.distributions.kl_divergence(beta, torch.distributions.Beta(x + 1, x)))
        return torch.autograd.grad(sum(each.sum() for each in terms), x)

    assert_alike(gradients, exact=False)


BOOLS = {
    "add": lambda x: torch.add(x, x, alpha=2),
    "largest": lambda x: x.scatter_reduce(0, torch.zeros(4, dtype=torch.int64), ~x, "amax"),
    "mask": lambda x: torch.arange(4).masked_fill(x, 9),
    "rows": lambda x: torch.ops.aten.index_put(torch.zeros(4, 3), [x, torch.tensor([-1, 1])], torch.ones(2), True),
    "masked places": lambda x: torch.ops.aten._unsafe_masked_index(
        torch.arange(4).float(), x, [torch.tensor([-1, 9, -4, -9])], 7.0
    ),
    "bins of small integers": lambda x: torch.bincount(x.to(torch.int8), torch.ones(4)).float(),
    "no values for bins": lambda x: torch.bincount(torch.zeros(0, dtype=torch.int64), torch.zeros(0), minlength=2),
    "a median of none": lambda x: torch.zeros(0).median().isnan(),
    "a sum of no doubles": lambda x: torch.zeros(3, 0, dtype=torch.float64).sum(1),
    "no slices": lambda x: torch.zeros(0, 3).index_add(1, torch.tensor([0]), torch.zeros(0, 1)),
}


@pytest.mark.parametrize("name", BOOLS)
def test_masks_and_empty_operands_are_pytorchs(name):
    values = torch.tensor([True, False, True, False])
    controlled_result, native = controlled(lambda: BOOLS[name](values)), BOOLS[name](values)
    assert torch.equal(controlled_result.double(), native.double())
    assert controlled_result.shape == native.shape


OUTSIDE = {
    "scatter": lambda: torch.zeros(2, 3).scatter(1, torch.tensor([[0, 0], [-1, -1]]), torch.ones(2, 2)),
    "scatter_add": lambda: torch.zeros(2, 3).scatter_add(1, torch.tensor([[0], [-1]]), torch.ones(2, 1)),
    "scatter_reduce": lambda: torch.zeros(2, 3).scatter_reduce(1, torch.tensor([[0], [-1]]), torch.ones(2, 1), "amax"),
    "index_copy": lambda: torch.zeros(4).index_copy(0, torch.tensor([-1]), torch.ones(1)),
    "put": lambda: torch.zeros(4).put(torch.tensor([-5]), torch.ones(1)),
    "unpool": lambda: functional.max_unpool2d(torch.ones(1, 1, 1, 1), torch.tensor([[[[-1]]]]), [2]),
    "segments": lambda: torch.segment_reduce(torch.ones(4), "sum", lengths=torch.tensor([5, -1])),
    "no bin": lambda: torch.histogram(torch.ones(3), torch.ones(1)),
    "bags": lambda: functional.embedding_bag(torch.tensor([0]), torch.ones(2, 2), torch.tensor([0, 9]), mode="sum"),
    "rows of a solver": lambda: torch.linalg.solve_triangular(torch.eye(3), torch.ones(2, 1), upper=True),
    "rows of a factor": lambda: torch.cholesky_solve(torch.ones(2, 1), torch.eye(3)),
    "no square": lambda: torch.linalg.solve(torch.ones(2, 3), torch.ones(2, 1)),
    "no square determinant": lambda: torch.linalg.det(torch.ones(2, 3)),
    "no square exponential": lambda: torch.linalg.matrix_exp(torch.ones(2, 3)),
    "a pivot 0": lambda: torch.linalg.lu_solve(torch.eye(2), torch.zeros(2, dtype=torch.int32), torch.ones(2, 1)),
    "a pivot beyond": lambda: torch.lu_unpack(torch.eye(2), torch.tensor([1, 9], dtype=torch.int32)),
    "reflections": lambda: torch.linalg.householder_product(torch.ones(2, 3), torch.ones(2)),
    "eigenvalues of NaN": lambda: torch.linalg.eigh(torch.full((2, 2), torch.nan)),
    "singular values of NaN": lambda: torch.linalg.svdvals(torch.full((2, 2), torch.nan)),
    "least squares of NaN": lambda: torch.linalg.lstsq(torch.full((3, 2), torch.nan), torch.ones(3, 1)),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_pytorch_refuses_is_refused(name):
    with pytest.raises((CallerError, IndexError, RuntimeError)):
        controlled(OUTSIDE[name])


def test_bicubic_samples_of_a_volume_are_refused():
    volume, grid = torch.ones(1, 1, 2, 2, 2), torch.zeros(1, 1, 1, 1, 3)
    with pytest.raises(UnsupportedOperator, match="bicubic samples of a volume"):
        controlled(lambda: torch.ops.aten.grid_sampler_3d(volume, grid, 2, 0, False))


@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
@pytest.mark.parametrize(("batch", "channels"), [(0, 2), (2, 0)])
def test_samples_of_nothing_have_a_shape(mode, batch, channels):
    image, grid = torch.ones(batch, channels, 3, 4), torch.zeros(batch, 2, 5, 2)
    assert_alike(lambda: functional.grid_sample(image, grid, mode, align_corners=False))


LOW_RANK = torch.outer(torch.tensor([1.0, 2.0, -1.0]), torch.tensor([1.0, 2.0]))


@pytest.mark.parametrize("matrix", [LOW_RANK, LOW_RANK.mT, LOW_RANK[:2], torch.zeros(3, 2)])
@pytest.mark.parametrize("full", [False, True])
def test_singular_vectors_of_a_matrix_of_low_rank_are_orthogonal(matrix, full):
    u, s, vh = controlled(lambda: torch.linalg.svd(matrix, full_matrices=full))
    rank = min(matrix.shape)
    assert torch.allclose(u.mT @ u, torch.eye(u.shape[1]), atol=1e-5)
    assert torch.allclose(vh @ vh.mT, torch.eye(vh.shape[0]), atol=1e-5)
    assert torch.allclose(u[:, :rank] * s @ vh[:rank], matrix, atol=1e-5)
    assert_alike(lambda: torch.linalg.pinv(matrix), exact=False)


def test_a_factor_that_fails_holds_what_it_was_given_from_there_on():
    matrix = torch.tensor([[4.0, 2.0, 6.0], [2.0, 1.0, 5.0], [6.0, 5.0, 7.0]])
    factor, info = controlled(lambda: torch.linalg.cholesky_ex(matrix))
    assert info.item() == 2
    assert factor.tolist() == [[2.0, 0.0, 0.0], [1.0, 1.0, 0.0], [3.0, 5.0, 7.0]]


COMPLEX = torch.tensor([1.0 + 2.0j, 3.0 - 1.0j])
REAL = torch.tensor([1.0, 2.0])
ARITHMETIC = {
    "sum": lambda: COMPLEX + COMPLEX,
    "difference": lambda: 1.0 - COMPLEX,
    "product": lambda: COMPLEX * REAL,
    "product with a number": lambda: torch.ops.aten.mul.Scalar(REAL, 1j),
    "sum with a number": lambda: torch.ops.aten.add.Scalar(REAL, 1j),
    "quotient": lambda: COMPLEX / 2.0,
    "reciprocal": lambda: COMPLEX.reciprocal(),
    "negation": lambda: -COMPLEX,
    "in place": lambda: COMPLEX.clone().add_(1.0),
    "a list": lambda: torch._foreach_add([COMPLEX], [COMPLEX]),
    "a list in place": lambda: torch._foreach_mul_([COMPLEX.clone()], 2.0),
    "a type": lambda: REAL.sum(dtype=torch.complex64),
    "all": lambda: COMPLEX.sum(),
    "matrix": lambda: COMPLEX[None] @ COMPLEX[:, None],
    "angle": lambda: COMPLEX.angle(),
    "power": lambda: COMPLEX**2,
    "mean": lambda: COMPLEX.mean(),
    "scatter": lambda: COMPLEX.scatter_add(0, torch.tensor([0, 0]), COMPLEX),
    "cast": lambda: REAL.to(torch.complex64),
}
UNSTATED = {
    "random": lambda: torch.randn(2, dtype=torch.complex64),
    "dropout": lambda: torch.ops.aten.native_dropout(COMPLEX, 0.5, True),
    "inverse": lambda: torch.linalg.inv(torch.eye(2, dtype=torch.complex64)),
    "running product": lambda: COMPLEX.cumprod(0),
    "double precision": lambda: COMPLEX.to(torch.complex128),
    "products in double precision": lambda: COMPLEX * REAL.double(),
}


@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic_of_complex_numbers_has_an_algorithm_of_its_own(name):
    assert_alike(ARITHMETIC[name], exact=False)


@pytest.mark.parametrize("name", UNSTATED)
@pytest.mark.parametrize("numerics", ["exact", "rounded"])
def test_arithmetic_of_complex_numbers_that_has_none_is_refused_by_name(name, numerics):
    with recording(numerics), pytest.raises(UnsupportedOperator, match=r"^aten.*complex"):
        UNSTATED[name]()


SHARED = {
    "cummax": lambda x: x.cummax(0)[0],
    "cumprod": lambda x: x.cumprod(0),
    "logcumsumexp": lambda x: x.logcumsumexp(0),
    "prod": lambda x: x.prod(0, keepdim=True),
    "prod of doubles": lambda x: x.double().sum(0, keepdim=True),
    "pixel_shuffle": lambda x: functional.pixel_shuffle(x.reshape(1, 1, 1, -1), 1),
    "median": lambda x: x.median(0, keepdim=True)[0],
    "index_put": lambda x: torch.ops.aten.index_put(x, [torch.zeros(0, dtype=torch.int64)], x[:0]),
    "renorm": lambda x: x.reshape(1, -1).renorm(2, 0, 1e9),
    "nan_to_num": lambda x: x.nan_to_num(),
    "masked_scatter_backward": lambda x: torch.ops.aten.masked_scatter_backward(x, torch.ones_like(x).bool(), x.shape),
    "adaptive pool": lambda x: functional.adaptive_avg_pool2d(x.reshape(1, 1, 1, -1), (1, len(x))),
}


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("size", [1, 3])
def test_a_result_that_is_overwritten_leaves_its_operand(name, size):
    def overwritten():
        x = torch.arange(1, size + 1).float()
        SHARED[name](x).fill_(7.0)
        return x

    assert_alike(overwritten)
