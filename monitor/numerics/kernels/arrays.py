"""Tensors as NumPy arrays for compiled kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["array"]


def array(tensor: Tensor) -> NDArray[Any]:
    """A tensor of the host's memory as an array on the same memory.

    ``Tensor.numpy`` would mark the storage as one that may never be resized; sharded training frees the storages of
    gathered parameters by resizing them.
    """
    return np.from_dlpack(tensor)
