"""What a dispute is about: the task that both labs say they did, as the referee knows it without either of them.

What was countersigned names the initial state and the programs, or a recipe gives them. Batches and hyper-parameters
that are declared step by step may differ between two labs without either being wrong: such a dispute decides nothing,
and the ruling says what would have to be agreed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache

from torch import Tensor

from firmware_sim.errors import EvidenceError
from inspector.dispute.claim import Claim
from inspector.dispute.messages import Absent, Failure, constant_of, shown
from inspector.dispute.ruling import Ruling, StepTask, compare
from inspector.inspection.agreement import Agreement, agreement_of, departures
from inspector.inspection.execution import check_numbers
from inspector.inspection.trust import NotCountersigned, Trust
from monitor.presets.task import Task
from monitor.programs.bits import same_bytes
from monitor.replay.repetition import scalars_of
from monitor.replay.steps import execution_of
from monitor.transcript import Leaf, encode_state
from monitor.transcript.data import DeclaredData, declared_data
from monitor.transcript.orders import Order, OrderedStep

__all__ = ["Disputed", "agreed_by", "is_ordered", "rule_on_tasks", "undecided"]


class Disputed:
    """The task of two runs.

    Args:
        agreed: what lab and inspectorate agreed to about it.
        order: what a client has ordered step by step, if one has.
    """

    def __init__(self, first: Claim, second: Claim, agreed: Agreement, order: Order | None = None) -> None:
        self._order = order
        self._declared = first.declared
        self._runs = (first, second)
        self._agreed = agreed
        begun = first.declared.origin.initialisation
        self._start = None if begun is None else self._agreed.program(first, begun.program)

    def starts_right(self, leaf: Leaf) -> bool:
        """Whether step 0 holds a state from which this task may start."""
        flop = 0 if self._start is None else self._start.flop
        bare = Leaf(step=0, batch="", state=leaf.state, log="", loss="", flop=flop)
        return leaf == bare and str(leaf.state.root) == self._agreed.initial_state

    def examine(self, step: int, leaves: Mapping[str, Leaf]) -> Ruling | None:
        """Rule on what the parties declare about a step other than its result; None if that is in order."""
        if self._order is not None:
            ordered = self._order.steps[step - 1]
            as_ordered = {
                name: is_ordered(run, leaf, ordered)
                for (name, leaf), run in zip(leaves.items(), self._runs, strict=True)
            }
            return None if all(as_ordered.values()) else compare(as_ordered, "the step", "order")
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
            return self._rule_on_batches(step)
        mine, theirs = map(execution_of, leaves.values())
        if mine.program != theirs.program:
            return _differ("run different programs, and both programs were agreed", "program")
        numbers = [
            scalars_of(run.program(mine.program), each) for run, each in zip(self._runs, (mine, theirs), strict=True)
        ]
        if len({tuple(number.hex() for number in each) for each in numbers}) > 1:
            return _differ("use different numbers, and each set fits its lab's hyper-parameters", "numbers")
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
            layout=runs[0].layout,
            program=program,
            execution=execution,
            batch=lambda: shown(parties, f"batch of step {step}", lambda party: party.batch(step)),
            constant=lambda number: constant_of(parties, step, program, number),
        )

    def _rule_on_batches(self, step: int) -> Ruling:
        """Where the data are the preset's own, the referee knows the batch."""
        task = self._declared.recipe
        if task is None or self._runs[0].data_digest != _own_data(task).agreement:
            return _differ("train on different batches, and no order of data was agreed", "batch")
        true = _own_data(task).with_salt(bytes(32)).batch(step)
        return compare({run.name: _equal(run.batch(step), true) for run in self._runs}, "the step", "batch")

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


def is_ordered(run: Claim, leaf: Leaf, ordered: OrderedStep) -> bool:
    """Whether a step states the program, FLOP, numbers and batch that were ordered, and its party shows that."""

    def check(run: Claim, leaf: Leaf) -> bool:
        if not ordered.is_of(leaf.execution) or leaf.flop != run.program(ordered.execution.program).flop:
            return False
        return hashlib.sha256(encode_state(run.batch(leaf.step))).hexdigest() == ordered.batch

    return _holds(check, run, leaf)


def rule_on_tasks(claims: tuple[Claim, Claim], trust: Trust | None) -> Ruling | None:
    """Rule where two runs are not of one task; None where they are.

    Where they declare different trainings, and just one of these was countersigned, the other lab loses. So does a lab
    whose data are not those that were agreed, where the other's are. Where the evidence says of neither that it is
    right, the ruling says what is missing.
    """
    first, second = (claim.declared for claim in claims)
    if first != second:
        return _rule_on_declarations(claims, trust)
    if first.numerics == "native":
        text = "the runs are of native numerics, where no two devices reach the same bits; only runs with exact "
        return undecided(f"{text}or rounded numerics can be disputed", "numerics")
    if first.recipe is not None and claims[0].data_digest != claims[1].data_digest:  # each lab salts its own
        return _rule_on_data(claims, first.recipe, trust)
    return None


def agreed_by(claim: Claim, trust: Trust | None) -> Agreement | Ruling:
    """What was agreed about a claim's task; a ruling that says what is missing where nothing was."""
    try:
        return agreement_of(claim, trust, of_any_lab=True)
    except (NotCountersigned, EvidenceError) as error:
        return undecided(str(error), "agreement")


def _rule_on_declarations(claims: tuple[Claim, Claim], trust: Trust | None) -> Ruling:
    signed = [] if trust is None else [each.declaration for each in trust.agreed()]
    guilty = tuple(claim.name for claim in claims if claim.declared not in signed)
    where = ", ".join(departures(*(claim.declared for claim in claims)))
    if len(guilty) == 1:
        text = f"the declaration of {guilty[0]} is not the countersigned one; they differ in {where}"
        return Ruling(guilty=guilty, operator=None, text=text, case="declaration")
    which = "both were" if not guilty else "neither was"
    text = f"the labs declare different trainings ({where}), and {which} countersigned: give a trust file in which "
    return undecided(f"{text}only the one that was ordered is", "declaration")


def _rule_on_data(claims: tuple[Claim, Claim], task: Task, trust: Trust | None) -> Ruling:
    """The data are the preset's own, or those that were countersigned.

    A lab that says openly that its data are another set has departed from a countersigned declaration that does not
    agree to them. A recipe alone does not rule that out.
    """
    agreed = agreed_by(claims[0], trust)
    if isinstance(agreed, Ruling):
        return agreed
    own = _own_data(task)
    known = {own.agreement, *agreed.always("data")}
    wrong = [claim for claim in claims if claim.data_digest not in known]
    guilty = tuple(each.name for each in wrong if each.data_set == own.name)
    if trust is not None and len(wrong) == 1:
        guilty = (wrong[0].name,)
    if guilty:
        return compare({claim.name: claim.name not in guilty for claim in claims}, "the task", "data")
    odd = ", ".join(f"{claim.data_digest} of {claim.name}" for claim in wrong or claims)
    text = (
        f"the labs commit to different data: give a trust file in which only those that were ordered are agreed ({odd})"
    )
    return undecided(text, "data")


@lru_cache(maxsize=2)
def _own_data(task: Task) -> DeclaredData:
    """The preset's own samples in the order of the task's seed."""
    return declared_data(task, None)


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


def undecided(text: str, case: str) -> Ruling:
    """A ruling against no one."""
    return Ruling(guilty=(), operator=None, text=text, case=case)


def _differ(text: str, case: str) -> Ruling:
    return undecided(f"the labs {text}: inspect both runs", case)
