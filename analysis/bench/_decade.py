"""A chip of the deployment profile over years, with a host that floods it and an inspection at the end of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np

from firmware_sim import (
    BIRTH,
    CURRENT_FIRMWARE,
    DEFAULT_ALGORITHM,
    DEPLOYMENT,
    LABORATORY,
    RECORD_BYTES,
    Beacon,
    ChipTrust,
    DeviceMemory,
    FirmwareChip,
    LogPosition,
    MailboxError,
    MakerCA,
    RecordKind,
    Region,
    SigningKey,
    Work,
    check_chip,
    collect_evidence,
    parse_log,
    rate_per_tick,
    seal_beacon,
    seal_log_checkpoint,
)
from firmware_sim.errors import EvidenceError

__all__ = ["decade"]

_TICKS, _DAYS = 24, 365
_RUN = bytes(range(32))
_RATE = rate_per_tick(Fraction(1, 10), _TICKS)


def decade(folder: Path, *, years: int = 10, progress: Callable[[int], object] | None = None) -> dict[str, object]:
    """Let a chip live and be flooded; what it had room for.

    A day has 24 ticks, two of them work, and 0.1 snapshots. The host attaches memory, shows beacons and commits each
    day, more often than there is room for. In the last quarter of three years of four it asks for quotes, closes epochs
    or takes the power until the chip is spent. Each year ends with an inspection, which must accept, and its
    checkpoint.

    Returns:
        ``used`` (most bytes of NVRAM), ``capacity``, ``snapshots``, ``records`` (all that were ever made), ``commits``,
        ``refused`` (by error), ``spent`` (years whose flood silenced the chip), ``cell_writes``, ``slot_writes``.

    Raises:
        EvidenceError: an inspection does not accept, or there is more in the chip's memory than it says.
    """
    verifier = SigningKey.generate(b"decade".ljust(32))
    chip, trust = _made(folder, verifier)
    memory = DeviceMemory([Region.of("w", np.arange(64, dtype=np.float32))])
    since, last, used, totals, refused = BIRTH, None, 0, Counter[RecordKind](), Counter[str]()
    spent = 0
    for year in range(years):
        for day in range(_DAYS):
            now = year * _DAYS + day + 1
            refused.update(_day(chip, memory, now, verifier))
            flood = year % 4 if day > _DAYS * 3 // 4 else 0
            if flood == 1:
                chip.quote(bytes(16), "host")
            elif flood == 2:
                chip.close_epoch()
            elif flood == 3 and day % 2:
                chip.cut_power()
                chip = FirmwareChip.power_on(folder)
            if day % 30 == 0:
                used = max(used, _used(chip, folder))
        used = max(used, _used(chip, folder))
        evidence = collect_evidence(chip, bytes(32), "v")
        checked = check_chip(
            evidence, chip_id="chip-1", trust=trust, nonce=bytes(32), verifier_id="v", last=last, since=since
        )
        totals.update(record.kind for record in checked.records)
        spent += checked.records[-1].kind is RecordKind.SPENT
        used = max(used, _used(chip, folder))
        since, last = checked.checkpoint(), LogPosition.of(checked.quote)
        chip.prune(seal_log_checkpoint("chip-1", since, verifier))
        if progress:
            progress(1)
    status = chip.nvram
    chip.power_off()
    return {
        "used": used,
        "capacity": status.capacity,
        "snapshots": totals[RecordKind.SNAPSHOT],
        "records": totals.total(),
        "commits": totals[RecordKind.COMMIT],
        "refused": dict(refused),
        "spent": spent,
        "cell_writes": status.cell_writes,
        "slot_writes": status.slot_writes,
    }


def _made(folder: Path, verifier: SigningKey) -> tuple[FirmwareChip, ChipTrust]:
    """A new chip, and whom to trust about it."""
    maker = MakerCA.create(b"decade")
    chip = FirmwareChip.manufacture(
        folder,
        maker=maker,
        chip_id="chip-1",
        seed=b"decade",
        snapshot_rate=_RATE,
        beacon_key=verifier.verifying,
        nvram=DEPLOYMENT,
    )
    trust = ChipTrust(
        ca_digests=[maker.certificate_digest],
        measurements=[CURRENT_FIRMWARE.measurement],
        minimum_security_version=1,
        snapshot_rate=_RATE,
        snapshot_algorithm=DEFAULT_ALGORITHM,
    )
    return chip, trust


def _day(chip: FirmwareChip, memory: DeviceMemory, now: int, verifier: SigningKey) -> Iterator[str]:
    """What a host does in a day; errors of the mailbox, by name."""
    calls: list[Callable[[], object]] = [
        partial(chip.attach, memory, _RUN, 0),
        partial(_show_beacon, chip, now, verifier),
        *[partial(chip.commit, _RUN, step, bytes(32)) for step in range(3)],
        *[partial(memory.meter.charge, Work(1, 0, LABORATORY.moved))] * 2,
        partial(chip.idle, _TICKS - 2),
    ]
    for call in calls:
        try:
            call()
        except MailboxError as error:
            yield error.code.name


def _show_beacon(chip: FirmwareChip, day: int, verifier: SigningKey) -> None:
    """Every tenth day a beacon of this day, on all others none that is signed."""
    boot, size = chip.position
    beacon = Beacon(chip_id=chip.chip_id, boot=boot, size=size, time=day)
    chip.beacon(seal_beacon(beacon, verifier) if day % 10 == 1 else b"")


def _used(chip: FirmwareChip, folder: Path) -> int:
    """Bytes in the chip's folder that count as NVRAM, which must be what the chip says."""
    data = chip.log_bytes()
    commits = sum(record.kind is RecordKind.COMMIT for record in parse_log(data)) if data else 0
    [log] = folder.glob("log*.bin")
    there = (folder / "nvram.bin").stat().st_size + log.stat().st_size - commits * RECORD_BYTES
    if there != chip.nvram.used:
        raise EvidenceError(f"the chip's memory holds {there} bytes, but the chip says {chip.nvram.used}")
    return there
