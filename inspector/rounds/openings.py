"""What of a run is opened to the cluster: the drawn segments, and what the checks need besides; and nothing else.

    always      head, journal (the leaves of all steps, which the inspectorate has too), metadata, programs with their
                constants, key of the salts, initial state; of a preset's run its samples and their order, each of which
                was declared as one
    drawn       of each drawn segment the state that it starts from, its batches and its rounding logs
    last state  where a rule asks for a score, or where another run continues this one
    batches     all of them, where a rule counts samples

The inspectorate says what it asks for. A lab compares that with the secret that was opened before, and opens it; the
cluster deletes what it did not ask for, unread.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Any

from firmware_sim.errors import CallerError, EvidenceError, Unreadable
from firmware_sim.evidence import SigningKey
from inspector.inspection.casefile import CaseFile
from inspector.inspection.disclosure import ThinRun, copy_whole
from inspector.inspection.guards import Settings
from inspector.inspection.sampling import choose, evaluations_in, run_seed
from inspector.inspection.transcripts import open_run, recalling
from inspector.inspection.trust import Trust, signer_of
from inspector.inspection.verdict import Verdict
from inspector.replay.segment import segments
from monitor.files import remove
from monitor.transcript import RunFolder
from monitor.transcript.export import signed_list
from monitor.transcript.layout import (
    JOURNAL,
    MANIFEST,
    METADATA,
    ORDER,
    SALT,
    SAMPLES,
    batch_path,
    checkpoint_path,
    log_path,
)
from monitor.transcript.reader import entry_of

__all__ = ["Asked", "asked_for", "copy_opened", "described", "keep", "require_drawn", "soundest", "sweep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What an inspectorate asks of one run.

    Attributes:
        head: SHA-256, in hex, of the head that the lab handed over.
        since: the step up to which an earlier inspection has accepted the run.
        segments: numbers of the drawn ones, in order.
        last: the state after the last step is asked for.
        batches: the batches of all steps are.
    """

    head: str
    since: int
    segments: tuple[int, ...]
    last: bool
    batches: bool

    def to_json(self) -> dict[str, Any]:
        """JSON-able values."""
        return {**asdict(self), "segments": list(self.segments)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Asked:
        """What ``to_json`` returned, in the form that messages have (``forms``)."""
        return cls(**{**data, "segments": tuple(data["segments"])})

    def paths(self, run: RunFolder) -> frozenset[str]:
        """The files that this asks for; EvidenceError if the run has no such segment."""
        known = {each.index: each for each in segments(run)}
        if not set(self.segments) <= set(known):
            raise EvidenceError(f"{run.folder.name} has no segment {min(set(self.segments) - set(known))}")
        drawn = [known[index] for index in self.segments]
        steps = [step for each in drawn for step in range(each.start + 1, each.stop + 1)]
        states = {0, *(each.start for each in drawn), *([run.committed] if self.last else [])}
        programs = run.programs()
        names = {METADATA, SALT, SAMPLES, ORDER, *programs.values(), *run.constants(programs).values()}
        names |= {*map(checkpoint_path, states)}
        read = range(1, run.committed + 1) if self.batches else [*steps, *recalling(run, run.load_steps()[0])]
        names |= {*map(log_path, steps), *map(batch_path, read)}
        return frozenset({MANIFEST, JOURNAL} | {name for name in names if name in run.files})


def asked_for(case: CaseFile, verdict: Verdict, jobs: Iterable[Mapping[str, Any]]) -> dict[str, Asked]:
    """By the name of a run's folder, what its lab is asked for, given what the cluster is to do.

    Args:
        case: the runs that could be read.
        jobs: of all runs, as devices take them.
    """
    mine: dict[str, list[Mapping[str, Any]]] = {item.run.folder.name: [] for item in case.transcripts}
    for job in jobs:
        mine[Path(job["run"]).name].append(job)
    parents = {each.run for each in (item.run.declared.origin.parent for item in case.transcripts) if each is not None}
    before = verdict.evidence["accepted_before"]
    return {
        item.run.folder.name: Asked(
            head=item.run.manifest_digest,
            since=before.get(item.run.manifest.run, 0),
            segments=tuple(sorted({index for job in wanted for index in job.get("segments", ())})),
            last=item.run.finished and (item.run.manifest.run in parents or any(job.get("tests") for job in wanted)),
            batches=any(job.get("sets") for job in wanted),
        )
        for item, wanted in ((item, mine[item.run.folder.name]) for item in case.transcripts)
    }


def require_drawn(
    asked: Asked,
    run: RunFolder,
    settings: Settings,
    seed: bytes,
    *,
    seen: Collection[int],
    known: Collection[int],
    kinds: Collection[str],
    others: bool,
) -> None:
    """Check for a lab that no more is asked of its run than the opened secret draws and the announced rules need.

    Args:
        seed: of the round's draw.
        seen: steps at which the lab's drawn chips took snapshots of the run.
        known: numbers of steps that the run's heads in earlier rounds had.
        kinds: of the announced rules.
        others: other runs are inspected in the round, which may continue this one.

    Raises:
        EvidenceError: more is asked for.
    """
    if asked.since not in {0, *known}:
        raise EvidenceError(f"it asks for the steps since step {asked.since}, but no earlier head ends at that step")
    every = {each.index: each for each in segments(run)}
    evaluations = evaluations_in(list(every.values()), run.load_steps()[0])
    own = run_seed(seed, run.manifest.run)
    picked = choose(list(every.values()), (), settings, own, evaluations=evaluations, since=asked.since).segments
    shown = set(asked.segments) - {each.index for each in picked}
    if any(index not in every or not any(step in every[index] for step in seen) for index in shown):
        raise EvidenceError("it asks for a segment that the secret does not draw and that contains no drawn snapshot")
    if settings.sampling is not None and len(shown) > settings.samples:
        raise EvidenceError(f"it asks for {len(shown)} segments with snapshots, but announced only {settings.samples}")
    if asked.batches and "data" not in kinds:
        raise EvidenceError("it asks for all batches, although no rule counts samples")
    if asked.last and "score" not in kinds and not others:
        raise EvidenceError(
            "it asks for the last state, although no rule needs a score and no other run continues this one"
        )


def copy_opened(run: RunFolder, asked: Asked, target: Path, key: SigningKey) -> dict[str, Any]:
    """Copy what is asked for, and say how much that is: ``head``, ``segments``, ``files`` and ``bytes``.

    ``listed`` is what the lab signs of each file, so that a file that is no other on its way is the lab's.
    """
    paths = sorted(path for path in asked.paths(run) if (run.folder / path).is_file())
    copy_whole(run.folder, paths, target)
    size = sum((target / path).stat().st_size for path in paths)
    entries = {path: entry for path in paths if (entry := entry_of(target, path)) is not None}
    listed = signed_list(run.manifest.run, entries, key).decode()
    counts = {"head": asked.head, "segments": list(asked.segments), "files": len(paths), "bytes": size}
    return {**counts, "listed": listed}


def sweep(folders: Sequence[Path], asked: Mapping[str, Asked], trust: Trust) -> tuple[dict[Path, frozenset[str]], int]:
    """Delete what a cluster did not ask for.

    Args:
        folders: runs as labs have opened them.
        asked: by name of the folder, what was asked of those that count.

    Returns:
        By folder the files that may be there, and how many others were.
    """
    kept: dict[Path, frozenset[str]] = {}
    refused = 0
    for folder in folders:
        wanted = asked.get(folder.name)
        found = (frozenset(), 0) if wanted is None else keep(folder, trust, wanted.head, wanted.paths)
        if found is not None and found[0]:
            kept[folder], more = found
            refused += more
        else:
            refused += sum(not path.is_dir() for path in (folder, *folder.rglob("*")))
            remove(folder)
    return kept, refused


def keep(
    folder: Path, trust: Trust, head: str, wanted: Callable[[RunFolder], Collection[str]]
) -> tuple[frozenset[str], int] | None:
    """Delete from a run that was opened what was not wanted of it, unread: others may have put it there.

    Args:
        head: SHA-256, in hex, of the run's head.
        wanted: the paths that may be there.

    Returns:
        These paths, and how many files were deleted; None, and nothing is, where it is no run with that head.
    """
    if folder.is_symlink() or not folder.is_dir():
        return None
    try:
        run = open_run(folder, trust, opened=())
        paths = frozenset(wanted(run)) if run.manifest_digest == head else frozenset[str]()
    except (CallerError, EvidenceError, Unreadable):
        return None  # what cannot be read is no run that was opened
    if not paths:
        return None
    folders = {str(parent) for path in paths for parent in PurePath(path).parents}
    refused = 0
    for place, below, names in os.walk(folder, topdown=False):
        for path in (Path(place) / name for name in (*names, *below)):
            inside = str(path.relative_to(folder))
            if path.is_symlink() or inside not in (folders if path.is_dir() else paths) or path.is_fifo():
                refused += path.is_symlink() or not path.is_dir()
                remove(path)
    return paths, refused


def soundest(folders: Sequence[Path], trust: Trust) -> Path | EvidenceError:
    """The first of a run's folders that holds what its head lists, or might; what is wrong where none does."""
    unread: Path | None = None
    wrong = EvidenceError("nothing was opened")
    for folder in folders:
        try:
            run = ThinRun(folder, trust.key_of(signer_of((folder / MANIFEST).read_bytes(), trust)[0]))
            run.check_listing()
            run.check_contents()
        except (Unreadable, OSError):  # damaged copies among them
            unread = unread or folder
            continue
        except EvidenceError as error:
            wrong = error
            continue
        return folder
    return unread or wrong


def described(case: CaseFile, asked: Mapping[str, Asked]) -> list[dict[str, Any]]:
    """What was asked for of each run.

    Returns:
        For each run ``run``, ``run_id``, ``segments``, ``last`` and ``batches``; how many ``files`` of the ``of_files``
        that its journal lists, and ``bytes`` of ``of_bytes``.
    """
    rows = []
    for item in case.transcripts:
        run, wanted = item.run, asked.get(item.run.folder.name)
        if wanted is None:
            continue
        lengths = {path: run.files[path].length for path in run.files}
        opened = [lengths[path] for path in wanted.paths(run) if path in lengths]
        rows.append(
            {
                "run": run.folder.name,
                "run_id": run.manifest.run,
                "segments": list(wanted.segments),
                "last": wanted.last,
                "batches": wanted.batches,
                "files": len(opened),
                "of_files": len(lengths),
                "bytes": sum(opened),
                "of_bytes": sum(lengths.values()),
            }
        )
    return rows
