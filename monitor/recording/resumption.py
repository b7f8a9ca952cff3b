"""What a new process needs of a run whose process died."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from firmware_sim import Chip, LogRecord, RecordKind, parse_log
from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import MerkleTree
from monitor.declaration.statement import Declaration, optimizer_name
from monitor.lab.conduct import Conduct
from monitor.lab.host import Host
from monitor.lab.pruning import accepted_standing
from monitor.lab.simulated_lab import lab_path
from monitor.loops.state import LoopState
from monitor.replay.ledger import Book, Ledger, needs_of
from monitor.replay.reexecution import OwnSteps
from monitor.replay.steps import execution_of
from monitor.sharding import ShardedMemory
from monitor.transcript import Leaf, RunFolder
from monitor.transcript.state import decode_state

__all__ = [
    "STOPPED",
    "booked_so_far",
    "heard_beyond",
    "repeat_committed",
    "repeated_from",
    "require_same",
    "require_start",
]

STOPPED = "stopped.safetensors"
"""In the lab's folder: the state after the step at which its run was shut down."""
_SCHEDULED = "initial_lr"
"""What a schedule of learning rates adds to each parameter group."""


def require_same(
    run: RunFolder,
    optimizer: Optimizer,
    groups: Sequence[Mapping[str, Any]],
    parameters: tuple[tuple[str, ...], ...],
    loop: LoopState,
) -> Declaration:
    """The run's declaration; CallerError unless model and optimizer are those that it declares."""
    declared = run.declared
    mine = replace(declared, optimizer=optimizer_name(optimizer), parameters=parameters, state=loop.entries)
    keys = [set(group) - {_SCHEDULED} for group in declared.groups]  # a schedule may come before or after
    if mine != declared or [set(group) - {_SCHEDULED} for group in groups] != keys:
        raise CallerError(f"{run.folder.name} was recorded with another model or optimizer")
    return declared


def require_start(declared: Declaration, leaves: Sequence[Leaf], loop: LoopState, *, honest: bool) -> None:
    """CallerError unless a run that came no further than its start can go on from what model and optimizer hold."""
    if not leaves and declared.origin.state not in (None, str(loop.memory.digest().root)):
        raise CallerError("the model or the optimizer does not hold the state that the run declares")
    if len(leaves) == 1 and honest:
        loop.require_start(leaves[0].state)
    elif leaves and loop.numbers:
        raise CallerError(f"the optimizer keeps {loop.numbers[0]} outside tensors, so no checkpoint holds it")


def heard_beyond(chips: Iterable[Chip], run: RunFolder, tree: MerkleTree) -> dict[int, bytes]:
    """Heads of the steps that chips have heard of and that no longer lie on disk: they have to come again.

    A chip hears of a step once it is written. So a process that ended leaves a chip with the last step or the one
    before. A power loss, and who puts a copy back, may take steps from the disk that chips have heard of.

    Raises:
        CallerError: a chip has heard of other steps than those on disk, or not of all of them.
    """
    last, name = tree.size - 1, run.folder.name
    beyond: dict[int, bytes] = {}
    for chip in chips:
        log = chip.log_bytes()
        records = parse_log(log, chip=chip.chip_id) if log else []
        before = accepted_standing(lab_path(run.folder), chip.chip_id, log).runs.get(run.metadata.run_id)
        heads = {} if before is None else {before.most: before.head}
        heads |= {each.step: each.digest for each in records if _is_head(each, run)}
        newest = max(heads, default=-1)
        is_pruned = not records or records[0].counter > 0  # a verifier has taken over what came before
        if newest < last - 1 and (heads or not is_pruned):
            raise CallerError(
                f"chip {chip.chip_id} last heard of step {newest}, but {name} ends with step {last}; the chip lost its "
                "record of the steps between in a power loss, so this run cannot be resumed"
            )
        heard = max((step for step in heads if step <= last), default=-1)
        later = {step: head for step, head in heads.items() if step > last}
        if (heard >= 0 and heads[heard] != tree.root(heard + 1)) or any(
            beyond.setdefault(step, head) != head for step, head in later.items()
        ):
            raise CallerError(
                f"the steps that chip {chip.chip_id} heard of are not those of {name}; this run cannot be resumed"
            )
    return beyond


def booked_so_far(chip: Chip, lab: Path, run: RunFolder, leaves: Sequence[Leaf], share: tuple[int, int]) -> Book:
    """What a chip has counted of a run: by the law that an inspector goes by, as far as the run's own steps tell."""
    programs = {digest: run.program(digest) for digest in {execution_of(leaf).program for leaf in leaves[1:]}}
    works = {digest: program.work for digest, program in programs.items()}
    dead = {digest: program.dead for digest, program in programs.items()}
    log, run_id = chip.log_bytes(), run.metadata.run_id
    standing = accepted_standing(lab, chip.chip_id, log)
    ledger = Ledger(chip.chip_id, {run_id: needs_of(run.declared, share, leaves, works, dead)}, standing=standing)
    for record in parse_log(log, chip=chip.chip_id) if log else []:
        with suppress(EvidenceError):
            ledger.take(record)
    return ledger.books.get(run_id, Book())


def repeated_from(run: RunFolder, last: int) -> tuple[int, int]:
    """The checkpoint from which a boot repeats steps, and the first step whose state is whole again."""
    start = run.checkpoint_before(max(last - 1, 0))  # of the last one the chips may not have heard
    return start, start + (start > 0)  # a checkpoint holds what its next step reads


def stopped_state(lab: Path, leaf: Leaf, memory: ShardedMemory) -> bool:
    """Bring memory to the state in which a run was shut down, if that is the one after its last committed step."""
    path = lab / STOPPED
    if not path.is_file():
        return False
    try:
        _, digest = memory.restore(decode_state(path.read_bytes(), STOPPED))
    except (OSError, EvidenceError):
        return False
    return digest == leaf.state


def _is_head(record: LogRecord, run: RunFolder) -> bool:
    return record.kind is RecordKind.COMMIT and record.run_id == run.metadata.run_id


def repeat_committed(run: RunFolder, leaves: Sequence[Leaf], host: Host, loop: LoopState, conduct: Conduct) -> None:
    """Show the chips the steps since the last checkpoint again; model and optimizer then hold the last one's state.

    A run that was shut down goes on from the state in which that was, and nothing is repeated.

    Raises:
        EvidenceError: a committed step does not lead to its committed state again.
    """
    if stopped_state(lab_path(run.folder), leaves[-1], loop.memory):
        for leaf in leaves:
            host.keep(leaf)
        host.attach_memory(leaves[-1].step)
        host.announce(leaves[-1].step)
        _hold(run, leaves, loop)
        return
    start, first = repeated_from(run, leaves[-1].step)
    for leaf in leaves[:first]:
        host.keep(leaf)
    steps = OwnSteps(run, start, conduct, memory=loop.memory)
    for leaf in leaves[first:]:
        if leaf.execution is not None:
            loop.memory.meter.charge(leaf.execution.outside)
        if leaf.step and steps.take()[0] != leaf:
            raise EvidenceError(
                f"step {leaf.step} does not give its committed state when it is repeated; this run cannot be resumed"
            )
        if leaf.step == first:
            host.attach_memory(first)
        host.keep(leaf)
        host.announce(leaf.step)
    _hold(run, leaves, loop)


def _hold(run: RunFolder, leaves: Sequence[Leaf], loop: LoopState) -> None:
    """The caller's objects hold what there is after the last step."""
    if len(leaves) > 1:
        commit = run.program(execution_of(leaves[-1]).program).commit
        loop.hold({name for name, place in commit.items() if place is not None})
