"""Compiled loops of the emulated orders, where multiplication and addition are rounded as written."""

from __future__ import annotations

from typing import Any

import numpy as np

from monitor.numerics.kernels.jit import compiled

__all__ = ["chunk_products", "chunk_sums", "chunked_dot", "chunked_total", "running_dot", "running_total"]

_BLOCK = 1024
"""Columns that are worked on together, so that their part of B stays in the cache; changes no bit."""

CHUNK = 8
_BELOW_FP32 = np.int64(0x1FFFFFFF)
"""The 29 bits of an FP64 significand that FP32 has no room for."""


@compiled
def running_dot(begin: int, end: int, a: Any, b: Any, out: Any) -> None:
    """out (M, N) = a (M, K)·b (K, N) by rising k: each product is rounded, then added. ``out`` starts at zero."""
    for start in range(0, b.shape[1], _BLOCK):
        stop = min(start + _BLOCK, b.shape[1])
        for i in range(begin, end):
            for k in range(a.shape[1]):
                left = a[i, k]
                for j in range(start, stop):
                    out[i, j] += left * b[k, j]


@compiled
def running_total(begin: int, end: int, x: Any, out: Any) -> None:
    """out (R,) = sums of the rows of x (R, n) by rising index."""
    for i in range(begin, end):
        total = x[i, 0]
        for k in range(1, x.shape[1]):
            total += x[i, k]
        out[i] = total


@compiled
def chunked_dot(begin: int, end: int, a: Any, b: Any, out: Any) -> None:
    """FP32: exact products of CHUNK neighbours are added to the accumulator in FP64, then it is cut to 24 bits."""
    accumulator = np.empty(_BLOCK, np.float64)
    bits = accumulator.view(np.int64)
    for start in range(0, b.shape[1], _BLOCK):
        width = min(_BLOCK, b.shape[1] - start)
        for i in range(begin, end):
            accumulator[:] = 0.0
            for first in range(0, a.shape[1], CHUNK):
                for k in range(first, min(first + CHUNK, a.shape[1])):
                    left = np.float64(a[i, k])
                    for j in range(width):
                        accumulator[j] += left * np.float64(b[k, start + j])
                for j in range(width):
                    bits[j] &= ~_BELOW_FP32
            for j in range(width):
                out[i, start + j] = np.float32(accumulator[j])


@compiled
def chunked_total(begin: int, end: int, x: Any, out: Any) -> None:
    """FP32: CHUNK neighbours are added to the accumulator in FP64, then it is cut to 24 bits."""
    accumulator = np.empty(1, np.float64)
    bits = accumulator.view(np.int64)
    for i in range(begin, end):
        accumulator[0] = 0.0
        for first in range(0, x.shape[1], CHUNK):
            for k in range(first, min(first + CHUNK, x.shape[1])):
                accumulator[0] += np.float64(x[i, k])
            bits[0] &= ~_BELOW_FP32
        out[i] = np.float32(accumulator[0])


@compiled
def chunk_products(begin: int, end: int, a: Any, b: Any, out: Any) -> None:
    """FP64: CHUNK rounded products are added up from zero, then to the accumulator; all to nearest."""
    part = np.empty(_BLOCK, a.dtype)
    for start in range(0, b.shape[1], _BLOCK):
        width = min(_BLOCK, b.shape[1] - start)
        for i in range(begin, end):
            for first in range(0, a.shape[1], CHUNK):
                part[:] = 0.0
                for k in range(first, min(first + CHUNK, a.shape[1])):
                    left = a[i, k]
                    for j in range(width):
                        part[j] += left * b[k, start + j]
                for j in range(width):
                    out[i, start + j] += part[j]


@compiled
def chunk_sums(begin: int, end: int, x: Any, out: Any) -> None:
    """FP64: CHUNK neighbours are added up, then added to the accumulator; all to nearest."""
    for i in range(begin, end):
        total = x[i, 0] * 0
        for first in range(0, x.shape[1], CHUNK):
            part = x[i, first]
            for k in range(first + 1, min(first + CHUNK, x.shape[1])):
                part += x[i, k]
            total += part
        out[i] = total
