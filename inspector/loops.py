"""Checks of a run of somebody's own loop: its programs, where it starts, and the numbers that change from step to step.

None of the lab's Python runs here. What stands in its place is an agreement from outside the run: the trust file names
the programs and the initial state. A number that changes is accepted if the optimizer's declared hyper-parameters give
it in every step, by one formula; the rates themselves are declared step by step, and listed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from firmware_sim.errors import EvidenceError
from inspector import agreement
from inspector.findings import Findings
from inspector.guards import Guard
from inspector.trust import Trust
from monitor.loops.program import Program
from monitor.loops.replaying import scalars_of
from monitor.loops.slots import SlotRules, overlay, updates_before
from monitor.loops.steps import execution_of
from monitor.transcript import Leaf, RunFolder

__all__ = ["LoopReport", "check_numbers", "examine_loop"]


@dataclass(slots=True, kw_only=True)
class LoopReport:
    """What an inspection says about a loop.

    Attributes:
        executable: its programs are agreed, so that replay devices may run them.
        programs: steps that run each program.
        constant_bytes: bytes of constants in all programs together.
        slots: (operator, formulas) of the numbers that change from step to step, with how many there are.
        rates: lowest and highest learning rate of each parameter group.
    """

    executable: bool = False
    programs: Counter[str] = field(default_factory=Counter)
    constant_bytes: int = 0
    slots: Counter[tuple[str, str]] = field(default_factory=Counter)
    rates: list[list[float]] = field(default_factory=list)
    updates: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return JSON-able values."""
        return {
            "programs": dict(self.programs),
            "constant_bytes": self.constant_bytes,
            "slots": [
                {"operator": operator, "explained_by": formulas, "count": count}
                for (operator, formulas), count in sorted(self.slots.items())
            ],
            "learning_rates": self.rates,
            "updates": self.updates,
        }


def examine_loop(run: RunFolder, leaves: list[Leaf], trust: Trust, findings: Findings) -> LoopReport:
    """Check all steps of a loop against the agreement in the trust file."""
    where = {"run": run.folder.name}
    report = LoopReport()
    start = leaves[0].state.root
    if str(start) not in trust.initial_states:
        text = "step 0: the initial state is not one that was agreed"
        findings.add(Guard.INITIALISATION, text, step=0, **where)
    report.programs = Counter(leaf.execution.program for leaf in leaves if leaf.execution is not None)
    programs = findings.read(lambda: _read_programs(run, report, trust, findings), **where)
    if programs is None:
        return report
    report.constant_bytes = sum(len(each.data) for program in programs.values() for each in program.constants)
    report.executable = agreement.may_load(leaves[0], trust, findings)
    strangers = [digest for digest in sorted(report.programs) if digest not in trust.programs]
    if strangers and findings.is_on(Guard.PROGRAM):
        report.executable = False
        steps = [leaf.step for leaf in leaves if leaf.execution is not None and leaf.execution.program in strangers]
        text = f"step {steps[0]}: runs program {strangers[0][:16]}…, which was not agreed"
        findings.add(Guard.PROGRAM, text, step=steps[0], **where)
    if not agreement.may_load(leaves[0], trust, findings) or len(programs) < len(report.programs):
        return report  # what was not agreed is not opened, so nothing more can be said
    if findings.read(lambda: _check_steps(run, leaves, programs), **where) is None:
        report.executable = False
        return report
    findings.check(Guard.RULES, lambda: _check_flop(leaves, programs), **where)
    findings.check(Guard.PROGRAM, lambda: _check_slots(run, leaves, programs, trust, report), **where)
    return report


def _read_programs(run: RunFolder, report: LoopReport, trust: Trust, findings: Findings) -> dict[str, Program]:
    """The agreed programs that steps name; every file is named, or announced with the next step, and each is there."""
    stored = {digest for digest, path in run.programs().items() if path in run.manifest.files}
    unused = sorted(stored - set(report.programs))
    if unused:
        raise EvidenceError(f"program {unused[0][:16]}… is stored, but no step runs it")
    missing = sorted(set(report.programs) - set(run.programs()))
    if missing:
        raise EvidenceError(f"program {missing[0][:16]}… is run by a step, but not stored")
    return {digest: run.program(digest) for digest in report.programs if agreement.may_decode(digest, trust, findings)}


def _check_steps(run: RunFolder, leaves: list[Leaf], programs: dict[str, Program]) -> bool:
    """Each step's execution fits its program and the declared optimizer."""
    for leaf in leaves[1:]:
        execution = execution_of(leaf)
        scalars_of(programs[execution.program], execution)
        if len(execution.hyper) != len(run.loop.groups):
            raise EvidenceError(f"step {leaf.step} declares {len(execution.hyper)} parameter groups")
        for changes, declared in zip(execution.hyper, run.loop.groups, strict=True):
            if not set(changes) <= set(declared):
                raise EvidenceError(f"step {leaf.step} declares a hyper-parameter that the optimizer does not have")
    return True


def check_numbers(run: RunFolder, last: int, trust: Trust) -> None:
    """EvidenceError if a number that a step up to ``last`` takes is not what its declared hyper-parameters give."""
    leaves = run.load_steps()[0][: last + 1]
    if not agreement.may_load(leaves[0], trust):
        raise EvidenceError("the initial state is not one that was agreed")
    named = {execution_of(leaf).program for leaf in leaves[1:]}
    programs = {digest: agreement.agreed_program(run, digest, trust) for digest in named}
    _check_steps(run, leaves, programs)
    _check_slots(run, leaves, programs, trust, LoopReport())


def _check_flop(leaves: list[Leaf], programs: dict[str, Program]) -> None:
    for leaf in leaves[1:]:
        expected = programs[execution_of(leaf).program].flop
        if leaf.flop != expected:
            raise EvidenceError(f"step {leaf.step} declares {leaf.flop} FLOP; the program needs {expected}")


def _check_slots(
    run: RunFolder, leaves: list[Leaf], programs: dict[str, Program], trust: Trust, report: LoopReport
) -> None:
    """Recompute every number that changes; the first step at which one has no explanation left is the finding."""
    rules = SlotRules(run.loop.optimizer, run.loop.groups, updates_before(run.checkpoint(0)))
    rates: list[list[float]] = [[] for _ in run.loop.groups]
    for leaf in leaves[1:]:
        execution = execution_of(leaf)
        rules.take(programs[execution.program], execution.slots, execution.hyper)
        for seen, hyper in zip(rates, overlay(run.loop.groups, execution.hyper), strict=True):
            rate = hyper.get("lr", 0.0)
            if not isinstance(rate, float | int):
                raise EvidenceError(f"step {leaf.step} declares {rate!r} as a learning rate")
            seen.append(float(rate))
        free = [slot for slot in rules.unexplained() if slot.program not in trust.free_slots]
        if free:
            raise EvidenceError(
                f"step {leaf.step}: a number that {free[0].operator} takes (scalar {free[0].number}) is not what the "
                "declared hyper-parameters give"
            )
    report.rates = [[min(seen), max(seen)] for seen in rates if seen]
    report.updates = rules.updates
    report.slots = Counter((slot.operator, " or ".join(slot.formulas) or "nothing") for slot in rules.slots())
