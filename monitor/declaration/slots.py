"""Compares the numbers of a run's programs, step by step, with what the declared optimizer takes.

One rule binds every number of an optimizer's update, whether it ever changes or not: by its place, it must equal the
number in the same place of the reference. A number elsewhere that some step gives another value than the program does
is a slot; nothing explains it. Values must agree to 2^-46 of themselves, since ``pow`` differs between mathematical
libraries in the last bits.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

from torch import Tensor

from firmware_sim.errors import EvidenceError
from monitor.declaration.binding import Binding, ProgramWrites, bind, calls_of
from monitor.declaration.reference import IMPLEMENTATION, SCHEDULES, ReferenceOptimizer
from monitor.declaration.statement import Declaration
from monitor.declaration.update_calls import Contradicted, NotBound
from monitor.declaration.values import Made
from monitor.declaration.writes import Marks, Written, declared_writes, shares_of
from monitor.programs.memory import Memory
from monitor.programs.program import Program, parse_hex
from monitor.programs.trace import in_numbers

__all__ = ["OffSchedule", "Slot", "StepNumbers", "numbered", "overlay"]

Hyper = Mapping[str, Any]

_CLOSE = 2.0**-46
_MOST_JUDGED = 64
_MOST_SHARES = 8
"""Different numbers that may say in one step how much averages take: few averages, and not one for each tensor."""
_MALFORMED = (AttributeError, LookupError, TypeError, ValueError)


class _OfFormula(Exception):
    """A number of a package's update is not what its formula gives."""


class OffSchedule(EvidenceError):
    """A step uses another learning rate than the declared schedule gives."""


def overlay(groups: Sequence[Hyper], changes: Sequence[Hyper]) -> list[Hyper]:
    """Hyper-parameters of a step: the declared ones with the step's changes."""
    return [{**group, **changed} for group, changed in zip(groups, changes, strict=True)]


def numbered(task: Declaration) -> frozenset[str]:
    """Names of the weights whose parameter groups declare a number: their updates are bound, or that is unbound."""
    groups = zip(task.parameters, task.groups, strict=True)
    return frozenset(name for names, group in groups if group.keys() - IMPLEMENTATION - SCHEDULES for name in names)


@dataclass(frozen=True, slots=True)
class Slot:
    """A scalar of a program that changes from step to step, and the operator that takes it.

    Attributes:
        explained: ``update`` if the declared optimizer gives it, ``average`` if it does nothing but say how much an
            average takes of what (``writes``), ``not bound`` if it is part of an update that could not be compared,
            ``nothing`` elsewhere.
    """

    program: str
    number: int
    operator: str
    explained: str


@dataclass(slots=True)
class _Known:
    """A program, the call that takes each of its scalars, and its last binding with the reference it was made for."""

    program: Program
    calls: list[int]
    writes: ProgramWrites
    slots: dict[int, str] = field(default_factory=dict)
    structure: tuple[Any, ...] | None = None
    bound: Binding | None = None
    memory: Memory | None = None
    judged: dict[Hashable, tuple[Marks, dict[str, Written], frozenset[Made]]] = field(default_factory=dict)

    def operator(self, number: int) -> str:
        """The operator that takes a scalar."""
        return str(self.program.calls[self.calls[number]]["operator"])


class StepNumbers:
    """Follows a run and keeps what its numbers are bound to.

    Args:
        task: the declaration.
        start: the state that the run began with, under ``kind/name``.

    Attributes:
        steps: steps so far.
        updates: runs of the optimizer's ``step`` so far.
        unbound: hyper-parameters that govern no number that could be found, each with the reason and the first step,
            and weights, ``weight/name``, that updates write by numbers that nothing declares.
        packages: those of them that were bound to a package's formula, until an update was another.
        contradicted: an update makes other calls than the declared hyper-parameters give.
        updated: weights that updates wrote.
        written: weights that declared writes wrote, with what these took and how.
        made: tensors that steps make of weights, by no copy and no average, and that updates take, each with the step.
    """

    def __init__(self, task: Declaration, start: Mapping[str, Tensor]) -> None:
        self._task = task
        self._known: dict[str, _Known] = {}
        self.steps = 0
        self.updates = 0
        self._updating = 0
        self._largest = [0.0] * len(task.groups)
        self.unbound: dict[str, str] = {}
        self.packages: set[str] = set()
        self.contradicted = False
        self.updated: set[str] = set()
        self.written: dict[str, Written] = {}
        self.made: dict[Made, int] = {}
        self._shapes = {f"{each.kind}/{each.name}": in_numbers(each.layout)["shape"] for each in task.state}
        self._governed = frozenset(name for names in task.parameters for name in names)
        self._marks = Marks.of_start(start, self._governed)
        self._numbered = numbered(task)
        self._reference: ReferenceOptimizer | None = None
        try:
            self._reference = ReferenceOptimizer(task, start)
        except NotBound as reason:
            self._give_up(str(reason))
            return
        self.unbound |= self._reference.reasons
        labels = {name for group in task.groups for name, value in group.items() if isinstance(value, str)}
        for name in self.names - self._reference.known - labels:
            self.unbound.setdefault(name, f"{task.optimizer} has no such hyper-parameter")

    def take(
        self,
        program: Program,
        slots: Mapping[str, Sequence[int]],
        hyper: Sequence[Hyper],
        values: Sequence[str] = (),
    ) -> None:
        """Add the next step: the program that it ran, the scalars that it changed, its changed hyper-parameters.

        Args:
            values: what the step read, in order, where an optimizer's numbers depend on it.

        Raises:
            EvidenceError: a number of an update is not what the declared hyper-parameters give.
            OffSchedule: nor is a learning rate what the declared schedule gives.
        """
        self.steps += 1
        if program.updates:
            self._check_rates(overlay(self._task.groups, hyper))
        self.updates += len(program.updates)
        try:
            known = self._known.get(program.digest) or _Known(program, calls_of(program), ProgramWrites(program))
        except _MALFORMED:
            raise EvidenceError(f"step {self.steps} runs a program whose calls have malformed arguments") from None
        self._known[program.digest] = known
        changed = {number: parse_hex(text) for text, numbers in slots.items() for number in numbers}
        bound: Binding | None = None
        if self._reference is not None:
            try:
                bound = self._follow(known, changed, overlay(self._task.groups, hyper), values)
            except NotBound as reason:
                self.contradicted = isinstance(reason, Contradicted)
                self._give_up(f"step {self.steps}: {reason}")
        for update in known.writes.updates:
            self.updated |= update.weights
            for name in sorted(update.weights - self._numbered):
                text = f"step {self.steps}: an update writes it by numbers that nothing declares"
                self.unbound.setdefault(f"weight/{name}", text)
        said = {
            number: "update" if bound is not None and number in bound.scalars else self._loose(known, number)
            for number in changed
        }
        shares = self._shares(known, changed) if "nothing" in said.values() else ()
        for number, explained in said.items():
            if explained == "nothing" and number in shares:
                explained = "average"
            if known.slots.get(number) != "nothing":
                known.slots[number] = explained

    def _check_rates(self, groups: Sequence[Hyper]) -> None:
        """The learning rates of a step that updates; others use none, and a schedule does not go on in them."""
        self._updating += 1
        schedule = self._task.schedule
        for number, (group, declared) in enumerate(zip(groups, self._task.groups, strict=True)):
            used, rate = group.get("lr"), declared.get("lr")
            if isinstance(used, float | int):
                self._largest[number] = max(self._largest[number], abs(used))
            if schedule is not None and not schedule.agrees(rate, used, self._updating, self._largest[number]):
                raise OffSchedule(
                    f"step {self.steps} uses learning rate {used!a:.40} in group {number}, but declares {rate!a:.40} "
                    f"times {schedule.factor(self._updating)!r} by its schedule, which counts updates: this is number "
                    f"{self._updating}"
                )

    def slots(self) -> Iterable[Slot]:
        """All slots of all programs so far."""
        for known in self._known.values():
            for number, explained in sorted(known.slots.items()):
                yield Slot(known.program.digest, number, known.operator(number), explained)

    def unexplained(self) -> list[Slot]:
        """Slots outside the optimizer's updates."""
        return [slot for slot in self.slots() if slot.explained == "nothing"]

    def governed(self) -> dict[str, int]:
        """For each program, how many of its scalars the declared hyper-parameters give."""
        return {
            digest: len(known.bound.scalars) if self._reference is not None and known.bound is not None else 0
            for digest, known in self._known.items()
        }

    def idle_groups(self) -> list[int]:
        """Parameter groups none of whose weights an update wrote: their hyper-parameters govern nothing."""
        return [i for i, names in enumerate(self._task.parameters) if not self.updated & set(names)]

    def _follow(
        self, known: _Known, changed: Mapping[int, float], groups: Sequence[Hyper], values: Sequence[str]
    ) -> Binding:
        """Bind a step; where a package's update is another than its formula makes, the others alone."""
        assert self._reference is not None
        if not self._reference.formulas:
            return self._bind(known, changed, groups, values)
        before = self._reference.values()
        try:
            return self._bind(known, changed, groups, values)
        except NotBound as error:
            reason = str(error)
        except _OfFormula as error:
            reason = str(error)
        self._reference.put_back(before)
        self._reference.drop_formulas(reason)
        self.packages |= self._reference.reasons.keys() - self.unbound.keys()
        self.unbound = self._reference.reasons | self.unbound
        for each in self._known.values():
            each.bound = None
            each.judged.clear()
        if not self._reference.known:
            raise NotBound(reason)
        return self._bind(known, changed, groups, values)

    def _bind(
        self, known: _Known, changed: Mapping[int, float], groups: Sequence[Hyper], values: Sequence[str]
    ) -> Binding:
        assert self._reference is not None
        writes = known.writes
        strangers = set().union(*(update.weights for update in writes.updates)) - self._governed
        if strangers:
            raise NotBound(f"an update writes {sorted(strangers)[0]!a}, which belongs to no parameter group")
        unknown = self._reference.unknown
        if any(touched & unknown and touched - unknown for touched in writes.touched):
            raise NotBound("a single update writes weights of two optimizers")
        ours = [not touched & unknown for touched in writes.touched]
        read = list(compress(writes.values_read(values), ours))
        reference = self._reference.take(list(compress(writes.updates, ours)), groups, writes.present, read)
        structure = reference.structure()
        if known.bound is None or known.structure != structure:
            try:
                known.bound, known.structure = bind(writes, reference, self._task, unknown), structure
            except _MALFORMED:
                raise NotBound("the program's calls have malformed arguments") from None
        for number, partner in known.bound.scalars.items():
            found = changed.get(number)
            found = parse_hex(known.program.scalars[number]) if found is None else found
            expected = parse_hex(reference.scalars[partner])
            if not _is_close(found, expected):
                raise self._mismatch(known, number)(
                    f"step {self.steps}: {known.operator(number)} of an update uses the number {found!r} (scalar "
                    f"{number}), but the declared hyper-parameters give {expected!r}"
                )
        for mine, theirs in known.bound.constants:
            if known.program.constants[mine] != reference.constants[theirs]:
                raise EvidenceError(
                    f"step {self.steps}: constant {mine} of an update is not what the declared hyper-parameters give"
                )
        self._follow_writes(known, known.bound, changed)
        return known.bound

    def _mismatch(self, known: _Known, number: int) -> type[Exception]:
        """What a number that is not as declared means: of a package's update, that its formula is another."""
        formulas = frozenset() if self._reference is None else self._reference.formulas
        ranges = zip(known.program.updates, known.writes.touched, strict=True)
        touched = (names for (first, last), names in ranges if first <= known.calls[number] < last)
        return _OfFormula if any(names <= formulas for names in touched) else EvidenceError

    def _follow_writes(self, known: _Known, bound: Binding, changed: Mapping[int, float]) -> None:
        """Take note of a step's declared writes; NotBound if it writes a weight otherwise."""
        other = {number: value for number, value in changed.items() if number not in bound.scalars}
        key = self._marks, bound.calls, tuple(sorted(other.items()))
        if key not in known.judged:
            known.memory = known.memory or Memory(known.program, self._shapes)
            scalars = [other.get(number, value) for number, value in enumerate(known.program.numbers)]
            if len(known.judged) >= _MOST_JUDGED:
                known.judged.clear()
            unknown = frozenset() if self._reference is None else self._reference.unknown
            ranges = zip(known.program.updates, known.writes.touched, strict=True)
            theirs = {call for (first, last), touched in ranges if touched & unknown for call in range(first, last)}
            known.judged[key] = declared_writes(
                known.program, known.memory, scalars, bound.calls | theirs, self._governed, self._marks, unknown
            )
        self._marks, written, taken = known.judged[key]
        for made in taken:
            if made.is_scale:
                raise NotBound(
                    f"an update takes gradients that are multiplied by {made.name!a}, a gradient scaler's scale; write "
                    "scaler.step(optimizer) or, before it, scaler.unscale_(optimizer)"
                )
            self.made.setdefault(made, self.steps)
        for name, each in written.items():
            before = self.written.get(name, Written(frozenset(), frozenset()))
            self.written[name] = Written(before.sources | each.sources, before.operators | each.operators)

    def _shares(self, known: _Known, changed: Mapping[int, float]) -> frozenset[int]:
        """The numbers of a step that say how much its averages take."""
        known.memory = known.memory or Memory(known.program, self._shapes)
        scalars = [changed.get(number, value) for number, value in enumerate(known.program.numbers)]
        updates = {call for first, last in known.program.updates for call in range(first, last)}
        shares = shares_of(known.program, known.memory, scalars, updates, self._marks)
        return shares if len({changed[each] for each in shares & changed.keys()}) <= _MOST_SHARES else frozenset()

    def _loose(self, known: _Known, number: int) -> str:
        """What to say about a changing number that is not bound."""
        call, reference = known.calls[number], self._reference
        touched = zip(known.program.updates, known.writes.touched, strict=True)
        inside = [weights for (first, last), weights in touched if first <= call < last]
        loose = any(reference is None or weights & reference.unknown for weights in inside)
        return "not bound" if loose else "nothing"

    def _give_up(self, reason: str) -> None:
        """From now on nothing is bound: the reference can no longer follow."""
        self._reference = None
        for name in self.names:
            self.unbound.setdefault(name, reason)

    @property
    def names(self) -> set[str]:
        """Hyper-parameters that the numbers of updates are held against, but for those that are unbound."""
        return {name for group in self._task.groups for name in group} - IMPLEMENTATION - SCHEDULES


def _is_close(found: float, expected: float) -> bool:
    if math.isnan(expected) or math.isinf(expected):
        return found == expected or (math.isnan(found) and math.isnan(expected))
    if expected == 0:
        return found == 0 and math.copysign(1, found) == math.copysign(1, expected)
    return abs(found - expected) <= _CLOSE * abs(expected)
