"""What a verdict says in words: what was found to hold, what that does not cover, and how each lab came out of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from firmware_sim import KEPT_BYTES, NO_WORK, Work
from inspector.inspection.execution import NOT_REVIEWED, numbers_text
from inspector.inspection.findings import Findings
from inspector.inspection.lineage import lineage_text
from inspector.inspection.sampling import odds_text
from inspector.inspection.transcripts import Transcript
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome

__all__ = ["acceptance", "outcomes_by_lab", "scope", "signed_text"]

_UNMETERED = (
    "work where no chip meters it: the host's own, by raw pointers, in other processes, on chips of no registry"
)
_OLDER = (
    "evidence withheld until after the draw, or older than the challenge",
    "chips put back to a copy of an earlier state",
)
_BETWEEN = "chips put back, before anybody asks again, to a copy of the state in which they were asked"
_KEPT = f"results of operators that a lab keeps, up to a step's and {KEPT_BYTES} bytes more"
_BESIDE = "what operators beside the programs do with the state, up to {} bytes between two steps"
_UNSEEN = "false steps in segments that were not replayed, but for the odds"
_SILENT = "labs that declare nothing"


def acceptance(evidence: dict[str, Any]) -> str:
    """The sentence of an acceptance."""
    replays = evidence.get("replays", [])
    chips = evidence.get("chips", [])
    snapshots = sum(len(chip["snapshots"]) for chip in chips)
    devices = ", ".join(sorted({replay["device"] for replay in replays}))
    steps = sum(replay.get("steps", 0) for replay in replays)
    text = f"{snapshots} snapshots of {len(chips)} drawn chips are states of the declared training, and "
    replayed = f"{steps} replayed steps on {devices} reach the committed states bit for bit"
    text += replayed if replays else "no step was replayed"
    for run in evidence["runs"]:
        if not run["finished"]:
            whole = "" if run["declared_steps"] is None else f" of {run['declared_steps']}"
            text += f"; {run['run']} goes on, and this is about its first {run['steps']}{whole} steps"
        if step := evidence.get("accepted_before", {}).get(run["run_id"]):
            text += f"; an earlier inspection accepted {run['run']} up to step {step}"
    if within := evidence.get("snapshots_inside_steps", 0):
        compared = evidence["snapshots_compared_inside_steps"]
        text += f"; {within} of the snapshots fell inside of steps"
        text += f", and {within - compared} of these in segments that were not replayed" if within > compared else ""
    logged = sum(replay.get("logged_decisions", 0) for replay in replays)
    turned = sum(replay.get("turned_decisions", 0) for replay in replays)
    if logged:
        text += f"; the rounding logs chose {logged} times where devices may differ, {turned} times unlike the device"
    if "known_chips" in evidence:
        known, extended = len(evidence["known_chips"]), len(evidence["extended_chips"])
        text += f"; {extended} of {len(evidence['drawn_chips'])} drawn chips go on from where an earlier inspection"
        text += " left them"
        if known > extended:
            text += f", {known - extended} showed what was seen then and nothing newer"
    if pruned := sum(chip["log_start"] > 0 for chip in chips):
        text += f"; the logs of {pruned} drawn chips begin behind checkpoints that an inspectorate signed"
    if beyond := max((chip["steps_beyond_heads"] for chip in chips), default=0):
        text += f"; chips have gone on by up to {beyond} steps since, which the next inspection looks at"
    if chips:
        gaps = sum(len(chip["power_gaps"]) for chip in chips)
        text += "; the chips' meters count the committed steps and nothing else"
        text += _beside_text([run["execution"] for run in evidence["runs"]])
        text += f", but for up to a step before each of {gaps} power cuts" if gaps else ""
        text += _untold_text(chips)
        text += f", and saw at most {max(chip['held_bytes'] for chip in chips)} bytes of results held beside the state"
    challenged = sum(bool(chip["nonce"]) for chip in chips)
    if challenged:
        text += f"; {challenged} drawn chips answered a challenge that was made after the draw"
    if shards := evidence.get("shards"):
        text += f"; {shards['opened']} of their snapshots were opened, and are what the chips hashed"
    text += f"; {evidence['chips_listed']}"
    text += numbers_text([run["execution"] for run in evidence["runs"]]) + lineage_text(evidence["lineages"])
    text += f"; {odds_text(evidence['odds'])}" if evidence.get("odds") else ""
    if evidence.get("draw", {}).get("simulated"):
        text += "; simulated draw: whoever knows the seed knew it beforehand"
    return text


def _beside_text(reports: Sequence[Mapping[str, Any]]) -> str:
    """What an acceptance adds about work that the lab declares beside its programs."""
    beside = sum((Work(**report["beside_programs"]) for report in reports), NO_WORK)
    text = "" if beside == NO_WORK else f" but {beside} beside the programs, as declared and allowed"
    counts = {kind: sum(report[kind] for report in reports) for kind in ("evaluations", "writes")}
    told = [f"{count} are {kind}" for kind, count in counts.items() if count]
    return text + (f" ({', '.join(told)})" if told else "")


def _untold_text(chips: Sequence[Mapping[str, Any]]) -> str:
    """What an acceptance adds about work behind the last step before a chip was shut down."""
    found = [work for chip in chips if (work := Work(**chip["untold"])) != NO_WORK]
    if not found:
        return ""
    most = max(found, key=lambda work: (work.moved, work.calls))
    return (
        f", but up to {most} on each of {len(found)} chips behind the last step, which are allowed and no step tells of"
    )


def signed_text(transcripts: Sequence[Transcript]) -> str:
    """Who countersigned, where it is nobody real."""
    return "; countersigned by a simulated inspectorate" if any(item.agreed.simulated for item in transcripts) else ""


def scope(transcripts: Sequence[Transcript], *, live: bool = False, beacons: bool = False, every: bool = False) -> str:
    """The scope of an acceptance: what it does not cover.

    Args:
        live: chips were challenged after the draw.
        beacons: and signs of life from them agreed, so that none can have been elsewhere in between.
        every: chips were drawn of labs that declare nothing, too.
    """
    derived = all(transcript.run.declared.recipe is not None for transcript in transcripts)
    old = (() if beacons else (_BETWEEN,)) if live else _OLDER
    silent = () if every else (_SILENT,)
    beside = max((transcript.run.declared.allowance.moved for transcript in transcripts), default=0)
    parts = [
        _UNMETERED,
        _KEPT,
        *([_BESIDE.format(beside)] if beside else []),
        *old,
        _UNSEEN,
        *silent,
        *(() if derived else NOT_REVIEWED),
    ]
    return "not covered: " + "; ".join(parts)


def outcomes_by_lab(
    findings: Findings, transcripts: Sequence[Transcript], trust: Trust, labs: Collection[str]
) -> dict[str, str]:
    """The outcome of each lab by itself: what a run says wrongly counts against the lab that signed it."""
    signers = {item.run.folder.name: item.run.metadata.lab for item in transcripts}

    def blamed(where: Mapping[str, Any]) -> str | None:
        return where.get("lab") or signers.get(where.get("run", "")) or trust.chips.get(where.get("chip", ""))

    guilty = {blamed(reason.where) for reason in findings.found}
    open_points = {blamed(reason.where) for reason in findings.doubts}
    outcomes = {}
    for lab in sorted(labs):
        outcome = Outcome.ACCEPT
        if open_points & {lab, None}:
            outcome = Outcome.INCONCLUSIVE
        if guilty & {lab, None}:
            outcome = Outcome.REJECT
        outcomes[lab] = outcome.value
    return outcomes
