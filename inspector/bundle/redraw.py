"""Draws chips and segments again, from the secret that a verdict opens, and compares them with what it states."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from firmware_sim import RecordKind
from firmware_sim.errors import CallerError, EvidenceError
from inspector.bundle.grounds import HeldChip
from inspector.bundle.runs import HeldRun
from inspector.inspection.document import Evidence
from inspector.inspection.guards import Sampling, Settings
from inspector.inspection.sampling import Chosen, challenge_seed, choose, draw, odds_of, run_seed
from inspector.inspection.trust import Trust
from inspector.probability.odds import Violation
from inspector.replay.segment import Segment, segments_of

__all__ = ["accepted_up_to", "covered", "drawn_again", "settings_from"]

_NONE = type(None)
_SETTINGS: Mapping[str, tuple[type, ...]] = {
    "samples": (int,),
    "segments": (int, _NONE),
    "shared": (int, float),
    "confidence": (float, _NONE),
    "against": (str, _NONE),
}
"""Types of the settings that are single values."""


def settings_from(data: Mapping[str, Any]) -> Settings:
    """Settings as ``settings_json`` says them; EvidenceError on any other form."""
    if set(data) != {*_SETTINGS, "devices"}:
        raise EvidenceError("the settings of the inspection have missing or extra keys")
    devices, said = data["devices"], {name: data[name] for name in _SETTINGS}
    fits = all(type(value) in _SETTINGS[name] for name, value in said.items())
    if not fits or type(devices) is not list or not all(type(each) is str for each in devices):
        raise EvidenceError("the settings of the inspection are malformed")
    confidence, against, shared = said["confidence"], said["against"], said["shared"]
    segments = 1 if said["segments"] is None else said["segments"]
    counted = said["samples"] >= 0 and segments >= 1
    if not counted or (confidence is None) is not (against is None) or not 0 <= shared <= 1:
        raise EvidenceError("the settings of the inspection are out of range")
    try:
        sampling = None if against is None else Sampling(confidence=confidence, against=Violation.parse(against))
    except CallerError as error:
        raise EvidenceError(f"the settings of the inspection: {error}") from None
    return Settings(
        samples=said["samples"],
        seed=None,
        devices=tuple(devices),
        segments=said["segments"],
        shared=shared,
        sampling=sampling,
    )


def drawn_again(
    evidence: Evidence, runs: Sequence[HeldRun], chips: Sequence[HeldChip], trust: Trust, settings: Settings
) -> dict[str, Chosen]:
    """Draw chips and segments again, and compare both and the odds with what the verdict states."""
    if "draw" not in evidence:
        return {}
    if not {run.head_digest for run in runs} <= set(evidence["draw"]["heads"]):
        raise EvidenceError("the draw did not include a head that the verdict judges")
    seed = challenge_seed(evidence["draw"]["secret"], evidence["draw"]["heads"])
    if not {run.lab for run in runs} <= set(evidence["labs"]):
        raise EvidenceError("the verdict leaves out a lab although it judges a run of that lab")
    pool = [chip for lab in sorted(evidence["labs"]) for chip in trust.chips_of(lab)]
    if sorted(draw(pool, min(settings.samples, len(pool)), seed)) != evidence["drawn_chips"]:
        raise EvidenceError("the drawn chips are not those that the secret gives")
    taken = _snapshots(evidence, chips)
    chosen = {}
    for stated in evidence.get("odds", []):
        run = next((each for each in runs if each.run_id == stated["run_id"]), None)
        if run is None:
            raise EvidenceError("it states odds of a run that the bundle does not hold")
        every = segments_of(run.declared, covered(run, evidence))
        since = accepted_up_to(run, evidence)
        own, drawn_evaluations = run_seed(seed, run.run_id), _evaluations(stated["evaluations"], every, run)
        picked = choose(every, taken.get(run.run_id, set()), settings, own, evaluations=drawn_evaluations, since=since)
        if picked.audit is None:
            raise EvidenceError("it states odds of a run that had nothing left to replay")
        if not _is_close(odds_of(picked, settings), {k: v for k, v in stated.items() if k not in ("run", "run_id")}):
            raise EvidenceError("the odds are not those of the segments that were drawn")
        chosen[run.run_id] = picked
    return chosen


def _snapshots(evidence: Evidence, chips: Sequence[HeldChip]) -> dict[str, set[int]]:
    """By run, the steps of the snapshots that the verdict names; EvidenceError if a sound chip has recorded no such."""
    recorded = {
        (entry.chip, record.run_id.hex(), step)
        for entry in chips
        for record in entry.case.records
        if record.kind is RecordKind.SNAPSHOT
        for step in (record.step, record.step + bool(record.operators))  # inside of the step that comes next
    }
    taken: dict[str, set[int]] = {}
    for report in (*evidence.get("chips", []), *evidence.get("past_spans", [])):
        for snapshot in report["snapshots"]:
            if report["sound"] and (report["chip"], snapshot["run_id"], snapshot["step"]) not in recorded:
                raise EvidenceError(f"chip {report['chip']} has not recorded a snapshot that the verdict names")
            taken.setdefault(snapshot["run_id"], set()).add(snapshot["step"])
    return taken


def _evaluations(stated: Mapping[str, Any], every: Sequence[Segment], run: HeldRun) -> dict[int, int]:
    """How many steps of which segments are evaluations; EvidenceError where the opened steps say otherwise."""
    found = {}
    for each in every:
        count = stated.get(str(each.index), 0)
        opened = [run.opened.leaves.get(step) for step in range(each.start + 1, each.stop + 1)]
        least = sum(entry is not None and not entry.trains for entry in opened)
        most = least + opened.count(None)
        if type(count) is not int or not least <= count <= most:
            raise EvidenceError(
                f"it counts {count!a:.20} evaluations in segment {each.index}, which can have {least} to {most}"
            )
        found[each.index] = count
    return found


def covered(run: HeldRun, evidence: Evidence) -> int:
    """The step up to which the verdict judges a run: the head's."""
    [counts] = [each["steps"] for each in evidence["runs"] if each["run_id"] == run.run_id]
    if counts != run.head.steps:
        raise EvidenceError("the steps that the verdict is about are not those of the head")
    return run.head.steps


def accepted_up_to(run: HeldRun, evidence: Evidence) -> int:
    """The step up to which an earlier inspection is said to have accepted a run; a head of that step must be proven."""
    step = evidence.get("accepted_before", {}).get(run.run_id, 0)
    if type(step) is not int or step < 0:
        raise EvidenceError("the step up to which a run was accepted before is malformed")
    if step and step + 1 not in run.opened.roots and step != run.head.steps:
        raise EvidenceError(f"no head of step {step} in the bundle shows what an earlier inspection accepted")
    return step


def _is_close(one: object, other: object) -> bool:
    """Equal, but for the last bits of a floating-point number."""
    if isinstance(one, float) and isinstance(other, float | int):
        return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-300)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return set(one) == set(other) and all(_is_close(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_close, one, other))
    return one == other
