"""An inspection, from the draw of chips to the verdict (Shavit 2023, sections 3–5).

A verdict is a function of frozen settings, trust anchors, evidence and what the replay devices return.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from firmware_sim import NO_WORK, TICK, LogPosition
from firmware_sim.errors import CallerError, DeviceError, EvidenceError
from inspector.devices import device
from inspector.inspection.agreement import agreement_of
from inspector.inspection.answers import Answers, Ask
from inspector.inspection.casefile import CaseFile
from inspector.inspection.comparison import compare_replay
from inspector.inspection.disclosure import Checked, ThinRun
from inspector.inspection.execution import examine_execution, numbers_text
from inspector.inspection.findings import Findings
from inspector.inspection.forks import check_equivocation, check_goes_on
from inspector.inspection.gradients import check_returned
from inspector.inspection.guards import Guard, Settings
from inspector.inspection.identities import examine_identities
from inspector.inspection.lineage import check_signed, examine_lineages, lineage_text
from inspector.inspection.mid_step_snapshots import InsideStep, compare_inside
from inspector.inspection.ownership import past_spans
from inspector.inspection.past_spans import check_registered, examine_past
from inspector.inspection.paths import NO_LOOKS, Looks, check_witness, looks_in
from inspector.inspection.provenance import ChipReport, examine_chip, runs_of_owner, sources_of
from inspector.inspection.rounding_logs import examine
from inspector.inspection.run_lookup import given_runs
from inspector.inspection.sampling import (
    Chosen,
    challenge_seed,
    choose,
    draw,
    evaluations_in,
    nonce_of,
    odds_of,
    run_seed,
    witness_draw,
)
from inspector.inspection.shards import OpenShard, examine_shards
from inspector.inspection.slack import judge_slack
from inspector.inspection.suppression import judge_draws
from inspector.inspection.transcripts import Transcript, open_run, read_transcript
from inspector.inspection.trust import Trust, rates_json
from inspector.inspection.verdict import Outcome, Verdict
from inspector.inspection.wording import acceptance, ignored_text, logs_text, outcomes_by_lab, scope, signed_text
from inspector.probability.chances import chances, unseen
from inspector.replay.changes import joined_changes
from inspector.replay.decisions import Decisions
from inspector.replay.pool import run_worker
from inspector.replay.scheduler import at_once
from inspector.replay.segment import Segment, segment_of, segments
from monitor.declaration.countersignature import Countersigned
from monitor.replay.ledger import Kind, total
from monitor.transcript import RunFolder

__all__ = ["Worker", "inspect", "judge", "replay", "verify"]

Worker = Callable[[str, dict[str, Any]], dict[str, Any]]
"""Runs a job on the named device; ``inspector.replay.pool.run_worker`` in production."""


def secret_of(settings: Settings) -> str:
    """The verifier's secret for the draw: fresh from the system's randomness, unless a simulation fixes it."""
    return os.urandom(32).hex() if settings.seed is None else settings.seed


def verify(folder: Path, trust: Trust, *, now: datetime, answers: Sequence[Path] = ()) -> Verdict:
    """Check everything of one run that needs no re-execution, on all chips that the registry gives to its lab.

    Args:
        answers: folders with the evidence of chips that take part in no run.
    """
    outside = Answers(answers)
    findings = Findings()
    [given] = given_runs([folder], trust, partial(open_run, trust=trust))
    evidence: dict[str, Any] = {"run": folder.name}
    run = findings.read(given.open, **given.where)
    transcript = None if run is None else read_transcript(run, trust, findings, now=now)
    if transcript is None:
        return Verdict.of(findings.found, findings.doubts, evidence, accept="")
    _describe(transcript, evidence)
    check_registered(transcript, trust, findings)
    evidence["chips_listed"] = trust.source
    evidence["lineages"] = examine_lineages([transcript], trust, findings, replayed=False)
    waiting = 0
    if transcript.run.finished:
        lab = transcript.run.metadata.lab
        past, heard, _ = examine_past([lab], [transcript], trust, findings, outside, {})
        chips = trust.chips_of(lab)
        reports = [examine_chip(chip, [transcript], trust, findings, answers=outside, heard=heard) for chip in chips]
        reports, evidence["past_spans"] = reports + past, [report.to_json() for report in past]
        blamed = [transcript.run.metadata.lab] if findings.found else []
        evidence["ledger"] = judge_slack(reports, [transcript], trust, findings, {}, blamed=blamed)
        evidence |= judge_draws(reports, trust.chip_trust.snapshot_rate, findings)
        evidence["chips"] = [report.to_json() for report in reports if report not in past]
        evidence["clones"] = examine_identities([transcript], trust, outside, findings)
        waiting = sum(len(report.inside) for report in reports)
    text = f"files, log, data, checkpoints and chips of {folder.name} are consistent; nothing was re-executed"
    text += f", so that {waiting} snapshots inside of steps were not compared" if waiting else ""
    text += (
        "; its native numerics cannot be repeated by any replay" if transcript.run.declared.numerics == "native" else ""
    )
    text += ignored_text([evidence | {"run": folder.name}]) + f"; {trust.source}"
    text += numbers_text([evidence["execution"]]) + lineage_text(evidence["lineages"])
    text += signed_text(_terms([transcript]))
    not_said = scope([transcript.run.declared], trust)
    return Verdict.of(findings.found, findings.doubts, evidence, accept=text, scope=not_said)


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
    open_shard: OpenShard | None = None,
    labs: Collection[str] | None = None,
    heads: Collection[str] | None = None,
    earlier: Sequence[bytes] = (),
    accepted: Mapping[str, int] | None = None,
    excused: Mapping[str, Sequence[str]] | None = None,
    checks: Mapping[str, Checked] | None = None,
    case: CaseFile | None = None,
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
        open_shard: opens what drawn chips' snapshots cover, where a lab has stored it.
        labs: whose chips are drawn, of labs that declare nothing too; None for the labs whose runs are given.
        heads: SHA-256, in hex, of each manifest that labs handed over before the draw; None for those of the runs.
        earlier: heads of runs that labs signed at earlier inspections; a run of the same id must go on from them.
        accepted: by id of a run, the step up to which one of these inspections has accepted it; what comes before is
            not replayed again.
        excused: by lab, the runs whose boots were excused at earlier inspections (``slack``).
        checks: what a cluster says of a run whose states and samples the folder lacks (``inspection.disclosure``), by
            the SHA-256, in hex, of its manifest.
        case: is filled with what the verdict rests on (inspector.bundle).

    Raises:
        CallerError: no run, no device, or more samples than the registry has chips.
    """
    if not folders and labs is None:
        raise CallerError("no run to inspect")
    if labs is not None and not set(labs) <= set(trust.labs):
        raise CallerError(f"lab {sorted(set(labs) - set(trust.labs))[0]!r} is not registered")
    if not settings.devices:
        raise CallerError("no replay device was named")
    for name in settings.devices:
        device(name)
    findings = Findings()
    outside = Answers(answers)
    evidence: dict[str, Any] = {"runs": [], "time": f"{now:%Y-%m-%dT%H:%M:%SZ}"}
    case = CaseFile() if case is None else case
    case.earlier = list(earlier)
    transcripts = case.transcripts
    unread: set[str | None] = set()
    every = given_runs(folders, trust, partial(open_run, trust=trust, thin=checks is not None))
    for given in every:
        run = findings.read(given.open, **given.where)
        if isinstance(run, ThinRun) and checks is not None:
            run.checked = checks.get(run.manifest_digest)
        case.heads += [] if run is None else [run.manifest_bytes]
        live = ask is not None
        transcript = None if run is None else read_transcript(run, trust, findings, now=now, live=live)
        if transcript is None:
            unread.add(given.where.get("lab"))
        else:
            transcripts.append(transcript)
            described: dict[str, Any] = {"run": transcript.run.name}
            _describe(transcript, described)
            evidence["runs"].append(described)
            check_registered(transcript, trust, findings)
    ids = {item.run.manifest.run for item in transcripts}
    evidence["accepted_before"] = {run: step for run, step in sorted((accepted or {}).items()) if run in ids}
    evidence["lineages"] = examine_lineages(transcripts, trust, findings)
    asked_labs = under_inspection({each.where["lab"] for each in every if "lab" in each.where}, trust, labs)
    if unread and (labs is None or None in unread):
        # What one lab's run hides says nothing about another lab, which was not judged to its end then.
        evidence["labs"] = outcomes_by_lab(findings, trust, asked_labs, ended=False)
        return Verdict.of(findings.found, findings.doubts, evidence, accept="")
    pool = [chip for lab in asked_labs for chip in trust.chips_of(lab)]
    if not 1 <= settings.samples <= len(pool) and (pool or not past_spans(asked_labs, trust)):
        raise CallerError(f"cannot draw {settings.samples} of {len(pool)} registered chips")
    check_equivocation(transcripts, findings)
    evidence["forks"] = check_goes_on(transcripts, earlier, trust, findings)
    secret = secret_of(settings)
    committed = sorted(heads if heads is not None else (each.run.manifest_digest for each in transcripts))
    seed = challenge_seed(secret, committed)
    drawn = draw(pool, min(settings.samples, len(pool)), seed)
    simulated = settings.seed is not None and not settings.committed
    evidence["draw"] = {"secret": secret, "simulated": simulated, "heads": committed, "every_lab": labs is not None}
    evidence["drawn_chips"] = sorted(drawn)
    evidence["registered_chips"] = len(pool)
    evidence["chips_listed"] = trust.source
    evidence |= {"rates": rates_json({chip: trust.rates[chip] for chip in drawn if chip in trust.rates})}
    complete = [item for item in transcripts if item.run.finished and len(item.leaves) == item.run.declared.steps + 1]
    if ask is not None:  # of a run that goes on, up to the head
        complete += [item for item in transcripts if not item.run.finished and len(item.leaves) > 1]
    # A chip that only an unfinished run uses has not been asked yet; every other chip must have answered.
    complete_chips = {chip for item in complete for chip in item.run.metadata.chips}
    busy = {chip for item in transcripts if not item.run.finished for chip in item.run.metadata.chips} - complete_chips
    asked = [chip for chip in sorted(drawn) if chip not in busy] if complete or labs is not None else []
    asked = [chip for chip in asked if trust.chips[chip] not in unread]  # nothing is known of their runs
    if ask is not None:
        nonces = {"nonces": partial(nonce_of, seed)} if settings.committed else {}
        for chip in asked:
            outside.challenge([chip], ask, trust.challenge_of(trust.chips[chip])[0], **nonces)
    case.drawn = {chip: sources_of(chip, runs_of_owner(chip, transcripts, trust), outside) for chip in drawn}
    evidence["clones"] = examine_identities(transcripts, trust, outside, findings)
    reports: list[ChipReport] = []
    if complete or labs is not None:
        known, seconds = memory or {}, int(now.timestamp())
        judged = [lab for lab in asked_labs if lab not in unread]
        past, heard, deposits = examine_past(judged, transcripts, trust, findings, outside, known)
        case.drawn |= deposits
        held = [
            examine_chip(
                chip, transcripts, trust, findings, answers=outside, last=known.get(chip), now=seconds, heard=heard
            )
            for chip in asked
        ]
        reports = held + past
        outcomes = outcomes_by_lab(findings, trust, asked_labs)
        blamed = [lab for lab, outcome in outcomes.items() if outcome == Outcome.REJECT.value]
        evidence["ledger"] = judge_slack(reports, transcripts, trust, findings, excused or {}, blamed=blamed)
        evidence |= judge_draws(reports, trust.chip_trust.snapshot_rate, findings)
        evidence["chips"] = [report.to_json() for report in held]
        evidence["past_spans"] = [report.to_json() for report in past]
        check_signed(transcripts, evidence, trust, findings)
        evidence |= _repeats(reports, trust) | _coinciding(transcripts)
        case.prunable = {report.chip: report.prunable for report in held if report.prunable is not None}
        case.unseen = {report.lab: report.unseen for report in reports if report.unseen}
        if memory is not None:
            evidence["known_chips"] = [report.chip for report in held if report.extends is not None]
            evidence["extended_chips"] = [report.chip for report in held if report.extends]
        seen = bool(reports) and all(report.start for report in reports) and _all_accepted(transcripts, accepted or {})
        if transcripts and not any(report.taken for report in reports) and not findings.found and not seen:
            since = " since the checkpoints that they were pruned by" if any(report.start for report in reports) else ""
            findings.doubt(f"the drawn chips hold no snapshot{since}, and none was due: there is nothing to match")
        case.replays = _replay(complete, reports, trust, settings, seed, findings, evidence, worker, accepted or {})
        if open_shard is not None:
            evidence["shards"] = examine_shards(transcripts, reports, trust, open_shard, findings)
    evidence["chances"] = chances(
        chips=len(pool) or 1,
        drawn=len(drawn) or 1,
        rate=trust.chip_trust.snapshot_rate,
        uniform=settings.sampling is not None,
        live=ask is not None,
        slack=any(report.ledger is None or report.ledger["slack"]["calls"] for report in reports),
    )
    evidence["labs"] = outcomes_by_lab(findings, trust, asked_labs)
    accept = acceptance(evidence, _terms(transcripts))
    not_said = scope(
        [item.run.declared for item in transcripts],
        trust,
        live=ask is not None,
        beacons=trust.beacon_seconds is not None,
        every=labs is not None,
        replays=evidence.get("replays", ()),
    )
    return Verdict.of(findings.found, findings.doubts, evidence, accept=accept, scope=not_said)


def _terms(transcripts: Iterable[Transcript]) -> list[tuple[str, Sequence[Countersigned]]]:
    return [(item.run.name, item.agreed.terms) for item in transcripts]


def _repeats(reports: Sequence[ChipReport], trust: Trust) -> dict[str, Any]:
    """What snapshots show of steps that were repeated: how many fell in there, and how likely work escapes them all."""
    kinds = (Kind.REPEATS, Kind.BACK)
    escapes, seen = 1.0, False
    for report in reports:
        work = total(book.counts[kind] for book in (report.books or {}).values() for kind in kinds)
        if work != NO_WORK and report.rates is not None:
            escapes *= unseen(report.rates.time(work) / TICK, trust.chip_trust.snapshot_rate)
            seen = True
    shots = sum(len(report.repeated) for report in reports)
    return {"repeats": {"snapshots": shots, "escapes": escapes}} if seen else {}


def _coinciding(transcripts: Sequence[Transcript]) -> dict[str, Any]:
    """Runs that pass through one state, so that a snapshot of it says less of which it was taken."""
    found: dict[str, list[str]] = {}
    for item in transcripts:
        for state in {str(leaf.state.root) for leaf in item.leaves}:
            found.setdefault(state, []).append(item.run.manifest.run)
    pairs = Counter(tuple(sorted(runs)) for runs in found.values() if len(runs) > 1)
    return {"coinciding": [{"runs": list(runs), "states": count} for runs, count in sorted(pairs.items())]}


def _all_accepted(transcripts: Sequence[Transcript], accepted: Mapping[str, int]) -> bool:
    """Whether an earlier inspection has accepted every step of these runs, so that nothing is left to be matched."""
    return all(accepted.get(item.run.manifest.run, -1) >= len(item.leaves) - 1 for item in transcripts)


def under_inspection(declared: Collection[str], trust: Trust, labs: Collection[str] | None) -> list[str]:
    """The labs whose chips are drawn: those that are named, or whose runs are given."""
    return sorted(set(declared) | set(labs or ()) or set(trust.labs))


def replay(
    folder: Path, trust: Trust, index: int, name: str, *, draw: bytes | None = None, worker: Worker = run_worker
) -> Verdict:
    """Re-execute one segment on a device and compare every step of it with what was committed.

    Args:
        draw: of the batches that are altered where a path was not agreed, as another verdict names it; None for a fresh
            one.

    Raises:
        CallerError: unknown device, or no such segment.
    """
    device(name)
    run = open_run(folder, trust)
    if run.declared.numerics == "native":
        raise CallerError("a run with native numerics cannot be replayed bit for bit")
    segment = segment_of(run, index)
    findings = Findings()
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
    looks = looks_in(transcript, {segment: os.urandom(32) if draw is None else draw})
    job = _job(transcript, trust, [segment], looks=looks)
    described = judge(name, transcript, [segment], worker(name, job), findings, looks=looks)
    return Verdict.of(
        findings.found,
        findings.doubts,
        {"replays": [described]},
        accept=f"segment {index} (steps {segment.start + 1} … {segment.stop}) replays bit for bit on {name}"
        + logs_text([described]),
    )


def _job(
    transcript: Transcript,
    trust: Trust,
    chosen: Sequence[Segment],
    inside: Sequence[InsideStep] = (),
    looks: Looks = NO_LOOKS,
) -> dict[str, Any]:
    return {
        "action": "replay",
        "run": str(transcript.run.folder.resolve()),
        "manifest": verified_manifest(transcript.run),
        "lab_key": trust.key_of(transcript.run.metadata.lab).raw.hex(),
        "segments": [segment.index for segment in chosen],
        "inside": [[snapshot.step, snapshot.operators] for snapshot in inside],
        "looks": looks,
    }


def verified_manifest(run: RunFolder) -> str:
    """SHA-256 of the manifest that this process verified, which every device must find again."""
    return run.manifest_digest


def _describe(transcript: Transcript, evidence: dict[str, Any]) -> None:
    run = transcript.run
    evidence["run_id"] = run.manifest.run
    evidence["ignored"] = run.ignored
    evidence["lab"] = run.metadata.lab
    evidence["steps"] = max(len(transcript.leaves) - 1, 0)
    evidence["finished"] = run.finished
    evidence["declared_steps"] = run.declared.length
    evidence["numerics"] = run.declared.numerics
    evidence["execution"] = transcript.execution.to_json()
    terms = transcript.agreed.terms
    evidence["statements"] = [{"number": each.number, "since": each.since, "signed": each.signed} for each in terms]
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
    accepted: Mapping[str, int],
) -> list[dict[str, Any]]:
    """Replay the chosen segments of each run on each device, compare with what was committed, return the answers."""
    jobs = []
    looked_at: dict[str, list[InsideStep]] = {}
    evidence["odds"] = []
    for transcript in transcripts:
        if not transcript.execution.executable:
            continue
        if transcript.run.declared.numerics == "native":
            findings.add(
                Guard.REPLAY,
                "the run used native numerics, which no other device can reproduce: its provenance cannot be shown",
                **transcript.run.where,
            )
            continue
        picked = _choose(transcript, reports, settings, seed, accepted.get(transcript.run.manifest.run, 0))
        if not picked.segments:
            continue  # nothing is new
        odds = {"run": transcript.run.name, "run_id": transcript.run.manifest.run}
        drawn = run_seed(seed, transcript.run.manifest.run)
        evidence["odds"].append(odds | odds_of(picked, settings))
        looked_at[transcript.run.manifest.run] = _inside(transcript, reports, picked.segments)
        for name, chosen in picked.dealt.items():
            inside = _inside(transcript, reports, chosen)
            looks = looks_in(transcript, {each: witness_draw(drawn, each.index) for each in chosen})
            job = _job(transcript, trust, chosen, inside, looks)
            jobs.append((name, transcript, chosen, job))
    results = at_once(lambda entry: _attempt(worker, entry[0], entry[3]), jobs)
    evidence["replays"] = []
    for (name, transcript, chosen, job), result in zip(jobs, results, strict=True):
        if isinstance(result, DeviceError):
            findings.doubt(str(result), **transcript.run.where, device=name)
            continue
        inside = looked_at[transcript.run.manifest.run]
        evidence["replays"].append(judge(name, transcript, chosen, result, findings, inside, job["looks"]))
    evidence["snapshots_inside_steps"] = sum(len(report.inside) for report in reports)
    evidence["snapshots_compared_inside_steps"] = sum(map(len, looked_at.values()))
    for transcript in transcripts:
        trained_on = transcript.run.metadata.device["fingerprint"]
        mine = [replay for replay in evidence["replays"] if replay["run_id"] == transcript.run.manifest.run]
        shown = {index for replay in mine if replay["fingerprint"] != trained_on for index in replay["segments"]}
        alike = {index for replay in mine for index in replay["segments"]} - shown
        if alike:
            text = "every replay device computes" if not shown else f"what replayed {len(alike)} segments computes"
            findings.doubt(
                f"{text} like the training device, so the replay shows little; name another",
                **transcript.run.where,
            )
    return [result for result in results if not isinstance(result, DeviceError)]


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


def _choose(transcript: Transcript, reports: list[ChipReport], settings: Settings, seed: bytes, since: int) -> Chosen:
    """The segments of a run to replay, given what drawn chips say of it."""
    run_id = transcript.run.manifest.run
    steps = {step for report in reports for of_run, step, _ in report.snapshots if of_run == run_id}
    every = segments(transcript.run)
    evaluations = evaluations_in(every, transcript.leaves) if transcript.execution.evaluations else {}
    return choose(every, steps, settings, run_seed(seed, run_id), evaluations=evaluations, since=since)


def judge(
    name: str,
    transcript: Transcript,
    chosen: Sequence[Segment],
    result: dict[str, Any],
    findings: Findings,
    inside: Sequence[InsideStep] = (),
    looks: Looks = NO_LOOKS,
) -> dict[str, Any]:
    """Compare what a device answered with what the run and its chips said; what differs goes to ``findings``.

    Args:
        inside: snapshots inside of the chosen segments' steps.
        looks: what the device was to look for.
    """
    run = transcript.run
    described: dict[str, Any] = {
        "run": run.name,
        "run_id": run.manifest.run,
        "device": name,
        "fingerprint": str(result.get("fingerprint")),
        "seconds": result.get("seconds"),
        "segments": [segment.index for segment in chosen],
        "segments_in_run": len(segments(run)),
        "returned": [],
        "dropped": result.get("dropped", []),
    }
    if "evidence_error" in result:
        findings.add(Guard.REPLAY, str(result["evidence_error"]), **run.where, device=name)
        return {**described, "equal": False}
    try:
        before, compared = len(findings.found), 0
        changes: list[list[float | None]] = []
        measured = 0
        for segment, replay in zip(chosen, result["replays"], strict=True):
            agreed = compare_replay(transcript, segment, replay, name, findings)
            shown = [snapshot for snapshot in inside if snapshot.step in segment and snapshot.step <= agreed]
            compared += compare_inside(transcript, shown, replay, name, findings)
            if agreed == segment.stop:
                changes.append(replay["changes"])
                measured += len(replay["leaves"])
                check_witness(transcript, replay["witness"], looks.get(str(segment.index)), name, findings)
            described["returned"] += check_returned(transcript, replay["returned"], name, findings)
        replays = result["replays"]
        described["snapshots_inside_steps"] = compared
        described |= {"largest_changes": joined_changes(changes, len(run.declared.groups)), "measured_steps": measured}
        described["steps"] = sum(len(replay["leaves"]) for replay in replays)
        decisions = Decisions.joined(Decisions.from_json(replay["decisions"]) for replay in replays)
        decided = examine(decisions, run.declared.numerics, name)
        described |= decided.to_json()
        for text in decided.doubts:
            findings.doubt(text, **run.where, device=name)
    except (LookupError, ValueError, TypeError, AttributeError, EvidenceError) as error:
        findings.doubt(f"device {name} gave an answer of another form: {error}", **run.where, device=name)
        return {**described, "equal": False}
    described["equal"] = len(findings.found) == before
    return described
