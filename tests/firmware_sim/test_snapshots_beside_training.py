"""A large memory is copied while the host waits and hashed while it goes on."""

from __future__ import annotations

import dataclasses
import threading
import time
from fractions import Fraction

import numpy as np
import pytest

from firmware_sim import DeviceMemory, FirmwareChip, MailboxError, RecordKind, Region, parse_log, records_of
from firmware_sim.memory import MemoryCopy
from tests.firmware_sim.conftest import RUN, snapshots, work

K = RecordKind


@pytest.fixture
def values():
    return np.zeros(1 << 19, dtype=np.float32)


@pytest.fixture
def memory(values):
    return DeviceMemory([Region.of("w", values)])


@pytest.fixture
def chip(world, memory):
    made = world.make(snapshot_rate=Fraction(1))
    made.attach(memory, RUN, 0)
    return made


@pytest.fixture
def may_hash(monkeypatch):
    """Hashing waits for this event."""
    event, original = threading.Event(), MemoryCopy.digest

    def waiting(self, algorithm):
        assert event.wait(10)
        return original(self, algorithm)

    monkeypatch.setattr(MemoryCopy, "digest", waiting)
    yield event
    event.set()


def boot(world):
    made = FirmwareChip.power_on(world.folder / "chip-1")
    world.chips.append(made)
    return made


def test_host_goes_on_while_the_copy_is_hashed(chip, world, values, memory, may_hash):
    chip.commit(RUN, 0, bytes(32))
    values[:] = 1
    work(memory)
    assert not chip._under_way.hashing.done()
    values[:] = 2  # the next step
    may_hash.set()
    record = chip.commit(RUN, 1, bytes(32))
    snapshot = parse_log(chip.log_bytes())[-2]
    assert (snapshot.kind, snapshot.counter + 1) == (K.SNAPSHOT, record.counter)
    assert (snapshot.tick, snapshot.step, snapshot.operators) == (0, 0, 1)
    values[:] = 1
    assert snapshot.digest == memory.digest().value
    values[:] = 2
    work(memory)
    trust = dataclasses.replace(world.trust, snapshot_rate=Fraction(1))
    assert world.check(world.collect(chip), trust=trust).audit.snapshots == 2


def test_record_comes_without_another_command(chip, memory, may_hash):
    work(memory)
    size = chip._silicon.state.log_size
    may_hash.set()
    deadline = time.monotonic() + 10
    while chip._silicon.state.log_size == size and time.monotonic() < deadline:
        time.sleep(0.01)
    assert chip._silicon.state.log_size == size + 1
    assert not chip._silicon.state.pending


def test_many_snapshots_in_a_row(chip, memory, values):
    for step in range(10):
        values[:] = step
        work(memory)
    records = snapshots(chip)
    assert [record.tick for record in records] == list(range(10))
    for step, record in enumerate(records):
        values[:] = step
        assert record.digest == DeviceMemory([Region.of("w", values)]).digest().value
    assert len(chip.idle(3)) == 3
    assert chip.utilisation.snapshots == 13


def test_one_operator_of_many_ticks_is_copied_once(chip, memory, values, world, monkeypatch):
    """Each moment in it has its record, of the memory that it left."""
    copies, original = [], DeviceMemory.copy

    def counted(self, reuse=None):
        copies.append(1)
        return original(self, reuse)

    monkeypatch.setattr(DeviceMemory, "copy", counted)
    values[:] = 5
    work(memory, 7)
    records = snapshots(chip)
    assert [record.tick for record in records] == list(range(7))
    assert len({(record.digest, record.work, record.op, record.busy) for record in records}) == len(copies) == 1
    assert records[0].digest == memory.digest().value
    chip.cut_power()
    again = boot(world)
    trust = dataclasses.replace(world.trust, snapshot_rate=Fraction(1))
    audit = world.check(world.collect(again), trust=trust).audit
    assert (audit.ticks, audit.snapshots, audit.cut_snapshots) == (7, 7, ())


def test_power_lost_among_snapshots_of_one_operator_shows_which_were_recorded(chip, memory, world, monkeypatch):
    work(memory, 1)
    chip.commit(RUN, 1, bytes(32))  # the first is recorded
    append, left = chip._append, [3]

    def failing(kind, **fields):
        left[0] -= kind is K.SNAPSHOT
        if left[0] < 0:
            chip._lose_power()
        return append(kind, **fields)

    monkeypatch.setattr(chip, "_append", failing)
    work(memory, 5)
    with pytest.raises(MailboxError, match="POWERED_OFF"):
        chip.commit(RUN, 1, bytes(32))
    again = boot(world)
    [gap] = records_of(parse_log(again.log_bytes()), K.POWER_GAP)
    assert (gap.tick, gap.op) == (6, 5), "those of ticks 1, 2 and 3 are recorded; that of 4 is the first that is not"
    trust = dataclasses.replace(world.trust, snapshot_rate=Fraction(1))
    audit = world.check(world.collect(again), trust=trust).audit
    assert (audit.snapshots, audit.cut_snapshots) == (4, (gap,))


def test_power_lost_while_hashing_shows_as_a_cut_snapshot(chip, memory, world, may_hash):
    work(memory)
    chip._lose_power()
    may_hash.set()
    with pytest.raises(MailboxError, match="POWERED_OFF"):
        chip.commit(RUN, 0, bytes(32))
    again = boot(world)
    [gap] = records_of(parse_log(again.log_bytes()), K.POWER_GAP)
    assert (gap.tick, gap.op) == (1, 1)


def test_shutdown_waits_for_the_record(chip, memory, world, may_hash):
    work(memory)
    threading.Timer(0.05, may_hash.set).start()
    chip.cut_power()
    again = boot(world)
    records = parse_log(again.log_bytes())
    assert len(records_of(records, K.SNAPSHOT)) == 1
    assert [gap.op for gap in records_of(records, K.POWER_GAP)] == [0]


def test_refusal_behind_a_snapshot_changes_nothing(chip, memory):
    work(memory)
    with pytest.raises(MailboxError, match="BAD_ARGUMENT"):
        chip.commit(RUN, 0, b"")
    work(memory)
    assert len(snapshots(chip)) == 2


def test_hash_that_fails_ends_the_boot(chip, memory, world, monkeypatch):
    def failing(self, algorithm):
        raise MemoryError("no memory")

    monkeypatch.setattr(MemoryCopy, "digest", failing)
    work(memory)
    with pytest.raises((MailboxError, MemoryError)):
        chip.commit(RUN, 0, bytes(32))
    with pytest.raises(MailboxError, match="POWERED_OFF"):
        chip.commit(RUN, 0, bytes(32))
    assert records_of(parse_log(boot(world).log_bytes()), K.POWER_GAP)[0].op == 1


def test_commands_that_wait_for_hashes_get_them(chip, memory):
    """The hashing thread never waits for a command that waits for its next hash."""
    for step in range(150):
        work(memory)
        chip.commit(RUN, step, bytes(32))
    assert chip.utilisation.snapshots == 150
