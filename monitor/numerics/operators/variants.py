"""The functional operator behind one that writes to ``out=`` arguments."""

from __future__ import annotations

import functools

from torch._ops import OpOverload

from monitor.numerics.arguments import Arguments, Keywords

__all__ = ["functional_variant", "split_outputs"]

_OPTIONS = frozenset(("dtype", "layout", "device", "pin_memory", "memory_format", "non_blocking"))
"""Arguments of a functional overload that its ``out=`` variant takes from the tensor it writes to."""


def _inputs(func: OpOverload) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in func._schema.arguments if not argument.is_out]


def _without_options(inputs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [argument for argument in inputs if argument[0] not in _OPTIONS]


@functools.cache
def functional_variant(func: OpOverload) -> OpOverload | None:
    """The overload of the same operator with the same inputs that returns what ``func`` writes.

    Names do not tell: ``sum.IntList_out`` belongs to ``sum.dim_IntList`` and ``max.out`` to ``max.other``. None where
    ``func`` writes to no ``out=`` argument or nothing matches.
    """
    if not any(argument.is_out for argument in func._schema.arguments):
        return None
    packet = func.overloadpacket
    others: list[OpOverload] = [getattr(packet, name) for name in packet.overloads()]
    plain = [one for one in others if not any(a.is_out or a.alias_info for a in one._schema.arguments)]
    wanted = _inputs(func)
    for one in plain:
        if _inputs(one) == wanted:
            return one
    for one in plain:
        if _without_options(_inputs(one)) == _without_options(wanted):
            return one
    return None


def split_outputs(func: OpOverload, functional: OpOverload, kwargs: Keywords) -> tuple[Keywords, Arguments]:
    """Keyword arguments for ``functional``, and the tensors that ``func`` writes to, in order."""
    outputs = tuple(kwargs[argument.name] for argument in func._schema.arguments if argument.is_out)
    names = {argument.name for argument in func._schema.arguments if argument.is_out}
    inputs = {name: value for name, value in kwargs.items() if name not in names}
    own = {argument.name for argument in func._schema.arguments}
    for argument in functional._schema.arguments:
        if argument.name in ("dtype", "device") and argument.name not in own:
            inputs[argument.name] = getattr(outputs[0], argument.name)
    return inputs, outputs
