"""What a run folder costs: bytes by kind of file, for each step and for each checkpoint."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from monitor.transcript import RunFolder
from monitor.transcript.layout import MANIFEST, step_record

__all__ = ["KindStats", "RunStats", "run_stats"]

_GROWING = ("leaves", "entries", "logs", "batches")
"""What each step adds to; checkpoints come every so many steps, the rest once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KindStats:
    """Files and bytes of one kind; ``per_step`` is bytes over all steps, ``each`` over all files."""

    kind: str
    files: int
    bytes: int
    per_step: float
    each: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStats:
    """Bytes of a run folder.

    Attributes:
        growth: bytes that a step adds, checkpoints and programs left out.
        released: number of checkpoints that are listed, and were deleted as declared; nothing else counts them.
        first, last: the same over the first and last tenth of all steps: equal where storage grows as it should.
    """

    run: str
    finished: bool
    steps: int
    files: int
    bytes: int
    released: int
    growth: float
    first: float
    last: float
    kinds: tuple[KindStats, ...]


def run_stats(run: RunFolder) -> RunStats:
    """Count a run's files by kind, from its signed journal.

    ``leaves`` are the steps' leaves and ``entries`` the rest of the journal: it is one file, counted with the leaves.

    Raises:
        EvidenceError: the journal is malformed.
    """
    files: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    steps = run.manifest.steps
    growth: list[int] = []
    released = 0
    for index, record in enumerate(run.journal):
        own: Counter[str] = Counter(leaves=len(record.leaf), entries=len(record.line()) - len(record.leaf))
        for path, entry in record.files.items():
            if run.is_released(path):
                released += 1
                continue
            kind = path.partition("/")[0].removesuffix(".json")
            own[kind] += entry.length
            files[kind] += entry.length > 0
        sizes.update(own)
        if step_record(0) < index <= step_record(steps):
            growth.append(sum(own[kind] for kind in _GROWING))
    files["leaves"] = 1
    files["manifest"], sizes["manifest"] = 1, (run.folder / MANIFEST).stat().st_size
    tenth = max(len(growth) // 10, 1)
    return RunStats(
        run=run.folder.name,
        finished=run.finished,
        steps=steps,
        files=sum(files.values()),
        bytes=sum(sizes.values()),
        released=released,
        growth=_mean(growth),
        first=_mean(growth[:tenth]),
        last=_mean(growth[-tenth:]),
        kinds=tuple(
            KindStats(
                kind=kind,
                files=files[kind],
                bytes=size,
                per_step=size / max(steps, 1),
                each=size / max(files[kind], 1),
            )
            for kind, size in sorted(sizes.items())
            if size
        ),
    )


def _mean(values: list[int]) -> float:
    return sum(values) / max(len(values), 1)
