"""Factorisations of FP64 matrices by IEEE +, −, ×, ÷ and √ in a stated order, compiled without contraction.

Each kernel takes one matrix as a C-ordered array and computes in place. The order of all operations is that of the
loops, so every IEEE machine gets the same bits; no library's function takes part.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from monitor.numerics.kernels.jit import compiled, inlined

__all__ = ["cholesky", "eigen", "exponential", "lu", "product", "qr", "singular", "solve_lower", "solve_upper"]

_SWEEPS = 60


@compiled
def product(a: Any, b: Any, out: Any) -> None:
    """out = a·b, each element summed from the first column of a to the last."""
    for i in range(a.shape[0]):
        for j in range(b.shape[1]):
            total = 0.0
            for k in range(a.shape[1]):
                total = total + a[i, k] * b[k, j]
            out[i, j] = total


@compiled
def lu(a: Any, pivots: Any, pivoting: Any) -> int:
    """Doolittle with the first largest pivot of a column; pivots[k] is the row that k was exchanged with.

    Returns the first column whose pivot is zero, counted from 1; 0 if there is none.
    """
    rows, columns = a.shape
    info = 0
    for k in range(min(rows, columns)):
        best = k
        if pivoting:
            for i in range(k + 1, rows):
                if abs(a[i, k]) > abs(a[best, k]):
                    best = i
        pivots[k] = best
        if best != k:
            for j in range(columns):
                held = a[k, j]
                a[k, j] = a[best, j]
                a[best, j] = held
        if a[k, k] == 0.0:
            if info == 0:
                info = k + 1
            continue
        for i in range(k + 1, rows):
            factor = a[i, k] / a[k, k]
            a[i, k] = factor
            for j in range(k + 1, columns):
                a[i, j] = a[i, j] - factor * a[k, j]
    return info


@compiled
def cholesky(a: Any) -> int:
    """The lower factor, from a lower triangle; returns the order of the first minor that is not positive, or 0."""
    n = a.shape[0]
    for j in range(n):
        total = a[j, j]
        for k in range(j):
            total = total - a[j, k] * a[j, k]
        if not total > 0.0:
            return j + 1
        root = math.sqrt(total)
        a[j, j] = root
        for i in range(j + 1, n):
            rest = a[i, j]
            for k in range(j):
                rest = rest - a[i, k] * a[j, k]
            a[i, j] = rest / root
        for i in range(j):
            a[i, j] = 0.0
    return 0


@compiled
def solve_lower(t: Any, b: Any, unit: Any) -> None:
    """b becomes the solution of t·x = b for a lower triangle t."""
    for j in range(b.shape[1]):
        for i in range(t.shape[0]):
            rest = b[i, j]
            for k in range(i):
                rest = rest - t[i, k] * b[k, j]
            b[i, j] = rest if unit else rest / t[i, i]


@compiled
def solve_upper(t: Any, b: Any, unit: Any) -> None:
    """b becomes the solution of t·x = b for an upper triangle t."""
    n = t.shape[0]
    for j in range(b.shape[1]):
        for i in range(n - 1, -1, -1):
            rest = b[i, j]
            for k in range(i + 1, n):
                rest = rest - t[i, k] * b[k, j]
            b[i, j] = rest if unit else rest / t[i, i]


@compiled
def qr(a: Any, q: Any) -> None:
    """Householder reflections (LAPACK's signs): a becomes R, and q, given as a unit matrix of a's rows, becomes Q."""
    rows, columns = a.shape
    v = np.zeros(rows)
    for k in range(min(rows - 1, columns)):
        square = 0.0
        for i in range(k + 1, rows):
            square = square + a[i, k] * a[i, k]
        if square == 0.0:
            continue
        norm = math.sqrt(a[k, k] * a[k, k] + square)
        head = -norm if a[k, k] >= 0.0 else norm
        first = a[k, k] - head
        v[k] = 1.0
        for i in range(k + 1, rows):
            v[i] = a[i, k] / first
        tau = -first / head
        for j in range(k, columns):
            along = 0.0
            for i in range(k, rows):
                along = along + v[i] * a[i, j]
            along = along * tau
            for i in range(k, rows):
                a[i, j] = a[i, j] - along * v[i]
        for i in range(q.shape[0]):
            along = 0.0
            for j in range(k, rows):
                along = along + q[i, j] * v[j]
            along = along * tau
            for j in range(k, rows):
                q[i, j] = q[i, j] - along * v[j]
        a[k, k] = head
        for i in range(k + 1, rows):
            a[i, k] = 0.0


@inlined
def _angle(first: Any, second: Any, off: Any) -> Any:
    """Cosine and sine of the smaller rotation that makes the off-diagonal element of a symmetric 2 by 2 matrix zero."""
    theta = (second - first) / (2.0 * off)
    t = 1.0 / (abs(theta) + math.sqrt(theta * theta + 1.0))
    if theta < 0.0:
        t = -t
    c = 1.0 / math.sqrt(t * t + 1.0)
    return c, t * c


@inlined
def _rotate(a: Any, p: Any, q: Any, c: Any, s: Any) -> None:
    """Two columns become c·p − s·q and s·p + c·q."""
    for k in range(a.shape[0]):
        x = a[k, p]
        y = a[k, q]
        a[k, p] = c * x - s * y
        a[k, q] = s * x + c * y


@compiled
def eigen(a: Any, v: Any) -> None:
    """Cyclic Jacobi rotations (Golub and Van Loan, section 8.5): the diagonal of symmetric a becomes its eigenvalues.

    v, given as a unit matrix, becomes the eigenvectors in its columns.
    """
    n = a.shape[0]
    for _ in range(_SWEEPS):
        moved = False
        for p in range(n - 1):
            for q in range(p + 1, n):
                off = a[p, q]
                if abs(off) <= 2.0**-60 * math.sqrt(abs(a[p, p]) * abs(a[q, q])) or off == 0.0:
                    continue
                moved = True
                c, s = _angle(a[p, p], a[q, q], off)
                _rotate(a, p, q, c, s)
                _rotate(a.T, p, q, c, s)
                a[p, q] = 0.0
                a[q, p] = 0.0
                _rotate(v, p, q, c, s)
        if not moved:
            return


@compiled
def singular(a: Any, v: Any) -> None:
    """One-sided Jacobi (Hestenes 1958): a's columns become orthogonal; v, a unit matrix, becomes their rotation.

    a has no fewer rows than columns.
    """
    rows, columns = a.shape
    for _ in range(_SWEEPS):
        moved = False
        for p in range(columns - 1):
            for q in range(p + 1, columns):
                alpha = 0.0
                beta = 0.0
                gamma = 0.0
                for i in range(rows):
                    alpha = alpha + a[i, p] * a[i, p]
                    beta = beta + a[i, q] * a[i, q]
                    gamma = gamma + a[i, p] * a[i, q]
                if gamma == 0.0 or abs(gamma) <= 2.0**-52 * math.sqrt(alpha * beta):
                    continue
                moved = True
                c, s = _angle(alpha, beta, gamma)
                _rotate(a, p, q, c, s)
                _rotate(v, p, q, c, s)
        if not moved:
            return


@compiled
def exponential(a: Any, out: Any) -> None:
    """e^a by the Taylor series of a/2^s with a norm of at most 1/2, to the 16th power, and s squarings."""
    n = a.shape[0]
    norm = 0.0
    for i in range(n):
        row = 0.0
        for j in range(n):
            row = row + abs(a[i, j])
        norm = max(norm, row)
    squarings = 0
    while norm > 0.5 and squarings < 1100:
        norm = norm * 0.5
        squarings += 1
    scale = 1.0
    for _ in range(squarings):
        scale = scale * 0.5
    small = np.empty((n, n))
    for i in range(n):
        for j in range(n):
            small[i, j] = a[i, j] * scale
            out[i, j] = 1.0 if i == j else 0.0
    held = np.empty((n, n))
    for step in range(16 + squarings):
        for i in range(n):
            for j in range(n):
                total = 0.0
                for k in range(n):
                    total = total + (small[i, k] if step < 16 else out[i, k]) * out[k, j]
                held[i, j] = total
        for i in range(n):
            for j in range(n):
                if step < 16:
                    out[i, j] = held[i, j] / (16 - step) + (1.0 if i == j else 0.0)
                else:
                    out[i, j] = held[i, j]
