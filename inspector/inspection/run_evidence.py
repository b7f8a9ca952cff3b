"""What a verdict's evidence says of a run itself, key by key (``document``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

__all__ = ["Execution", "Ignored", "RunEvidence"]


class Ignored(TypedDict):
    """Files in the run's folder that are no part of it."""

    count: int
    names: Sequence[str]


class Execution(TypedDict):
    """What the run's programs do.

    Attributes:
        programs: by digest, the steps that run it.
        initialisation_brings: what the initialisation knows without having computed it; None where that is unknown.
        constant_bytes: of the constants in all programs together.
        slots: numbers that change from step to step: operator, explained_by, and count.
        declared_groups: of each parameter group, what was declared and used.
        learning_rates: lowest and highest of each parameter group.
        changed_hyper_parameters: those that differ from their declaration in some step.
        not_bound: hyper-parameters and tensors that are bound to no declared number, with the reason.
        idle_groups: parameter groups none of whose weights is ever updated.
        not_reviewed: what an acceptance does not cover of programs that no recipe gives, in words.
        updates: runs of the optimizer's step.
        evaluations: steps that write nothing of the state.
        writes: steps that the loop took between two others, and that update nothing.
        declared_writes: by weight that is written outside the updates, the tensors and operators that this takes.
        beside_programs: work on the state that the lab declares outside all programs.
        direct_paths: by which batches and constants reach the new state past every loss.
        governed_scalars: by program, how many scalars the declared hyper-parameters give.
        most_flop: of all steps, however products are written in their programs; None where these are not known.
    """

    programs: Mapping[str, int]
    initialisation_brings: str | None
    constant_bytes: int
    slots: Sequence[Mapping[str, Any]]
    declared_groups: Sequence[Mapping[str, Any]]
    learning_rates: Sequence[Sequence[float]]
    changed_hyper_parameters: Sequence[Mapping[str, Any]]
    not_bound: Mapping[str, str]
    not_reviewed: Sequence[str]
    idle_groups: Sequence[int]
    updates: int
    evaluations: int
    writes: int
    declared_writes: Mapping[str, Mapping[str, Any]]
    beside_programs: Mapping[str, int]
    direct_paths: Mapping[str, Any]
    governed_scalars: Mapping[str, int]
    most_flop: int | None


class RunEvidence(TypedDict):
    """A run that was judged.

    Attributes:
        run: name of its folder.
        steps: that are committed.
        declared_steps: None where none were declared.
        statements: what was countersigned: number, since which step, and by whom it is signed.
        training_device: as the lab declares it.
        state_digest: of the last committed state.
        log_root: Merkle root of the run's log.
        flop: of all committed steps.
    """

    run: str
    run_id: str
    ignored: Ignored
    lab: str
    steps: int
    finished: bool
    declared_steps: int | None
    numerics: str
    execution: Execution
    statements: Sequence[Mapping[str, Any]]
    training_device: Mapping[str, Any]
    state_digest: str | None
    log_root: str
    flop: int
