"""Explains the numbers of a program that change from step to step by the optimizer's declared hyper-parameters.

A place among a program's scalars that any step gives another value than the program does is a slot. A slot is explained
if one formula of the optimizer, for one parameter group, gives its value in every step that ran the program. Formulas
know the hyper-parameters that the step declares and t, the number of optimizer updates since the run began (or as many
more as the state that was taken over had seen). Values must agree to 2^-46 of themselves, since ``pow`` differs between
mathematical libraries in the last bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from monitor.loops.program import Program, parse_hex, scalar_numbers

__all__ = ["Slot", "SlotRules", "formulas_of", "overlay", "updates_before"]

Hyper = Mapping[str, Any]
Formula = Callable[[Hyper, float], float]

_CLOSE = 2.0**-46

_ANY: dict[str, Formula] = {
    "-lr": lambda h, t: -h["lr"],
    "lr": lambda h, t: h["lr"],
    "1-lr·weight_decay": lambda h, t: 1 - h["lr"] * h["weight_decay"],
    "-lr·weight_decay": lambda h, t: -h["lr"] * h["weight_decay"],
    "lr·weight_decay": lambda h, t: h["lr"] * h["weight_decay"],
}
_ADAM: dict[str, Formula] = {
    "-lr/(1-beta1^t)": lambda h, t: -(h["lr"] / (1 - h["betas"][0] ** t)),
    "sqrt(1-beta2^t)": lambda h, t: (1 - h["betas"][1] ** t) ** 0.5,
    "beta1": lambda h, t: h["betas"][0],
    "1-beta1": lambda h, t: 1 - h["betas"][0],
}


def _radam_rectification(h: Hyper, t: float) -> float:
    """Liu et al. 2020, equation for r_t; complex, and so nobody's value, while the variance is intractable."""
    beta = h["betas"][1]
    longest = 2 / (1 - beta) - 1
    length = longest - 2 * t * beta**t / (1 - beta**t)
    share = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
    return float(share**0.5)


_FORMULAS: dict[str, dict[str, Formula]] = {
    "torch.optim.adam.Adam": _ADAM,
    "torch.optim.adamw.AdamW": _ADAM,
    "torch.optim.adamax.Adamax": _ADAM,
    "torch.optim.sgd.SGD": {
        "momentum": lambda h, t: h["momentum"],
        "1-dampening": lambda h, t: 1 - h["dampening"],
    },
    "torch.optim.radam.RAdam": {
        "1-beta1^t": lambda h, t: 1 - h["betas"][0] ** t,
        "sqrt(1-beta2^t)": lambda h, t: (1 - h["betas"][1] ** t) ** 0.5,
        "rectification": _radam_rectification,
    },
    "torch.optim.rmsprop.RMSprop": {"momentum": lambda h, t: h["momentum"]},
    "torch.optim.adagrad.Adagrad": {"-lr/(1+(t-1)·lr_decay)": lambda h, t: -h["lr"] / (1 + (t - 1) * h["lr_decay"])},
}


def formulas_of(optimizer: str) -> dict[str, Formula]:
    """The formulas for an optimizer's class; those of the learning rate and of weight decay hold for any."""
    return {**_ANY, **_FORMULAS.get(optimizer, {})}


def overlay(groups: Sequence[Hyper], changes: Sequence[Hyper]) -> list[dict[str, Any]]:
    """Hyper-parameters of a step: the declared ones with the step's changes."""
    return [{**group, **changed} for group, changed in zip(groups, changes, strict=True)]


def updates_before(state: Mapping[str, Tensor]) -> int:
    """Updates that an initial state has seen, by the optimizer's own counters ``optimizer/…/step`` in it."""
    counters = [t for name, t in state.items() if name.startswith("optimizer/") and name.endswith("/step")]
    values = [float(t) for t in counters if t.numel() == 1 and not t.is_complex()]
    return int(max((value for value in values if math.isfinite(value)), default=0))


@dataclass(frozen=True, slots=True)
class Slot:
    """A scalar of a program that changes, the operator that takes it, and what explains it (empty: nothing does)."""

    program: str
    number: int
    operator: str
    formulas: tuple[str, ...]


@dataclass(slots=True)
class _Use:
    """One step that ran a program: hyper-parameters, updates before it, and the values that it changed."""

    groups: list[dict[str, Any]]
    updates: int


@dataclass(slots=True)
class _Known:
    program: Program
    operators: list[str]
    uses: list[_Use] = field(default_factory=list)
    slots: dict[int, set[tuple[str, int, int]]] = field(default_factory=dict)


class SlotRules:
    """Follows a run step by step and keeps, for every slot, the formulas that explain all of its values so far.

    Args:
        optimizer: full name of the class.
        groups: declared hyper-parameters of each parameter group.
        before: updates that the optimizer's state had seen when the run began.
    """

    def __init__(self, optimizer: str, groups: Sequence[Hyper], before: int = 0) -> None:
        self._formulas = formulas_of(optimizer)
        self._groups = groups
        self._known: dict[str, _Known] = {}
        self.updates = before

    def take(self, program: Program, slots: Mapping[str, Sequence[int]], hyper: Sequence[Hyper]) -> None:
        """Add the next step: the program that it ran, the scalars that it changed, its changed hyper-parameters."""
        known = self._known.setdefault(program.digest, _Known(program, _operators(program)))
        use = _Use(overlay(self._groups, hyper), self.updates)
        changed = {number: parse_hex(text) for text, numbers in slots.items() for number in numbers}
        for number in changed:
            if number not in known.slots:
                inline = parse_hex(program.scalars[number])
                everything = {
                    (name, group, later)
                    for name in self._formulas
                    for group in range(len(self._groups))
                    for later in range(1, program.updates + 1)
                }
                known.slots[number] = self._explaining(everything, inline, known.uses)
        for number, candidates in known.slots.items():
            value = changed.get(number)
            value = parse_hex(program.scalars[number]) if value is None else value
            known.slots[number] = self._explaining(candidates, value, [use])
        known.uses.append(use)
        self.updates += program.updates

    def slots(self) -> Iterable[Slot]:
        """All slots of all programs so far."""
        for known in self._known.values():
            for number, candidates in sorted(known.slots.items()):
                names = tuple(sorted({name for name, _, _ in candidates}))
                yield Slot(known.program.digest, number, known.operators[number], names)

    def unexplained(self) -> list[Slot]:
        """Slots that no formula explains."""
        return [slot for slot in self.slots() if not slot.formulas]

    def _explaining(
        self, candidates: set[tuple[str, int, int]], value: float, uses: Sequence[_Use]
    ) -> set[tuple[str, int, int]]:
        """Those among the candidates (formula, group, update within the step) that give ``value`` in all these uses."""
        for use in uses:
            candidates = {
                (name, group, later)
                for name, group, later in candidates
                if _close(self._formulas[name], use.groups[group], use.updates + later, value)
            }
        return candidates


def _close(formula: Formula, hyper: Hyper, t: int, value: float) -> bool:
    try:
        expected = formula(hyper, float(t))
    except (KeyError, TypeError, ValueError, IndexError, ZeroDivisionError, OverflowError):
        return False
    return isinstance(expected, float | int) and abs(value - expected) <= _CLOSE * abs(expected)


def _operators(program: Program) -> list[str]:
    """The operator that takes each scalar."""
    return [call["operator"] for call in program.calls for _ in scalar_numbers(call["arguments"])]
