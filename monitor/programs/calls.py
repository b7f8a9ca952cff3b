"""One call of a program: its operator, its arguments, and which of its tensors it writes or returns as views.

Operators on lists (``_foreach_…``): a meter counts them tensor by tensor, and so they write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from firmware_sim import Meter, Work
from firmware_sim.errors import EvidenceError
from monitor.numerics.arguments import Arguments, Keywords
from monitor.numerics.declared import resolve
from monitor.numerics.operators.lists import writes_list
from monitor.programs.trace import written_positions

__all__ = [
    "ITEM",
    "argument",
    "base_name",
    "build_arguments",
    "charge",
    "charge_part",
    "check_arguments",
    "is_view",
    "operator_of",
    "scalar_numbers",
    "tensor_slots",
    "writes_list",
    "written_slots",
]


@lru_cache(maxsize=4096)
def _parts(work: Work, count: int) -> tuple[Work, ...]:
    return tuple(work.share(number + 1, count) - work.share(number, count) for number in range(count))


def charge(meter: Meter, work: Work) -> None:
    """Count a call that has been made; one on lists as a call for each tensor."""
    if work.calls <= 1:
        meter.charge(work)
        return
    for part in _parts(work, work.calls):
        meter.charge(part)


def charge_part(meter: Meter, work: Work, number: int, count: int) -> None:
    """Count one of ``count`` equal parts of a call on lists."""
    meter.charge(_parts(work, count)[number])


ITEM = "aten._local_scalar_dense.default"
"""The call by which Python reads a value; its result is a number, not a tensor."""

_UNSAFE_VIEWS = frozenset({"aten._unsafe_view.default", "aten.unsafe_split.Tensor"})
"""Operators whose results share memory with an argument although the schema does not say so."""

_TYPES: dict[str, type] = {
    "$dtype": torch.dtype,
    "$layout": torch.layout,
    "$memory_format": torch.memory_format,
}


_FORMS: dict[str, tuple[tuple[type, ...], tuple[str, ...]]] = {
    "BoolType": ((bool,), ()),
    "IntType": ((int,), ()),
    "SymIntType": ((int,), ()),
    "StringType": ((str,), ()),
    "GeneratorType": ((type(None),), ()),
    "NumberType": ((bool, int), ("$scalar",)),
    "FloatType": ((), ("$scalar",)),
    "TensorType": ((bool, int), ("$scalar", "$tensor")),  # of products and sums PyTorch takes numbers for tensors
    "DeviceObjType": ((), ("$device",)),
    "ScalarTypeType": ((), ("$dtype",)),
    "LayoutType": ((), ("$layout",)),
    "MemoryFormatType": ((), ("$memory_format",)),
}
"""For each type of a schema, what JSON holds as it is, and the marks of what it names."""


@lru_cache(maxsize=4096)
def operator_of(name: str) -> OpOverload:
    """The ATen overload that a program may call; UnsupportedOperator if the operator table does not admit it."""
    return resolve(name)


@lru_cache(maxsize=4096)
def base_name(name: str) -> str:
    """An operator without namespace, overload and the mark of those in place: ``aten.add_.Tensor`` → ``add``."""
    operator = name.split(".")[1]
    return operator[:-1] if operator.endswith("_") and not operator.endswith("__") else operator


@lru_cache(maxsize=4096)
def is_view(func: OpOverload) -> bool:
    """Tell whether what an operator returns lies in the memory of its first tensor argument."""
    returned = func._schema.returns
    return str(func) in _UNSAFE_VIEWS or any(
        each.alias_info is not None and not each.alias_info.is_write for each in returned
    )


def argument(call: Mapping[str, Any], name: str) -> Any:
    """An argument by the name that the operator's schema gives it, in the program's form; its default if not given."""
    kwargs, args = call["arguments"]["kwargs"], call["arguments"]["args"]
    for position, each in enumerate(operator_of(call["operator"])._schema.arguments):
        if each.name == name:
            return args[position] if position < len(args) else kwargs.get(name, each.default_value)
    return None


def check_arguments(call: Mapping[str, Any]) -> None:
    """EvidenceError unless a call is written as PyTorch hands it on: each argument in its place and of its type.

    So an analysis reads of it what PyTorch does, which takes 1 for True, and -1 for the last slot. Sources are in the
    order of the arguments that name them: the work that a call counts for depends on which comes first.
    """
    args, kwargs = call["arguments"]["args"], call["arguments"]["kwargs"]
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise EvidenceError("a call's arguments are malformed")
    positional, named = _forms(call["operator"])
    given = [(name, form, value) for (name, form), value in zip(positional.items(), args, strict=False)]
    given += [(name, form, kwargs[name]) for name, form in named.items() if name in kwargs]
    wrong = [name for name, form, value in given if not _has_form(form, value)]
    if wrong or len(given) < len(args) + len(kwargs):
        what = f"{wrong[0]!a:.100} of another type" if wrong else "an argument for which it has no such place"
        raise EvidenceError(f"a program calls {call['operator']} with {what}")
    slots = [slot for _, _, value in given for slot in tensor_slots(value)]
    if slots != list(range(len(call["sources"]))):
        raise EvidenceError(f"a program's call of {call['operator']} does not take its sources once each, in order")


_Form = tuple[str, ...]
"""A type of a schema, from the outside in."""


@lru_cache(maxsize=4096)
def _forms(name: str) -> tuple[dict[str, _Form], dict[str, _Form]]:
    """Types of an operator's positional arguments and of those that have to be named, in the order of its schema."""
    arguments = operator_of(name)._schema.arguments
    forms = [
        {each.name: _form_of(each.real_type) for each in arguments if each.kwarg_only is is_named}
        for is_named in (False, True)
    ]
    return forms[0], forms[1]


def _form_of(kind: Any) -> _Form:
    name = kind.kind()
    return (name, *_form_of(kind.getElementType())) if name in ("OptionalType", "ListType") else (name,)


def _has_form(form: _Form, value: Any) -> bool:
    outer, *inner = form
    if outer == "OptionalType":
        return value is None or _has_form(tuple(inner), value)
    if outer == "ListType":
        return type(value) is list and all(_has_form(tuple(inner), each) for each in value)
    plain, marks = _FORMS.get(outer, ((), ()))
    if type(value) is not dict or len(value) != 1:
        return type(value) in plain
    [(mark, item)] = value.items()
    return mark in marks and type(item) is (int if mark in ("$tensor", "$scalar") else str)


def written_slots(call: Mapping[str, Any]) -> list[int]:
    """Which of a call's tensor inputs it writes, each once, in the order of its results."""
    found: list[int] = []
    args, kwargs = call["arguments"]["args"], call["arguments"]["kwargs"]
    for position, name in written_positions(operator_of(call["operator"])):
        value = args[position] if position < len(args) else kwargs.get(name)
        found += [slot for slot in tensor_slots(value) if slot not in found]
    return found


def tensor_slots(value: Any) -> Iterator[int]:
    """Numbers of the tensor inputs that an argument names."""
    if isinstance(value, list):
        for item in value:
            if isinstance(item, (list, dict)):
                yield from tensor_slots(item)
    elif isinstance(value, dict) and len(value) == 1 and "$tensor" in value:
        yield value["$tensor"]


def build_arguments(
    arguments: Mapping[str, Any], tensors: Sequence[Tensor], scalar: Callable[[int], float], place: torch.device
) -> tuple[Arguments, Keywords]:
    """Rebuild positional and keyword arguments of a call that runs on ``place``; EvidenceError on any other form."""

    def build(value: Any) -> Any:
        if isinstance(value, list):
            return [build(item) for item in value]
        if not isinstance(value, dict):
            return value
        if len(value) != 1:
            raise EvidenceError("a call's arguments are malformed")
        ((kind, item),) = value.items()
        if kind == "$tensor":
            return tensors[item]
        if kind == "$scalar":
            return scalar(item)
        if kind == "$device":
            return place
        found = getattr(torch, str(item).removeprefix("torch."), None)
        if kind in _TYPES and isinstance(found, _TYPES[kind]):
            return found
        raise EvidenceError("a call's arguments are malformed")

    try:
        args, kwargs = arguments["args"], arguments["kwargs"]
        return tuple(build(args)), {name: build(value) for name, value in kwargs.items()}
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        raise EvidenceError("a call's arguments are malformed") from None


def scalar_numbers(value: Any) -> Iterator[Any]:
    """Numbers of the scalars among arguments, in order: positional ones first, keywords by name."""
    if isinstance(value, list):
        for item in value:
            if isinstance(item, (list, dict)):
                yield from scalar_numbers(item)
    elif isinstance(value, dict):
        if len(value) == 1 and "$scalar" in value:
            yield value["$scalar"]
        else:
            for name in sorted(value):
                if isinstance(value[name], (list, dict)):
                    yield from scalar_numbers(value[name])
