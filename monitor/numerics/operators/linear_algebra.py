"""Linear algebra: FP32 matrices, factorised in FP64 in a stated order (``kernels.factorisations``), rounded once.

Where a result is not unique a rule fixes it: pivots are the first largest ones, R's diagonal has LAPACK's signs, and of
an eigenvector, or of a left singular vector, the first largest element is positive. A factorisation that fails says
where: LU goes on behind a column without a pivot, whose quotients are not taken; Cholesky stops, and from the column of
the first minor that is not positive on its factor holds what it was given. Divisions by a zero pivot are IEEE's.
Eigenvalues and singular values are those of finite matrices.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from firmware_sim.errors import CallerError
from monitor.numerics.backend import Backend
from monitor.numerics.engines.eager.exact.functions import KERNELS
from monitor.numerics.kernels import factorisations as f
from monitor.numerics.kernels.coefficients import LN2_HIGH, LN2_LOW

__all__ = [
    "cholesky",
    "cholesky_ex",
    "cholesky_inverse",
    "cholesky_solve",
    "determinant",
    "eigh",
    "householder_product",
    "inverse_ex",
    "least_squares",
    "log_determinant",
    "lu",
    "lu_factor_ex",
    "lu_solve",
    "lu_unpack",
    "matrix_exponential",
    "pseudo_inverse",
    "qr",
    "solve_ex",
    "solve_triangular",
    "svd",
    "triangular_solve",
]

Matrix = np.ndarray[Any, Any]


def _matrices(x: Tensor) -> Matrix:
    """All matrices of a batch in FP64, C-ordered, (count, rows, columns)."""
    flat = x.detach().cpu().to(torch.float64).reshape((x.shape[:-2].numel(), *x.shape[-2:]))
    return np.array(flat.numpy(), order="C")


def _back(found: Matrix, like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Rounded to FP32, with these dimensions behind those of the batch."""
    flat = torch.from_numpy(np.ascontiguousarray(found)).to(torch.float32)
    return flat.reshape((*like.shape[:-2], *shape)).to(like.device)


def _whole(found: Matrix, like: Tensor, shape: tuple[int, ...] = ()) -> Tensor:
    return torch.from_numpy(np.asarray(found, np.int32)).reshape((*like.shape[:-2], *shape)).to(like.device)


def _checked(info: Tensor, wanted: bool, what: str) -> Tensor:
    if wanted and bool((info != 0).any()):
        raise CallerError(f"{what} (matrix {int((info.reshape(-1) != 0).nonzero()[0])} of the batch)")
    return info


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise CallerError(what)


def _require_square(x: Tensor) -> None:
    _require(x.dim() > 1 and x.shape[-2] == x.shape[-1], f"a square matrix is needed, not {tuple(x.shape)}")


def _finite(x: Tensor) -> Matrix:
    _require(bool(x.isfinite().all()), "a matrix holds numbers that are not finite")
    return _matrices(x)


def _from_zero(pivots: Tensor, rows: int) -> Matrix:
    """Pivots counted from 0, one line for each matrix; CallerError where one is no row."""
    found = pivots.cpu().numpy().astype(np.int64).reshape((pivots.shape[:-1].numel(), pivots.shape[-1])) - 1
    _require(bool(((found >= 0) & (found < rows)).all()), f"a pivot is none of the rows 1 to {rows}")
    return found


def _unit(count: int, size: int) -> Matrix:
    return np.tile(np.eye(size), (count, 1, 1))


def _factorised(x: Tensor, pivoting: bool = True) -> tuple[Matrix, Matrix, Matrix]:
    """LU in one matrix, pivots counted from 0, and which pivot is zero."""
    a = _matrices(x)
    pivots = np.zeros((len(a), min(a.shape[1:])), np.int64)
    info = np.array([f.lu(a[i], pivots[i], pivoting) for i in range(len(a))], np.int64)
    return a, pivots, info


def _order(pivots: Matrix, rows: int) -> Matrix:
    """Where each row of P·A lies in A."""
    order = np.tile(np.arange(rows), (len(pivots), 1))
    for mine, row in zip(pivots, order, strict=True):
        for k, other in enumerate(mine):
            row[[k, other]] = row[[other, k]]
    return order


def _solved(a: Matrix, pivots: Matrix, b: Matrix, adjoint: bool = False) -> Matrix:
    """Solutions of A·x = b, or of Aᵀ·x = b, by the factors of A."""
    out = b.copy()
    for i, order in enumerate(_order(pivots, a.shape[1])):
        if adjoint:
            turned = np.ascontiguousarray(a[i].T)
            f.solve_lower(turned, out[i], False)
            f.solve_upper(turned, out[i], True)
            out[i][order] = out[i].copy()
        else:
            out[i] = b[i][order]
            f.solve_lower(a[i], out[i], True)
            f.solve_upper(a[i], out[i], False)
    return out


def _batched(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """A square matrix and right-hand sides, both with the batch of both."""
    _require_square(a)
    return _spread(a, b)


def _spread(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Both with the batch of both."""
    rows = b.dim() > 1 and a.shape[-2] == b.shape[-2]
    _require(rows, f"right-hand sides of shape {tuple(b.shape)} for matrices of shape {tuple(a.shape)}")
    batch = np.broadcast_shapes(tuple(a.shape[:-2]), tuple(b.shape[:-2]))
    return a.expand(*batch, *a.shape[-2:]), b.expand(*batch, *b.shape[-2:])


def cholesky_ex(_: Backend, x: Tensor, *, upper: bool = False, check_errors: bool = False) -> tuple[Tensor, Tensor]:
    _require_square(x)
    a = _matrices(x.mT if upper else x)
    info = np.array([f.cholesky(each) for each in a], np.int64)
    found = _whole(info, x)
    _checked(found, check_errors, "a matrix is not positive definite")
    out = _back(np.tril(a), x, x.shape[-2:])
    return (out.mT.contiguous() if upper else out), found


def cholesky(backend: Backend, x: Tensor, upper: bool = False) -> Tensor:
    return cholesky_ex(backend, x, upper=upper, check_errors=True)[0]


def cholesky_solve(_: Backend, b: Tensor, factor: Tensor, upper: bool = False) -> Tensor:
    factor, b = _batched(factor.mT if upper else factor, b)
    t, out = _matrices(factor), _matrices(b)
    for i in range(len(out)):
        f.solve_lower(t[i], out[i], False)
        f.solve_upper(np.ascontiguousarray(t[i].T), out[i], False)
    return _back(out, b, b.shape[-2:])


def cholesky_inverse(backend: Backend, factor: Tensor, upper: bool = False) -> Tensor:
    _require_square(factor)
    unit = torch.eye(factor.shape[-1], device=factor.device).expand(factor.shape)
    return cholesky_solve(backend, unit, factor, upper)


def lu_factor_ex(
    _: Backend, x: Tensor, *, pivot: bool = True, check_errors: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    a, pivots, info = _factorised(x, pivot)
    found = _checked(_whole(info, x), check_errors, "a matrix is singular")
    return _back(a, x, x.shape[-2:]), _whole(pivots + 1, x, pivots.shape[1:]), found


def _unpacked(a: Matrix, x: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = a.shape[1:]
    rank = min(rows, columns)
    lower = np.tril(a[:, :, :rank], -1) + np.eye(rows, rank)
    return _back(lower, x, (rows, rank)), _back(np.triu(a[:, :rank]), x, (rank, columns))


def _permutation(pivots: Matrix, x: Tensor, rows: int) -> Tensor:
    places = np.zeros((len(pivots), rows, rows))
    for each, order in zip(places, _order(pivots, rows), strict=True):
        each[order, np.arange(rows)] = 1.0
    return _back(places, x, (rows, rows))


def lu(_: Backend, x: Tensor, *, pivot: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    a, pivots, _info = _factorised(x, pivot)
    return (_permutation(pivots, x, x.shape[-2]), *_unpacked(a, x))


def lu_unpack(
    _: Backend, packed: Tensor, pivots: Tensor, unpack_data: bool = True, unpack_pivots: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    none = packed.new_empty(0)
    mine = _from_zero(pivots, packed.shape[-2])
    order = _permutation(mine, packed, packed.shape[-2]) if unpack_pivots else none
    return (order, *(_unpacked(_matrices(packed), packed) if unpack_data else (none, none)))


def lu_solve(
    _: Backend, packed: Tensor, pivots: Tensor, b: Tensor, *, left: bool = True, adjoint: bool = False
) -> Tensor:
    packed, b = _batched(packed, b if left else b.mT)
    mine = _from_zero(pivots.expand(*packed.shape[:-2], packed.shape[-1]), packed.shape[-1])
    found = _solved(_matrices(packed), mine, _matrices(b), adjoint == left)
    out = _back(found, b, b.shape[-2:])
    return out if left else out.mT.contiguous()


def solve_ex(
    _: Backend, x: Tensor, b: Tensor, *, left: bool = True, check_errors: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    vector = b.dim() == 1 or (b.dim() == x.dim() - 1 and b.shape == x.shape[:-1])
    right = b.unsqueeze(-1) if vector else b
    wide, right = _batched(x, right if left else right.mT)
    a, pivots, info = _factorised(x)
    found = _checked(_whole(info, x), check_errors, "a matrix is singular")
    repeats = wide.shape[:-2].numel() // max(len(a), 1) if len(a) else 0
    if repeats > 1:
        whole, mine, _again = _factorised(wide)
    else:
        whole, mine = a, pivots
    out = _back(_solved(whole, mine, _matrices(right), not left), right, right.shape[-2:])
    out = out if left else out.mT.contiguous()
    packed = _back(a, x, x.shape[-2:])
    return (out.squeeze(-1) if vector else out), packed, _whole(pivots + 1, x, pivots.shape[1:]), found


def inverse_ex(_: Backend, x: Tensor, *, check_errors: bool = False) -> tuple[Tensor, Tensor]:
    _require_square(x)
    a, pivots, info = _factorised(x)
    found = _checked(_whole(info, x), check_errors, "a matrix is singular")
    return _back(_solved(a, pivots, _unit(len(a), x.shape[-1])), x, x.shape[-2:]), found


def solve_triangular(
    _: Backend, t: Tensor, b: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Tensor:
    if not left:
        return solve_triangular(_, t.mT, b.mT, upper=not upper, unitriangular=unitriangular).mT.contiguous()
    t, b = _batched(t, b)
    triangle, out = _matrices(t), _matrices(b)
    for i in range(len(out)):
        (f.solve_upper if upper else f.solve_lower)(triangle[i], out[i], unitriangular)
    return _back(out, b, b.shape[-2:])


def triangular_solve(
    backend: Backend, b: Tensor, t: Tensor, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[Tensor, Tensor]:
    wide, b = _batched(t, b)
    turned, above = (wide.mT, not upper) if transpose else (wide, upper)
    return solve_triangular(backend, turned, b, upper=above, unitriangular=unitriangular), wide.clone()


def _product_of_pivots(x: Tensor) -> tuple[Matrix, Matrix, Matrix, Matrix]:
    _require_square(x)
    # PyTorch's backward takes the factors for those of the transpose where the matrix is contiguous.
    a, pivots, _info = _factorised(x.mT if x.is_contiguous() else x)
    sign = np.where(((pivots != np.arange(pivots.shape[1])).sum(1) % 2) == 1, -1.0, 1.0)
    return a, pivots, sign, np.stack([np.diagonal(each) for each in a]) if len(a) else np.ones((0, x.shape[-1]))


def determinant(_: Backend, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The product of the pivots in their order, with the sign of the exchanges."""
    a, pivots, sign, diagonal = _product_of_pivots(x)
    for column in diagonal.T:
        sign = sign * column
    return _back(sign, x, ()), _back(a, x, x.shape[-2:]), _whole(pivots + 1, x, pivots.shape[1:])


def log_determinant(backend: Backend, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sign, and the logarithm of the product of the pivots: of its significand, and of its exponent apart."""
    a, pivots, sign, diagonal = _product_of_pivots(x)
    significand, exponent = np.ones(len(a)), np.zeros(len(a))
    for column in diagonal.T:
        sign = sign * np.sign(column)
        significand, moved = np.frexp(significand * np.abs(column))
        exponent = exponent + moved
    # The logarithm is taken in FP64 by the kernel of ``exact``, whose bits follow from its IEEE operations.
    logs = KERNELS["log"](torch.from_numpy(significand)).numpy() + exponent * (LN2_HIGH + LN2_LOW)
    packed = _back(a, x, x.shape[-2:])
    return _back(sign, x, ()), _back(logs, x, ()), packed, _whole(pivots + 1, x, pivots.shape[1:])


def qr(_: Backend, x: Tensor, mode: str = "reduced") -> tuple[Tensor, Tensor]:
    r = _matrices(x)
    rows, columns = r.shape[1:]
    q = _unit(len(r), rows)
    for i in range(len(r)):
        f.qr(r[i], q[i])
    rank = rows if mode == "complete" else min(rows, columns)
    upper = _back(np.triu(r[:, :rank]), x, (rank, columns))
    return (x.new_empty(0) if mode == "r" else _back(q[:, :, :rank], x, (rows, rank))), upper


def householder_product(_: Backend, x: Tensor, tau: Tensor) -> Tensor:
    """The first columns of H_1 H_2 … with H_i = 1 − tau_i v_i v_iᵀ, each v_i below the diagonal of a column."""
    rows, columns, used = *x.shape[-2:], tau.shape[-1]
    fits = rows >= columns >= used and tau.shape[:-1] == x.shape[:-2]
    _require(fits, f"{used} reflections for matrices of shape {tuple(x.shape)}")
    v = np.tril(_matrices(x), -1) + np.eye(*x.shape[-2:])
    factors = tau.detach().cpu().to(torch.float64).reshape((len(v), tau.shape[-1])).numpy()
    out = np.tile(np.eye(*x.shape[-2:]), (len(v), 1, 1))
    for each, vectors, weights in zip(out, v, factors, strict=True):
        for k in range(len(weights) - 1, -1, -1):
            column = np.ascontiguousarray(vectors[:, k : k + 1])
            along = np.empty((1, each.shape[1]))
            f.product(np.ascontiguousarray(column.T), each, along)
            each -= weights[k] * column * along
    return _back(out, x, x.shape[-2:])


def _signs(vectors: Matrix) -> Matrix:
    """−1 for each column whose first largest element is negative."""
    places = np.argmax(np.abs(vectors), axis=1)[:, None]
    return np.where(np.take_along_axis(vectors, places, 1) < 0, -1.0, 1.0)


def eigh(_: Backend, x: Tensor, uplo: str = "L", compute_v: bool = True) -> tuple[Tensor, Tensor]:
    _require_square(x)
    a = _finite(x)
    lower = np.tril(a) if uplo.upper() == "L" else np.swapaxes(np.triu(a), 1, 2)
    a = np.ascontiguousarray(lower + np.swapaxes(np.tril(lower, -1), 1, 2))
    v = _unit(len(a), a.shape[1])
    for i in range(len(a)):
        f.eigen(a[i], v[i])
    values = np.diagonal(a, axis1=1, axis2=2)
    order = np.argsort(values, axis=1, kind="stable")
    values = np.take_along_axis(values, order, 1)
    v = np.take_along_axis(v, order[:, None, :], 2)
    v = v * _signs(v) if v.size else v
    return _back(values, x, values.shape[1:]), _back(v, x, x.shape[-2:]) if compute_v else x.new_empty(0)


def _singular(a: Matrix, full: bool) -> tuple[Matrix, Matrix, Matrix]:
    """U, S, Vᵀ of matrices with no fewer rows than columns."""
    count, rows, columns = a.shape
    v = _unit(count, columns)
    u = np.zeros((count, rows, rows if full else columns))
    s = np.zeros((count, columns))
    for i in range(count):
        f.singular(a[i], v[i])
        total = np.zeros(columns)
        for row in a[i]:
            total = total + row * row
        lengths = np.sqrt(total)
        order = np.argsort(-lengths, kind="stable")
        s[i], v[i] = lengths[order], v[i][:, order]
        turned = a[i][:, order]
        known = s[i] > 2.0**-50 * max(float(s[i].max(initial=0.0)), 2.0**-1000)
        basis = np.where(known, turned / np.where(known, s[i], 1.0), 0.0)
        if not known.all() or full:  # columns that the matrix does not reach are those of a complete basis
            rank = int(known.sum())
            q, r = _unit(1, rows)[0], np.array(basis[:, :rank], order="C")
            f.qr(r, q)
            basis = np.concatenate([basis[:, :rank], q[:, rank : u.shape[2]]], axis=1)
        u[i] = basis
    if u.size and columns:
        signs = _signs(u[:, :, :columns])
        u[:, :, :columns] *= signs
        v = v * signs
    return u, s, np.swapaxes(v, 1, 2)


def svd(
    _: Backend, x: Tensor, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = x.shape[-2:]
    rank = min(rows, columns)
    wide = rows < columns
    u, s, vh = _singular(_finite(x.mT if wide else x), full_matrices)
    if wide:
        u, vh = np.swapaxes(vh, 1, 2), np.swapaxes(u, 1, 2)
    values = _back(s, x, (rank,))
    if not compute_uv:
        return x.new_empty(0), values, x.new_empty(0)
    return _back(u, x, u.shape[1:]), values, _back(vh, x, vh.shape[1:])


def pseudo_inverse(
    _: Backend, x: Tensor, *, atol: Tensor | None = None, rtol: Tensor | None = None, hermitian: bool = False
) -> Tensor:
    """V·S⁺·Uᵀ, without the singular values that are at most max(atol, rtol · the largest)."""
    rows, columns = x.shape[-2:]
    if not x.numel():
        return x.new_empty((*x.shape[:-2], columns, rows))
    wide = rows < columns
    x = x.tril() + x.tril(-1).mT if hermitian else x  # only the lower triangle is read, as ATen does
    u, s, vh = _singular(_finite(x.mT if wide else x), False)

    def limits(value: Tensor | None, default: float) -> Matrix:
        if value is None:
            return np.full((len(s), 1), default)
        spread = value.detach().cpu().to(torch.float64).expand(x.shape[:-2])
        return np.asarray(spread.reshape((len(s), 1)).numpy())

    usual = 0.0 if atol is not None and bool((atol > 0).any()) else torch.finfo(torch.float32).eps * max(rows, columns)
    least = np.maximum(limits(atol, 0.0), limits(rtol, usual) * s.max(1, keepdims=True))
    inverse = np.where(s > least, 1.0 / np.where(s > least, s, 1.0), 0.0)
    out = np.empty((len(s), vh.shape[2], u.shape[1]))
    for i in range(len(s)):
        scaled = np.ascontiguousarray(np.swapaxes(vh, 1, 2)[i] * inverse[i])
        f.product(scaled, np.ascontiguousarray(u[i].T), out[i])
    found = np.swapaxes(out, 1, 2) if wide else out
    return _back(found, x, (columns, rows))


def least_squares(
    backend: Backend, x: Tensor, b: Tensor, rcond: float | None = None, *, driver: str | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The shortest of the best solutions, by the singular values above rcond · the largest, and no sum but in FP64.

    What comes with it is by the driver: squares of what is left (where all matrices have as many independent columns
    as columns), ranks (not for ``gels``), singular values (for ``gelsd`` and ``gelss``).
    """
    rows, columns = x.shape[-2:]
    vector = b.dim() == x.dim() - 1 and b.shape == x.shape[:-1]
    wide, right = _spread(x, b.unsqueeze(-1) if vector else b)
    a, targets, turned = _finite(wide), _matrices(right), rows < columns
    u, s, vh = _singular(np.swapaxes(a, 1, 2).copy() if turned else a.copy(), False)
    if turned:
        u, vh = np.swapaxes(vh, 1, 2), np.swapaxes(u, 1, 2)
    limit = torch.finfo(torch.float32).eps * max(rows, columns) if rcond is None else rcond
    kept = s > limit * s.max(1, keepdims=True, initial=0.0)
    out, left = np.zeros((len(a), columns, targets.shape[2])), np.zeros((len(a), targets.shape[2]))
    for i in range(len(a)):
        along, seen = np.empty((s.shape[1], targets.shape[2])), np.empty((rows, targets.shape[2]))
        f.product(np.ascontiguousarray(u[i].T), targets[i], along)
        along *= np.where(kept[i], 1.0 / np.where(kept[i], s[i], 1.0), 0.0)[:, None]
        f.product(np.ascontiguousarray(vh[i].T), along, out[i])
        f.product(a[i], out[i], seen)
        for row in seen - targets[i]:
            left[i] += row * row
    found, none = _back(out, right, (columns, targets.shape[2])), x.new_empty(0)
    name, ranks = driver or "gelsy", kept.sum(1)[: x.shape[:-2].numel()]
    shown = name != "gelsy" and rows > columns and bool((kept.sum(1) == columns).all())
    return (
        found.squeeze(-1) if vector else found,
        _back(left, right, (targets.shape[2],)) if shown else none,
        none.long() if name == "gels" else torch.from_numpy(ranks).reshape(x.shape[:-2]).to(x.device),
        _back(s[: len(ranks)], x, (s.shape[1],)) if name in ("gelsd", "gelss") else none,
    )


def matrix_exponential(_: Backend, x: Tensor) -> Tensor:
    _require_square(x)
    a = _matrices(x)
    out = np.empty_like(a)
    for i in range(len(a)):
        f.exponential(a[i], out[i])
    return _back(out, x, x.shape[-2:])
