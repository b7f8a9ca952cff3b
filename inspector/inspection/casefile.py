"""What a verdict rests on, as an inspection met it: a bundle is made of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from inspector.replay.scheduler import Answer

if TYPE_CHECKING:
    from firmware_sim.evidence import LogCheckpoint, Standing
    from inspector.inspection.answers import EvidenceSource
    from inspector.inspection.transcripts import Transcript

__all__ = ["CaseFile"]


@dataclass(slots=True)
class CaseFile:
    """Filled by ``inspector.inspection.inspection.inspect``, as far as the inspection came.

    Attributes:
        heads: manifest of each run that a registered lab signed.
        earlier: heads that labs signed at earlier inspections.
        transcripts: the runs that could be read.
        drawn: where the evidence of each drawn chip lies.
        replays: what the devices answered.
        prunable: of each drawn chip whose evidence is sound, where its log may be pruned if the verdict accepts.
        unseen: by lab, runs that earlier inspections accepted of its drawn chips, and that are not handed over now.
        checks: what a cluster has signed of the files that the inspectorate was not shown.
        examinations: what they answered of samples and weights for the sake of rules.
    """

    heads: list[bytes] = field(default_factory=list)
    earlier: list[bytes] = field(default_factory=list)
    transcripts: list[Transcript] = field(default_factory=list)
    drawn: dict[str, list[EvidenceSource]] = field(default_factory=dict)
    replays: list[Answer] = field(default_factory=list)
    prunable: dict[str, tuple[LogCheckpoint, Standing]] = field(default_factory=dict)
    unseen: dict[str, list[str]] = field(default_factory=dict)
    checks: list[bytes] = field(default_factory=list)
    examinations: list[Answer] = field(default_factory=list)
