"""What other libraries keep of a step: copies in the host's own memory, on which no chip meters anything."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

__all__ = ["on_host"]


def on_host(value: Any) -> Any:
    """Copy tensors by pointer, and those in lists, tuples and dicts; anything else, and other devices', is as it was.

    To be called behind the step, of which it is no part.
    """
    return _pytree.tree_map(_copy, value)


def _copy(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.device.type != "cpu":
        return value
    kind = torch.int16 if value.dtype == torch.bfloat16 else value.dtype  # NumPy has no bfloat16
    return torch.from_numpy(value.detach().view(kind).numpy().copy()).view(value.dtype)
