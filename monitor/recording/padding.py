"""Batches of a few shapes: each shape that a step sees is a separate program."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional

from firmware_sim.errors import CallerError

__all__ = ["padded"]


def padded(tensor: Tensor, sizes: Sequence[int], *, dim: int = -1, value: float = 0) -> Tensor:
    """A copy with a dimension padded at its end to the smallest of ``sizes`` that holds it.

        ids = padded(ids, (64, 128, 256), value=tokenizer.pad_token_id)
        labels = padded(labels, (64, 128, 256), value=-100)  # ignored by cross_entropy

    Law: ``padded(x, sizes, dim=d).narrow(d, 0, x.shape[d])`` equals x.

    Args:
        tensor: any shape with that dimension.
        sizes: in any order; a run then has at most so many programs for this reason.
        value: of what is added.

    Raises:
        CallerError: the dimension is longer than each size, or there is no such dimension.
    """
    if not -tensor.dim() <= dim < tensor.dim():
        raise CallerError(f"a tensor of shape {tuple(tensor.shape)} has no dimension {dim}")
    length = tensor.shape[dim]
    fitting = [size for size in sizes if size >= length]
    if not fitting:
        raise CallerError(f"dimension {dim} has {length} places, more than each of the sizes {tuple(sizes)}")
    behind = tensor.dim() - 1 - dim % tensor.dim()
    return functional.pad(tensor, [0, 0] * behind + [0, min(fitting) - length], value=value)
