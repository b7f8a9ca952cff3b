"""What ``chip show``, ``log`` and ``quote`` print of a chip, as JSON and as lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields

from analysis.commands._chip_answers import Clock, LoggedChip, QuotedChip, ShownChip, ShownEpoch, Work
from analysis.public_data import Chip
from firmware_sim import Work as Metered
from firmware_sim.evidence import NO_RUN, LogRecord, RecordKind
from firmware_sim.roofline import intervals
from firmware_sim.service import ChipView, EpochRow

__all__ = ["log_json", "log_lines", "quote_json", "quote_lines", "show_json", "show_lines"]

_EPOCHS_SHOWN = 20
_TICKS_SHOWN = 12
_SAYS = {
    RecordKind.GENESIS: "log {run} of this chip begins",
    RecordKind.BOOT: "firmware {digest} of security version {step} starts{clean}",
    RecordKind.EPOCH: "epoch {step} begins; its key is committed to as {digest}",
    RecordKind.CLOSE_EPOCH: "epoch {step} ends",
    RecordKind.POWER_OFF: "shut down in order",
    RecordKind.POWER_GAP: "epoch {step} lost its power{cut}",
    RecordKind.REGIONS: "memory of run {run} from step {step} on: table {digest}",
    RecordKind.COMMIT: "host commits step {step} of run {run}: {digest}; {op} bytes are held outside the state",
    RecordKind.SNAPSHOT: "snapshot {digest}, {operators}after {where}{late}",
    RecordKind.BEACON: "the verifier's time is {step}: beacon {digest}",
    RecordKind.QUOTE: "a quote is asked for: request {digest}",
    RecordKind.SPENT: "the log is full for good",
}
_CERTIFICATE, _LOG = "certificate", "log"
_COMPARED = {
    "chip_id": _CERTIFICATE,
    "certificate_digest": _CERTIFICATE,
    "measurement": f"{_CERTIFICATE}, {_LOG}",
    "security_version": f"{_CERTIFICATE}, {_LOG}",
    "boot": _LOG,
    "tick": _LOG,
    "epoch": _LOG,
    "counter": "not below the log's size",
    "log_size": _LOG,
    "log_head": _LOG,
    "journey": "replay of the log",
    "current": "replay of the log",
    "snapshot_rate": "schedule by the revealed keys",
    "flop_rate": f"busy ticks of the {_LOG}",
    "moved_rate": f"busy ticks of the {_LOG}",
    "beacon": _LOG,
    "calls": _LOG,
    "flop": _LOG,
    "moved": _LOG,
    "held": _LOG,
    "nonce": "last record of the log",
    "verifier_id": "last record of the log",
}
"""What each field of a quote was compared with; any other is what the chip says."""


def show_json(name: str, view: ChipView, device: Chip | None = None) -> ShownChip:
    """Identity, firmware, time, counters, memory and schedule; with a device also its clock."""
    identity, counts, quotas, memory = view.identity, view.counts(), view.quotas, view.memory
    page: ShownChip = {
        "chip": name,
        "identity": identity.chip_id,
        "maker": str(identity.maker_digest),
        "certificate": str(identity.certificate_digest),
        "firmware": {
            "name": identity.firmware,
            "measurement": str(identity.measurement),
            "security_version": identity.security_version,
        },
        "boot": view.boot,
        "tick": view.tick,
        "busy": view.busy,
        "work": _work(view.work),
        "in_a_tick": {"flop": view.roofline.flop, "moved": view.roofline.moved},
        "counter": view.counter,
        "log_size": view.log_size,
        "log_start": view.since.size,
        "checkpoint_signer": view.signer,
        "log_head": view.log_head.hex(),
        "records": {
            kind.name: {"used": counts[kind], "quota": None if quotas is None else quotas[kind]} for kind in RecordKind
        },
        "memory": None
        if memory is None
        else {
            "used_bytes": memory.used,
            "capacity_bytes": memory.capacity,
            "slot_writes": memory.slot_writes,
            "cell_writes": memory.cell_writes,
        },
        "snapshot_rate": str(view.snapshot_rate),
        "snapshot_algorithm": view.snapshot_algorithm,
        "epochs": [_epoch_json(row) for row in view.epochs],
        "problem": view.problem,
    }
    if device is not None:
        page["clock"] = _clock(view, device)
    return page


def _work(work: Metered) -> Work:
    return {"calls": work.calls, "flop": work.flop, "moved": work.moved}


def show_lines(name: str, view: ChipView, device: Chip | None = None) -> Iterator[str]:
    """The same for a person."""
    page = show_json(name, view, device)
    identity, counts = view.identity, view.counts()
    yield f"chip         {name}" + (
        "" if name == page["identity"] else f", which presents itself as {page['identity']}"
    )
    yield f"maker        {page['maker']}"
    yield f"certificate  {page['certificate']}"
    yield f"firmware     {identity.firmware}, security version {identity.security_version}"
    yield f"             {identity.measurement}"
    yield f"time         boot {page['boot']}, tick {view.tick}, of which {view.busy} busy"
    yield f"meter        {view.work} in this boot"
    yield f"a tick       is the time of {view.roofline.flop} FLOP, or of {view.roofline.moved} bytes moved"
    if device is not None:
        rates = f"{device.peak_dense_flops_bf16:.3g} FLOP/s and {device.memory_bandwidth_gbps:g} GB/s"
        busy = device.roofline.seconds(view.work)
        yield f"clock        at least {busy:.3g} s of work in this boot on {device.chip}, at {rates}"
        for each in list(intervals(view.records, device.roofline))[-_EPOCHS_SHOWN:]:
            seconds, busy = each.stop - each.start, each.busy
            yield f"             {seconds} s from beacon {each.start} on: work for at least {busy:.3g} s of them"
    yield f"counter      {view.counter} changes of the persistent state"
    yield f"log          {page['log_size']} records, head {page['log_head']}"
    held = [f"{kind.name} {count}" for kind, count in sorted(counts.items())]
    yield f"records      {', '.join(held) or 'none'}"
    if view.since.size:
        yield f"             {_behind(view)}"
    if view.memory is not None:
        memory = view.memory
        yield f"memory       {memory.used} of {memory.capacity} bytes"
        yield f"             written most: a slot {memory.slot_writes} times, a cell {memory.cell_writes} times"
    shares = {kind: (counts[kind], most) for kind, most in (view.quotas or {}).items() if most > 1}
    if shares:
        kind, (count, most) = max(shares.items(), key=lambda item: item[1][0] / item[1][1])
        yield f"             fullest share: {kind.name}, {count} of {most} records"
    yield f"schedule     a snapshot with probability {view.snapshot_rate} a tick, as {view.snapshot_algorithm}"
    for row in view.epochs[-_EPOCHS_SHOWN:]:
        yield f"             {_epoch_line(row)}"
    if len(view.epochs) > _EPOCHS_SHOWN:
        yield f"             and {len(view.epochs) - _EPOCHS_SHOWN} epochs before"
    yield f"problem      {view.problem or 'none'}"


def _clock(view: ChipView, device: Chip) -> Clock:
    """The chip's meter as a clock, if it were such a device, and from beacon to beacon."""
    roofline = device.roofline
    return {
        "device": device.chip,
        "busy_seconds": roofline.seconds(view.work),
        "intervals": [
            {"start": each.start, "stop": each.stop, "busy_seconds": each.busy, "idle_seconds": each.idle}
            for each in intervals(view.records, roofline)
        ],
    }


def log_json(name: str, view: ChipView) -> LoggedChip:
    """All records of the log, each with what it says in words."""
    return {
        "chip": name,
        "log_start": view.since.size,
        "checkpoint_signer": view.signer,
        "records": [
            {
                "counter": record.counter,
                "kind": record.kind.name,
                "boot": record.boot,
                "tick": record.tick,
                "busy": record.busy,
                "work": _work(record.work),
                "run_id": record.run_id.hex(),
                "step": record.step,
                "op": record.op,
                "digest": record.digest.hex(),
                "previous": record.previous.hex(),
                "says": _says(record),
            }
            for record in view.records
        ],
        "problem": view.problem,
    }


def log_lines(name: str, view: ChipView) -> Iterator[str]:
    """The same for a person: number, time as boot:tick, busy ticks, kind, words."""
    yield f"chip {name}"
    if view.since.size:
        yield _behind(view)
    for record in view.records:
        time = f"{record.boot}:{record.tick}"
        yield f"{record.counter:6} {time:>9} {record.busy:6}  {record.kind.name:11} {_says(record)}"
    if view.problem is not None:
        yield f"problem: {view.problem}"


def quote_json(name: str, view: ChipView) -> QuotedChip:
    """Each field of the quote, with what it was compared with; none of that where the evidence has a problem."""
    return {
        "chip": name,
        "signed_by": view.identity.alias_key.key_id,
        "fields": _fields(view),
        "problem": view.problem,
    }


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a quote, and what it was compared with."""

    value: object
    compared_with: str | None


def _fields(view: ChipView) -> dict[str, Field]:
    known = _COMPARED if view.problem is None else {}
    quote = () if view.quote is None else fields(view.quote)
    return {each.name: Field(_value(getattr(view.quote, each.name)), known.get(each.name)) for each in quote}


def quote_lines(name: str, view: ChipView) -> Iterable[str]:
    """The same for a person."""
    yield f"quote of chip {name}, signed by {view.identity.alias_key.key_id}"
    for field, entry in _fields(view).items():
        yield f"  {field:18} {entry.value!s:72} {entry.compared_with or 'as the chip says'}"
    if view.problem is not None:
        yield f"problem: {view.problem}"


def _behind(view: ChipView) -> str:
    """From which checkpoint a log begins."""
    since, signer = view.since, "" if view.signer is None else f", said to be signed by {view.signer}"
    return f"from record {since.size} on, behind a checkpoint at boot {since.boot}, tick {since.tick}{signer}"


def _says(record: LogRecord) -> str:
    run = record.run_id.hex()[:16]
    return _SAYS.get(record.kind, "step {step}, op {op}: {digest}").format(
        run=run,
        step=record.step,
        op=record.op,
        digest=record.digest.hex()[:16],
        clean="" if record.op else ", and was not shut down in order before",
        cut=f" in the snapshot of tick {record.op - 1}" if record.op else "",
        late=", late" if record.kind is RecordKind.SNAPSHOT and record.is_late else "",
        where="no run" if record.run_id == NO_RUN else f"step {record.step} of run {run}",
        operators=f"{record.operators} operators " if record.operators else "",
    )


def _epoch_json(row: EpochRow) -> ShownEpoch:
    return {
        "epoch": row.epoch,
        "boot": row.boot,
        "first": row.first,
        "last": row.last,
        "due": None if row.due is None else list(row.due),
        "taken": list(row.taken),
        "ended": None if row.ended is None else row.ended.name,
    }


def _epoch_line(row: EpochRow) -> str:
    ticks = f"ticks {row.first:.2f} to {row.last:.2f}" if row.last > row.first else "no time"
    span = f"epoch {row.epoch}, boot {row.boot}, {ticks}"
    taken = f"taken {_ticks(row.taken)}"
    if row.ended is None:
        return f"{span}: open, its key is secret; {taken}"
    due = "not computed" if row.due is None else _ticks(row.due)
    return f"{span}: due {due}; {taken}; {row.ended.name}"


def _ticks(ticks: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, ticks[:_TICKS_SHOWN])) or "none"
    return shown if len(ticks) <= _TICKS_SHOWN else f"{shown}, and {len(ticks) - _TICKS_SHOWN} more"


def _value(value: object) -> object:
    if isinstance(value, bytes):
        return value.hex()
    return value if isinstance(value, int | str) else str(value)
