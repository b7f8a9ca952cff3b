"""Makes a bundle of what an inspection found and what it rests on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from firmware_sim import RecordKind
from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import LogRecord, SigningKey, Standing, open_acceptance, parse_log
from inspector.bundle.contents import Bundle
from inspector.bundle.steps import open_steps
from inspector.inspection.answers import EvidenceSource
from inspector.inspection.casefile import CaseFile
from inspector.inspection.guards import Settings
from inspector.inspection.ownership import span_named
from inspector.inspection.transcripts import Transcript
from inspector.inspection.trust import Trust, signer_of
from inspector.inspection.verdict import Verdict
from inspector.replay.segment import segments
from monitor.transcript.layout import CHIP_CHECKPOINT, CHIP_FILES, METADATA
from monitor.transcript.manifest import Manifest

__all__ = ["bundle_of", "settings_json"]


def settings_json(settings: Settings) -> dict[str, object]:
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
    items, others = _head_items(case, trust)
    chips = _chips(case, verdict, trust)
    items |= {f"chips/{each.chip}/{name}": content for each in chips for name, content in each.files.items()}
    for transcript in case.transcripts:
        run_id = transcript.run.manifest.run
        items[f"runs/{run_id}/metadata.json"] = transcript.run.read(METADATA)
        steps, sizes = _needed(transcript, verdict, [each.log for each in chips])
        runs = [each.standing.runs for each in chips if each.standing is not None]
        heard = [each[run] for each in runs if (run := transcript.run.metadata.run_id) in each]
        sizes |= {each.most + 1 for each in heard if each.most < len(transcript.leaves)}
        sizes |= {each.steps + 1 for each in others.get(run_id, []) if each.steps < len(transcript.leaves)}
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


def _head_items(case: CaseFile, trust: Trust) -> tuple[dict[str, bytes], dict[str, list[Manifest]]]:
    """The heads by their paths, and by id of a run the further ones that contradict or precede its first."""
    items: dict[str, bytes] = {}
    others: dict[str, list[Manifest]] = {}
    for number, head in enumerate([*case.heads, *case.earlier]):
        opened = signer_of(head, trust)[1]
        path = f"runs/{opened.run}/head.json"
        if items.setdefault(path, head) != head:
            items[f"heads/{number}.json"] = head
            others.setdefault(opened.run, []).append(opened)
    return items, others


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chip:
    """A drawn chip's files by which it was judged, its log and, where the log was pruned, what came before."""

    chip: str
    files: Mapping[str, bytes]
    log: Sequence[LogRecord]
    standing: Standing | None


def _chips(case: CaseFile, verdict: Verdict, trust: Trust) -> list[_Chip]:
    found = []
    for chip, sources in case.drawn.items():
        live = [each for each in sources if each.nonce is not None]
        chosen = next((each for each in (live or sources) if each.run_id == _judged(verdict, chip)), None)
        if chosen is not None:
            with suppress(EvidenceError):  # what cannot be read is a reason of the verdict, and no evidence
                found.append(_read_chip(chip, chosen, trust))
    return found


def _read_chip(chip: str, source: EvidenceSource, trust: Trust) -> _Chip:
    files = {name: source.read(name) for name in CHIP_FILES}
    log, standing = parse_log(files["log.bin"], chip=chip), None
    if log[0].counter:
        files[CHIP_CHECKPOINT] = source.read(CHIP_CHECKPOINT)
        span = span_named(chip, trust)
        named = chip if span is None else span.chip
        standing = open_acceptance(files[CHIP_CHECKPOINT], named, trust.inspectorates)[1]
    return _Chip(chip=chip, files=files, log=log, standing=standing)


def _judged(verdict: Verdict, chip: str) -> str:
    """Id of the run by whose evidence a chip was judged; "" where that lay in none."""
    return next((str(each["run_id"]) for each in verdict.evidence.get("chips", []) if each["chip"] == chip), "")


def _is_about(envelope: bytes, trust: Trust, labs: set[str]) -> bool:
    return any(each.lab in labs for each in replace(trust, countersigned=frozenset({envelope})).agreed())


def _needed(transcript: Transcript, verdict: Verdict, logs: Iterable[Iterable[LogRecord]]) -> tuple[set[int], set[int]]:
    """Steps to open of a run, and sizes of its log whose root to show."""
    run = transcript.run
    steps, sizes = {0}, set()
    before = verdict.evidence.get("accepted_before", {}).get(run.manifest.run)
    if before is not None:
        sizes.add(before + 1)
    every = {segment.index: segment for segment in segments(run)}
    for replay in verdict.evidence.get("replays", []):
        if replay["run_id"] == run.manifest.run:
            for index in replay["segments"]:
                steps |= set(range(every[index].start, every[index].stop + 1))
    for log in logs:
        mine = [each for each in log if each.run_id == run.metadata.run_id and each.step < len(transcript.leaves)]
        steps |= {record.step for record in mine if record.kind is RecordKind.SNAPSHOT}
        commits = [record for record in mine if record.kind is RecordKind.COMMIT]
        sizes |= {each.step + 1 for each in commits if each.digest != transcript.tree.root(each.step + 1)}
        sizes |= {each.step + 1 for each in commits[-1:]}
    return {step for step in steps if step < len(transcript.leaves)}, sizes
