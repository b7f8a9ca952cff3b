"""What a dispute is about: the task that both labs say they did, as the referee knows it without either of them.

What was countersigned names the initial state and the programs, or a recipe gives them. Batches and hyper-parameters
that are declared step by step may differ between two labs without either being wrong: such a dispute decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from torch import Tensor

from firmware_sim import NO_WORK
from firmware_sim.errors import CallerError, EvidenceError
from inspector.dispute.operators import Ruling, StepTask, compare
from inspector.inspection.agreement import agreement_of, departures, unread_files
from inspector.inspection.execution import check_numbers
from inspector.inspection.trust import Trust
from monitor.programs.bits import same_bytes
from monitor.replay.repetition import scalars_of
from monitor.replay.steps import execution_of
from monitor.transcript import Leaf, RunFolder
from monitor.transcript.layout import ORDER, SAMPLES, batch_path

__all__ = ["Disputed", "rule_on_declarations"]


class Disputed:
    """The task of two finished runs.

    Attributes:
        steps, layout: as both declare them.

    Raises:
        CallerError: the runs are not of one task that can be disputed.
        EvidenceError: a run declares other things than its recipe gives.
    """

    def __init__(self, first: RunFolder, second: RunFolder, trust: Trust | None) -> None:
        _require_one_task(first, second)
        self._declared = first.declared
        self.steps, self.layout = first.declared.steps, first.layout
        self._runs = (first, second)
        self._agreed = agreement_of(first, trust, of_any_lab=True)
        self._program = lru_cache(maxsize=64)(first.program)
        begun = first.declared.origin.initialisation
        self._start = None if begun is None else self._agreed.program(first, begun.program)

    def claim_of(self, leaf: Leaf) -> Leaf:
        """A leaf's claim, without what may differ between two labs that are both right, such as rounding logs.

        Batches are compared by their content, as each lab salts its own. What a lab logs outside steps is not compared.
        """
        taken = None if leaf.execution is None else replace(leaf.execution, outside=NO_WORK)
        return replace(leaf, log="", batch="", execution=taken)

    def starts_right(self, leaf: Leaf) -> bool:
        """Whether step 0 holds a state from which this task may start."""
        flop = 0 if self._start is None else self._start.flop
        bare = Leaf(step=0, batch="", state=leaf.state, log="", loss="", flop=flop)
        return leaf == bare and str(leaf.state.root) == self._agreed.initial_state

    def examine(self, step: int, leaves: Mapping[str, Leaf]) -> Ruling | None:
        """Rule on what the parties declare about a step other than its result; None if that is in order."""
        for what, check in (
            ("program", self._check_program),
            ("batch", self._check_batch),
            ("FLOP", _check_flop),
            ("numbers", self._check_numbers),
        ):
            right = {
                name: _holds(check, run, leaf) for (name, leaf), run in zip(leaves.items(), self._runs, strict=True)
            }
            if not all(right.values()):
                return compare(right, "the step", what)
        batches = [run.batches().batch(step) for run in self._runs]
        if not _equal(*batches):
            return _undecided("train on different batches, and no order of data was agreed", "batch")
        mine, theirs = (execution_of(leaf) for leaf in leaves.values())
        if mine.program != theirs.program:
            return _undecided("run different programs, both of them agreed", "program")
        program = self._program(mine.program)
        numbers = [[number.hex() for number in scalars_of(program, each)] for each in (mine, theirs)]
        if numbers[0] != numbers[1]:
            return _undecided("take different numbers, each in accord with its hyper-parameters", "numbers")
        return None

    def at(self, step: int) -> StepTask:
        """One step of the task."""
        run = self._runs[0]
        execution = execution_of(run.leaf(step))
        program = self._program(execution.program)
        return StepTask(
            step=step,
            declared=self._declared,
            layout=self.layout,
            program=program,
            execution=execution,
            batch=lambda: run.batches().batch(step),
            constant=program.constants.__getitem__,
        )

    def _check_batch(self, run: RunFolder, leaf: Leaf) -> bool:
        unread = unread_files(run, [leaf], self._agreed)  # longer than its program reads, it is not read either
        return batch_path(leaf.step) not in unread and leaf.batch == run.batches().batch_root(leaf.step).hex()

    def _check_program(self, run: RunFolder, leaf: Leaf) -> bool:
        return execution_of(leaf).program in self._agreed.programs

    def _check_numbers(self, run: RunFolder, leaf: Leaf) -> bool:
        check_numbers(run, leaf.step, self._agreed)
        return True


def rule_on_declarations(names: Sequence[str], runs: Sequence[RunFolder], trust: Trust | None) -> Ruling | None:
    """Where two runs declare different trainings, and just one of these was countersigned, the other lab loses."""
    first, second = (run.declared for run in runs)
    if trust is None or first == second:
        return None
    signed = [each.declaration for each in trust.agreed()]
    guilty = tuple(name for name, run in zip(names, runs, strict=True) if run.declared not in signed)
    if len(guilty) != 1:
        return None
    text = f"{guilty[0]} declares other things than was countersigned: {', '.join(departures(first, second))}"
    return Ruling(guilty=guilty, operator=None, text=text, case="declaration")


def _check_flop(run: RunFolder, leaf: Leaf) -> bool:
    return leaf.flop == run.program(execution_of(leaf).program).flop


def _holds(check: Callable[[RunFolder, Leaf], bool], run: RunFolder, leaf: Leaf) -> bool:
    """If a lab cannot show its own evidence, that speaks against it."""
    try:
        return check(run, leaf)
    except EvidenceError:
        return False


def _equal(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    return set(first) == set(second) and all(
        first[name].dtype == second[name].dtype
        and first[name].shape == second[name].shape
        and same_bytes(first[name], second[name])
        for name in first
    )


def _undecided(text: str, case: str) -> Ruling:
    return Ruling(guilty=(), operator=None, text=f"the labs {text}: inspect both runs", case=case)


def _require_one_task(first: RunFolder, second: RunFolder) -> None:
    for run in (first, second):
        if not run.finished:
            raise CallerError(f"{run.folder.name} is not finished, so it has no result to dispute")
        if not run.declared.steps:
            raise CallerError(f"{run.folder.name} took no step, so it has no result to dispute")
    if first.folder.resolve() == second.folder.resolve():
        raise CallerError("a run cannot be in dispute with itself")
    if first.declared != second.declared:
        raise CallerError("the runs declare different tasks; a dispute is about one task")
    if first.declared.steps != second.declared.steps:
        raise CallerError(f"the runs took {first.declared.steps} and {second.declared.steps} steps: different tasks")
    if first.declared.numerics == "native":
        raise CallerError("runs with native numerics cannot be disputed: no two devices reach the same bits")
    data = [[run.files.get(path) for path in (SAMPLES, ORDER)] for run in (first, second)]  # each lab salts its own
    if first.declared.recipe is not None and data[0] != data[1]:
        raise CallerError("the runs commit to different data, so they are different tasks")
