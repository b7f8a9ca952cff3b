"""Operators over lists of tensors (``_foreach_*``): the operator on one tensor, for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from monitor.numerics.arguments import Arguments, Keywords
from monitor.numerics.backend import Backend
from monitor.numerics.operators.reductions import vector_norm
from monitor.numerics.operators.row import Code

__all__ = ["are_apart", "each", "native", "norms", "one_by_one", "writes_list"]


@cache
def writes_list(func: OpOverload) -> bool:
    """Whether an operator writes each tensor of a list."""
    return func._schema.name.startswith("aten::_foreach_") and func._schema.is_mutable


def are_apart(lists: Sequence[Any]) -> bool:
    """Whether no tensor of the first list lies in the memory of another one, at another place of any list.

    Where one does, what an operator writes is what a later one of the list reads.
    """
    spans = []
    for number, each in enumerate(lists):
        for place, tensor in enumerate(each if isinstance(each, list | tuple) else ()):
            if isinstance(tensor, Tensor) and tensor.numel():
                reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
                start = tensor.data_ptr()
                spans.append((start, start + (reach + 1) * tensor.element_size(), place, not number))
    ends = {False: (0, -1), True: (0, -1)}  # of what lies furthest, by whether it is written
    for start, end, place, is_written in sorted(spans):
        if any(start < ends[other][0] and place != ends[other][1] for other in ({True, not is_written})):
            return False
        ends[is_written] = max(ends[is_written], (end, place))
    return True


def one_by_one(args: Sequence[Any], kwargs: Keywords) -> Iterator[tuple[Arguments, Keywords]]:
    """The same operator on each tensor of its list alone: its other lists, and a tensor of scalars, are cut likewise.

    Lists of different lengths stay whole, for the operator to refuse.
    """
    count = len(args[0])

    def is_list(value: Any) -> bool:
        return isinstance(value, list | tuple)

    if any(is_list(value) and len(value) != count for value in (*args, *kwargs.values())):
        yield tuple(args), kwargs
        return

    def cut(value: Any, number: int) -> Any:
        is_column = is_list(value) or (isinstance(value, Tensor) and value.ndim == 1 and len(value) == count)
        return value[number : number + 1] if is_column else value

    for number in range(count):
        yield (
            tuple(cut(value, number) for value in args),
            {name: cut(value, number) for name, value in kwargs.items()},
        )


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
