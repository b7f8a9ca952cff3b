"""Matrix products on the CPU, tile by tile: FP64 copies of operands and results never leave the cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from monitor.numerics.engines.cpu.rounded.tiles import Bounds, Operand, flat, settle
from monitor.numerics.engines.results import Integers, Near, Piece, Reals, Rounding, Settled
from monitor.numerics.kernels.scratch import scratch
from monitor.numerics.kernels.workers import edges, run_tiles, workers

__all__ = ["multiply"]

Widened = tuple[Tensor, Reals, Integers]

_MOST_VECTORS = 512
_TILE_ELEMENTS = 1 << 20
_PIECE_ELEMENTS = 1 << 18
_TILE_WORK = 1 << 22


def _bounds(left: Widened, right: Widened, factor: float) -> Bounds:
    return Bounds(
        left=(left[1] * factor).reshape(-1),
        left_spans=left[2].reshape(-1),
        right=right[1],
        right_spans=right[2],
        rows_per_right=left[1].shape[1],
    )


def _whole(operand: Operand, batch: int, threads: int) -> Widened:
    """All vectors of one matrix, widened by all threads."""
    pieces = edges(operand.count, max(_PIECE_ELEMENTS // operand.terms, 16))
    if len(pieces) == 1 or threads == 1:
        return operand.widened((batch, batch + 1), (0, operand.count), "whole")
    wide = torch.empty((1, operand.count, operand.terms), dtype=torch.float64)
    norms, spans = np.empty((1, operand.count)), np.empty((1, operand.count), dtype=np.int32)

    def widen(i: int) -> None:
        begin, end = pieces[i]
        part, norms[:, begin:end], spans[:, begin:end] = operand.widened((batch, batch + 1), pieces[i], "piece")
        wide[:, begin:end] = part

    run_tiles(len(pieces), operand.count * operand.terms, widen)
    return wide, norms, spans


def multiply(a: Tensor, b: Tensor, factor: float, rounding: Rounding) -> Settled:
    """FP32 product (m, k) × (k, n), or a batch of them, computed in FP64; β = factor·‖row‖·‖column‖."""
    out = torch.empty((*a.shape[:-1], b.shape[-1]), dtype=torch.float32)
    if out.numel() == 0 or a.shape[-1] == 0:
        return Settled(out=out.zero_(), near=Near.joined(()))
    left, right = (Operand(x if x.dim() == 3 else x[None]) for x in (a, b.mT))
    work = left.batch * left.count * right.count * left.terms
    target = flat(out)
    per_matrix = work // left.batch
    pieces: list[Piece] = []
    if left.batch > 1 and per_matrix < _TILE_WORK:
        groups = edges(left.batch, max(_TILE_WORK // per_matrix, 1))
        pieces = run_tiles(len(groups), work, lambda i: _batch_tile(left, right, groups[i], factor, rounding, target))
    else:
        for batch in range(left.batch):
            pieces += _matrix_tiles(left, right, batch, factor, rounding, target)
    return Settled(out=out, near=Near.joined(pieces))


def _batch_tile(
    left: Operand, right: Operand, batches: tuple[int, int], factor: float, rounding: Rounding, target: Any
) -> Piece:
    wide_left = left.widened(batches, (0, left.count), "left")
    wide_right = right.widened(batches, (0, right.count), "right")
    v = scratch("product", (batches[1] - batches[0], left.count, right.count), torch.float64)
    torch.bmm(wide_left[0], wide_right[0].mT, out=v)
    bounds = _bounds(wide_left, wide_right, factor)
    rows = v.shape[0] * left.count
    base = batches[0] * left.count * right.count
    return settle(flat(v), rows, right.count, bounds, rounding, target, out_base=base)


def _matrix_tiles(
    left: Operand, right: Operand, batch: int, factor: float, rounding: Rounding, target: Any
) -> list[Piece]:
    """Tiles along the longer side; the operand of the shorter one is widened once."""
    rows, columns, terms = left.count, right.count, left.terms
    work = rows * columns * terms
    threads = workers(work)
    by_columns = columns >= rows
    fixed, split = (left, right) if by_columns else (right, left)
    fit = _TILE_ELEMENTS // max(terms, fixed.count)
    each = min(_MOST_VECTORS, fit, split.count // (4 * threads) if threads > 1 else split.count)
    ranges = edges(split.count, max(each, 64))
    kept = _whole(fixed, batch, threads)

    def tile(i: int) -> Piece:
        part = split.widened((batch, batch + 1), ranges[i], "split")
        begin = ranges[i][0]
        wide_left, wide_right = (kept, part) if by_columns else (part, kept)
        v = scratch("product", (wide_left[0].shape[1], wide_right[0].shape[1]), torch.float64)
        torch.mm(wide_left[0][0], wide_right[0][0].mT, out=v)
        bounds = _bounds(wide_left, wide_right, factor)
        base = batch * rows * columns + (begin if by_columns else begin * columns)
        return settle(flat(v), v.shape[0], v.shape[1], bounds, rounding, target, out_base=base, out_stride=columns)

    return run_tiles(len(ranges), work, tile)
