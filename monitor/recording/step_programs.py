"""Turns what was observed of a step into a program and the numbers that the step takes."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from firmware_sim.errors import CallerError, EvidenceError
from monitor.declaration.reference import CLASSES, READING, classes_of, may_vary
from monitor.declaration.slots import OffSchedule, StepNumbers
from monitor.declaration.statement import Declaration
from monitor.loops.state import FROM_THE_START
from monitor.programs.batches import batch_layout
from monitor.programs.capture import Capture, digest_reads
from monitor.programs.program import MANY_PROGRAMS, MAXIMUM_PROGRAMS, Program
from monitor.recording.follower import Follower
from monitor.recording.options import RunConfig
from monitor.recording.path_warnings import Foreseen
from monitor.recording.refusals import Line
from monitor.recording.updates import OptimizerUpdates
from monitor.recording.write_programs import WriteCapture
from monitor.replay.steps import zeros
from monitor.transcript import EVALUATION, STEP, WRITE, Execution

__all__ = ["StepPrograms", "changed_constants", "changed_number", "differences", "require_unwritten"]

Hyper = Mapping[str, Any]

_FEWER = (
    "pad batches to a few sizes (monitor.padded), and keep integer arguments and branches the same from step to step"
)
_RECENT = 8


class StepPrograms:
    """The programs of a run so far, and what binds the numbers of its steps.

    Args:
        groups: the hyper-parameters that the run declares, by parameter group.
        checked: refuse numbers that the declaration does not explain, and evaluations that write the state; a simulated
            lie does not ask.
        start: the state that the run began with, under ``kind/name``.

    Attributes:
        known: all programs that a step ran, by digest.
        left: names of tensors that the last step left absent.
    """

    def __init__(
        self,
        declared: Declaration,
        groups: Sequence[Hyper],
        options: RunConfig,
        *,
        checked: bool,
        start: Mapping[str, Tensor],
    ) -> None:
        self.known: dict[str, Program] = {}
        self._by_form: dict[tuple[Any, ...], list[Program]] = {}
        self._groups, self._options = groups, options
        self._rules = StepNumbers(declared, start) if checked else None
        self._foreseen = Foreseen(declared, options) if checked else None
        self._classes = classes_of(declared)
        self._states_reads = any(CLASSES.get(name) in READING for name in self._classes)
        self.left = zeros(start)
        self._looked_at: set[str] = set()
        self._carried: dict[str, set[int]] = {}

    @property
    def rules(self) -> StepNumbers | None:
        """What binds the numbers of the steps; None under a lie."""
        return self._rules

    @property
    def recent(self) -> list[Program]:
        """Programs among which those of a step are looked for, call by call, the newest first."""
        return list(self.known.values())[: -_RECENT - 1 : -1]

    def recall(self, program: Program, execution: Execution) -> None:
        """Take note of a step that was recorded before."""
        self.know(program)
        program = self.known[execution.program]
        self.left = program.absent
        self.foresee(program, {})
        if self._rules is not None:
            self._rules.take(program, execution.slots, execution.hyper, execution.values)

    def explain(
        self,
        observed: Capture | Follower,
        updates: OptimizerUpdates,
        state: Mapping[str, Tensor | None],
        batch: Mapping[str, Tensor],
        loss: Tensor | None,
        kind: str = STEP,
    ) -> tuple[Program, Execution]:
        """The program that a step ran, an earlier one if there is one of its structure, and the step's values.

        Raises:
            CallerError: a number or a tensor of the step is not explained by the declaration, or an evaluation writes
                the state.
        """
        changes = self.changes(updates)
        if isinstance(observed, Follower):
            program, slots = observed.program, observed.slots()
        else:
            captured = observed.program(state, batch_layout(batch), updates.places, loss)
            if isinstance(observed, WriteCapture) and captured.written:
                captured = observed.recalling(captured)
            program = self.same(captured, observed)
            slots = differences(captured, program)
        execution = Execution(
            program=program.digest,
            slots=slots,
            hyper=changes,
            reads=digest_reads(observed.reads),
            kind=kind,
            values=tuple(observed.reads) if self._states_reads and program.updates else (),
        )
        if self._rules is not None:
            before = set(self._rules.unbound)
            self._require_bound(self._rules, program, execution)
            self._require_declared(kind, program, self._rules.unbound, before)
        self.settle(program, kind)
        return program, execution

    def foresee(self, program: Program, lines: Mapping[int, Line | None]) -> tuple[CallerError, Line | None] | None:
        """What would leave an inspection without a verdict on a program that is new, with the caller's line.

        Raises:
            CallerError: no inspection can look at the program.
        """
        if self._foreseen is None or program.digest in self._looked_at:
            return None
        self._looked_at.add(program.digest)
        return self._foreseen.look(program, lines)

    def warn(self, program: Program, lines: Mapping[int, Line | None]) -> None:
        """Warn of what ``foresee`` finds."""
        found = self.foresee(program, lines)
        if found is not None:
            error, line = found
            warnings.warn(f"{line}: {error}" if line else str(error), stacklevel=2)

    def settle(self, program: Program, kind: str) -> None:
        """Take note of what a step leaves absent; CallerError if it is an evaluation and changes the state."""
        if kind == EVALUATION and self._rules is not None:
            require_unwritten(program, self.left)
        self.left = program.absent

    def _require_bound(self, rules: StepNumbers, program: Program, execution: Execution) -> None:
        try:
            rules.take(program, execution.slots, execution.hyper, execution.values)
        except EvidenceError as error:
            remedy = "; let the optimizer follow that, or declare no schedule" * isinstance(error, OffSchedule)
            raise CallerError(f"this step cannot be recorded: {error}{remedy}") from None
        unbound = sorted(set(rules.unbound).difference(self._options.free))
        if rules.contradicted and unbound:
            raise CallerError(
                f"this step cannot be recorded: {unbound[0]} is not bound to the arithmetic, since "
                f"{rules.unbound[unbound[0]]}; lab and inspector may agree to that: free={tuple(unbound)!r}"
            )
        unexplained = rules.unexplained()
        if unexplained and not self._options.free_slots:
            raise CallerError(changed_number(unexplained[0].operator))

    def _require_declared(
        self, kind: str, program: Program, unbound: Mapping[str, str], before: Collection[str]
    ) -> None:
        """CallerError where a write between steps unbinds the optimizer's numbers, without an agreement."""
        packages = set() if self._rules is None else self._rules.packages
        grown = sorted((unbound.keys() - before).difference(self._options.free, packages))
        if grown and kind == WRITE:
            paths = "" if self._foreseen is None else self._foreseen.agreement(program)
            raise CallerError(
                f"a write between steps cannot be recorded: {unbound[grown[0]]}; copy or average what weights or "
                "tensors under state=[…] hold, clamp all of a weight, or have lab and inspector agree: "
                f"free={tuple(grown)!r}{f' and {paths}' if paths else ''}"
            )

    def same(self, captured: Program, capture: Capture) -> Program:
        """The program of the captured one's structure that a step ran before, or the captured one itself.

        Tensors that it reads and nothing in it made are constants, until one is another than before: from then on it
        is carried from step to step, and a part of the batch.
        """
        program = self.alike(captured)
        changed = self._carried.setdefault(program.digest, set()) if program is not captured else set()
        changed |= changed_constants(captured, program)
        if changed:
            names = {number: _free_name(number, captured.batch) for number in sorted(changed)}
            capture.carried = {name: captured.constants[number].tensor() for number, name in names.items()}
            captured = captured.carrying(names)
            program = self.alike(captured)
        if program is captured:
            self._count_another()
        return program

    def admits(self, capture: WriteCapture, state: Mapping[str, Tensor | None]) -> bool:
        """Whether operators between steps, which only read, can be a program: one of before, or one of not too many."""
        try:
            captured = capture.program(state, batch_layout(capture.batch), ())
        except CallerError:
            return False
        known = self.alike(captured)
        return not differences(captured, known) if known is not captured else len(self.known) < MANY_PROGRAMS

    def alike(self, captured: Program) -> Program:
        """The known program of the same structure, or the captured one."""
        structure = captured.structure()
        others = self._by_form.get(_form(captured), ())
        return next((known for known in others if known.structure() == structure), captured)

    def _count_another(self) -> None:
        if len(self.known) >= MAXIMUM_PROGRAMS:
            raise CallerError(f"the run already has {MAXIMUM_PROGRAMS} different programs; {_FEWER}")
        if len(self.known) == MANY_PROGRAMS:
            size = sum(len(program.encoded) for program in self.known.values())
            warnings.warn(
                f"this step runs program {MANY_PROGRAMS + 1} of the run; those before take {size} bytes on disk and "
                f"some fifteen times as much memory here and at each inspection; at most {MAXIMUM_PROGRAMS} can "
                f"be recorded; {_FEWER}",
                stacklevel=2,
            )

    def know(self, program: Program) -> None:
        """Take note of a program that a step ran."""
        if program.digest not in self.known:
            self.known[program.digest] = program
            self._by_form.setdefault(_form(program), []).append(program)

    def changes(self, updates: OptimizerUpdates) -> tuple[Hyper, ...]:
        """For each parameter group, the hyper-parameters of a step that differ from the declared ones.

        Raises:
            CallerError: one may not differ.
        """
        if len(updates.used) != len(self._groups):
            raise CallerError(f"the optimizer got a new parameter group after the recorder was made; {FROM_THE_START}")
        changes: list[Hyper] = []
        for now, declared, kind in zip(updates.used, self._groups, self._classes, strict=True):
            # A schedule made after the recorder adds its own keys to the groups; they decide nothing.
            changes.append({name: now[name] for name in declared if name in now and now[name] != declared[name]})
            if self._rules is not None:
                _require_constant(kind, changes[-1], declared, self._options.free)
        return tuple(changes)


def require_unwritten(program: Program, absent: frozenset[str]) -> None:
    """CallerError if the program of an evaluation writes the state, or drops a tensor that was not ``absent``."""
    if program.written:
        raise CallerError(
            f"an evaluation wrote {program.written[0]}; put the model into eval(), and compute no gradients and no "
            "update there, or record it as a step"
        )
    if dropped := sorted(program.absent - absent):
        raise CallerError(f"{dropped[0]} was dropped before or in an evaluation; drop it in a step")


def changed_number(operator: str) -> str:
    """Why a step cannot be recorded in which an operator takes another number than in the step before."""
    return (
        f"a number that {operator} takes changes from step to step outside the optimizer's updates; pass it as a "
        "tensor of the batch, compute with the tensor itself where it comes from .item(), or have lab and inspector "
        "agree by free_slots=True"
    )


def changed_constants(captured: Program, program: Program) -> set[int]:
    """The numbers of constants that are not the known program's."""
    pairs = zip(captured.constants, program.constants, strict=True)
    return {number for number, (one, other) in enumerate(pairs) if one != other}


def _free_name(number: int, taken: Collection[str]) -> str:
    """What a tensor is called that is carried from step to step."""
    name = f"carried.{number}"
    while name in taken:
        name += "'"
    return name


def _form(program: Program) -> tuple[Any, ...]:
    """What programs of one structure share, and few others do."""
    shapes = tuple((name, *layout["shape"]) for name, layout in sorted(program.batch.items()))
    return len(program.calls), len(program.scalars), program.updates, shapes


def differences(captured: Program, program: Program) -> dict[str, tuple[int, ...]]:
    """Each value of a captured step that differs from its program's own, with the numbers of its scalars."""
    slots: dict[str, list[int]] = {}
    for number, (mine, known) in enumerate(zip(captured.scalars, program.scalars, strict=True)):
        if mine != known:
            slots.setdefault(mine, []).append(number)
    return {text: tuple(numbers) for text, numbers in slots.items()}


def _require_constant(
    optimizer: str, changed: Mapping[str, Any], declared: Mapping[str, Any], free: Collection[str]
) -> None:
    """CallerError if something differs from its declaration that may not, and was not agreed to."""
    for name in sorted(changed.keys() - free):
        if not may_vary(optimizer, name, declared[name], changed[name]):
            raise CallerError(
                f"{name} is {changed[name]!r:.60} in this step, but was declared as {declared[name]!r:.60}; only "
                "learning rates may change, a momentum while it stays below its first value (create its schedule "
                f"before the recorder), and what lab and inspector agree to: free=({name!r},)"
            )
