"""What of a run may be opened: what lab and inspector agreed on outside the run, and what follows from it.

Of a run that follows a recipe, the inspector derives the agreement from its own copy of the preset; of any other, the
trust file names it. A declaration that the recipe does not give, a program that was not agreed and a state that does
not start from an agreed one are not opened, and a batch is not read before an agreed program says how long it is. Of
all these only length and, where it costs little, digest are checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from firmware_sim.errors import CallerError, EvidenceError
from inspector.inspection.findings import Findings
from inspector.inspection.guards import Guard
from inspector.inspection.trust import Trust
from monitor.presets.task import Task
from monitor.programs.program import Program
from monitor.recording.derivation import derive, initial_state
from monitor.transcript import Leaf, RunFolder
from monitor.transcript.layout import batch_path
from monitor.transcript.lengths import batch_bytes

__all__ = ["Agreement", "agreement_of", "unread_files"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Agreed programs, states, data and free numbers of one run.

    Attributes:
        programs: SHA-256, in hex, of each program that its steps may run.
        named_states: digests of the states that it may start from, where no recipe gives the one.
        free: names of hyper-parameters that need not be bound to the arithmetic or stay as declared, and those among
            the programs that may change numbers outside the optimizer's updates from step to step.
        direct_paths: tensors of the state, and programs, whose paths past every loss were agreed.
        recipe: the preset's task that gives the initial state and the layout of states, or None.
    """

    programs: frozenset[str]
    named_states: frozenset[str]
    free: frozenset[str]
    direct_paths: frozenset[str]
    recipe: Task | None

    @property
    def initial_states(self) -> frozenset[str]:
        """Digests of the states that it may start from; a recipe's is computed when it is asked for, and no sooner."""
        return self.named_states if self.recipe is None else frozenset({str(initial_state(self.recipe).root)})

    def may_decode(self, digest: str, findings: Findings | None = None) -> bool:
        """Whether a program may be decoded: it was agreed, or a test has switched that guard off."""
        return digest in self.programs or (findings is not None and not findings.is_on(Guard.PROGRAM))

    def may_load(self, start: Leaf, findings: Findings | None = None) -> bool:
        """Whether states may be loaded of a run that starts with this leaf."""
        agreed = self.recipe is not None or str(start.state.root) in self.initial_states
        return agreed or (findings is not None and not findings.is_on(Guard.INITIALISATION))

    def program(self, run: RunFolder, digest: str) -> Program:
        """Return a program of the run; EvidenceError if it was not agreed."""
        if not self.may_decode(digest):
            raise EvidenceError(f"program {digest[:16]}… was not agreed")
        return run.program(digest)


def agreement_of(run: RunFolder, trust: Trust | None) -> Agreement:
    """The agreement for a run: derived from its preset, or the trust file's.

    Raises:
        CallerError: the run has no recipe, and no trust file was given.
        EvidenceError: the run declares other things than its recipe gives.
    """
    recipe = run.declared.recipe
    if recipe is None:
        if trust is None:
            raise CallerError(f"{run.folder.name} follows no recipe; the trust file must name its agreed programs")
        return Agreement(
            programs=trust.programs,
            named_states=trust.initial_states,
            free=trust.free,
            direct_paths=trust.direct_paths,
            recipe=None,
        )
    derived = derive(recipe)
    if run.declared != derived.declaration:
        raise EvidenceError(f"the run declares other things than preset {recipe.preset} and its task give")
    return Agreement(
        programs=frozenset({derived.program.digest}),
        named_states=frozenset(),
        free=frozenset(),
        direct_paths=frozenset(),
        recipe=recipe,
    )


def unread_files(run: RunFolder, leaves: Sequence[Leaf], agreed: Agreement, findings: Findings) -> frozenset[str]:
    """Files of a run that are as long as its lab likes, since nothing agreed explains them.

    Raises:
        EvidenceError: a batch is longer than the agreed program of its step reads.
    """
    named = {leaf.step: leaf.execution.program for leaf in leaves if leaf.execution is not None}
    stored = {digest for digest in run.programs() if agreed.may_decode(digest, findings)}
    longest = {digest: batch_bytes(run.program(digest).batch) for digest in sorted(stored)}
    anything = max(longest.values(), default=0)
    unread = set()
    if not leaves or not agreed.may_load(leaves[0], findings):
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
