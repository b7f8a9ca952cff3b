"""What a dispute is about: the task that both labs say they did, as the referee knows it without either of them.

What was countersigned names the initial state and the programs, or a recipe gives them. Batches and hyper-parameters
that are declared step by step may differ between two labs without either being wrong: such a dispute decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from firmware_sim import NO_WORK
from firmware_sim.errors import CallerError, EvidenceError
from inspector.dispute.claim import Claim
from inspector.dispute.messages import Absent, Failure, constant_of, shown
from inspector.dispute.operators import Ruling, StepTask, compare
from inspector.inspection.agreement import agreement_of, departures
from inspector.inspection.execution import check_numbers
from inspector.inspection.trust import Trust
from monitor.programs.bits import same_bytes
from monitor.replay.repetition import scalars_of
from monitor.replay.steps import execution_of
from monitor.transcript import Leaf

__all__ = ["Disputed", "rule_on_declarations"]


class Disputed:
    """The task of two finished runs.

    Attributes:
        steps, layout: as both declare them.

    Raises:
        CallerError: the runs are not of one task that can be disputed.
        EvidenceError: a run declares other things than its recipe gives.
    """

    def __init__(self, first: Claim, second: Claim, trust: Trust | None) -> None:
        _require_one_task(first, second)
        self._declared = first.declared
        self.steps, self.layout = first.declared.steps, first.layout
        self._runs = (first, second)
        self._agreed = agreement_of(first, trust, of_any_lab=True)
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
            ("FLOP", self._check_flop),
            ("numbers", self._check_numbers),
        ):
            if what == "numbers" and self._declare_one(leaves.values()):
                continue  # no rule about their numbers tells one from the other
            right = {
                name: _holds(check, run, leaf) for (name, leaf), run in zip(leaves.items(), self._runs, strict=True)
            }
            if not all(right.values()):
                return compare(right, "the step", what)
        if not _equal(*(run.batch(step) for run in self._runs)):
            return _undecided("train on different batches, and no order of data was agreed", "batch")
        mine, theirs = map(execution_of, leaves.values())
        if mine.program != theirs.program:
            return _undecided("run different programs, both of them agreed", "program")
        numbers = [
            scalars_of(run.program(mine.program), each) for run, each in zip(self._runs, (mine, theirs), strict=True)
        ]
        if len({tuple(number.hex() for number in each) for each in numbers}) > 1:
            return _undecided("take different numbers, each in accord with its hyper-parameters", "numbers")
        return None

    def _declare_one(self, leaves: Iterable[Leaf]) -> bool:
        """Whether both name one program, the same numbers and the same hyper-parameters for a step."""
        mine, theirs = ((each.program, each.slots, each.hyper, each.values) for each in map(execution_of, leaves))
        return mine == theirs

    def at(self, step: int) -> StepTask:
        """One step of the task."""
        runs, parties = self._runs, [run.party for run in self._runs]
        execution = execution_of(runs[0].leaf(step))
        program = runs[0].program(execution.program)
        return StepTask(
            step=step,
            declared=self._declared,
            layout=self.layout,
            program=program,
            execution=execution,
            batch=lambda: shown(parties, f"batch of step {step}", lambda party: party.batch(step)),
            constant=lambda number: constant_of(parties, step, program, number),
        )

    def _check_batch(self, run: Claim, leaf: Leaf) -> bool:
        run.batch(leaf.step)
        return True

    def _check_flop(self, run: Claim, leaf: Leaf) -> bool:
        return leaf.flop == run.program(execution_of(leaf).program).flop

    def _check_program(self, run: Claim, leaf: Leaf) -> bool:
        return execution_of(leaf).program in self._agreed.programs

    def _check_numbers(self, run: Claim, leaf: Leaf) -> bool:
        check_numbers(run, leaf.step, self._agreed)
        return True


def rule_on_declarations(names: Sequence[str], runs: Sequence[Claim], trust: Trust | None) -> Ruling | None:
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


def _holds(check: Callable[[Claim, Leaf], bool], run: Claim, leaf: Leaf) -> bool:
    """If a lab cannot show its own evidence, that speaks against it."""
    try:
        return check(run, leaf)
    except Failure as failure:
        if isinstance(failure, Absent) or failure.party != run.name:  # the other's failure is not this one's
            raise
        return False
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


def _require_one_task(first: Claim, second: Claim) -> None:
    for run in (first, second):
        if not run.finished:
            raise CallerError(f"{run.name} is not finished, so it has no result to dispute")
        if not run.declared.steps:
            raise CallerError(f"{run.name} took no step, so it has no result to dispute")
    if first.declared != second.declared:
        raise CallerError("the runs declare different tasks; a dispute is about one task")
    if first.declared.steps != second.declared.steps:
        raise CallerError(f"the runs took {first.declared.steps} and {second.declared.steps} steps: different tasks")
    if first.declared.numerics == "native":
        raise CallerError("runs with native numerics cannot be disputed: no two devices reach the same bits")
    if first.declared.recipe is not None and first.data_digests != second.data_digests:  # each lab salts its own
        raise CallerError("the runs commit to different data, so they are different tasks")
