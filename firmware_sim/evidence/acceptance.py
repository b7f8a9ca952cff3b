"""What an inspector has accepted of a chip's log, as a file that replaces the records up to there.

It holds two statements under one key: the chip's checkpoint, for which the chip releases these records (`pruning`), and
the state of its host then, which an inspector needs to judge the records behind it. The chip is shown the first alone.

    {"checkpoint": DSSE envelope, "standing": DSSE envelope}
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any, NamedTuple

from firmware_sim import limits
from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import canonical
from firmware_sim.evidence.chiplog import NO_RUN, LogRecord, RecordKind
from firmware_sim.evidence.envelope import SignatureError, SigningKey, VerifyingKey, open_sealed, seal
from firmware_sim.evidence.pruning import (
    BIRTH,
    LogCheckpoint,
    open_log_checkpoint,
    read_log_checkpoint,
    seal_log_checkpoint,
)
from firmware_sim.evidence.work import NO_WORK, Work

__all__ = [
    "LOG_STANDING_TYPE",
    "NEWBORN",
    "NOT_DRAWN",
    "Drawn",
    "Heard",
    "Standing",
    "chips_part",
    "open_acceptance",
    "read_acceptance",
    "seal_acceptance",
]

LOG_STANDING_TYPE = "application/vnd.chipwitness.log-standing+json"
_KEYS = {"chip_id", "head", "runs", "attached", "before", "counted", "books", "drawn"}
_MOST_WORKS = 16
"""Entries of one run's book."""
_NUMBER = range(1 << 64)


class Drawn(NamedTuple):
    """Draws of ended epochs: how many, the time that they cover in 2^-32 ticks, and how many snapshots were due."""

    trials: int = 0
    time: int = 0
    due: int = 0


NOT_DRAWN = Drawn()
"""Before a chip's first epoch has ended."""


class Heard(NamedTuple):
    """What a chip has heard of a run: the step committed last, the highest one, and the log head of that one."""

    last: int
    most: int
    head: bytes = bytes(32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The state of a chip's host at a place of the chip's log; the default is `NEWBORN`.

    `runs` holds what the chip has heard of each run, so that no other transcript of it can take its place. Of the boot,
    `attached` is the run whose memory was attached last (`NO_RUN`: none was), `before` what the meter had counted then,
    and `counted` the first step committed since whose work the chip did; None where no step was. `books` holds for each
    run what an inspector's ledger has booked of it, and `drawn` what an audit has counted, which mean nothing here.
    """

    runs: Mapping[bytes, Heard] = field(default_factory=dict)
    attached: bytes = NO_RUN
    before: Work = NO_WORK
    counted: int | None = None
    books: Mapping[bytes, Sequence[Work]] = field(default_factory=dict)
    drawn: Drawn = NOT_DRAWN

    def extend(self, records: Sequence[LogRecord]) -> Standing:
        """Return the standing behind `records`, which follow on this one; its books and draws are as they were."""
        runs, attached, before, counted = dict(self.runs), self.attached, self.before, self.counted
        for record in records:
            if record.kind is RecordKind.BOOT:
                attached, before, counted = NO_RUN, NO_WORK, None
            elif record.kind is RecordKind.REGIONS:
                attached, before, counted = record.run_id, record.work, None
            elif record.kind is RecordKind.COMMIT:
                heard = runs.get(record.run_id, Heard(0, 0))
                if record.run_id == attached and counted is None:
                    counted = record.step + (record.step <= heard.most)  # memory held that state already
                head = record.digest if record.step >= heard.most else heard.head
                runs[record.run_id] = Heard(record.step, max(record.step, heard.most), head)
        return replace(self, runs=runs, attached=attached, before=before, counted=counted)

    @property
    def newest(self) -> int | None:
        """The newest step that the attached run has committed in this boot."""
        return None if self.counted is None else self.runs[self.attached].last


NEWBORN = Standing()
"""Before a chip's first record."""


def seal_acceptance(chip_id: str, checkpoint: LogCheckpoint, standing: Standing, key: SigningKey) -> bytes:
    """Return the file; `key` is of the verifier whom the chip was made to obey.

    Raises:
        EvidenceError: more runs than a file holds.
    """
    limits.CHECKPOINT_RUNS.check(len(standing.runs))
    limits.CHECKPOINT_RUNS.check(len(standing.books))
    payload = {
        "chip_id": chip_id,
        "head": checkpoint.head.hex(),
        "runs": {run.hex(): [heard.last, heard.most, heard.head.hex()] for run, heard in standing.runs.items()},
        "attached": standing.attached.hex(),
        "before": standing.before.to_bytes().hex(),
        "counted": standing.counted,
        "books": {run.hex(): [list(astuple(work)) for work in works] for run, works in standing.books.items()},
        "drawn": list(standing.drawn),
    }
    parts = {
        "checkpoint": seal_log_checkpoint(chip_id, checkpoint, key),
        "standing": seal(LOG_STANDING_TYPE, payload, key),
    }
    return canonical.encode({name: canonical.decode(envelope) for name, envelope in parts.items()})


def open_acceptance(data: bytes, chip_id: str, keys: Collection[VerifyingKey]) -> tuple[LogCheckpoint, Standing]:
    """Return what one of `keys` signed of this chip.

    Raises:
        SignatureError: signed by no such key, or by two.
        EvidenceError: malformed, another chip's, of a chip's birth, or its parts are of two moments.
    """
    checkpoint, standing = _parts(data)
    for key in keys:
        try:
            opened = open_log_checkpoint(checkpoint, chip_id, key)
        except SignatureError:
            continue
        if opened.size == BIRTH.size:
            raise EvidenceError(
                f"chip {chip_id}: its log checkpoint is at record 0, but there is nothing before that record"
            )
        return opened, _standing(open_sealed(standing, LOG_STANDING_TYPE, key), chip_id, opened)
    raise SignatureError(f"chip {chip_id}: its log checkpoint is not signed by any inspectorate in the trust file")


def read_acceptance(data: bytes, chip_id: str) -> tuple[LogCheckpoint, str]:
    """Parse the chip's part without the key, for somebody who wants to read it; also the id of its alleged signer.

    Raises:
        EvidenceError: malformed, or another chip's.
    """
    return read_log_checkpoint(_parts(data)[0], chip_id)


def chips_part(data: bytes) -> bytes:
    """Return what the chip is shown; EvidenceError if this is no such file."""
    return _parts(data)[0]


def _parts(data: bytes) -> tuple[bytes, bytes]:
    parts = canonical.decode(data, most=limits.CHECKPOINT_BYTES)
    if not isinstance(parts, dict) or set(parts) != {"checkpoint", "standing"}:
        raise EvidenceError("this is not a log checkpoint with a standing")
    return canonical.encode(parts["checkpoint"]), canonical.encode(parts["standing"])


def _standing(payload: Any, chip_id: str, checkpoint: LogCheckpoint) -> Standing:
    if isinstance(payload, dict):
        payload = {"books": {}, "drawn": [0, 0, 0], **payload}  # which older ones do not have
    if not isinstance(payload, dict) or set(payload) != _KEYS:
        raise EvidenceError("the standing in a log checkpoint is malformed")
    if not isinstance(payload["runs"], dict) or not isinstance(payload["books"], dict):
        raise EvidenceError("the standing in a log checkpoint is malformed")
    if (payload["chip_id"], payload["head"]) != (chip_id, checkpoint.head.hex()):
        raise EvidenceError(
            f"chip {chip_id}: the standing in its log checkpoint belongs to another chip or another record"
        )
    limits.CHECKPOINT_RUNS.check(len(payload["runs"]))
    limits.CHECKPOINT_RUNS.check(len(payload["books"]))
    try:
        standing = Standing(
            runs={
                _bytes(run, 32): Heard(_step(last), _step(most), _bytes(head, 32))
                for run, (last, most, head) in payload["runs"].items()
            },
            attached=_bytes(payload["attached"], 32),
            before=Work.from_bytes(_bytes(payload["before"], len(NO_WORK.to_bytes()))),
            counted=None if payload["counted"] is None else _step(payload["counted"]),
            books={_bytes(run, 32): _works(works) for run, works in payload["books"].items()},
            drawn=_drawn(payload["drawn"]),
        )
        if standing.counted is not None and standing.attached not in standing.runs:
            raise ValueError
    except (TypeError, ValueError):
        raise EvidenceError("the standing in a log checkpoint is malformed") from None
    return standing


def _works(entries: object) -> tuple[Work, ...]:
    if not isinstance(entries, list) or not 0 < len(entries) <= _MOST_WORKS:
        raise ValueError
    if not all(isinstance(entry, list) and len(entry) == 3 for entry in entries):
        raise ValueError
    return tuple(Work(*map(_step, entry)) for entry in entries)


def _drawn(numbers: object) -> Drawn:
    if not isinstance(numbers, list) or len(numbers) != len(Drawn._fields):
        raise ValueError
    return Drawn(*map(_step, numbers))


def _bytes(text: object, length: int) -> bytes:
    if not isinstance(text, str) or len(text) != 2 * length or bytes.fromhex(text).hex() != text:
        raise ValueError
    return bytes.fromhex(text)


def _step(value: object) -> int:
    if type(value) is not int or value not in _NUMBER:
        raise ValueError
    return value
