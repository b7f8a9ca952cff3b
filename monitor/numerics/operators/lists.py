"""Operators over lists of tensors (``_foreach_*``): the operator on one tensor, for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from monitor.numerics.backend import Backend
from monitor.numerics.operators.reductions import vector_norm
from monitor.numerics.operators.row import Code

__all__ = ["each", "native", "norms"]


def native(function: Callable[..., Tensor]) -> Code:
    """An operator of torch on one tensor, as the code of a row."""
    return lambda _, *args, **kwargs: function(*args, **kwargs)


def each(name: str, single: Code) -> Code:
    """``_foreach_<name>`` by its operator on one tensor."""
    takes_value = name in ("addcmul", "addcdiv")

    def apply(backend: Backend, tensors: list[Tensor], *args: Any, **kwargs: Any) -> list[Tensor]:
        count = len(tensors)
        columns: list[list[Any]] = []
        value: list[Any] | None = None
        for place, argument in enumerate(args):
            column = list(argument) if isinstance(argument, list | tuple) else [argument] * count
            if takes_value and place == 2:
                value = list(argument.unbind()) if isinstance(argument, Tensor) else column
            elif name == "copy" and place == 1:
                continue
            else:
                columns.append(column)
        if any(len(column) != count for column in columns):
            raise ValueError(f"_foreach_{name} with lists of different lengths")
        out = []
        for i, tensor in enumerate(tensors):
            more = dict(kwargs)
            if takes_value and value is not None:
                more["value"] = value[i].item() if isinstance(value[i], Tensor) else value[i]
            out.append(single(backend, tensor, *(column[i] for column in columns), **more))
        return out

    return apply


def norms(backend: Backend, tensors: list[Tensor], order: float = 2, dtype: torch.dtype | None = None) -> list[Tensor]:
    return [vector_norm(backend, tensor, order, dtype=dtype) for tensor in tensors]
