"""What a cluster checks of the runs that labs open to it: every opened file that the inspectorate is not shown."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from inspector.inspection.disclosure import Checked, counters_of
from inspector.inspection.lineage import examine_lineages
from inspector.inspection.transcripts import given_runs, open_run, read_transcript
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Findings, Reason
from monitor.transcript import RunFolder

__all__ = ["check_runs"]


def check_runs(
    folders: Sequence[Path], trust: Trust, *, now: datetime, opened: Mapping[Path, Collection[str]] | None = None
) -> dict[str, Checked]:
    """Read runs: files, samples, states, logs, and what each takes over from its parent.

    Args:
        opened: by folder, the files that the lab was asked for; of any other it is the whole run.

    Returns:
        By the SHA-256, in hex, of the manifest, what was found of each run whose lab is known.
    """
    findings = Findings()
    runs: list[RunFolder] = []
    transcripts = []

    def open_folder(folder: Path) -> RunFolder:
        return open_run(folder, trust, opened=(opened or {}).get(folder))

    for given in given_runs(folders, trust, open_folder):
        run = findings.read(given.open, **given.where)
        if run is None:
            continue
        runs.append(run)
        transcript = read_transcript(run, trust, findings, now=now, live=True)
        transcripts += [] if transcript is None else [transcript]
    examine_lineages(transcripts, trust, findings)
    readable = {item.run.manifest_digest: item for item in transcripts}
    return {
        run.manifest_digest: Checked(
            found=_about(run, findings.found),
            open=_about(run, findings.doubts) + (() if run.manifest_digest in readable else _UNREAD),
            counters=counters_of(run) if run.manifest_digest in readable else {},
            models=readable[run.manifest_digest].models if run.manifest_digest in readable else {},
        )
        for run in runs
    }


_UNREAD = (("evidence", None),)
"""What is open of a run that could not be read to its end, whatever was found by then."""


def _about(run: RunFolder, reasons: Iterable[Reason]) -> tuple[tuple[str, int | None], ...]:
    """Guard and step of each reason that is about a run or its lab, once; one that names neither is about all."""
    about = run.where
    mine = [each for each in reasons if all(each.where.get(key, value) == value for key, value in about.items())]
    return tuple(dict.fromkeys((each.guard, each.where.get("step")) for each in mine))
