"""Tensors compared by their bits."""

from __future__ import annotations

import torch
from torch import Tensor

from monitor.numerics.kernels.workers import edges, run_tiles

__all__ = ["as_bits", "copy_over", "same_bytes"]

_PIECE = 1 << 20
"""Bytes that one thread copies or compares at a time."""


def as_bits(tensor: Tensor) -> Tensor:
    """A tensor's elements in one dimension, as integers of their size: NaN equals itself and -0 is not +0."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(tensor.dtype.itemsize, torch.int64)
    return tensor.detach().reshape(-1).view(kind)


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """Compare as bytes, wherever the two lie."""
    if not one.numel():
        return True
    mine, theirs = as_bits(one), as_bits(other).to(one.device)
    if mine.shape != theirs.shape or mine.device.type != "cpu":
        return bool(torch.equal(mine, theirs))
    pieces = _pieces(mine)
    return all(run_tiles(len(pieces), mine.nbytes, lambda i: torch.equal(mine[pieces[i]], theirs[pieces[i]])))


def copy_over(target: Tensor, source: Tensor) -> None:
    """Give a contiguous tensor the content of another one of its type and shape, by several threads."""
    if target.device.type != "cpu" or not target.numel():
        target.copy_(source)
        return
    mine, theirs = as_bits(target), as_bits(source)
    pieces = _pieces(mine)
    run_tiles(len(pieces), mine.nbytes, lambda i: mine[pieces[i]].copy_(theirs[pieces[i]]))


def _pieces(flat: Tensor) -> list[slice]:
    return [slice(*edge) for edge in edges(flat.numel(), _PIECE // flat.dtype.itemsize)]
