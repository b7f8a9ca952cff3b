"""An inspection, from the draw of chips to the verdict (Shavit 2023, sections 3–5).

A verdict is a function of frozen settings, trust anchors, evidence and what the replay devices return.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from firmware_sim import LogPosition
from firmware_sim.errors import CallerError, DeviceError, EvidenceError
from inspector.devices import device
from inspector.inspection.agreement import agreement_of
from inspector.inspection.answers import Answers, Ask
from inspector.inspection.comparison import compare_replay
from inspector.inspection.execution import examine_execution, numbers_text
from inspector.inspection.findings import Findings
from inspector.inspection.guards import Guard, Settings
from inspector.inspection.identities import examine_identities
from inspector.inspection.inside import InsideStep, compare_inside
from inspector.inspection.lineage import examine_lineages, lineage_text
from inspector.inspection.provenance import ChipReport, examine_chip
from inspector.inspection.transcripts import Transcript, open_run, read_transcript
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome, Reason, Verdict
from inspector.inspection.wording import acceptance, outcomes_by_lab, scope, signed_text
from inspector.probability.chances import chances
from inspector.replay.pool import run_worker
from inspector.replay.segment import Segment, segment_of, segments
from monitor.transcript import RunFolder

__all__ = ["Worker", "draw", "inspect", "judge", "replay", "verify"]

Worker = Callable[[str, dict[str, Any]], dict[str, Any]]
"""Runs a job on the named device; ``inspector.devices.run_worker`` in production."""


def draw(items: Iterable[str], count: int, seed: bytes) -> list[str]:
    """Draw ``count`` different items: those with the smallest SHA-256(seed ‖ item), which anyone can check."""
    return sorted(items, key=lambda item: hashlib.sha256(seed + item.encode()).digest())[:count]


def secret_of(settings: Settings) -> str:
    """The verifier's secret for the draw: fresh from the system's randomness, unless a simulation fixes it."""
    return os.urandom(32).hex() if settings.seed is None else settings.seed


def challenge_seed(secret: str, runs: Sequence[RunFolder]) -> bytes:
    """H(verifier's secret ‖ run manifests): the lab commits to everything, quotes included, before it can know this."""
    hasher = hashlib.sha256(b"chipwitness/draw/1")
    hasher.update(hashlib.sha256(secret.encode()).digest())
    for digest in sorted(hashlib.sha256(run.manifest_bytes).digest() for run in runs):
        hasher.update(digest)
    return hasher.digest()


def verify(folder: Path, trust: Trust, *, now: datetime, answers: Sequence[Path] = ()) -> Verdict:
    """Check everything of one run that needs no re-execution, on all chips that the registry gives to its lab.

    Args:
        answers: folders with the evidence of chips that take part in no run.
    """
    settings = Settings(samples=0, seed=None, devices=())
    outside = Answers(answers)
    findings = Findings(settings)
    evidence: dict[str, Any] = {"run": folder.name}
    run = findings.read(lambda: open_run(folder, trust), run=folder.name)
    transcript = None if run is None else read_transcript(run, trust, findings, now=now)
    if transcript is None:
        return Verdict.of(findings.found, findings.doubts, evidence, accept="")
    _describe(transcript, evidence)
    _check_registered(transcript, trust, findings)
    evidence["chips_listed"] = trust.source
    evidence["lineages"] = examine_lineages([transcript], trust, findings, replayed=False)
    waiting = 0
    if transcript.run.finished:
        chips = trust.chips_of(transcript.run.metadata.lab)
        reports = [examine_chip(chip, [transcript], trust, findings, answers=outside) for chip in chips]
        evidence["chips"] = [report.to_json() for report in reports]
        evidence["clones"] = examine_identities([transcript], trust, outside, findings)
        waiting = sum(len(report.inside) for report in reports)
    text = f"files, log, data, checkpoints and chips of {folder.name} are consistent; nothing was re-executed"
    text += f", so that {waiting} snapshots inside of steps were not compared" if waiting else ""
    text += f"; {trust.source}"
    text += numbers_text([evidence["execution"]]) + lineage_text(evidence["lineages"]) + signed_text([transcript])
    return Verdict.of(findings.found, findings.doubts, evidence, accept=text, scope=scope([transcript]))


def inspect(
    folders: Sequence[Path],
    trust: Trust,
    settings: Settings,
    *,
    now: datetime,
    worker: Worker = run_worker,
    memory: Mapping[str, LogPosition] | None = None,
    answers: Sequence[Path] = (),
    ask: Ask | None = None,
) -> Verdict:
    """Draw chips, check their evidence, match their snapshots to the runs, and replay segments on other devices.

    Args:
        folders: all runs that the lab (or the labs) declare.
        now: the time of the inspection; a run that is unfinished after its declared end is rejected.
        memory: where each chip's log ended at earlier inspections (inspector.inspection.memory); it must go on from
            there, and the verdict says how many of the drawn chips did. None for an inspector who remembers nothing.
        answers: folders with the evidence of chips that take part in no run.
        ask: challenges drawn chips live, after the draw, and no older quote of theirs counts; None where the verdict
            goes by what was handed over.

    Raises:
        CallerError: no run, no device, or more samples than the registry has chips.
    """
    if not folders:
        raise CallerError("no run to inspect")
    if not settings.devices:
        raise CallerError("no replay device was named")
    for name in settings.devices:
        device(name)
    findings = Findings(settings)
    outside = Answers(answers)
    evidence: dict[str, Any] = {"runs": []}
    transcripts = []
    unread: dict[str, str] = {}
    for folder in folders:
        before = len(findings.found)
        run = findings.read(partial(open_run, folder, trust), run=folder.name)
        transcript = None if run is None else read_transcript(run, trust, findings, now=now)
        if transcript is None and run is not None:
            outcome = Outcome.REJECT if len(findings.found) > before else Outcome.INCONCLUSIVE
            unread[run.metadata.lab] = outcome.value
        if transcript is not None:
            transcripts.append(transcript)
            described: dict[str, Any] = {"run": folder.name}
            _describe(transcript, described)
            evidence["runs"].append(described)
            _check_registered(transcript, trust, findings)
    evidence["lineages"] = examine_lineages(transcripts, trust, findings)
    labs = {transcript.run.metadata.lab for transcript in transcripts} or set(trust.labs)
    pool = [chip for lab in sorted(labs) for chip in trust.chips_of(lab)]
    if not 1 <= settings.samples <= len(pool):
        raise CallerError(f"cannot draw {settings.samples} of {len(pool)} registered chips")
    if len(transcripts) < len(folders):
        # What one lab's run hides says nothing about another lab, which was not judged then.
        evidence["labs"] = dict.fromkeys(sorted(labs), Outcome.INCONCLUSIVE.value) | unread
        return Verdict.of(findings.found, findings.doubts, evidence, accept="")
    _check_equivocation(transcripts, findings)
    secret = secret_of(settings)
    seed = challenge_seed(secret, [transcript.run for transcript in transcripts])
    drawn = draw(pool, settings.samples, seed)
    evidence["draw"] = {"secret": secret, "simulated": settings.seed is not None}
    evidence["drawn_chips"] = sorted(drawn)
    evidence["registered_chips"] = len(pool)
    evidence["chips_listed"] = trust.source
    shortest = min((item.run.declared.checkpoint_every for item in transcripts), default=1)
    evidence["chances"] = chances(
        chips=len(pool),
        drawn=len(drawn),
        rate=trust.chip_trust.snapshot_rate,
        segment=shortest if settings.segments is None else None,
    )
    complete = [item for item in transcripts if item.run.finished and len(item.leaves) == item.run.declared.steps + 1]
    # A chip that only an unfinished run uses has not been asked yet; every other chip must have answered.
    told = {chip for item in complete for chip in item.run.metadata.chips}
    busy = {chip for item in transcripts if not item.run.finished for chip in item.run.metadata.chips} - told
    asked = [chip for chip in sorted(drawn) if chip not in busy] if complete else []
    if ask is not None:
        outside.challenge(asked, ask, trust.verifier)
    evidence["clones"] = examine_identities(transcripts, trust, outside, findings)
    if complete:
        known, seconds = memory or {}, int(now.timestamp())
        reports = [
            examine_chip(chip, transcripts, trust, findings, answers=outside, last=known.get(chip), now=seconds)
            for chip in asked
        ]
        evidence["chips"] = [report.to_json() for report in reports]
        if memory is not None:
            evidence["known_chips"] = [report.chip for report in reports if report.extends is not None]
            evidence["extended_chips"] = [report.chip for report in reports if report.extends]
        if not any(report.snapshots for report in reports) and not findings.found:
            findings.doubt("the drawn chips hold no snapshot, and none was due: there is nothing to match")
        _replay(complete, reports, trust, settings, seed, findings, evidence, worker)
    evidence["labs"] = outcomes_by_lab(findings, transcripts, trust)
    accept = acceptance(evidence) + signed_text(transcripts)
    not_said = scope(transcripts, live=ask is not None, beacons=trust.beacon_seconds is not None)
    return Verdict.of(findings.found, findings.doubts, evidence, accept=accept, scope=not_said)


def replay(folder: Path, trust: Trust, index: int, name: str, *, worker: Worker = run_worker) -> Verdict:
    """Re-execute one segment on a device and compare every step of it with what was committed.

    Raises:
        CallerError: unknown device, or no such segment.
    """
    device(name)
    run = open_run(folder, trust)
    if run.declared.numerics == "native":
        raise CallerError("a run with native numerics cannot be replayed bit for bit")
    segment = segment_of(run, index)
    findings = Findings(Settings(samples=0, seed=None, devices=(name,)))
    leaves, tree = run.load_steps()
    if len(leaves) <= segment.stop:
        raise CallerError(f"segment {index} is not complete; {len(leaves) - 1} steps are committed")
    agreed = agreement_of(run, trust)
    report = examine_execution(run, leaves, agreed, findings)
    transcript = Transcript(
        run=run, agreed=agreed, leaves=leaves, tree=tree, data=run.batches(), region_tables=[], execution=report
    )
    if not report.executable:
        return Verdict.of(findings.found, findings.doubts, {"replays": []}, accept="")
    job = _job(transcript, trust, [segment], findings)
    described = judge(name, transcript, [segment], worker(name, job), findings)
    return Verdict.of(
        findings.found,
        findings.doubts,
        {"replays": [described]},
        accept=f"segment {index} (steps {segment.start + 1} … {segment.stop}) replays bit for bit on {name}",
    )


def _job(
    transcript: Transcript,
    trust: Trust,
    chosen: list[Segment],
    findings: Findings,
    inside: Sequence[InsideStep] = (),
) -> dict[str, Any]:
    return {
        "action": "replay",
        "run": str(transcript.run.folder.resolve()),
        "manifest": verified_manifest(transcript.run),
        "lab_key": trust.key_of(transcript.run.metadata.lab).raw.hex(),
        "segments": [segment.index for segment in chosen],
        "inside": [[snapshot.step, snapshot.operators] for snapshot in inside],
        "check_rounding": findings.is_on(Guard.ROUNDING),
    }


def verified_manifest(run: RunFolder) -> str:
    """SHA-256 of the manifest that this process verified, which every device must find again."""
    return run.manifest_digest


def _check_registered(transcript: Transcript, trust: Trust, findings: Findings) -> None:
    """A run may use only chips that the registry gives to its lab; whatever else it lists counts for nothing."""
    run = transcript.run
    registered = trust.chips_of(run.metadata.lab)
    for chip in run.metadata.chips:
        if chip not in registered:
            text = f"chip {chip}: the run uses it, but the registry does not give it to lab {run.metadata.lab}"
            said = "" if trust.registry is None else trust.registry.why_not(chip)
            text = f"chip {chip}: the run uses it, but {said}" if said else text
            findings.add(Guard.IDENTITY, text, run=run.folder.name, chip=chip)


def _check_equivocation(transcripts: list[Transcript], findings: Findings) -> None:
    """One run has one transcript: two logs of one run id that differ prove by themselves that the lab lied."""
    seen: dict[str, Transcript] = {}
    for transcript in transcripts:
        run = transcript.run
        other = seen.setdefault(run.manifest.run, transcript)
        if other is transcript:
            continue
        if other.run.manifest_bytes == run.manifest_bytes:
            raise CallerError(f"{run.folder} was given twice")
        text = f"{other.run.folder.name} and {run.folder.name} are two transcripts of one run"
        findings.found.append(Reason(guard="evidence", text=text, where={"run_id": run.manifest.run}))


def _describe(transcript: Transcript, evidence: dict[str, Any]) -> None:
    run = transcript.run
    evidence["run_id"] = run.manifest.run
    evidence["lab"] = run.metadata.lab
    evidence["steps"] = max(len(transcript.leaves) - 1, 0)
    evidence["numerics"] = run.declared.numerics
    evidence["execution"] = transcript.execution.to_json()
    evidence["training_device"] = run.metadata.device
    evidence["state_digest"] = str(transcript.leaves[-1].state.root) if transcript.leaves else None
    evidence["log_root"] = transcript.tree.root().hex()
    evidence["flop"] = sum(leaf.flop for leaf in transcript.leaves)


def _replay(
    transcripts: list[Transcript],
    reports: list[ChipReport],
    trust: Trust,
    settings: Settings,
    seed: bytes,
    findings: Findings,
    evidence: dict[str, Any],
    worker: Worker,
) -> None:
    """Replay the chosen segments of each run on each device and compare with what was committed."""
    jobs = []
    looked_at: dict[str, list[InsideStep]] = {}
    for transcript in transcripts:
        if not transcript.execution.executable:
            continue
        if transcript.run.declared.numerics == "native":
            findings.add(
                Guard.REPLAY,
                "the run used native numerics, which no other device can reproduce: its provenance cannot be shown",
                run=transcript.run.folder.name,
            )
            continue
        chosen = _choose(transcript, reports, settings, seed)
        inside = looked_at[transcript.run.manifest.run] = _inside(transcript, reports, chosen)
        job = _job(transcript, trust, chosen, findings, inside)
        jobs += [(name, transcript, chosen, job) for name in settings.devices]
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        results = list(pool.map(lambda entry: _attempt(worker, entry[0], entry[3]), jobs))
    evidence["replays"] = []
    for (name, transcript, chosen, _), result in zip(jobs, results, strict=True):
        if isinstance(result, DeviceError):
            findings.doubt(str(result), device=name)
            continue
        inside = looked_at[transcript.run.manifest.run]
        evidence["replays"].append(judge(name, transcript, chosen, result, findings, inside))
    evidence["snapshots_inside_steps"] = sum(len(report.inside) for report in reports)
    evidence["snapshots_compared_inside_steps"] = sum(map(len, looked_at.values()))
    for transcript in transcripts:
        trained_on = transcript.run.metadata.device["fingerprint"]
        mine = [replay for replay in evidence["replays"] if replay["run"] == transcript.run.folder.name]
        if mine and all(replay["fingerprint"] == trained_on for replay in mine):
            findings.doubt(
                "every replay device computes like the training device, so the replay shows little; name another",
                run=transcript.run.folder.name,
            )


def _inside(transcript: Transcript, reports: Sequence[ChipReport], chosen: Sequence[Segment]) -> list[InsideStep]:
    """The snapshots of drawn chips that fell inside of steps which are replayed."""
    run_id = transcript.run.manifest.run
    every = [snapshot for report in reports for snapshot in report.inside if snapshot.run_id == run_id]
    return [snapshot for snapshot in every if any(snapshot.step in segment for segment in chosen)]


def _attempt(worker: Worker, name: str, job: dict[str, Any]) -> dict[str, Any] | DeviceError:
    try:
        return worker(name, job)
    except DeviceError as error:
        return error


def _choose(transcript: Transcript, reports: list[ChipReport], settings: Settings, seed: bytes) -> list[Segment]:
    """The first segment, and those that hold a snapshot of a drawn chip: ``settings.segments`` in all, drawn."""
    every = segments(transcript.run)
    mine = transcript.run.manifest.run
    steps = {step for report in reports for run_id, step, _ in report.snapshots if run_id == mine}
    wanted = [every[0]] + [segment for segment in every[1:] if any(step in segment for step in steps)]
    if settings.segments is None:
        return wanted
    if settings.segments < 1:
        raise CallerError("at least one segment must be replayed")
    return first_and_drawn(wanted, settings.segments, seed)


def first_and_drawn(wanted: list[Segment], count: int, seed: bytes) -> list[Segment]:
    """The first of the segments, where a forged start would show, and ``count`` - 1 drawn among the others."""
    drawn = set(draw([str(segment.index) for segment in wanted[1:]], count - 1, seed))
    return [wanted[0], *(segment for segment in wanted[1:] if str(segment.index) in drawn)]


def judge(
    name: str,
    transcript: Transcript,
    chosen: list[Segment],
    result: dict[str, Any],
    findings: Findings,
    inside: Sequence[InsideStep] = (),
) -> dict[str, Any]:
    """Compare what a device answered with what the run and its chips said; what differs goes to ``findings``.

    Args:
        inside: snapshots inside of the chosen segments' steps.
    """
    run = transcript.run
    described: dict[str, Any] = {
        "run": run.folder.name,
        "device": name,
        "fingerprint": str(result.get("fingerprint")),
        "seconds": result.get("seconds"),
        "segments": [segment.index for segment in chosen],
        "segments_in_run": len(segments(run)),
    }
    if "evidence_error" in result:
        findings.add(Guard.REPLAY, str(result["evidence_error"]), run=run.folder.name, device=name)
        return {**described, "equal": False}
    try:
        before, compared = len(findings.found), 0
        for segment, replay in zip(chosen, result["replays"], strict=True):
            compare_replay(transcript, segment, replay, name, findings)
            shown = [snapshot for snapshot in inside if snapshot.step in segment]
            compared += compare_inside(transcript, shown, replay, name, findings)
        replays = result["replays"]
        described["snapshots_inside_steps"] = compared
        described["steps"] = sum(len(replay["leaves"]) for replay in replays)
        described["logged_decisions"] = sum(int(replay["logged"]) for replay in replays)
        described["turned_decisions"] = sum(int(replay["turned"]) for replay in replays)
        turned = [int(replay["first_turned_step"]) for replay in replays if replay["first_turned_step"] is not None]
        described["first_turned_step"] = min(turned, default=None)
    except (LookupError, ValueError, TypeError, AttributeError, EvidenceError) as error:
        findings.doubt(f"device {name} gave an answer of another form: {error}", device=name)
        return {**described, "equal": False}
    described["equal"] = len(findings.found) == before
    return described
