"""What an inspection goes by in addition to a trust file, settings and the folders of runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from firmware_sim import LogPosition
from inspector.inspection.answers import Ask

if TYPE_CHECKING:
    from inspector.inspection.disclosure import Checked
    from inspector.inspection.shards import OpenShard

__all__ = ["Past", "Sources"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where evidence comes from other than the folders of runs.

    Attributes:
        answers: folders with the evidence of chips that take part in no run.
        ask: challenges drawn chips live, after the draw, and no older quote of theirs counts; None where the verdict
            goes by what was handed over.
        open_shard: opens what drawn chips' snapshots cover, where a lab has stored it.
        heads: SHA-256, in hex, of each manifest that labs handed over before the draw; None for those of the runs.
        checks: what a cluster says of a run whose states and samples the folder lacks (``inspection.disclosure``), by
            the SHA-256, in hex, of its manifest; None where the folders hold everything.
    """

    answers: Sequence[Path] = ()
    ask: Ask | None = None
    open_shard: OpenShard | None = None
    heads: Collection[str] | None = None
    checks: Mapping[str, Checked] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """What earlier inspections left.

    Attributes:
        memory: where each chip's log ended (``inspection.memory``); it must go on from there, and the verdict says how
            many of the drawn chips did. None for an inspector who remembers nothing.
        heads: heads of runs that labs signed; a run of the same id must go on from them.
        accepted: by id of a run, the step up to which it was accepted; what comes before is not replayed again.
    """

    memory: Mapping[str, LogPosition] | None = None
    heads: Sequence[bytes] = ()
    accepted: Mapping[str, int] = field(default_factory=dict)
