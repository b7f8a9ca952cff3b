"""What a lab opens of its drawn chips' snapshots: the bytes that a chip hashed, compared with those of a replay."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from firmware_sim import NEVER, DeviceMemory, LogRecord, MemoryCopy, Work
from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import DTYPE_SIZES
from firmware_sim.evidence.blocks import BlockSlice, block_elements
from inspector.inspection.chip_report import ChipReport
from inspector.inspection.guards import Guard
from inspector.inspection.mid_step_snapshots import place_of
from inspector.inspection.transcripts import Transcript
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Findings
from monitor.replay.steps import ProgramSteps

__all__ = ["Difference", "OpenShard", "OpenedShards", "examine_shards", "first_difference"]

OpenShard = Callable[[str, int, int], bytes]
"""Opens the shard of a chip's record, of so many bytes; EvidenceError where the lab does not."""


class _Seen(NamedTuple):
    """What a memory held: the slices of one shard, and the tensors, ``kind/name``, whose content is not known."""

    slices: Sequence[BlockSlice]
    unknown: frozenset[str]


class Difference(NamedTuple):
    """The first element, named by its tensor (``kind/name``) and place, in which two shards of one layout differ."""

    tensor: str
    element: int
    held: str
    replayed: str


@dataclass(slots=True, kw_only=True)
class OpenedShards:
    """What labs opened of the drawn chips' snapshots.

    Attributes:
        opened: snapshots whose bytes are those that the chip hashed.
        not_kept: snapshots that a lab does not keep.
        differences: chip, record and step of each that no run explains, with its ``Difference``.
    """

    opened: int = 0
    not_kept: int = 0
    differences: list[Mapping[str, object]] = field(default_factory=list)


def examine_shards(
    transcripts: Sequence[Transcript],
    reports: Sequence[ChipReport],
    trust: Trust,
    open_shard: OpenShard,
    findings: Findings,
) -> OpenedShards:
    """Have a lab open the drawn chips' snapshots; what it opens is what the chip hashed, or the lab lies.

    Of one that no run explains it is said which element differs first from a replay up to the same operator. One that
    the lab does not open counts for nothing: a lab keeps as many as it says.
    """
    runs = {item.run.metadata.run_id: item for item in transcripts}
    counts = OpenedShards()
    for report in reports:
        for record in report.taken:
            transcript = runs[record.run_id]
            memory = transcript.run.declared.empty_memory(torch.device("cpu"))
            like = memory.shards[transcript.run.metadata.chips.index(report.chip)]
            where = {**report.where, "record": record.counter}
            try:
                content = open_shard(report.chip, record.counter, sum(len(part.data) for part in like.slices()))
            except EvidenceError:
                counts.not_kept += 1
                continue
            check = partial(_opened, content, like, record, report.chip, trust)
            opened = findings.check(Guard.SNAPSHOT, check, **where)
            if opened is None:
                continue
            counts.opened += 1
            if any(each.where.items() >= where.items() for each in (*findings.found, *findings.doubts)):
                counts.differences += _differences(transcript, report, record, opened, findings)
    return counts


def _opened(content: bytes, like: DeviceMemory, record: LogRecord, chip: str, trust: Trust) -> MemoryCopy:
    shard = MemoryCopy.from_bytes(content, like)
    if shard.digest(trust.chip_trust.snapshot_algorithm).value != record.digest:
        raise EvidenceError(
            f"chip {chip}, record {record.counter}: the shard that the lab opens is not the one that the chip hashed"
        )
    return shard


def _differences(
    transcript: Transcript,
    report: ChipReport,
    record: LogRecord,
    opened: MemoryCopy,
    findings: Findings,
) -> list[Mapping[str, object]]:
    """Where a snapshot that is not as declared departs from a replay; nothing where none can be made."""
    if not transcript.execution.executable or transcript.run.declared.numerics == "native":
        return []
    try:
        step, operators = place_of(record, transcript)
        seen = _replayed(transcript, report.chip, step, operators)
        found = first_difference(opened.slices, seen.slices, seen.unknown)
    except (EvidenceError, CallerError):
        return []  # which other findings are about
    if found is None:
        return []
    where = {**report.where, "record": record.counter, "step": step, **found._asdict()}
    text = f"chip {report.chip}, record {record.counter}: element {found.element} of {found.tensor!a} is the first"
    text += f" that differs: the chip held {found.held!r}, a replay gives {found.replayed!r}"
    findings.add(Guard.SNAPSHOT, text, **where)
    return [where]


def _replayed(transcript: Transcript, chip: str, step: int, operators: int) -> _Seen:
    """A chip's shard after so many operators of a step, or after the whole step, as its program gives it here."""
    run = transcript.run
    shard, last = run.metadata.chips.index(chip), step - (operators > 0)
    steps = ProgramSteps(run, run.checkpoint_before(last) if last else 0, device=torch.device("cpu"))
    training, seen = steps.training, []

    def look(*_: Work) -> None:
        seen.append(training.memory.shards[shard].copy())

    while training.step < last:
        steps.take()
    unknown = frozenset(training.absent)
    if operators:
        training.memory.meter.wake(Work(training.memory.meter.total.calls + operators, NEVER, NEVER), look)
        program = steps.program(step)
        first = program.first_held(training.left)
        unknown = frozenset(name for name in unknown if first.get(name, operators + 1) > operators)
        steps.take()
    else:
        look()
    return _Seen(seen[0].slices, unknown)


def first_difference(
    held: Sequence[BlockSlice], replayed: Sequence[BlockSlice], unknown: frozenset[str]
) -> Difference | None:
    """The first element in which two shards of one layout differ; None if they do not.

    Args:
        unknown: tensors, ``kind/name``, that are not compared.
    """
    for mine, theirs in zip(held, replayed, strict=True):
        one, other = np.asarray(mine.data), np.asarray(theirs.data)
        if f"{mine.kind}/{mine.name}" in unknown or np.array_equal(one, other):
            continue
        width = DTYPE_SIZES[mine.dtype]
        at = int(np.flatnonzero(one != other)[0]) // width
        first = mine.first * block_elements(mine.dtype, mine.shape)
        span = slice(at * width, (at + 1) * width)
        values = (_value(each[span], mine.dtype) for each in (one, other))
        return Difference(f"{mine.kind}/{mine.name}", first + at, *values)
    return None


def _value(raw: np.ndarray, dtype: str) -> str:
    """One element as text, such as ``0.5``."""
    kind: torch.dtype = getattr(torch, dtype)
    return str(torch.from_numpy(raw.copy()).view(kind)[0].item())
