"""Operators over lists of tensors (``_foreach_*``): the single-tensor rule for each element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from monitor.numerics.backend import Backend
from monitor.numerics.operators.reductions import vector_norm
from monitor.numerics.operators.rule import Rule

__all__ = ["rules"]

_OVERLOADS = {
    "add": ("List", "Scalar", "ScalarList", "Tensor"),
    "sub": ("List", "Scalar", "ScalarList"),
    "mul": ("List", "Scalar", "ScalarList", "Tensor"),
    "div": ("List", "Scalar", "ScalarList", "Tensor"),
    "maximum": ("List",),
    "minimum": ("List",),
    "clamp_min": ("Scalar",),
    "clamp_max": ("Scalar",),
    "lerp": ("List", "Scalar"),
    "addcmul": ("Scalar", "ScalarList", "Tensor"),
    "addcdiv": ("Scalar", "ScalarList", "Tensor"),
    "pow": ("Scalar",),
    "sqrt": ("default",),
    "neg": ("default",),
    "abs": ("default",),
    "reciprocal": ("default",),
    "exp": ("default",),
    "copy": ("default",),
    "zero": ("default",),
}
_SINGLE = {"pow": "pow.Tensor_Scalar", "lerp": "lerp.Scalar"}
_NATIVE: dict[str, Callable[..., Tensor]] = {
    "mul": torch.mul,
    "neg": torch.neg,
    "abs": torch.abs,
    "clamp_min": torch.clamp_min,
    "clamp_max": torch.clamp_max,
    "zero": torch.zeros_like,
}


def _single(name: str, table: dict[str, Rule]) -> Callable[..., Any]:
    """The one-tensor operator behind ``_foreach_<name>``, called with the backend first."""
    if name in _NATIVE:
        native = _NATIVE[name]
        return lambda _, *args, **kwargs: native(*args, **kwargs)
    for candidate in (_SINGLE.get(name, f"{name}.Tensor"), f"{name}.default"):
        rule = table.get(f"aten.{candidate}")
        if rule is not None and rule.implementation is not None:
            return rule.implementation
    raise KeyError(name)


def _map(name: str, overload: str, table: dict[str, Rule]) -> Callable[..., list[Tensor]]:
    single = _single(name, table)
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

    apply.__name__ = f"_foreach_{name}_{overload}"
    return apply


def _norms(backend: Backend, tensors: list[Tensor], order: float = 2, dtype: torch.dtype | None = None) -> list[Tensor]:
    return [vector_norm(backend, tensor, order, dtype=dtype) for tensor in tensors]


def rules(table: dict[str, Rule]) -> dict[str, Rule]:
    """Rows for list operators over the single-tensor rows of ``table``."""
    out = {"aten._foreach_norm.Scalar": Rule(kind="implemented", implementation=_norms)}
    for name, overloads in _OVERLOADS.items():
        for overload in overloads:
            code = _map(name, overload, table)
            out[f"aten._foreach_{name}.{overload}"] = Rule(kind="implemented", implementation=code)
    return out
