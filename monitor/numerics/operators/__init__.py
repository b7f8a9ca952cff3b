"""The operator table: every ATen overload that may run under controlled numerics, and how."""

from __future__ import annotations

import functools
from dataclasses import replace

from monitor.numerics.operators import (
    decomposed,
    elementwise,
    exact,
    indexing,
    limits,
    linear,
    lists,
    losses,
    normalisation,
    random,
    reductions,
)
from monitor.numerics.operators.rule import Kind, Rule

__all__ = ["Kind", "Rule", "functional_name", "functional_of_out", "operator_table", "remedy_for"]

_REFUSED = {
    "autocast": "switch autocast off; keep parameters in one format",
    "_amp_": "switch the gradient scaler off",
    "_fused_": "build the optimizer with fused=False",
    "mkldnn": "switch torch.backends.mkldnn off for this model",
    "_linalg_": "decompose the model's linear algebra into matrix products",
    "quantize": "train without quantised operators",
    "sparse": "use dense tensors",
    "scaled_dot_product": "leave the choice of its kernel to the session, which takes the one made of plain operators",
    "_cudnn": "switch cuDNN off for this operator",
}


_IN_PLACE = {"aten.pow_.Scalar": "aten.pow.Tensor_Scalar", "aten.pow_.Tensor": "aten.pow.Tensor_Tensor"}


_SETTLED = """
mm.default bmm.default exp.default log.default tanh.default erf.default sigmoid.default silu.default gelu.default
embedding_dense_backward.default max_pool2d_with_indices_backward.default
"""


@functools.cache
def operator_table() -> dict[str, Rule]:
    """Rows by functional overload name, such as ``aten.add.Tensor``; in-place overloads use their functional row."""
    table = exact.rules() | decomposed.rules()
    for module in (elementwise, limits, reductions, linear, normalisation, indexing, losses, random):
        table.update(module.rules())
    for name in _SETTLED.split():
        table[f"aten.{name}"] = replace(table[f"aten.{name}"], settled=True)
    table.update(lists.rules(table))
    return table


def functional_name(name: str) -> str | None:
    """``aten.add_.Tensor`` → ``aten.add.Tensor``; None for a name that is not in place."""
    if name in _IN_PLACE:
        return _IN_PLACE[name]
    namespace, operator, overload = name.split(".", 2)
    if not operator.endswith("_") or operator.endswith("__"):
        return None
    return f"{namespace}.{operator[:-1]}.{overload}"


def functional_of_out(name: str) -> str | None:
    """``aten.maximum.out`` → ``aten.maximum.default``; None for a name that writes to no ``out=``."""
    namespace, operator, overload = name.split(".", 2)
    if overload != "out" and not overload.endswith("_out"):
        return None
    known = operator_table()
    for candidate in (overload.removesuffix("out").removesuffix("_"), "default", "Tensor"):
        if candidate and f"{namespace}.{operator}.{candidate}" in known:
            return f"{namespace}.{operator}.{candidate}"
    return None


def remedy_for(name: str) -> str:
    """What a user can do about an operator without a row."""
    for part, remedy in _REFUSED.items():
        if part in name:
            return remedy
    return "write it with operators listed by `chipwitness operators`, or train with native numerics"
