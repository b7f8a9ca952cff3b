"""An inspection, from the draw of chips to the verdict (Shavit 2023, sections 3–5).

A verdict is a function of frozen settings, trust anchors, evidence and what the replay devices return. An inspection
has one order: read the runs, draw, challenge, examine chips, replay, conclude. No step looks at what a later one
brings, so nothing that is known after the draw decides it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, cast

from firmware_sim import NO_WORK, TICK
from firmware_sim.errors import CallerError
from inspector.devices import device
from inspector.inspection.answers import Answers
from inspector.inspection.casefile import CaseFile
from inspector.inspection.chip_report import ChipReport
from inspector.inspection.disclosure import ThinRun
from inspector.inspection.document import Chance, Coinciding, Evidence, Repeats, Shards
from inspector.inspection.guards import Settings
from inspector.inspection.history import check_equivocation, check_goes_on
from inspector.inspection.identities import examine_identities
from inspector.inspection.lineage import check_signed, examine_lineages, lineage_text
from inspector.inspection.memory import Memory
from inspector.inspection.number_wording import numbers_text
from inspector.inspection.ownership import past_spans
from inspector.inspection.past_spans import check_registered, examine_past
from inspector.inspection.provenance import examine_chip, runs_of_owner, sources_of
from inspector.inspection.replays import Worker, replay_drawn
from inspector.inspection.run_evidence import Execution, Ignored, RunEvidence
from inspector.inspection.sampling import challenge_seed, draw, nonce_of
from inspector.inspection.shards import examine_shards
from inspector.inspection.slack import judge_slack
from inspector.inspection.sources import Past, Sources
from inspector.inspection.suppression import judge_draws
from inspector.inspection.transcripts import Transcript, given_runs, open_run, read_transcript
from inspector.inspection.trust import Trust, rates_json
from inspector.inspection.verdict import Findings, Outcome, Verdict
from inspector.inspection.wording import acceptance, ignored_text, outcomes_by_lab, scope, signed_text
from inspector.probability.chances import chances, unseen
from inspector.replay.pool import run_worker
from monitor.declaration.countersignature import Countersigned
from monitor.replay.ledger import Kind, total
from monitor.transcript import RunFolder

__all__ = ["inspect", "verify"]

_FOLDERS_ALONE, _FIRST = Sources(), Past()


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
    described = _described(transcript)
    evidence |= described
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
        if draws := judge_draws(reports, trust.chip_trust.snapshot_rate, findings):
            evidence["draws"] = draws
        evidence["chips"] = [report.to_json() for report in reports if report not in past]
        evidence["clones"] = examine_identities([transcript], trust, outside, findings)
        waiting = sum(len(report.inside) for report in reports)
    text = f"files, log, data, checkpoints and chips of {folder.name} are consistent; nothing was re-executed"
    text += f", so {waiting} snapshots inside steps were not compared" if waiting else ""
    text += "; no replay can repeat its native numerics" if transcript.run.declared.numerics == "native" else ""
    text += ignored_text([described]) + f"; {trust.source}"
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
    sources: Sources = _FOLDERS_ALONE,
    past: Past = _FIRST,
    case: CaseFile | None = None,
) -> Verdict:
    """Draw chips, check their evidence, match their snapshots to the runs, and replay segments on other devices.

    Args:
        folders: all runs that the lab (or the labs) declare.
        now: the time of the inspection; a run that is unfinished after its declared end is rejected.
        sources: where evidence comes from other than those folders.
        past: what earlier inspections left.
        case: is filled with what the verdict rests on (inspector.bundle).

    Raises:
        CallerError: no run, no device, or more samples than the registry has chips.
    """
    if not folders and settings.labs is None:
        raise CallerError("no run to inspect")
    if settings.labs is not None and not set(settings.labs) <= set(trust.labs):
        raise CallerError(f"lab {sorted(set(settings.labs) - set(trust.labs))[0]!r} is not registered")
    if not settings.devices:
        raise CallerError("no replay device was named")
    for name in settings.devices:
        device(name)
    inspection = _Inspection(trust, settings, now, sources, past, CaseFile() if case is None else case)
    if not inspection.read(folders):
        return inspection.stopped()
    inspection.draw()
    inspection.challenge()
    if inspection.concludes:
        inspection.examine_chips()
        inspection.replay(worker)
    return inspection.verdict()


class _Inspection:
    """One inspection under way: each method is one transition, in the order in which ``inspect`` calls them."""

    def __init__(
        self, trust: Trust, settings: Settings, now: datetime, sources: Sources, past: Past, case: CaseFile
    ) -> None:
        self.trust, self.settings, self.now = trust, settings, now
        self.sources, self.past, self.case = sources, past, case
        self.findings, self.outside = Findings(), Answers(sources.answers)
        self.runs: list[RunEvidence] = []
        self.evidence = Evidence(runs=self.runs, time=f"{now:%Y-%m-%dT%H:%M:%SZ}")
        self.labs: list[str] = []
        self.unread: set[str | None] = set()
        self.reports: list[ChipReport] = []
        self.seed = b""
        self.pool: list[str] = []
        self.drawn: Collection[str] = ()
        case.earlier = list(past.heads)

    @property
    def transcripts(self) -> list[Transcript]:
        """The runs that could be read."""
        return self.case.transcripts

    @property
    def live(self) -> bool:
        """Whether drawn chips are challenged after the draw."""
        return self.sources.ask is not None

    def read(self, folders: Sequence[Path]) -> bool:
        """Read the runs; False where one that may be of any lab under inspection could not be read."""
        checks = self.sources.checks
        every = given_runs(folders, self.trust, partial(open_run, trust=self.trust, thin=checks is not None))
        for given in every:
            run = self.findings.read(given.open, **given.where)
            if isinstance(run, ThinRun) and checks is not None:
                run.checked = checks.get(run.manifest_digest)
            if run is None or not self._read(run):
                self.unread.add(given.where.get("lab"))
        ids = {item.run.manifest.run for item in self.transcripts}
        self.evidence["accepted_before"] = {run: step for run, step in sorted(self.past.accepted.items()) if run in ids}
        self.evidence["lineages"] = examine_lineages(self.transcripts, self.trust, self.findings)
        declared = {each.where["lab"] for each in every if "lab" in each.where}
        self.labs = under_inspection(declared, self.trust, self.settings.labs)
        # What one lab's run hides says nothing about another lab, which was not judged to its end then.
        return not self.unread or (self.settings.labs is not None and None not in self.unread)

    def _read(self, run: RunFolder) -> bool:
        self.case.heads.append(run.manifest_bytes)
        transcript = read_transcript(run, self.trust, self.findings, now=self.now, live=self.live)
        if transcript is None:
            return False
        self.transcripts.append(transcript)
        self.runs.append(_described(transcript))
        check_registered(transcript, self.trust, self.findings)
        return True

    def stopped(self) -> Verdict:
        """The verdict where the runs could not be read."""
        self.evidence["labs"] = outcomes_by_lab(self.findings, self.trust, self.labs, ended=False)
        return Verdict.of(self.findings.found, self.findings.doubts, self.evidence, accept="")

    def draw(self) -> None:
        """Draw chips, by a seed that binds every head that the labs have signed."""
        trust, settings, evidence = self.trust, self.settings, self.evidence
        self.pool = [chip for lab in self.labs for chip in trust.chips_of(lab)]
        nothing_left = not self.pool and bool(past_spans(self.labs, trust))
        if not 1 <= settings.samples <= len(self.pool) and not nothing_left:
            raise CallerError(f"cannot draw {settings.samples} of {len(self.pool)} registered chips")
        check_equivocation(self.transcripts, self.findings)
        evidence["forks"] = check_goes_on(self.transcripts, self.past.heads, trust, self.findings)
        secret, heads = secret_of(settings), self.sources.heads
        committed = sorted(heads if heads is not None else (each.run.manifest_digest for each in self.transcripts))
        self.seed = challenge_seed(secret, committed)
        self.drawn = draw(self.pool, min(settings.samples, len(self.pool)), self.seed)
        evidence["draw"] = {
            "secret": secret,
            "simulated": settings.seed is not None and not settings.committed,
            "heads": committed,
            "every_lab": settings.labs is not None,
        }
        evidence["drawn_chips"] = sorted(self.drawn)
        evidence["registered_chips"] = len(self.pool)
        evidence["chips_listed"] = trust.source
        evidence["rates"] = rates_json({chip: trust.rates[chip] for chip in self.drawn if chip in trust.rates})

    @property
    def complete(self) -> list[Transcript]:
        """The runs that can be judged to their end or, of one that goes on while its chips answer, up to its head."""

        def ends(item: Transcript) -> bool:
            if item.run.finished:
                return len(item.leaves) == item.run.declared.steps + 1
            return self.live and len(item.leaves) > 1

        return sorted(filter(ends, self.transcripts), key=lambda item: not item.run.finished)

    @property
    def concludes(self) -> bool:
        """Whether there is anything that drawn chips can be held against."""
        return bool(self.complete) or self.settings.labs is not None

    @property
    def asked(self) -> list[str]:
        """The drawn chips that must have answered: not those that only an unfinished run uses, or one unread."""
        if not self.concludes:
            return []
        used = {chip for item in self.complete for chip in item.run.metadata.chips}
        busy = {chip for item in self.transcripts if not item.run.finished for chip in item.run.metadata.chips} - used
        free = [chip for chip in sorted(self.drawn) if chip not in busy]
        return [chip for chip in free if self.trust.chips[chip] not in self.unread]

    def challenge(self) -> None:
        """Ask the drawn chips live, where they can be asked."""
        trust, ask = self.trust, self.sources.ask
        if ask is not None:
            nonces = {"nonces": partial(nonce_of, self.seed)} if self.settings.committed else {}
            for chip in self.asked:
                self.outside.challenge([chip], ask, trust.challenge_of(trust.chips[chip])[0], **nonces)
        self.case.drawn = {
            chip: sources_of(chip, runs_of_owner(chip, self.transcripts, trust), self.outside) for chip in self.drawn
        }
        self.evidence["clones"] = examine_identities(self.transcripts, trust, self.outside, self.findings)

    def examine_chips(self) -> None:
        """Hold the drawn chips' logs, and what other owners left of them, against the runs."""
        trust, findings, evidence, transcripts = self.trust, self.findings, self.evidence, self.transcripts
        known = self.past.memory or {}
        judged = [lab for lab in self.labs if lab not in self.unread]
        past, heard, deposits = examine_past(judged, transcripts, trust, findings, self.outside, known)
        self.case.drawn |= deposits
        examine = partial(examine_chip, answers=self.outside, now=int(self.now.timestamp()), heard=heard)
        held = [examine(chip, transcripts, trust, findings, last=known.get(chip)) for chip in self.asked]
        self.reports = held + past
        outcomes = outcomes_by_lab(findings, trust, self.labs)
        blamed = [lab for lab, outcome in outcomes.items() if outcome == Outcome.REJECT.value]
        excused = known.excused if isinstance(known, Memory) else {}
        evidence["ledger"] = judge_slack(self.reports, transcripts, trust, findings, excused, blamed=blamed)
        if draws := judge_draws(self.reports, trust.chip_trust.snapshot_rate, findings):
            evidence["draws"] = draws
        evidence["chips"] = [report.to_json() for report in held]
        evidence["past_spans"] = [report.to_json() for report in past]
        check_signed(transcripts, evidence, trust, findings)
        if repeats := _repeats(self.reports, trust):
            evidence["repeats"] = repeats
        evidence["coinciding"] = _coinciding(transcripts)
        self.case.prunable = {report.chip: report.prunable for report in held if report.prunable is not None}
        self.case.unseen = {report.lab: report.unseen for report in self.reports if report.unseen}
        if self.past.memory is not None:
            evidence["known_chips"] = [report.chip for report in held if report.extends is not None]
            evidence["extended_chips"] = [report.chip for report in held if report.extends]
        self._require_snapshots()

    def _require_snapshots(self) -> None:
        """Nothing to match leaves a verdict open, but where an earlier one has accepted all of it."""
        reports, findings = self.reports, self.findings
        seen = bool(reports) and all(each.start for each in reports)
        seen = seen and _all_accepted(self.transcripts, self.past.accepted)
        if self.transcripts and not any(each.taken for each in reports) and not findings.found and not seen:
            since = " since the checkpoints that they were pruned by" if any(each.start for each in reports) else ""
            findings.doubt(f"the drawn chips have no snapshot{since}, and none was due, so there is nothing to match")

    def replay(self, worker: Worker) -> None:
        """Replay segments of the complete runs, and have the labs open what the drawn chips hashed."""
        stated, self.case.replays = replay_drawn(
            self.complete,
            self.reports,
            self.trust,
            self.settings,
            self.seed,
            self.findings,
            worker=worker,
            accepted=self.past.accepted,
        )
        self.evidence.update(stated)
        if self.sources.open_shard is not None:
            opened = examine_shards(self.transcripts, self.reports, self.trust, self.sources.open_shard, self.findings)
            self.evidence["shards"] = cast(Shards, asdict(opened))

    def verdict(self) -> Verdict:
        """The verdict: chances, the outcome of each lab, and what an acceptance says and leaves out."""
        trust, settings, findings, evidence = self.trust, self.settings, self.findings, self.evidence
        caught = chances(
            chips=len(self.pool) or 1,
            drawn=len(self.drawn) or 1,
            rate=trust.chip_trust.snapshot_rate,
            uniform=settings.sampling is not None,
            live=self.live,
            slack=any(report.ledger is None or report.ledger["slack"]["calls"] > 0 for report in self.reports),
        )
        evidence["chances"] = cast("list[Chance]", caught)
        evidence["labs"] = outcomes_by_lab(findings, trust, self.labs)
        not_said = scope(
            [item.run.declared for item in self.transcripts],
            trust,
            live=self.live,
            beacons=trust.beacon_seconds is not None,
            every=settings.labs is not None,
            replays=evidence.get("replays", ()),
        )
        accept = acceptance(evidence, _terms(self.transcripts))
        return Verdict.of(findings.found, findings.doubts, evidence, accept=accept, scope=not_said)


def _terms(transcripts: Iterable[Transcript]) -> list[tuple[str, Sequence[Countersigned]]]:
    return [(item.run.name, item.agreed.terms) for item in transcripts]


def _repeats(reports: Sequence[ChipReport], trust: Trust) -> Repeats | None:
    """What snapshots show of steps that were repeated: how many fell in there, and how likely work escapes them all."""
    kinds = (Kind.REPEATS, Kind.BACK)
    escapes, seen = 1.0, False
    for report in reports:
        work = total(book.counts[kind] for book in (report.books or {}).values() for kind in kinds)
        if work != NO_WORK and report.rates is not None:
            escapes *= unseen(report.rates.time(work) / TICK, trust.chip_trust.snapshot_rate)
            seen = True
    shots = sum(len(report.repeated) for report in reports)
    return {"snapshots": shots, "escapes": escapes} if seen else None


def _coinciding(transcripts: Sequence[Transcript]) -> list[Coinciding]:
    """Runs that pass through one state, so that a snapshot of it says less of which it was taken."""
    found: dict[str, list[str]] = {}
    for item in transcripts:
        for state in {str(leaf.state.root) for leaf in item.leaves}:
            found.setdefault(state, []).append(item.run.manifest.run)
    pairs = Counter(tuple(sorted(runs)) for runs in found.values() if len(runs) > 1)
    return [{"runs": list(runs), "states": count} for runs, count in sorted(pairs.items())]


def _all_accepted(transcripts: Sequence[Transcript], accepted: Mapping[str, int]) -> bool:
    """Whether an earlier inspection has accepted every step of these runs, so that nothing is left to be matched."""
    return all(accepted.get(item.run.manifest.run, -1) >= len(item.leaves) - 1 for item in transcripts)


def under_inspection(declared: Collection[str], trust: Trust, labs: Collection[str] | None) -> list[str]:
    """The labs whose chips are drawn: those that are named, or whose runs are given."""
    return sorted(set(declared) | set(labs or ()) or set(trust.labs))


def _described(transcript: Transcript) -> RunEvidence:
    run = transcript.run
    terms = transcript.agreed.terms
    return {
        "run": run.name,
        "run_id": run.manifest.run,
        "ignored": cast(Ignored, run.ignored),
        "lab": run.metadata.lab,
        "steps": max(len(transcript.leaves) - 1, 0),
        "finished": run.finished,
        "declared_steps": run.declared.length,
        "numerics": run.declared.numerics,
        "execution": cast(Execution, transcript.execution.to_json()),
        "statements": [{"number": each.number, "since": each.since, "signed": each.signed} for each in terms],
        "training_device": run.metadata.device,
        "state_digest": str(transcript.leaves[-1].state.root) if transcript.leaves else None,
        "log_root": transcript.tree.root().hex(),
        "flop": sum(leaf.flop for leaf in transcript.leaves),
    }
