"""CPU engine of the sums: compiled kernels, then exact arithmetic for the few elements that they leave undecided."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monitor.numerics.engines.cpu.exact import sum_kernels as kernels
from monitor.numerics.kernels.arrays import array
from monitor.numerics.kernels.workers import run_pieces
from monitor.numerics.reference.resolution import rounded_sum

__all__ = ["exact_value", "scatter_rows", "sum_blocks"]

_WORK = 2


def exact_value(values: NDArray[np.float32], divisor: int) -> float:
    """FP32(Σ values / divisor): compensated summation, rational numbers where that does not decide either."""
    total, error, magnitude, exact = kernels.two_sum(values)
    slack = 0.0 if exact else magnitude * (len(values) + 1.0) ** 2 * 2.0**-104
    if exact and divisor == 1:
        return float(np.float32(total + 0.0))
    head = total + error
    rest = error - (head - total)
    low = np.nextafter((head + (rest - slack)) / divisor, -np.inf)
    high = np.nextafter((head + (rest + slack)) / divisor, np.inf)
    low, high = np.nextafter(low, -np.inf), np.nextafter(high, np.inf)
    if np.float32(low) == np.float32(high) and np.float32(low) != 0:
        return float(np.float32(low))
    return rounded_sum(values.tolist(), divisor)


def sum_blocks(x: Tensor, divisor: int) -> Tensor:
    """Sums of FP32 (O, N, I) over N, each divided by `divisor` before the one rounding."""
    outer, count, inner = x.shape
    source = array(x.contiguous())
    out = np.empty((outer, inner), np.float32)
    undecided = np.empty((outer, inner), np.bool_)
    work = x.numel() * _WORK
    if inner == 1:
        rows: tuple[Any, ...] = (source.reshape(outer, count), float(divisor), out.reshape(-1), undecided.reshape(-1))
        counts = run_pieces(kernels.sum_last, outer, work, *rows)
    else:
        counts = run_pieces(kernels.sum_middle, inner, work, source, float(divisor), out, undecided)
    if any(counts):
        for o, i in np.argwhere(undecided):
            out[o, i] = exact_value(np.ascontiguousarray(source[o, :, i]), divisor)
    return torch.from_numpy(out)


def scatter_rows(rows: int, slots: Tensor, source: Tensor) -> Tensor:
    """(rows, D) sums of those rows of source (n, D) whose slot (n,) each row is, one rounding for each element."""
    out = torch.zeros((rows, source.shape[1]))
    n = slots.numel()
    if n == 0 or source.shape[1] == 0:
        return out
    index = array(slots)
    order = np.argsort(index, kind="stable")
    arranged = index[order]
    heads = np.flatnonzero(np.concatenate([[True], arranged[1:] != arranged[:-1]]))
    starts = np.append(heads, n)
    targets, values, undecided = arranged[heads], array(source.contiguous()), np.empty(len(heads), np.bool_)
    result = array(out)
    arguments = (order, starts, targets, values, result, undecided)
    run_pieces(kernels.sum_groups, len(heads), values.size * _WORK, *arguments)
    for group in np.flatnonzero(undecided):
        terms = values[order[starts[group] : starts[group + 1]]]
        for column in range(terms.shape[1]):
            chosen = np.ascontiguousarray(terms[:, column])
            if np.isfinite(chosen).all():
                result[targets[group], column] = exact_value(chosen, 1)
            else:
                total = chosen.astype(np.float64).sum()
                result[targets[group], column] = np.float32(total if total == total else np.nan)
    return out
