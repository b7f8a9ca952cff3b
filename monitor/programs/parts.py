"""A call as one operator on named tensors; an operator on lists is one for each element of the lists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from firmware_sim.errors import EvidenceError
from monitor.programs.calls import base_name, operator_of, tensor_slots
from monitor.programs.memory import Access

__all__ = ["Part", "is_list", "parts_of"]

_LISTS = "_foreach_"


@dataclass(frozen=True, slots=True)
class Part:
    """One operator.

    Attributes:
        name: without namespace, overload and the mark of those in place.
        slots: the tensor inputs that each argument names, but for those that ``out=`` names.
        others: arguments that are no tensors.
        outputs: numbers of the call's outputs that this part makes.
    """

    name: str
    slots: Mapping[str, tuple[int, ...]]
    others: Mapping[str, Any] = field(default_factory=dict)
    outputs: tuple[int, ...] = ()

    @property
    def read(self) -> tuple[int, ...]:
        """All tensor inputs."""
        return tuple(slot for slots in self.slots.values() for slot in slots)


def is_list(operator: str) -> bool:
    """Whether an operator, by its full name, takes lists of tensors and treats each by itself."""
    return base_name(operator).startswith(_LISTS)


def parts_of(access: Access) -> list[Part]:
    """The operators of a call; EvidenceError on lists of different lengths."""
    count = len(access.results) + len(access.written)
    name = base_name(access.operator)
    slots: dict[str, tuple[int, ...]] = {}
    lists: set[str] = set()
    others: dict[str, object] = {}
    args, kwargs = access.call["arguments"]["args"], access.call["arguments"]["kwargs"]
    for position, each in enumerate(operator_of(access.operator)._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(each.name)
        found = tuple(tensor_slots(value))
        if not found:
            others[each.name] = each.default_value if value is None else value
        elif not each.is_out:
            slots[each.name] = found
            if isinstance(value, list):
                lists.add(each.name)
    if not name.startswith(_LISTS):
        return [Part(name, slots, others, tuple(range(count)))]
    if {len(slots[each]) for each in lists} != {count}:
        raise EvidenceError(f"{access.operator} takes lists of different lengths")
    return [
        Part(
            name.removeprefix(_LISTS),
            {each: (found[index],) if each in lists else found for each, found in slots.items()},
            others,
            (index,),
        )
        for index in range(count)
    ]
