"""What of a loop's run may be opened: what lab and inspector agreed on outside the run, and what follows from it.

A program that was not agreed is not decoded, a state that does not start from an agreed one is not loaded, and a batch
is not read before an agreed program says how long it is. Of all these only length and, where it costs little, digest
are checked.
"""

from __future__ import annotations

from collections.abc import Sequence

from firmware_sim.errors import EvidenceError
from inspector.findings import Findings
from inspector.guards import Guard
from inspector.trust import Trust
from monitor.loops.program import Program
from monitor.loops.declaration import Declaration
from monitor.transcript import Leaf, RunFolder
from monitor.transcript.layout import batch_path
from monitor.transcript.lengths import batch_bytes

__all__ = ["agreed_program", "may_decode", "may_load", "unread_files"]


def may_decode(digest: str, trust: Trust, findings: Findings | None = None) -> bool:
    """Whether a program may be decoded: it was agreed, or a test has switched that guard off."""
    return digest in trust.programs or (findings is not None and not findings.is_on(Guard.PROGRAM))


def may_load(start: Leaf, trust: Trust, findings: Findings | None = None) -> bool:
    """Whether states of a loop may be loaded that starts with this leaf."""
    agreed = str(start.state.root) in trust.initial_states
    return agreed or (findings is not None and not findings.is_on(Guard.INITIALISATION))


def agreed_program(run: RunFolder, digest: str, trust: Trust) -> Program:
    """Return a program of the run; EvidenceError if it was not agreed."""
    if not may_decode(digest, trust):
        raise EvidenceError(f"program {digest[:16]}… was not agreed")
    return run.program(digest)


def unread_files(run: RunFolder, leaves: Sequence[Leaf], trust: Trust, findings: Findings) -> frozenset[str]:
    """Files of a run that are as long as its lab likes, since nothing agreed explains them.

    Raises:
        EvidenceError: a batch is longer than the agreed program of its step reads.
    """
    if not isinstance(run.declared, Declaration):
        return frozenset()
    named = {leaf.step: leaf.execution.program for leaf in leaves if leaf.execution is not None}
    stored = {digest for digest in run.programs() if may_decode(digest, trust, findings)}
    longest = {digest: batch_bytes(run.program(digest).batch) for digest in sorted(stored)}
    anything = max(longest.values(), default=0)
    unread = set()
    if not leaves or not may_load(leaves[0], trust, findings):
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
