"""Makes a bundle of what an inspection found and what it rests on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from firmware_sim import RecordKind
from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import LogRecord, SigningKey, Standing, open_acceptance, parse_log
from inspector.bundle.contents import Bundle
from inspector.bundle.steps import open_steps
from inspector.inspection.casefile import CaseFile
from inspector.inspection.forks import signer_of
from inspector.inspection.guards import Settings
from inspector.inspection.ownership import span_named
from inspector.inspection.transcripts import Transcript
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Verdict
from inspector.replay.segment import segments
from monitor.transcript.layout import CHIP_CHECKPOINT, CHIP_FILES, METADATA
from monitor.transcript.manifest import Manifest

__all__ = ["bundle_of", "settings_json"]


def settings_json(settings: Settings) -> dict[str, Any]:
    """How the inspection was done, as a verdict says it."""
    sampling = settings.sampling
    return {
        "samples": settings.samples,
        "segments": settings.segments,
        "devices": list(settings.devices),
        "shared": settings.shared,
        "confidence": None if sampling is None else sampling.confidence,
        "against": None if sampling is None else str(sampling.against),
    }


def bundle_of(case: CaseFile, verdict: Verdict, trust: Trust, settings: Settings, key: SigningKey) -> bytes:
    """Sign a verdict with everything that it rests on.

    Args:
        case: filled by the inspection that gave the verdict, whose worker signed its results (``bundle.replays``).
        key: the inspectorate's.

    Raises:
        CallerError: no cluster signed the replays.
    """
    items: dict[str, bytes] = {}
    others: dict[str, list[Manifest]] = {}
    for number, head in enumerate([*case.heads, *case.earlier]):
        opened = signer_of(head, trust)[1]
        path = f"runs/{opened.run}/head.json"
        if items.setdefault(path, head) != head:
            items[f"heads/{number}.json"] = head
            others.setdefault(opened.run, []).append(opened)
    logs: dict[str, list[LogRecord]] = {}
    standings: list[Standing] = []
    for chip, sources in case.drawn.items():
        live = [each for each in sources if each.nonce is not None]
        chosen = next((each for each in (live or sources) if each.run_id == _judged(verdict, chip)), None)
        if chosen is None:
            continue
        try:
            files = {name: chosen.read(name) for name in CHIP_FILES}
            logs[chip] = parse_log(files["log.bin"], chip=chip)
            if logs[chip][0].counter:
                files[CHIP_CHECKPOINT] = chosen.read(CHIP_CHECKPOINT)
                span = span_named(chip, trust)
                named = chip if span is None else span.chip
                standings.append(open_acceptance(files[CHIP_CHECKPOINT], named, trust.inspectorates)[1])
        except EvidenceError:  # what cannot be read is a reason of the verdict, and no evidence
            continue
        items |= {f"chips/{chip}/{name}": content for name, content in files.items()}
    for transcript in case.transcripts:
        run_id = transcript.run.manifest.run
        items[f"runs/{run_id}/metadata.json"] = transcript.run.read(METADATA)
        steps, sizes = _needed(transcript, verdict, logs)
        heard = [each.runs[run] for each in standings if (run := transcript.run.metadata.run_id) in each.runs]
        sizes |= {each.most + 1 for each in heard if each.most < len(transcript.leaves)}
        sizes |= {each.steps + 1 for each in others.get(run_id, []) if 0 <= each.steps < len(transcript.leaves)}
        leaves = [transcript.leaves[step] for step in sorted(steps)]
        items[f"runs/{run_id}/steps.json"] = open_steps(leaves, transcript.tree, sorted(sizes))
    labs = {transcript.run.metadata.lab for transcript in case.transcripts}
    signed = [each for each in sorted(trust.countersigned) if _is_about(each, trust, labs)]
    items |= {f"declarations/{number}.json": each for number, each in enumerate(signed)}
    for kind, results in (("replays", case.replays), ("examinations", case.examinations)):
        for number, result in enumerate(results):
            if "signed" not in result:
                raise CallerError(f"no cluster has signed the {kind}: a bundle needs its key")
            items[f"{kind}/{number}.json"] = result["signed"].encode()
    items |= {f"checks/{number}.json": each for number, each in enumerate(case.checks)}
    predicate = {
        **verdict.to_json(),
        "settings": settings_json(settings),
        "challenge": trust.challenge_json(),
    }
    return Bundle.sign(predicate, items, key)


def _judged(verdict: Verdict, chip: str) -> str:
    """Id of the run by whose evidence a chip was judged; "" where that lay in none."""
    return next((str(each["run_id"]) for each in verdict.evidence.get("chips", []) if each["chip"] == chip), "")


def _is_about(envelope: bytes, trust: Trust, labs: set[str]) -> bool:
    return any(each.lab in labs for each in replace(trust, countersigned=frozenset({envelope})).agreed())


def _needed(
    transcript: Transcript, verdict: Verdict, logs: Mapping[str, Iterable[LogRecord]]
) -> tuple[set[int], set[int]]:
    """Steps to open of a run, and sizes of its log whose root to show."""
    run, count = transcript.run, len(transcript.leaves)
    steps, sizes = {0}, set()
    before = verdict.evidence.get("accepted_before", {}).get(run.manifest.run)
    if before is not None:
        sizes.add(before + 1)
    every = {segment.index: segment for segment in segments(run)}
    for replay in verdict.evidence.get("replays", []):
        if replay["run_id"] == run.manifest.run:
            for index in replay["segments"]:
                steps |= set(range(every[index].start, every[index].stop + 1))
    for records in logs.values():
        newest = None
        for record in records:
            if record.run_id != run.metadata.run_id or record.step >= count:
                continue
            if record.kind is RecordKind.SNAPSHOT:
                steps.add(record.step)
            elif record.kind is RecordKind.COMMIT:
                newest = record.step + 1
                if record.digest != transcript.tree.root(newest):
                    sizes.add(newest)
        sizes |= set() if newest is None else {newest}
    return {step for step in steps if step < count}, sizes
