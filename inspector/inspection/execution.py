"""Checks of what a run executed: its programs, where it starts, and what its declared numbers govern.

None of the lab's Python runs here. Its place is taken by an agreement from outside the run (``agreement``) that
names the programs and the initial state. The numbers of the optimizer's updates must be those that PyTorch's own class
takes with the declared hyper-parameters; where that cannot be compared, nothing is concluded. Hyper-parameters are
declared step by step, and each that changes is listed.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from math import isfinite, prod
from typing import Any

from firmware_sim import NO_WORK, Work
from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import DTYPE_SIZES
from inspector.inspection.agreement import Agreement
from inspector.inspection.guards import Guard
from inspector.inspection.number_wording import ChangedNumber, UsedGroup, changes_text, listed
from inspector.inspection.paths import (
    PathReport,
    check_differentiating,
    check_paths,
    check_tensors,
    made_of_weights,
    ungoverned,
)
from inspector.inspection.verdict import Findings
from monitor.declaration.countersignature import Admitted
from monitor.declaration.ranges import gain_of, least_beta, outside
from monitor.declaration.reference import SCHEDULES, classes_of, may_vary
from monitor.declaration.slots import StepNumbers, overlay
from monitor.declaration.statement import Declaration, is_hyper_name
from monitor.declaration.writes import Written
from monitor.environment import versions
from monitor.programs import Compute, facts_of
from monitor.programs.program import Program
from monitor.replay.derivation import derive
from monitor.replay.repetition import scalars_of
from monitor.replay.steps import execution_of
from monitor.transcript import EVALUATION, WRITE, Leaf, RunFolder

__all__ = ["MOST_TEXT", "NOT_REVIEWED", "ExecutionReport", "brings", "check_numbers", "examine_execution"]

NOT_REVIEWED = (
    "a model delivered through a linear loss, or number by number",
    "factors that a model or a loss has in its own arithmetic, which multiply what a rate does",
    "derivatives by hand or in forward mode, which no backward operator makes: in evaluations, where paths were "
    "agreed and, by tensors of the batch, in training steps",
    "results of evaluations that come back in a later batch in another form, or much later",
    "work whose results programs take in and cancel out",
)
"""What a review of programs does not show."""
MOST_TEXT = 1024
"""Bytes of an initialisation's compressed text for each tensor that it makes.

Those of PyTorch's own modules and of common models take 50 to 140, a truncated normal that draws ten times 750."""
_SHORT_TEXT, _TEXT_SHARE = 1 << 16, 64
"""Bytes of it that hold no model worth the trouble, and beyond them its share in the bytes that it makes."""


@dataclass(slots=True, kw_only=True)
class ExecutionReport:
    """An inspection's findings about the programs that a run executed.

    Attributes:
        executable: its programs are agreed, so that replay devices may run them.
        programs: steps that run each program; an initialisation is run by step 0.
        brings: what the initialisation knows without having computed it, in words; None where it is not known.
        constant_bytes: bytes of constants in all programs together.
        slots: (operator, what explains it) of the numbers that change from step to step, with how many there are.
        groups: each parameter group.
        rates: lowest and highest learning rate of each parameter group, over the steps that update.
        changed: each hyper-parameter that differs from its declaration in some step, over the steps that update.
        strayed: group and name of those among them that may not.
        unbound: hyper-parameters, and tensors that take a gradient, bound to no declared number, with the reason.
        contradicted: since an update makes other calls than those hyper-parameters give.
        idle: parameter groups none of whose weights is ever updated.
        updates: runs of the optimizer's ``step``.
        paths: by which batches and constants reach the new state past every loss.
        governed: scalars of each program that the declared hyper-parameters give.
        works: what each program's calls are for a chip's meter; None where a program is not known.
        evaluations: steps that are evaluations, which write nothing of the state.
        writes: steps that the loop took between two others, writing or only reading the state; they update nothing.
        written: weights that are written outside the updates, each with the tensors and the operators that this takes.
        outside: work on the state that the lab declares outside all programs.
        made: bytes of all results of each program's calls.
        dead: the part of each program's work whose results are used for nothing that it commits or reads.
        most_flop: of all steps, however products are written in their programs; None where these are not known.
    """

    executable: bool = False
    programs: Counter[str] = field(default_factory=Counter)
    brings: str | None = None
    constant_bytes: int = 0
    slots: Counter[tuple[str, str]] = field(default_factory=Counter)
    groups: list[UsedGroup] = field(default_factory=list)
    rates: list[list[float]] = field(default_factory=list)
    changed: list[ChangedNumber] = field(default_factory=list)
    strayed: set[tuple[int, str]] = field(default_factory=set)
    unbound: dict[str, str] = field(default_factory=dict)
    contradicted: bool = False
    idle: list[int] = field(default_factory=list)
    updates: int = 0
    paths: PathReport = field(default_factory=PathReport)
    governed: dict[str, int] = field(default_factory=dict)
    works: dict[str, Work] | None = None
    evaluations: int = 0
    writes: int = 0
    written: dict[str, Written] = field(default_factory=dict)
    outside: Work = NO_WORK
    made: dict[str, int] = field(default_factory=dict)
    dead: dict[str, Work] = field(default_factory=dict)
    most_flop: int | None = None

    def to_json(self) -> dict[str, object]:
        """Return JSON-able values."""
        return {
            "programs": dict(self.programs),
            "initialisation_brings": self.brings,
            "constant_bytes": self.constant_bytes,
            "slots": [
                {"operator": operator, "explained_by": explained, "count": count}
                for (operator, explained), count in sorted(self.slots.items())
            ],
            "declared_groups": list(map(asdict, self.groups)),
            "learning_rates": self.rates,
            "changed_hyper_parameters": [each.to_json() for each in self.changed],
            "not_bound": dict(sorted(self.unbound.items())),
            "idle_groups": self.idle,
            "updates": self.updates,
            "evaluations": self.evaluations,
            "writes": self.writes,
            "declared_writes": {
                name: {"takes": sorted(each.sources), "operators": sorted(each.operators)}
                for name, each in sorted(self.written.items())
            },
            "beside_programs": asdict(self.outside),
            "direct_paths": self.paths.to_json(),
            "governed_scalars": dict(self.governed),
            "most_flop": self.most_flop,
            "not_reviewed": list(NOT_REVIEWED),
        }


def examine_execution(run: RunFolder, leaves: Sequence[Leaf], agreed: Agreement, findings: Findings) -> ExecutionReport:
    """Check all steps of a run against the agreement."""
    where = run.where
    report = ExecutionReport()
    start = leaves[0].state.root
    if str(start) != agreed.initial_state:
        text = f"step 0: the initial state is not {_which(agreed, run)}"
        findings.add(Guard.INITIALISATION, text, step=0, **where)
    report.programs = Counter(leaf.execution.program for leaf in leaves if leaf.execution is not None)
    begun = run.declared.origin.initialisation
    if begun is not None:
        report.programs[begun.program] += 1
    programs = findings.read(lambda: _read_programs(run, report, agreed, findings), **where)
    if programs is None:
        return report
    report.constant_bytes = sum(each.length for program in programs.values() for each in program.constants)
    if begun is not None and begun.program in programs:
        report.brings = brings(programs[begun.program])
    report.executable = agreed.may_load(leaves[0])
    ran = [*([] if begun is None else [(begun.program, 0)]), *((execution_of(x).program, x.step) for x in leaves[1:])]
    strangers = strangers_of(ran, agreed)
    if strangers:
        report.executable = False
        _name_strangers(strangers, agreed, findings, where)
    if not agreed.may_load(leaves[0]) or len(programs) < len(report.programs):
        return report  # what was not agreed is not opened, so nothing more can be said
    if findings.read(lambda: _check_steps(run, leaves, programs), **where) is None:
        report.executable = False
        return report
    kinds = Counter(leaf.kind for leaf in leaves)
    report.evaluations, report.writes = kinds[EVALUATION], kinds[WRITE]
    report.outside = sum((execution_of(leaf).outside for leaf in leaves[1:]), NO_WORK)
    findings.check(Guard.METER, lambda: _check_beside(run, leaves), **where)
    findings.check(Guard.METER, lambda: _check_reads(leaves, programs, findings, where), **where)
    report.works = findings.read(lambda: {key: each.work for key, each in programs.items()}, **where)
    report.dead = (
        findings.read(lambda: {key: each.dead for key, each in programs.items()}, **where) or report.works or {}
    )
    report.made = findings.read(lambda: {key: each.made for key, each in programs.items()}, **where) or {}
    report.paths = check_paths(programs, run.declared, agreed, findings, where, agreed.numbers_for(ran))
    report.most_flop = findings.check(Guard.RULES, lambda: _check_flop(run, leaves, programs), **where)
    if report.most_flop is not None:
        findings.check(Guard.RULES, lambda: _check_costs(programs, agreed, findings, where), **where)
    findings.check(Guard.PROGRAM, lambda: _follow(run, leaves, programs, agreed, report), **where)
    report.unbound = ungoverned(run.declared, report.paths) | report.unbound
    _check_bound(run, report, agreed, findings, where)
    check_tensors(report.unbound, agreed, findings, where)
    check_differentiating(leaves, report.paths, agreed, findings, where)
    _check_changed(report, agreed, findings, where)
    return report


def _check_costs(
    programs: Mapping[str, Program], agreed: Agreement, findings: Findings, where: Mapping[str, Any]
) -> None:
    """Who countersigned other costs than a program has did not know what they agreed to: that decides nothing."""
    for digest, program in programs.items():
        signed, found = agreed.programs.get(digest), Admitted.of(program)
        if signed is not None and not is_same_cost(signed, found):
            text = f"program {digest[:16]}… was countersigned as {_cost(signed)}, but it takes {_cost(found)}"
            findings.doubt(text, program=digest, **where)


def is_same_cost(signed: Admitted, found: Admitted) -> bool:
    """Whether a program costs what was countersigned."""
    return signed == found


def _cost(cost: Admitted) -> str:
    return f"{cost.flop} FLOP, at most {cost.most_flop}, and {cost.bytes} bytes"


def brings(program: Program) -> str:
    """What an initialisation knows without having computed it, if it may be weights that somebody trained.

    These are constants of more than one value, and a text that cannot be made short: numbers, places and the order of
    calls can hold a model, too, but no more of it than the compressed text has bytes.
    """
    tables = sum(each["bytes"] for each in facts_of(program, ()).constants if not each["uniform"])
    if tables:
        return f"{tables} bytes that no operator made"
    made = [prod(place["shape"]) * DTYPE_SIZES[place["dtype"]] for place in program.commit.values() if place]
    size, most = len(zlib.compress(program.encoded)), most_text(made)
    if size > most:
        return f"a program of {size} bytes, compressed, more than the {most} that making {len(made)} tensors may take"
    return ""


def most_text(made: Sequence[int]) -> int:
    """Bytes of compressed text that may make tensors of these sizes: many small ones buy no room for a model."""
    return min(MOST_TEXT * len(made), max(_SHORT_TEXT, sum(made) // _TEXT_SHARE))


def _which(agreed: Agreement, run: RunFolder) -> str:
    return f"what seed {run.declared.seed} gives" if agreed.start is None else "the one that was declared"


def strangers_of(ran: Iterable[tuple[str, int]], agreed: Agreement) -> dict[str, int]:
    """The programs that steps run without a countersignature for them, each with the first such step."""
    found: dict[str, int] = {}
    for program, step in ran:
        if program not in found and program not in agreed.at(step).programs:
            found[program] = step
    return found


def _name_strangers(
    strangers: Mapping[str, int], agreed: Agreement, findings: Findings, where: Mapping[str, Any]
) -> None:
    """A program other than a recipe's is a lie; any other without a countersignature is an open amendment."""
    for digest, step in sorted(strangers.items()):
        named = f"step {step}: runs program {digest[:16]}…"
        if agreed.recipe is not None and digest != derive(agreed.recipe).program.digest:
            findings.add(Guard.PROGRAM, f"{named}, which is not its preset's", step=step, **where)
        else:
            text = f"{named}, and no amendment that allows it was countersigned for this step{agreed.how_to_amend}"
            findings.doubt(text, step=step, program=digest, **where)


def _read_programs(
    run: RunFolder, report: ExecutionReport, agreed: Agreement, findings: Findings
) -> dict[str, Program]:
    """The agreed programs that steps name; every file is named, or announced with the next step, and each is there."""
    stored = {digest for digest, path in run.programs().items() if not run.is_pending(path)}
    unused = sorted(stored - set(report.programs))
    if unused:
        raise EvidenceError(f"program {unused[0][:16]}… is stored, but no step runs it")
    missing = sorted(set(report.programs) - set(run.programs()))
    if missing:
        raise EvidenceError(f"program {missing[0][:16]}… is run by a step, but not stored")
    return {digest: run.program(digest) for digest in report.programs if agreed.may_decode(digest)}


def _check_steps(run: RunFolder, leaves: Sequence[Leaf], programs: dict[str, Program]) -> bool:
    """Each step's execution fits its program and the declared optimizer."""
    for before, leaf in pairwise(leaves):
        execution = execution_of(leaf)
        scalars_of(programs[execution.program], execution)
        if leaf.kind == EVALUATION:
            _check_evaluation(before, leaf, programs)
        if leaf.kind == WRITE and programs[execution.program].updates:
            raise EvidenceError(f"step {leaf.step} is declared as a write between steps, but makes an update")
        if len(execution.hyper) != len(run.declared.groups):
            raise EvidenceError(f"step {leaf.step} has {len(execution.hyper)} parameter groups, not those declared")
        for changes, declared in zip(execution.hyper, run.declared.groups, strict=True):
            if not set(changes) <= set(declared):
                raise EvidenceError(f"step {leaf.step} declares a hyper-parameter that the optimizer does not have")
    return True


def _check_evaluation(before: Leaf, leaf: Leaf, programs: Mapping[str, Program]) -> None:
    """It gives no tensor another value, and drops none but gradients."""
    program = programs[execution_of(leaf).program]
    if program.written:
        raise EvidenceError(f"step {leaf.step} is declared as an evaluation, but writes {program.written[0]!a}")
    if before.state.root == leaf.state.root:
        return
    absent = programs[execution_of(before).program].absent if before.step else frozenset()
    if dropped := sorted(program.absent - absent):
        raise EvidenceError(f"step {leaf.step} is declared as an evaluation, but drops {dropped[0]!a}")


def _check_reads(
    leaves: Sequence[Leaf], programs: Mapping[str, Program], findings: Findings, where: Mapping[str, Any]
) -> None:
    """Between two training steps, programs that only read the state take no more than the longest training step."""
    longest = [programs[execution_of(leaf).program].work for leaf in leaves[1:] if leaf.trains]
    flop, moved = (max((getattr(work, count) for work in longest), default=0) for count in ("flop", "moved"))
    read = NO_WORK
    for leaf in leaves[1:]:
        program = programs[execution_of(leaf).program]
        read = NO_WORK if leaf.trains else read + program.work if leaf.kind == WRITE and not program.written else read
        if read.flop > flop or read.moved > moved:
            text = f"step {leaf.step}: since the last training step {read} only read the state, more than any training "
            findings.doubt(f"{text}step takes; such work belongs in evaluations", step=leaf.step, **where)
            return


def _check_beside(run: RunFolder, leaves: Sequence[Leaf]) -> None:
    """For each training step no more is declared outside the programs than was agreed on before the first.

    In a run that has none that is for each step.
    """
    allowed, extra = run.declared.allowance, NO_WORK
    trains = any(leaf.trains for leaf in leaves[1:])
    for leaf in leaves[1:]:
        extra += execution_of(leaf).outside
        if not extra <= allowed:
            since = " since the last training step" if extra != execution_of(leaf).outside else ""
            raise EvidenceError(
                f"step {leaf.step} declares {extra} outside its program{since}, but only {allowed} are allowed"
            )
        extra = extra if trains and not leaf.trains else NO_WORK


def check_numbers(run: RunFolder, last: int, agreed: Agreement) -> None:
    """EvidenceError if a number that a step up to ``last`` takes is not what its declared hyper-parameters give."""
    leaves = run.load_steps()[0][: last + 1]
    if not agreed.may_load(leaves[0]):
        raise EvidenceError("the initial state is not one that was agreed")
    named = {execution_of(leaf).program for leaf in leaves[1:]}
    programs = {digest: agreed.program(run, digest) for digest in named}
    _check_steps(run, leaves, programs)
    _follow(run, leaves, programs, agreed, ExecutionReport())


def _check_flop(run: RunFolder, leaves: Sequence[Leaf], programs: dict[str, Program]) -> int:
    """Each step declares what its program computes; returns what all of them compute at most."""
    begun, most = run.declared.origin.initialisation, 0
    for leaf in leaves:
        digest = execution_of(leaf).program if leaf.step else "" if begun is None else begun.program
        compute = programs[digest].compute if digest else Compute(0, 0)
        if leaf.flop != compute.flop:
            raise EvidenceError(f"step {leaf.step} declares {leaf.flop} FLOP; the program needs {compute.flop}")
        most += compute.most
    return most


def _follow(
    run: RunFolder, leaves: Sequence[Leaf], programs: dict[str, Program], agreed: Agreement, report: ExecutionReport
) -> None:
    """Compare the numbers of every step; the first that is not as declared or explained is the finding."""
    used = {
        leaf.step: overlay(run.declared.groups, execution_of(leaf).hyper)
        for leaf in leaves[1:]
        if leaf.trains and (programs[execution_of(leaf).program].updates or any(execution_of(leaf).hyper))
    }
    rates = zip(*(_rates(groups, step) for step, groups in used.items()), strict=True)
    report.rates = [[min(seen), max(seen)] for seen in rates]
    report.changed = list(_changed(run.declared.groups, list(used.values())))
    report.strayed = _strayed(run.declared, list(used.values()))
    report.groups = [
        _group(optimizer, [run.declared.groups[number], *(groups[number] for groups in used.values())])
        for number, optimizer in enumerate(classes_of(run.declared))
    ]
    numbers = StepNumbers(run.declared, run.declared.check_state(run.checkpoint(0)))
    try:
        for leaf in leaves[1:]:
            execution = execution_of(leaf)
            numbers.take(programs[execution.program], execution.slots, execution.hyper, execution.values)
            agreed_free = {*agreed.once_free - {execution.program}, *agreed.at(leaf.step).free}
            free = [slot for slot in numbers.unexplained() if slot.program not in agreed_free]
            if free:
                raise EvidenceError(
                    f"step {leaf.step}: a number that {free[0].operator} takes (scalar {free[0].number}) changes from "
                    "step to step outside the optimizer's updates"
                )
    finally:
        report.contradicted = numbers.contradicted
        report.unbound, report.idle, report.updates = numbers.unbound, numbers.idle_groups(), numbers.updates
        report.governed, report.written = numbers.governed(), numbers.written
        report.unbound = made_of_weights(numbers.made, run.declared, report.paths) | report.unbound
        report.slots = Counter((slot.operator, slot.explained) for slot in numbers.slots())


def _group(optimizer: str, groups: Sequence[Mapping[str, Any]]) -> UsedGroup:
    """A parameter group as the report has it, as declared and in each step; rates of at least 0 are all alike here."""
    alike = {repr({**each, "lr": min(each["lr"], 0)} if _is_ordered(each.get("lr")) else each): each for each in groups}
    least = least_beta(groups)
    gains = [gain_of(optimizer, each, least) for each in alike.values()]
    known = [gain for gain in gains if gain is not None and isfinite(gain)]
    return UsedGroup(
        optimizer=optimizer,
        numbers={name: value for name, value in groups[0].items() if name not in SCHEDULES},
        gain=max(known) if len(known) == len(gains) else None,
        outside={name: text for each in alike.values() for name, text in outside(optimizer, each, least).items()},
    )


def _rates(groups: Sequence[Mapping[str, Any]], step: int) -> list[float]:
    """Learning rate of each parameter group in a step, 0 where there is none."""
    rates = [group.get("lr", 0.0) for group in groups]
    try:
        if all(map(_is_ordered, rates)):
            return [float(rate) for rate in rates]
    except OverflowError:
        pass
    raise EvidenceError(f"step {step} declares a learning rate that is not a number")


def _changed(
    declared: Sequence[Mapping[str, Any]], used: Sequence[Sequence[Mapping[str, Any]]]
) -> Iterator[ChangedNumber]:
    """Each hyper-parameter that some step uses otherwise than declared: first, last, lowest and highest value."""
    for number, group in enumerate(declared):
        for name in sorted(group):
            values = [groups[number][name] for groups in used]
            if all(_is_same(value, group[name]) for value in values):
                continue
            span = (min(values), max(values)) if all(map(_is_ordered, values)) else None
            yield ChangedNumber(
                group=number, name=name, declared=group[name], first=values[0], last=values[-1], span=span
            )


def _strayed(declared: Declaration, used: Sequence[Sequence[Mapping[str, Any]]]) -> set[tuple[int, str]]:
    """Group and name of each hyper-parameter that some step uses otherwise than it may."""
    return {
        (number, name)
        for number, (kind, group) in enumerate(zip(classes_of(declared), declared.groups, strict=True))
        for name, value in group.items()
        if any(
            not _is_same(groups[number][name], value) and not may_vary(kind, name, value, groups[number][name])
            for groups in used
        )
    }


def _is_ordered(value: object) -> bool:
    return isinstance(value, int | float)


def _is_same(one: object, other: object) -> bool:
    return type(one) is type(other) and one == other


def _check_bound(
    run: RunFolder, report: ExecutionReport, agreed: Agreement, findings: Findings, where: Mapping[str, Any]
) -> None:
    """A declared hyper-parameter that governs no number that could be found says nothing about the training.

    Where an update makes other calls than the declared optimizer does here, under the PyTorch that the lab names, the
    declaration is contradicted.
    """
    names = sorted(name for name in set(report.unbound) - agreed.always("free") if is_hyper_name(name))
    if names:
        text = f"not bound to the arithmetic: {listed(names)}, since {report.unbound[names[0]]}"
        is_lie = report.contradicted and not agreed.once_free.issuperset(names)
        if is_lie and run.metadata.versions.get("torch") == versions()["torch"]:
            findings.add(Guard.PROGRAM, text, **where)
        else:
            findings.doubt(text, **where)


def _check_changed(report: ExecutionReport, agreed: Agreement, findings: Findings, where: Mapping[str, Any]) -> None:
    """Rates and momenta follow schedules; everything else is as it was declared before the first step, unless free."""
    lines = [
        line
        for line in report.changed
        if (line.group, line.name) in report.strayed and line.name not in agreed.always("free")
    ]
    if lines:
        text = f"hyper-parameters differ from their declaration: {changes_text(lines)}"
        if agreed.once_free.issuperset(line.name for line in lines):
            findings.doubt(f"{text}, which was agreed for a part of the steps", **where)
        else:
            findings.add(Guard.PROGRAM, text, **where)
