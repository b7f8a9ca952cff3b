"""What the check of a bundle states, as JSON has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from inspector.inspection.document import LineageEvidence, Odds

__all__ = ["BundledRun", "CheckedBundle", "Decided"]


class BundledRun(TypedDict):
    """A run of a bundle.

    Attributes:
        head: SHA-256 of what its lab signed.
    """

    run_id: str
    lab: str
    head: str


class Decided(TypedDict):
    """What a contest of lab and cluster decided.

    Attributes:
        run: SHA-256 of the head that its lab signed.
        guilty: lab, cluster, both or none.
        text: why.
    """

    run: str
    step: int
    guilty: Sequence[str]
    text: str


class CheckedBundle(TypedDict, total=False):
    """The evidence of ``verify`` for a bundle.

    Attributes:
        verifies: whether the bundle is sound; if not, it says nothing about the lab, and the other keys are missing.
        verdict: outcome that the inspectorate gives.
        inspectorate: id of its key.
        time: of the judgment; None where the verdict states none.
        simulated_draw: chips were drawn by --seed.
        one_process: one process was both inspectorate and cluster.
        countersigned_by_simulation: a simulated inspectorate countersigned the declaration.
        scope: what the acceptance does not show.
        lineages: where each run comes from.
        grounds: what in the bundle shows the REJECT.
        reasons: those that the inspectorate gives.
        runs: whose steps are opened.
        odds: of each run: coverage, and the chance that each violation escapes.
        rules: as inspect states them.
        model: with --model: name, sha256, files, ignored, not_compared, buffers and run_id.
        decided: of each --contest.
    """

    verifies: bool
    verdict: str
    inspectorate: str
    time: str | None
    simulated_draw: bool | None
    one_process: bool
    countersigned_by_simulation: bool
    scope: str
    lineages: Sequence[LineageEvidence]
    grounds: Sequence[str]
    reasons: Sequence[Mapping[str, Any]]
    runs: Sequence[BundledRun]
    drawn_chips: Sequence[str] | None
    odds: Sequence[Odds] | None
    rules: Mapping[str, Any]
    model: Mapping[str, Any]
    decided: Sequence[Decided]
