"""Run folders for the explorer: what the chips' logs say, and the verdict of an inspection that was made before.

Nothing is judged here: a page that shows a log has not verified it. All text is foreign.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from analysis.explorer.programs import program_graphs
from analysis.text import visible
from analysis.words import alike, said
from firmware_sim import limits
from firmware_sim.checks import ChipEvidence
from firmware_sim.errors import CallerError, EvidenceError, file_error
from firmware_sim.evidence import LogRecord, canonical, digest_bytes
from firmware_sim.evidence.canonical import JsonObject
from firmware_sim.service import ChipView, read_evidence
from monitor.transcript.layout import CHIP_CHECKPOINT, CHIP_FILES, METADATA
from monitor.transcript.listing import CHIP_FILE_BYTES

__all__ = ["opened_runs"]

_SUMMARY = "summary.json"
_MOST_RUNS, _MOST_CHIPS, _MOST_RECORDS, _MOST_REASONS = 20, 200, 20_000, 100
_MOST_BYTES = limits.Limit(64 << 20, "bytes of a verdict")


def opened_runs(place: Path, verdict: Path | None = None) -> dict[str, Any]:
    """Return a run folder, or every run of a demo's folder, for JSON.

    Args:
        place: a run folder, or what ``chipwitness demo`` wrote.
        verdict: what ``inspect --json`` printed about the run; a demo's summary has its own.

    Raises:
        CallerError: neither, no such folder, or a verdict that cannot be read.
    """
    summary = place / _SUMMARY
    if summary.is_file():
        if verdict is not None:
            raise CallerError("--verdict needs a run folder: the summary of a demo already has its verdicts")
        about = _read(summary)
        runs = sorted(folder for folder in (place / "runs").iterdir() if (folder / "chips").is_dir())
        verdicts = {run_id: each for each in _dicts(about.get("labs")) for run_id in _judged(each)}
        dispute = about.get("dispute")
        return {
            "name": visible(place.name),
            "runs": [_run(folder, verdicts.get(_run_id(folder))) for folder in runs[:_MOST_RUNS]],
            "dispute": _dispute(dispute) if isinstance(dispute, dict) else None,
        }
    if not (place / "chips").is_dir():
        raise CallerError(f"{place} is neither a run folder nor a folder that demo wrote: there are no chips in it")
    found, run_id = None if verdict is None else _read(verdict), _run_id(place)
    if found is not None and run_id and _judged(found) and run_id not in _judged(found):
        raise CallerError(f"{verdict} is not about the run in {place}")
    return {"name": visible(place.name), "runs": [_run(place, found)], "dispute": None}


def _run_id(folder: Path) -> str:
    """By what a run is known, whatever its folder is called; "" where it is unknown."""
    try:
        content = limits.read_file(folder / METADATA, limits.METADATA_BYTES)
        declared = canonical.decode(content, most=limits.METADATA_BYTES)
    except (OSError, EvidenceError):
        return ""
    return digest_bytes("run", canonical.encode(declared)).value.hex()


def _judged(verdict: Mapping[str, Any]) -> set[str]:
    """The ids of the runs that a verdict is about."""
    evidence = verdict.get("evidence")
    runs = _dicts(evidence.get("runs")) if isinstance(evidence, dict) else []
    return {each["run_id"] for each in (*runs, *_dicts(verdict.get("reasons"))) if isinstance(each.get("run_id"), str)}


def _read(path: Path) -> JsonObject:
    try:
        document = canonical.parse(limits.read_file(path, _MOST_BYTES), most=_MOST_BYTES)
    except OSError as error:
        raise file_error(f"{path} cannot be read", error) from None
    except EvidenceError as error:
        raise CallerError(f"{path} cannot be read: {error}") from None
    if not isinstance(document, dict):
        raise CallerError(f"{path} does not contain a verdict")
    return document


def _run(folder: Path, verdict: Mapping[str, Any] | None) -> dict[str, Any]:
    chips = sorted(each for each in (folder / "chips").iterdir() if each.is_dir() and not each.is_symlink())
    shown = chips[:_MOST_CHIPS]
    most = _MOST_RECORDS // max(len(shown), 1)
    return {
        "name": visible(folder.name),
        "chips": [_chip(each, most) for each in shown],
        "chips_left_out": len(chips) - len(shown),
        "graphs": program_graphs(folder),
        "verdict": None if verdict is None else _verdict(verdict, _run_id(folder)),
    }


def _chip(folder: Path, most: int) -> dict[str, Any]:
    name = visible(folder.name)
    try:
        names = [*CHIP_FILES, *([CHIP_CHECKPOINT] if (folder / CHIP_CHECKPOINT).exists() else [])]
        files = [limits.read_file(folder / file, CHIP_FILE_BYTES[file]) for file in names]
        chain, epoch_keys, log, quote, checkpoint = (*files, b"")[:5]
        given = ChipEvidence(chain=chain, log=log, quote=quote, epoch_keys=epoch_keys, checkpoint=checkpoint)
        view = read_evidence(given, folder.name)
    except (OSError, EvidenceError) as error:
        return {"name": name, "problem": visible(error), "events": [], "left_out": 0, "busy": 0, "records": 0}
    return {
        "name": name,
        "problem": None if view.problem is None else visible(view.problem),
        "busy": view.busy,
        "records": view.log_size,
        "events": _events(view, most),
        "left_out": max(len(view.records) - most, 0),
    }


def _events(view: ChipView, most: int) -> list[list[Any]]:
    """Kind, boot, tick and step of each record, with ticks over all boots first, so that later boots come later."""
    events, before, boot, last = [], 0, None, 0
    for record in view.records[:most]:
        if boot is not None and record.boot != boot:
            before += last
        boot, last = record.boot, record.tick
        events.append([before + record.tick, record.kind.name, record.boot, record.tick, _step(record)])
    return events


def _step(record: LogRecord) -> int | None:
    return record.step if record.kind.name in ("COMMIT", "SNAPSHOT", "REGIONS") else None


def _verdict(verdict: Mapping[str, Any], run_id: str) -> dict[str, object]:
    evidence = verdict.get("evidence")
    evidence = evidence if isinstance(evidence, dict) else {}
    reasons = _dicts(verdict.get("reasons"))
    shown = alike({"guard": visible(each.get("guard", "")), "text": visible(each.get("text", ""))} for each in reasons)
    return {
        "outcome": visible(verdict.get("outcome", "no outcome")),
        "reasons": [each[: _MOST_REASONS + 1] for each in shown[:_MOST_REASONS]],
        "reasons_left_out": len(reasons) - sum(len(each[1 : _MOST_REASONS + 1]) for each in shown[:_MOST_REASONS]),
        "drawn": _texts(evidence.get("drawn_chips")),
        "unexplained": {
            visible(each.get("chip")): _texts(each.get("unexplained_records")) for each in _dicts(evidence.get("chips"))
        },
        "replays": [
            {key: visible(said(each.get(key))) for key in ("device", "segments", "segments_in_run", "steps", "equal")}
            for each in _dicts(evidence.get("replays"))
            if each.get("run_id", run_id) == run_id
        ],
        "false_alarm": 0.0,  # An honest run replays to the same bits, and its chips show what they did.
        "chances": [
            [visible(each.get("lie")), visible(said(each.get("probability")))]
            for each in _dicts(evidence.get("chances"))
        ],
    }


def _dispute(verdict: Mapping[str, Any]) -> dict[str, object]:
    evidence = verdict.get("evidence")
    evidence = evidence if isinstance(evidence, dict) else {}
    return {
        "outcome": visible(verdict.get("outcome", "no outcome")),
        "text": " ".join(visible(each.get("text", "")) for each in _dicts(verdict.get("reasons"))),
        "found": [
            [visible(key).replace("_", " "), visible(said(value))] for key, value in evidence.items() if key != "search"
        ],
        "search": _search(evidence.get("search")),
    }


def _search(found: object) -> list[list[Any]]:
    """Return where the referee asked: phase, place, of how many, and whether the parties agreed there."""
    kept = []
    for each in found[:_MOST_REASONS] if isinstance(found, list) else []:
        if isinstance(each, list | tuple) and len(each) == 4 and type(each[1]) is type(each[2]) is int and each[2] > 0:
            kept.append([visible(each[0]), each[1], each[2], each[3] is True])
    return kept


def _dicts(value: object) -> list[JsonObject]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _texts(value: object) -> list[str]:
    return [visible(each) for each in value[:_MOST_RECORDS]] if isinstance(value, list) else []
