"""Power loss at every system call, torn at several places, and real kills of a real process."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from contextlib import suppress
from fractions import Fraction

import numpy as np
import pytest

from firmware_sim import (
    CURRENT_FIRMWARE,
    DEFAULT_ALGORITHM,
    LABORATORY,
    RECORD_BYTES,
    ChipTrust,
    DeviceError,
    DeviceMemory,
    FirmwareChip,
    MailboxError,
    MakerCA,
    RecordKind,
    Region,
    check_chip,
    check_life,
    collect_evidence,
    parse_log,
    records_of,
)
from firmware_sim.nvram import PosixDisk
from tests.firmware_sim.conftest import work

RUN = hashlib.sha256(b"run").digest()
MAKER = MakerCA.create(b"maker")


class PowerLoss(DeviceError):
    """The process ends here, as far as the disk is concerned."""


class FaultyDisk(PosixDisk):
    """Loses power at call number `fatal`, having written the first `kept` per mille of its bytes."""

    def __init__(self, fatal: int = 0, kept: int = 0) -> None:
        super().__init__()
        self.calls = 0
        self._fatal = fatal
        self._kept = kept

    def write_at(self, descriptor, data, offset):
        if self._dies():
            super().write_at(descriptor, data[: len(data) * self._kept // 1000], offset)
            raise PowerLoss
        super().write_at(descriptor, data, offset)

    def truncate(self, descriptor, size):
        if self._dies():
            raise PowerLoss
        super().truncate(descriptor, size)

    def _dies(self) -> bool:
        self.calls += 1
        return self.calls == self._fatal


def _order(folder, disk, **options):
    order = {"maker": MAKER, "chip_id": "chip-1", "seed": b"s", "snapshot_rate": Fraction(1, 2), **options}
    return FirmwareChip.manufacture(folder, disk=disk, **order)


def _memory():
    return DeviceMemory([Region.of("w", np.arange(6, dtype=np.float32))])


def _live(chip, acknowledged):
    """A short life; `acknowledged` keeps log, tick and busy ticks after each command that returned.

    Who runs operators is not told that a write has failed: the next command is.
    """
    memory = _memory()
    commands = [
        lambda: chip.attach(memory, RUN, 0),
        lambda: chip.commit(RUN, 0, bytes(32)),
        *[lambda: work(memory, Fraction(2, 3))] * 12,
        lambda: work(memory, 4),
        chip.close_epoch,
        lambda: chip.quote(bytes(16), "v"),
        lambda: chip.idle(2),
        chip.power_off,
    ]
    for command in commands:
        command()
        if command != chip.power_off:
            acknowledged.append((chip.log_bytes(), chip.time, chip.utilisation.busy_ticks))


def _count_calls(tmp_path):
    disk = FaultyDisk()
    _live(_order(tmp_path / "whole", disk), [])
    return disk.calls


@pytest.mark.parametrize("kept", [0, 1, 500, 999, 1000])
def test_power_loss_at_any_write_leaves_the_old_log_or_the_new(tmp_path, kept):
    total = _count_calls(tmp_path)
    assert total > 40
    for fatal in range(1, total + 1):
        folder = tmp_path / f"chip {fatal}"
        disk = FaultyDisk(fatal, kept)
        acknowledged = [(b"", 0, 0)]
        with pytest.raises((PowerLoss, MailboxError)):
            _live(_order(folder, disk), acknowledged)
        again = FirmwareChip.power_on(folder)
        data = again.log_bytes()
        again.close_epoch()
        log, tick, busy = acknowledged[-1]
        assert data.startswith(log), f"call {fatal}: an acknowledged record is gone"
        records = parse_log(again.log_bytes())
        end = max(record.tick for record in records if record.boot == 1 or again.boot == 1)
        assert end >= tick, f"call {fatal}: acknowledged ticks are gone"
        assert max(record.busy for record in records) >= busy, f"call {fatal}: acknowledged busy ticks are gone"
        check_life(records, chip="chip-1", roofline=LABORATORY)
        assert again.boot == len(records_of(records, RecordKind.BOOT)) == records[-1].boot
        _inspect(again)
        again.cut_power()


@pytest.mark.parametrize("kind", [RecordKind.BOOT, RecordKind.EPOCH, RecordKind.QUOTE])
@pytest.mark.parametrize("kept", [0, 500, 1000])
def test_power_loss_at_any_write_of_a_chip_at_its_limits(tmp_path, kind, kept):
    """The chip's quota of one kind ends within this life; whenever the power goes, it answers the inspection."""
    quotas = {kind: 2}

    def live(folder, disk):
        chip = _order(folder, disk, quotas=quotas)
        try:
            chip.idle(1)
            chip.quote(bytes(16), "v")
            chip.close_epoch()
            chip.cut_power()
            chip = FirmwareChip.power_on(folder, disk=disk)
            chip.close_epoch()
            for _ in range(3):
                chip.quote(bytes(16), "v")
            chip.power_off()
        finally:
            chip.cut_power()

    whole = FaultyDisk()
    live(tmp_path / "whole", whole)
    for fatal in range(1, whole.calls + 1):
        folder = tmp_path / f"chip {fatal}"
        with pytest.raises(PowerLoss):
            live(folder, FaultyDisk(fatal, kept))
        for _ in range(3):
            again = FirmwareChip.power_on(folder)
            _inspect(again)
            again.cut_power()
        assert parse_log((folder / "log.bin").read_bytes())[-1].kind is RecordKind.SPENT


def test_interrupt_anywhere_in_a_command_leaves_evidence_that_passes(tmp_path, monkeypatch):
    """An interrupt between two changes that belong together ends the boot, so that the next one can tell."""
    for number, name in enumerate(["_snapshot", "_open_epoch", "_append", "_store"]):
        chip = _order(tmp_path / f"chip {number}", PosixDisk())
        original = getattr(chip, name)

        def interrupted(*args, original=original, **kwargs):
            original(*args, **kwargs)
            raise KeyboardInterrupt

        def live(chip=chip):
            memory = _memory()
            chip.attach(memory, RUN, 0)
            for _ in range(20):
                work(memory)
                chip.close_epoch()

        monkeypatch.setattr(chip, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            live()
        with pytest.raises(MailboxError, match="POWERED_OFF"):
            chip.idle(1)
        again = FirmwareChip.power_on(tmp_path / f"chip {number}")
        _inspect(again)
        again.cut_power()


@pytest.mark.parametrize("where", ["_look", "_snapshot", "_freeze", "_digest", "_settle", "_await_next"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, MemoryError])
def test_interrupt_anywhere_in_a_snapshot_hides_none(tmp_path, monkeypatch, where, error):
    """A handler of the host that raises, as Ctrl-C does: the snapshot whose moment had come is not hidden."""
    chip, memory = _order(tmp_path / "chip", PosixDisk(), snapshot_rate=Fraction(1)), _memory()
    chip.attach(memory, RUN, 0)
    work(memory, 2)
    original = getattr(chip, where)

    def interrupted(*args, **kwargs):
        monkeypatch.setattr(chip, where, original)
        raise error

    monkeypatch.setattr(chip, where, interrupted)
    with pytest.raises(error):
        work(memory, Fraction(5, 2))
    with pytest.raises(MailboxError, match="POWERED_OFF"):
        chip.idle(1)
    again = FirmwareChip.power_on(tmp_path / "chip")
    audit = _inspect(again, rate=Fraction(1))
    again.cut_power()
    assert (audit.ticks, audit.power_gaps) == (4, 1)
    assert audit.snapshots >= 4 or audit.cut_snapshots


def test_interrupt_in_one_chip_leaves_the_others_their_moments(tmp_path, monkeypatch):
    """Chips that hold a state together share one meter: the second is woken even where the first is interrupted."""
    memory = _memory()
    chips = [
        _order(tmp_path / name, PosixDisk(), snapshot_rate=Fraction(1), chip_id=name) for name in ("chip-1", "chip-2")
    ]
    for chip in chips:
        share = memory.byte_count, 2 * memory.byte_count
        chip.attach(DeviceMemory(memory.regions, meter=memory.meter, share=share), RUN, 0)

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(chips[0], "_freeze", interrupted)
    with pytest.raises(KeyboardInterrupt):
        work(memory, 4)
    work(memory, 2)
    for chip, snapshots in zip((FirmwareChip.power_on(tmp_path / "chip-1"), chips[1]), (0, 3), strict=True):
        audit = _inspect(chip, rate=Fraction(1))
        chip.cut_power()
        assert audit.snapshots == snapshots
        assert len(audit.cut_snapshots) == (not snapshots)


@pytest.mark.parametrize("size", [6, 1 << 19], ids=["hashed at once", "hashed beside"])
@pytest.mark.parametrize("kept", [0, 1000])
def test_power_loss_at_any_write_of_a_snapshot_in_an_idle_chip(tmp_path, kept, size):
    """Several snapshots in one call: those that were not recorded are under way, and none is missing."""
    for fatal in range(1, 14):
        folder = tmp_path / str(fatal)
        disk = FaultyDisk()
        chip = _order(folder, disk, snapshot_rate=Fraction(1))
        chip.attach(DeviceMemory([Region.of("w", np.zeros(size, dtype=np.float32))]), RUN, 0)
        disk._fatal, disk._kept = disk.calls + fatal, kept
        with suppress(PowerLoss, MailboxError):
            chip.idle(3)
        chip._lose_power()
        again = FirmwareChip.power_on(folder)
        _inspect(again, rate=Fraction(1))
        again.cut_power()


def test_power_loss_while_booting_leaves_a_chip_that_boots(tmp_path):
    folder = tmp_path / "chip"
    _order(folder, PosixDisk()).cut_power()
    boots = 0
    for fatal in range(1, 12):
        disk = FaultyDisk(fatal, 1000)
        try:
            FirmwareChip.power_on(folder, disk=disk).cut_power()
            boots += 1
        except PowerLoss:
            pass
    assert boots >= 3
    chip = FirmwareChip.power_on(folder)
    chip.close_epoch()
    check_life(parse_log(chip.log_bytes()), chip="chip-1", roofline=LABORATORY)
    _inspect(chip)
    chip.cut_power()


def test_failed_write_ends_the_session_with_the_chip(tmp_path):
    disk = FaultyDisk()
    chip = _order(tmp_path / "chip", disk)
    disk._fatal = disk.calls + 1
    with pytest.raises(PowerLoss):
        chip.commit(RUN, 0, bytes(32))
    with pytest.raises(MailboxError, match="POWERED_OFF"):
        chip.commit(RUN, 0, bytes(32))
    FirmwareChip.power_on(tmp_path / "chip").cut_power()


def test_interrupted_snapshot_shows_in_the_power_gap(tmp_path):
    folder = tmp_path / "chip"
    disk = FaultyDisk()
    chip = FirmwareChip.manufacture(
        folder, maker=MAKER, chip_id="chip-1", seed=b"s", snapshot_rate=Fraction(1), disk=disk
    )
    chip.idle(1)
    disk._fatal = disk.calls + 2  # the first write says that a snapshot is under way, the second is its record
    with pytest.raises(PowerLoss):
        chip.idle(1)
    again = FirmwareChip.power_on(folder)
    gap = records_of(parse_log(again.log_bytes()), RecordKind.POWER_GAP)[0]
    assert (gap.boot, gap.tick, gap.busy, gap.op) == (1, 2, 0, 2)
    audit = _inspect(again, rate=Fraction(1))
    assert audit.cut_snapshots == (gap,)
    again.cut_power()


def _inspect(chip, rate=Fraction(1, 2)):
    evidence = collect_evidence(chip, bytes(32), "v")
    trust = ChipTrust(
        ca_digests=[MAKER.certificate_digest],
        measurements=[CURRENT_FIRMWARE.measurement],
        minimum_security_version=1,
        snapshot_rate=rate,
        snapshot_algorithm=DEFAULT_ALGORITHM,
    )
    return check_chip(evidence, chip_id=chip.chip_id, trust=trust, nonce=bytes(32), verifier_id="v", last=None).audit


CHILD = """
import sys
from fractions import Fraction
import numpy as np
from firmware_sim import LABORATORY, DeviceMemory, FirmwareChip, MakerCA, Region, Work
folder = sys.argv[1]
if sys.argv[2] == "new":
    chip = FirmwareChip.manufacture(
        folder, maker=MakerCA.create(b"maker"), chip_id="chip-1", seed=b"s", snapshot_rate=Fraction(1, 2)
    )
else:
    chip = FirmwareChip.power_on(folder)
step = 0
memory = DeviceMemory([Region.of("w", np.zeros(6))])
chip.attach(memory, bytes(32), 0)
while True:
    memory.meter.charge(Work(1, 0, LABORATORY.moved * 2 // 3))
    record = chip.commit(bytes(32), step, bytes(32))
    print(record.counter, flush=True)
    step += 1
"""


def test_killed_process_loses_nothing_that_was_acknowledged(tmp_path):
    folder = tmp_path / "chip"
    for number, lines in enumerate([1, 7, 40, 200]):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(folder), "new" if number == 0 else "again"], stdout=subprocess.PIPE
        )
        try:
            assert child.stdout is not None
            for _ in range(lines):
                last = child.stdout.readline()
        finally:
            os.kill(child.pid, signal.SIGKILL)
            rest = child.communicate()[0]
        complete = (last + rest).split(b"\n")[:-1]
        acknowledged = int(complete[-1])
        size = (folder / "log.bin").stat().st_size // RECORD_BYTES
        assert size > acknowledged
    chip = FirmwareChip.power_on(folder)
    assert chip.boot == 5
    assert len(records_of(parse_log(chip.log_bytes()), RecordKind.POWER_GAP)) == 4
    _inspect(chip)
    chip.cut_power()
