"""What of a run may be opened: what lab and inspectorate both signed, and what follows from it.

The lab declares in the run's metadata, the inspectorate countersigns outside the run (``monitor.declaration``). Of a
run that follows a recipe, the inspector derives declaration, program and initial state from its own copy of the preset
besides. A declaration that was not countersigned, a program that was not admitted and a state that does not start from
the declared one are not opened, and a batch is not read before an admitted program says how long it is. Of all these
only length and, where it costs little, digest are checked.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from firmware_sim.errors import EvidenceError
from inspector.inspection.trust import NotCountersigned, Trust
from inspector.inspection.verdict import Findings
from monitor.declaration.countersignature import Admitted, Countersigned, declaration_digest, in_force
from monitor.declaration.origin import Origin
from monitor.declaration.statement import Declaration
from monitor.presets.task import Task
from monitor.programs.program import Program
from monitor.replay.derivation import derive, initial_state
from monitor.transcript import Leaf, RunFolder
from monitor.transcript.layout import batch_path
from monitor.transcript.listing import batch_bytes

__all__ = ["Agreement", "agreement_of", "countersigned", "departures", "statements_of", "unread_files"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Agreed programs, states, data and free numbers of one run.

    Attributes:
        programs: by SHA-256, in hex, each program that its steps may run, with the cost that was countersigned.
        start: digest of the declared initial state; None where the recipe's seed gives it.
        terms: the statements in force for its steps (``monitor.declaration.countersignature``); without a trust file,
            what a recipe gives, as if it were one.
        recipe: the preset's task that gives the program and the layout of states, or None.
    """

    programs: Mapping[str, Admitted]
    start: str | None
    terms: tuple[Countersigned, ...]
    recipe: Task | None

    def at(self, step: int) -> Countersigned:
        """The statement that counts for a step."""
        return in_force(self.terms, step)[-1]

    def always(self, what: str, numbers: Collection[int] | None = None) -> frozenset[str]:
        """What all statements, or those with these numbers, say under ``free``, ``direct_paths`` or ``data``."""
        said = [getattr(each, what) for each in self.terms if numbers is None or each.number in numbers]
        return frozenset(said[0]).intersection(*said) if said else frozenset()

    def numbers_for(self, ran: Iterable[tuple[str, int]]) -> dict[str, set[int]]:
        """The numbers of the statements that count for what ran: programs, each with a step."""
        found: dict[str, set[int]] = {}
        for program, step in ran:
            found.setdefault(program, set()).add(self.at(step).number)
        return found

    @property
    def once_free(self) -> frozenset[str]:
        """What any statement leaves free: who keeps to one lies about no steps of another."""
        return frozenset().union(*(each.free for each in self.terms))

    @property
    def how_to_amend(self) -> str:
        """What else the command for the next statement needs."""
        text = f", with `--amends` statement {self.terms[-1].number} and `--since` the step from which it is agreed"
        return f"{text}, and all else that it agreed to"

    @property
    def initial_state(self) -> str:
        """Digest of the state that it starts from; a seed's is computed when it is asked for, and no sooner."""
        if self.start is not None:
            return self.start
        assert self.recipe is not None
        return str(initial_state(self.recipe).root)

    def may_decode(self, digest: str) -> bool:
        """Whether a program was admitted, so that it may be decoded."""
        return digest in self.programs

    def may_load(self, start: Leaf) -> bool:
        """Whether states may be loaded of a run that starts with this leaf."""
        return self.start in (None, str(start.state.root))

    def program(self, run: RunFolder, digest: str) -> Program:
        """Return a program of the run; EvidenceError if it was not admitted."""
        if not self.may_decode(digest):
            raise EvidenceError(f"program {digest[:16]}… was not countersigned")
        return run.program(digest)


def agreement_of(run: RunFolder, trust: Trust | None, *, of_any_lab: bool = False) -> Agreement:
    """What lab and inspectorate agreed to for a run; without a trust file, what its recipe gives.

    Args:
        of_any_lab: it counts with whichever lab the declaration was agreed on, as where two labs did one task.

    Raises:
        NotCountersigned: no declaration of the lab was countersigned, or there is neither recipe nor trust file.
        EvidenceError: the run declares other things than was countersigned, or than its recipe gives.
    """
    declared = run.declared
    recipe, start = declared.recipe, declared.origin.state
    derived = None if recipe is None else _derived(declared, recipe)
    if trust is not None:
        terms = in_force(countersigned(run, trust, of_any_lab=of_any_lab), run.committed)
    elif recipe is not None:
        terms = (_by_recipe(run, derive(recipe).program),)
    else:
        raise NotCountersigned(f"{run.name} does not follow a recipe, so a trust file has to say what was agreed")
    if derived is not None:
        terms = tuple(replace(each, programs=_only(each.programs, derived)) for each in terms)
    programs = {digest: cost for each in terms for digest, cost in each.programs.items()}
    return Agreement(programs=programs, start=start, terms=terms, recipe=recipe)


def _by_recipe(run: RunFolder, program: Program) -> Countersigned:
    """What a recipe gives, in the form of a statement."""
    lab, run_id, signed = run.metadata.lab, run.manifest.run, run.metadata.started
    programs = {program.digest: Admitted.of(program)}
    return Countersigned(lab=lab, run=run_id, declaration=run.declared, programs=programs, signed=signed)


def _only(programs: Mapping[str, Admitted], digest: str) -> dict[str, Admitted]:
    return {each: cost for each, cost in programs.items() if each == digest}


def countersigned(run: RunFolder, trust: Trust, *, of_any_lab: bool = False) -> tuple[Countersigned, ...]:
    """What was countersigned of a run: its statement and all amendments, by their numbers.

    Raises:
        NotCountersigned: no declaration of the lab was, or this one was for another run alone.
        EvidenceError: others were, and not this one; the text says where it departs from one of them.
    """
    lab = run.metadata.lab
    signed = [each for each in trust.agreed() if of_any_lab or each.lab == lab]
    equal = [each for each in signed if each.declaration == run.declared]
    if equal and of_any_lab:
        return (replace(equal[0].joined(equal[1:]), number=1, since=1),)
    mine = statements_of(run.name, run.manifest.run, equal)
    if mine:
        return mine
    if not signed:
        raise NotCountersigned(
            f"{run.name}: no inspectorate in the trust file has countersigned a declaration of lab {lab}; this run's "
            f"declaration is {declaration_digest(run.declared)}"
        )
    if equal:
        raise NotCountersigned(
            f"{run.name}: its declaration was countersigned for run {equal[0].run[:16]}… but this is run "
            f"{run.manifest.run[:16]}…; an inspectorate that agrees to this run signs what `declare show` prints of it"
        )
    odd = min((departures(each.declaration, run.declared) for each in signed), key=len)
    raise EvidenceError(
        f"the declaration of {run.name} is not the countersigned one; these parts differ: {', '.join(odd)}"
    )


def statements_of(name: str, run_id: str, signed: Sequence[Countersigned]) -> tuple[Countersigned, ...]:
    """Those of statements that are about a run, by their numbers; NotCountersigned if one is missing or there twice."""
    about = [each for each in signed if each.run == run_id]
    mine = sorted((each for n, each in enumerate(about) if each not in about[:n]), key=lambda each: each.number)
    numbers = [each.number for each in mine]
    if numbers != list(range(1, len(mine) + 1)):
        given = ", ".join(map(str, numbers))
        raise NotCountersigned(
            f"{name}: its countersigned statements have the numbers {given}; give each statement once, numbered from 1 "
            "without gaps"
        )
    return tuple(mine)


def departures(agreed: Declaration, declared: Declaration) -> list[str]:
    """The keys in which a declaration departs from one that was countersigned, those that one has alone among them."""
    one, other = agreed.to_json(), declared.to_json()
    return sorted(name for name in one.keys() | other.keys() if one.get(name, ...) != other.get(name, ...))


def _derived(declared: Declaration, recipe: Task) -> str:
    """Digest of the program that a recipe gives; EvidenceError if the run declares other things than it does."""
    derived = derive(recipe)
    if replace(declared, origin=Origin(), shares=derived.declaration.shares) != derived.declaration:
        raise EvidenceError(f"the run's declaration is not the one that preset {recipe.preset} and its task give")
    return derived.program.digest


def unread_files(
    run: RunFolder, leaves: Sequence[Leaf], agreed: Agreement, findings: Findings | None = None
) -> frozenset[str]:
    """Files of a run that are as long as its lab likes, since nothing agreed explains them.

    Raises:
        EvidenceError: a batch is longer than the agreed program of its step reads.
    """
    named = {leaf.step: leaf.execution.program for leaf in leaves if leaf.execution is not None}
    stored = {digest for digest in run.programs() if agreed.may_decode(digest)}
    longest = {digest: batch_bytes(run.program(digest).batch) for digest in sorted(stored)}
    anything = max(longest.values(), default=0)
    unread = set()
    if not leaves or not agreed.may_load(leaves[0]):
        unread |= {path for path in run.files if path.startswith("checkpoints/")}
    for step in range(1, run.declared.steps + 1):
        entry = run.files.get(batch_path(step))
        if entry is None:
            continue
        if step not in named:  # announced, and not committed yet
            unread |= {batch_path(step)} if entry.length > anything else set()
        elif named[step] not in longest:
            unread.add(batch_path(step))
        elif entry.length > longest[named[step]]:
            most = longest[named[step]]
            raise EvidenceError(f"the batch of step {step} has {entry.length} bytes; its program reads at most {most}")
    return frozenset(unread)
