"""Discrete Fourier transforms of lines in FP64, in a stated order of IEEE operations: the same bits on every machine.

A length whose prime factors are all at most 13 is transformed by Stockham's mixed-radix algorithm (Van Loan,
Computational Frameworks for the Fast Fourier Transform, 1992, section 1.7), radices in the order of ``_factors``. Any
other is a chirp times a convolution with a chirp (Bluestein 1970), by three transforms of a power of two. Roots of
unity are correctly rounded: powers in fixed point, by integers alone.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from monitor.numerics.kernels.jit import compiled, inlined
from monitor.numerics.kernels.workers import run_pieces

__all__ = ["roots_of_unity", "transform_lines"]

Numbers = npt.NDArray[np.float64]

_BITS, _KEPT = 160, 120
"""Bits behind the point of a root's power, and those that errors do not reach: a power has up to 2^30 factors."""
_RADICES = (4, 2, 3, 5, 7, 11, 13)
_LANES, _LONG = 8, 1 << 14
"""Lines that are transformed side by side, and the length from which on each goes alone."""


def _arctan_of_inverse(x: int, one: int) -> int:
    total = term = one // x
    n, sign = 1, 1
    while term:
        term //= x * x
        n, sign = n + 2, -sign
        total += sign * (term // n)
    return total


@lru_cache(maxsize=32)
def roots_of_unity(n: int) -> tuple[Numbers, Numbers]:
    """cos and −sin of 2πk/n for 0 ≤ k < n, correctly rounded."""
    one, half = 1 << _BITS, 1 << (_BITS - 1)
    angle = 8 * (4 * _arctan_of_inverse(5, one) - _arctan_of_inverse(239, one)) // n  # Machin's 2π
    cosine, sine, term, k = 0, 0, one, 0
    while term:
        cosine, sine = (cosine + (term, 0, -term, 0)[k % 4], sine + (0, term, 0, -term)[k % 4])
        k += 1
        term = term * angle // (one * k)
    real, imag = np.empty(n), np.empty(n)
    x, y, drop = one, 0, _BITS - _KEPT
    for k in range(n // 2 + 1):
        real[k], imag[k] = (((each + (1 << (drop - 1))) >> drop) / (1 << _KEPT) for each in (x, -y))
        x, y = (x * cosine - y * sine + half) >> _BITS, (x * sine + y * cosine + half) >> _BITS
    real[n // 2 + 1 :], imag[n // 2 + 1 :] = real[1 : (n + 1) // 2][::-1], -imag[1 : (n + 1) // 2][::-1]
    return real, imag


def _factors(n: int) -> npt.NDArray[np.int64] | None:
    """Radices whose product is n; None if a prime factor is larger than the largest of them."""
    found = []
    for radix in _RADICES:
        while n % radix == 0:
            found.append(radix)
            n //= radix
    return np.array(found, np.int64) if n == 1 else None


@inlined
def _stages(ar: Any, ai: Any, br: Any, bi: Any, factors: Any, wr: Any, wi: Any) -> Any:
    """Stockham's stages over (length, lanes); which of the two pairs of arrays the result is in."""
    n, lanes = ar.shape
    m = n
    s = 1
    for stage in range(factors.size):
        r = factors[stage]
        m = m // r
        step = s * m
        for p in range(m):
            for q in range(s):
                x = q + s * p
                for t in range(r):
                    y = q + s * (r * p + t)
                    for v in range(lanes):
                        br[y, v] = ar[x, v]
                        bi[y, v] = ai[x, v]
                    for j in range(1, r):
                        z = x + step * j
                        turn = (4 * j * t) % (4 * r)
                        if turn == 0:
                            for v in range(lanes):
                                br[y, v] = br[y, v] + ar[z, v]
                                bi[y, v] = bi[y, v] + ai[z, v]
                        elif turn == 2 * r:
                            for v in range(lanes):
                                br[y, v] = br[y, v] - ar[z, v]
                                bi[y, v] = bi[y, v] - ai[z, v]
                        elif turn == r:
                            for v in range(lanes):
                                br[y, v] = br[y, v] + ai[z, v]
                                bi[y, v] = bi[y, v] - ar[z, v]
                        elif turn == 3 * r:
                            for v in range(lanes):
                                br[y, v] = br[y, v] - ai[z, v]
                                bi[y, v] = bi[y, v] + ar[z, v]
                        else:
                            c = wr[(j * t) % r * (n // r)]
                            d = wi[(j * t) % r * (n // r)]
                            for v in range(lanes):
                                br[y, v] = br[y, v] + (ar[z, v] * c - ai[z, v] * d)
                                bi[y, v] = bi[y, v] + (ar[z, v] * d + ai[z, v] * c)
                    if p * t:
                        c = wr[p * t * s]
                        d = wi[p * t * s]
                        for v in range(lanes):
                            e = br[y, v] * c - bi[y, v] * d
                            bi[y, v] = br[y, v] * d + bi[y, v] * c
                            br[y, v] = e
        s = s * r
        ar, br = br, ar
        ai, bi = bi, ai
    return ar, ai


@compiled
def _transform(
    begin: Any, end: Any, real: Any, imag: Any, lanes: Any, factors: Any, wr: Any, wi: Any,
    cr: Any, ci: Any, fr: Any, fi: Any,
) -> None:  # fmt: skip
    """Transform the lines of these blocks of (outer, length, inner) arrays in place.

    With a chirp c it is Bluestein's algorithm, and f is the transform of the chirp's conjugate, of the length of w.
    """
    outer, n, inner = real.shape
    size = wr.size
    chirped = cr.size > 0
    ar = np.zeros((size, lanes))
    ai = np.zeros((size, lanes))
    br = np.zeros((size, lanes))
    bi = np.zeros((size, lanes))
    for block in range(begin, end):
        first = block * lanes
        count = min(lanes, outer * inner - first)
        for k in range(n, size):
            for v in range(lanes):
                ar[k, v] = 0.0
                ai[k, v] = 0.0
        for k in range(n):
            for v in range(count):
                x = real[(first + v) // inner, k, (first + v) % inner]
                y = imag[(first + v) // inner, k, (first + v) % inner]
                ar[k, v] = x * cr[k] - y * ci[k] if chirped else x
                ai[k, v] = x * ci[k] + y * cr[k] if chirped else y
        xr, xi = _stages(ar, ai, br, bi, factors, wr, wi)
        if chirped:
            for k in range(size):
                for v in range(lanes):
                    x = xr[k, v] * fr[k] - xi[k, v] * fi[k]
                    y = xr[k, v] * fi[k] + xi[k, v] * fr[k]
                    ar[k, v] = y  # real and imaginary part in each other's place turn the transform round
                    ai[k, v] = x
            xi, xr = _stages(ar, ai, br, bi, factors, wr, wi)
        for k in range(n):
            for v in range(count):
                x = xr[k, v] / size if chirped else xr[k, v]
                y = xi[k, v] / size if chirped else xi[k, v]
                real[(first + v) // inner, k, (first + v) % inner] = x * cr[k] - y * ci[k] if chirped else x
                imag[(first + v) // inner, k, (first + v) % inner] = x * ci[k] + y * cr[k] if chirped else y


@lru_cache(maxsize=32)
def _chirp(n: int) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """The chirp of length n, and the transform of its conjugate, periodic in a power of two."""
    real, imag = roots_of_unity(2 * n)
    places = np.arange(n, dtype=object) ** 2 % (2 * n)
    cr, ci = (each[places.astype(np.int64)] for each in (real, imag))
    size = 1 << (2 * n - 2).bit_length()
    fr, fi = np.zeros((1, size, 1)), np.zeros((1, size, 1))
    fr[0, :n, 0], fi[0, :n, 0] = cr, -ci
    fr[0, size - n + 1 :, 0], fi[0, size - n + 1 :, 0] = cr[1:][::-1], -ci[1:][::-1]
    transform_lines(fr, fi)
    return cr, ci, fr.reshape(-1), fi.reshape(-1)


def transform_lines(real: Numbers, imag: Numbers) -> None:
    """X_k = Σ x_j e^(−2πi·jk/n) along the middle axis of (outer, n, inner) arrays, in place.

    With the arrays exchanged it is the transform with the other sign.

    Raises:
        DeviceError: a thread flushes subnormal numbers to zero.
    """
    outer, n, inner = real.shape
    lines, factors = outer * inner, _factors(n)
    if not lines or n <= 1:
        return
    chirp = (np.empty(0),) * 4 if factors is not None else _chirp(n)
    size = n if factors is not None else len(chirp[2])
    lanes = 1 if size > _LONG else _LANES
    wr, wi = roots_of_unity(size)
    work = 4 * lines * size * size.bit_length()
    run_pieces(_transform, -(-lines // lanes), work, real, imag, lanes, _factors(size), wr, wi, *chirp)
