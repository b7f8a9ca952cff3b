"""The replays of an inspection: segments dealt to devices, and their answers compared with what was committed.

Compares what a replay reached with what a run committed to: exactly, digest by digest.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from firmware_sim.errors import CallerError, DeviceError
from firmware_sim.evidence import canonical
from firmware_sim.evidence.canonical import JsonObject
from inspector.devices import device
from inspector.inspection.agreement import agreement_of
from inspector.inspection.chip_report import ChipReport
from inspector.inspection.document import Evidence, Odds, ReplayEvidence
from inspector.inspection.execution import examine_execution
from inspector.inspection.guards import Guard, Settings
from inspector.inspection.mid_step_snapshots import InsideStep, compare_inside
from inspector.inspection.rounding_logs import examine
from inspector.inspection.sampling import Chosen, choose, evaluations_in, odds_of, run_seed, witness_draw
from inspector.inspection.transcripts import Transcript, open_run
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Findings, Verdict
from inspector.inspection.witnesses import Looks, check_returned, check_witness, looks_in
from inspector.inspection.wording import logs_text
from inspector.replay.changes import joined_changes
from inspector.replay.decisions import Decisions
from inspector.replay.pool import run_worker
from inspector.replay.result import MALFORMED, Replayed
from inspector.replay.scheduler import Answer, Worker, at_once
from inspector.replay.segment import Segment, segment_of, segments
from monitor.sharding import StateDigest
from monitor.transcript import Leaf, RunFolder

__all__ = ["Job", "Worker", "compare_replay", "judge", "replay", "replay_drawn", "verified_manifest"]


def compare_replay(
    transcript: Transcript, segment: Segment, answer: Answer, replayed: Replayed, device: str, findings: Findings
) -> int:
    """Every recomputed leaf must equal the committed one; the first that does not is the finding.

    Returns the last step up to which replay and run agree.

    Args:
        answer: what the device returned, which says in what they differ.
        replayed: the same as digests.

    Raises:
        EvidenceError, KeyError, ValueError: the replay's own answer is malformed: the device's fault.
    """
    run = transcript.run
    where: dict[str, object] = {**run.where, "device": device, "segment": segment.index}
    if replayed.segment != (segment.index, segment.start, segment.stop):
        raise ValueError(f"segment {replayed.segment} was replayed, not {segment.index}")
    if not replayed.begins_with(transcript.leaves[segment.start].state):
        StateDigest.from_json(answer["start_state"], run.layout)  # a malformed one is the device's fault
        findings.add(
            Guard.REPLAY,
            f"step {segment.start}: the replay starts from a checkpoint that is not the committed state",
            step=segment.start,
            **where,
        )
        return segment.start - 1
    check_initialised(transcript, segment, answer["initial_state"], device, findings)
    departure = replayed.departure(transcript.leaf)
    if departure is None and not replayed.is_complete:
        stopped = replayed.contradicted_step
        text = f"it has {len(replayed.leaves)} steps of a segment with {segment.stop - segment.start}"
        raise ValueError(text if stopped is None else f"{text}, and says that it stopped at step {stopped}")
    if departure is None:
        return segment.stop
    step, reached = departure
    if reached is not None:
        committed = transcript.leaves[step]
        leaf = Leaf.from_json(answer["leaves"][step - segment.start - 1], run.layout)
        if leaf == committed or leaf.step != step:
            raise ValueError(f"the leaf of step {step} is not in its canonical form, or of another step")
        findings.add(Guard.REPLAY, _difference(transcript, committed, leaf, device), step=step, **where)
        return step - 1
    contradiction = answer["contradiction"]
    place = {key: value for key, value in contradiction.items() if key not in ("text", "obeyed")}
    obeyed = contradiction.get("obeyed")
    if obeyed is not None and Leaf.from_json(obeyed, run.layout) == transcript.leaves[step]:
        guard = Guard.ROUNDING
        what = f"a replay on {device} reaches the committed state only if it follows an edited log"
    else:
        guard = Guard.REPLAY
        declared = transcript.data.describe(step)
        what = f"training on the declared {declared} fails when replayed on {device}"
    findings.add(guard, f"step {step}: {what}: {contradiction['text']}", **place, **where)
    return segment.start + len(replayed.leaves)


def check_initialised(
    transcript: Transcript, segment: Segment, initial: str | None, device: str, findings: Findings
) -> None:
    """The declared initialisation gives the state that the run starts from.

    Raises:
        ValueError: the device did not execute it.
    """
    run = transcript.run
    if segment.start or run.declared.origin.initialisation is None:
        return
    if initial is None:
        raise ValueError("the initialisation was not executed")
    reached, committed = StateDigest.from_json(initial, run.layout), transcript.leaves[0].state
    if reached != committed:
        text = "step 0: the declared initialisation does not reach the state that the run starts from "
        text += f"({_shards(transcript, reached, committed)}) when executed on {device}"
        findings.add(Guard.INITIALISATION, text, **run.where, device=device, step=0)


def _difference(transcript: Transcript, committed: Leaf, reached: Leaf, device: str) -> str:
    step = committed.step
    declared = transcript.data.describe(step)
    if reached.state != committed.state:
        what = f"does not reach the committed state ({_shards(transcript, reached.state, committed.state)})"
    else:
        names = [
            name
            for name in ("batch", "log", "loss", "flop", "execution")
            if getattr(reached, name) != getattr(committed, name)
        ]
        what = f"differs in {', '.join(names)}"
    return f"step {step}: training on the declared {declared} {what} when replayed on {device}"


def _shards(transcript: Transcript, mine: StateDigest, theirs: StateDigest) -> str:
    """Which chips hold shards that differ."""
    chips = transcript.run.metadata.chips
    pairs = zip(chips, mine.shards, theirs.shards, strict=True)
    differing = [chip for chip, one, other in pairs if one != other]
    which = f"all {len(chips)} chips" if len(differing) == len(chips) else ", ".join(differing)
    return f"the shards of {which} differ"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Segments of a run that one device replays.

    Attributes:
        inside: snapshots inside of the segments' steps.
        looks: what the device is to look for.
    """

    device: str
    transcript: Transcript
    chosen: Sequence[Segment]
    inside: Sequence[InsideStep] = ()
    looks: Looks = field(default_factory=dict)

    def to_json(self, trust: Trust) -> dict[str, object]:
        """The job as a worker takes it."""
        run = self.transcript.run
        return {
            "action": "replay",
            "run": str(run.folder.resolve()),
            "manifest": verified_manifest(run),
            "lab_key": trust.key_of(run.metadata.lab).raw.hex(),
            "segments": [segment.index for segment in self.chosen],
            "inside": [[snapshot.step, snapshot.operators] for snapshot in self.inside],
            "looks": self.looks,
        }


def verified_manifest(run: RunFolder) -> str:
    """SHA-256 of the manifest that this process verified, which every device must find again."""
    return run.manifest_digest


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
        raise CallerError(f"segment {index} is not complete: only {len(leaves) - 1} steps are committed")
    agreed = agreement_of(run, trust)
    report = examine_execution(run, leaves, agreed, findings)
    transcript = Transcript(
        run=run, agreed=agreed, leaves=leaves, tree=tree, data=run.batches(), region_tables=[], execution=report
    )
    if not report.executable:
        return Verdict.of(findings.found, findings.doubts, {"replays": []}, accept="")
    looks = looks_in(transcript, {segment: os.urandom(32) if draw is None else draw})
    job = Job(device=name, transcript=transcript, chosen=[segment], looks=looks)
    described = judge(job, worker(name, job.to_json(trust)), findings)
    return Verdict.of(
        findings.found,
        findings.doubts,
        {"replays": [described]},
        accept=f"segment {index} (steps {segment.start + 1} … {segment.stop}) replays bit for bit on {name}"
        + logs_text([described]),
    )


def replay_drawn(
    transcripts: Sequence[Transcript],
    reports: Sequence[ChipReport],
    trust: Trust,
    settings: Settings,
    seed: bytes,
    findings: Findings,
    *,
    worker: Worker,
    accepted: Mapping[str, int],
) -> tuple[Evidence, list[Answer]]:
    """Replay the drawn segments of each run on each device, and compare with what was committed.

    Args:
        seed: of the draw.
        accepted: by id of a run, the step up to which it is not replayed again.

    Returns:
        What the verdict's evidence says of the replays, and what the devices answered, but for malformed answers that
        show nothing.
    """
    odds, jobs, compared = list[Odds](), list[Job](), 0
    for transcript in _replayable(transcripts, findings):
        run_id = transcript.run.manifest.run
        picked = _choose(transcript, reports, settings, seed, accepted.get(run_id, 0))
        if not picked.segments:
            continue  # nothing is new
        odds.append(cast(Odds, {"run": transcript.run.name, "run_id": run_id} | odds_of(picked, settings)))
        compared += len(_inside(transcript, reports, picked.segments))
        jobs += [_job(name, transcript, reports, chosen, seed) for name, chosen in picked.dealt.items()]
    answers = at_once(lambda job: _attempt(worker, job.device, job.to_json(trust)), jobs)
    replays, sound = list[ReplayEvidence](), list[Answer]()
    for job, answer in zip(jobs, answers, strict=True):
        if isinstance(answer, DeviceError):
            findings.doubt(str(answer), **job.transcript.run.where, device=job.device)
            continue
        replays.append(judge(job, answer, findings))
        if not replays[-1].get("malformed"):
            sound.append(answer)
    _check_arithmetic(transcripts, replays, findings)
    evidence: Evidence = {
        "odds": odds,
        "replays": replays,
        "snapshots_inside_steps": sum(len(report.inside) for report in reports),
        "snapshots_compared_inside_steps": compared,
    }
    return evidence, sound


def _job(
    name: str, transcript: Transcript, reports: Sequence[ChipReport], chosen: Sequence[Segment], seed: bytes
) -> Job:
    drawn = run_seed(seed, transcript.run.manifest.run)
    looks = looks_in(transcript, {each: witness_draw(drawn, each.index) for each in chosen})
    inside = _inside(transcript, reports, chosen)
    return Job(device=name, transcript=transcript, chosen=chosen, inside=inside, looks=looks)


def _replayable(transcripts: Sequence[Transcript], findings: Findings) -> list[Transcript]:
    """The runs whose programs are agreed and whose numerics other devices can repeat."""
    found = []
    for transcript in transcripts:
        if transcript.execution.executable and transcript.run.declared.numerics == "native":
            findings.add(
                Guard.REPLAY,
                "the run used native numerics, which no other device can reproduce: its provenance cannot be shown",
                **transcript.run.where,
            )
        elif transcript.execution.executable:
            found.append(transcript)
    return found


def _check_arithmetic(transcripts: Sequence[Transcript], replays: Sequence[ReplayEvidence], findings: Findings) -> None:
    """A segment that only devices with the trainer's arithmetic have replayed leaves the verdict open."""
    for transcript in transcripts:
        trained_on = transcript.run.metadata.device["fingerprint"]
        mine = [replay for replay in replays if replay["run_id"] == transcript.run.manifest.run]
        shown = {index for replay in mine if replay["fingerprint"] != trained_on for index in replay["segments"]}
        alike = {index for replay in mine for index in replay["segments"]} - shown
        if alike:
            text = "every replay device computes" if not shown else f"what replayed {len(alike)} segments computes"
            findings.doubt(
                f"{text} like the training device, so the replay shows little; name another device",
                **transcript.run.where,
            )


def _inside(transcript: Transcript, reports: Sequence[ChipReport], chosen: Sequence[Segment]) -> list[InsideStep]:
    """The snapshots of drawn chips that fell inside of steps which are replayed."""
    run_id = transcript.run.manifest.run
    every = [snapshot for report in reports for snapshot in report.inside if snapshot.run_id == run_id]
    return [snapshot for snapshot in every if any(snapshot.step in segment for segment in chosen)]


def _attempt(worker: Worker, name: str, job: JsonObject) -> Answer | DeviceError:
    try:
        answer = worker(name, job)
    except DeviceError as error:
        return error
    try:
        canonical.encode(answer)
    except CallerError as error:
        return DeviceError(f"device {name} gave a malformed answer: {error}")
    if not isinstance(answer, Mapping):
        return DeviceError(f"device {name} gave a malformed answer: it is not a JSON object")
    return answer


def _choose(
    transcript: Transcript, reports: Sequence[ChipReport], settings: Settings, seed: bytes, since: int
) -> Chosen:
    """The segments of a run to replay, given what drawn chips say of it."""
    run_id = transcript.run.manifest.run
    steps = {step for report in reports for of_run, step, _ in report.snapshots if of_run == run_id}
    every = segments(transcript.run)
    evaluations = evaluations_in(every, transcript.leaves) if transcript.execution.evaluations else {}
    return choose(every, steps, settings, run_seed(seed, run_id), evaluations=evaluations, since=since)


def judge(job: Job, result: Mapping[str, Any], findings: Findings) -> ReplayEvidence:
    """Compare what a device answered with what the run and its chips said; what differs goes to ``findings``."""
    name, transcript, run = job.device, job.transcript, job.transcript.run
    described: ReplayEvidence = {
        "run": run.name,
        "run_id": run.manifest.run,
        "device": name,
        "fingerprint": str(result.get("fingerprint")),
        "seconds": None,
        "segments": [segment.index for segment in job.chosen],
        "segments_in_run": len(segments(run)),
        "returned": [],
        "dropped": [],
        "equal": False,
    }
    before, compared = len(findings.found), 0
    try:
        seconds, dropped, unread = result.get("seconds"), result.get("dropped", []), result.get("evidence_error", "")
        texts = [result.get("fingerprint"), unread, *dropped]
        if not isinstance(seconds, float | int | None) or not all(isinstance(each, str) for each in texts):
            raise ValueError("its seconds are not a number, or a name or message in it is not text")
        described["seconds"], described["dropped"] = seconds, dropped
        if "evidence_error" in result:
            if not unread:
                raise ValueError("its error has no text")
            findings.add(Guard.REPLAY, unread, **run.where, device=name)
            return described
        changes: list[list[float | None]] = []
        returned, measured = list[Mapping[str, Any]](), 0
        replays = list[Replayed]()
        for segment, replay in zip(job.chosen, result["replays"], strict=True):
            replays.append(replayed := Replayed.of(replay))
            agreed = compare_replay(transcript, segment, replay, replayed, name, findings)
            shown = [snapshot for snapshot in job.inside if snapshot.step in segment and snapshot.step <= agreed]
            compared += compare_inside(transcript, shown, replayed, name, findings)
            if agreed == segment.stop:
                changes.append(replay["changes"])
                measured += len(replayed.leaves)
                check_witness(transcript, replayed.witness, job.looks.get(str(segment.index)), name, findings)
            returned += check_returned(transcript, replay["returned"], name, findings)
        described["snapshots_inside_steps"] = compared
        described["returned"] = returned
        described["largest_changes"] = joined_changes(changes, len(run.declared.groups))
        described["measured_steps"] = measured
        described["steps"] = sum(len(each.leaves) for each in replays)
        decisions = Decisions.joined(each.decisions for each in replays)
        decided = examine(decisions, run.declared.numerics, name)
        described.update(cast(ReplayEvidence, decided.to_json()))
        for text in decided.doubts:
            findings.doubt(text, **run.where, device=name)
    except MALFORMED as error:
        findings.doubt(f"device {name} gave a malformed answer: {error}", **run.where, device=name)
        if len(findings.found) == before:
            described["malformed"] = True
        return described
    described["equal"] = len(findings.found) == before
    return described
