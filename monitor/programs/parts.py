"""A call as one operator on named tensors; an operator on lists is one for each element of the lists.

Batch tensors that an earlier committed state holds: weights that a loop has put aside and takes back.

A program names such a tensor ``recalled:weight/0.bias``. The batch also holds the number of the step after which
the state held it, and hashes in place of all else in that state. With the leaf of that step one can check that the
values are true (``require_recalled``); an analysis of a program may take them for the state's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from firmware_sim.errors import EvidenceError
from monitor.programs.calls import base_name, operator_of, tensor_slots
from monitor.programs.memory import Access
from monitor.sharding import ShardedMemory, StateDigest

__all__ = ["PROOF", "RECALLED", "STEP", "Part", "is_list", "is_recalled", "parts_of", "require_recalled", "state_of"]


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


RECALLED = "recalled:"
STEP, PROOF = f"{RECALLED}step", f"{RECALLED}proof"
_KINDS = ("weight/", "buffer/")


def is_recalled(names: Iterable[str]) -> bool:
    """Whether a batch of these names holds something of an earlier state."""
    return any(name.startswith(RECALLED) for name in names)


def state_of(source: str) -> str | None:
    """The tensor of the state, ``kind/name``, that a source of a program is an earlier value of, if it is one."""
    name = source.removeprefix(f"batch:{RECALLED}")
    return name if name != source and name.startswith(_KINDS) else None


def require_recalled(
    batch: Mapping[str, Tensor], step: int, memory: ShardedMemory, state_after: Callable[[int], StateDigest]
) -> None:
    """EvidenceError unless a step's batch holds what it says of an earlier state; a batch without such passes.

    Args:
        step: the step whose batch it is.
        memory: in the run's layout; it stays as it is.
        state_after: what an earlier step commits to.
    """
    if not is_recalled(batch):
        return
    try:
        number, proof = batch[STEP], batch[PROOF]
    except KeyError:
        raise EvidenceError(f"step {step} recalls tensors, but does not say from the state of which step") from None
    if number.dtype != torch.int64 or number.numel() != 1 or not 0 <= int(number) < step:
        raise EvidenceError(f"step {step} recalls tensors, but not from a step before it")
    held, given = memory.export(), {}
    for name in sorted(batch.keys() - {STEP, PROOF}):
        if name.startswith(RECALLED):
            tensor, own = batch[name], state_of(f"batch:{name}")
            like = None if own is None else held.get(own)
            if own is None or like is None or tensor.dtype != like.dtype or tensor.numel() != like.numel():
                raise EvidenceError(f"step {step} recalls {name!a:.100}, which is not a weight or buffer of the state")
            given[own] = tensor.reshape(like.shape)
    if memory.digest_with(given, proof) != state_after(int(number)):
        raise EvidenceError(f"step {step} recalls tensors that are not those of the state after step {int(number)}")
