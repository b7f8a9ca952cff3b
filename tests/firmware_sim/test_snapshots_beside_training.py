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
from tests.firmware_sim.conftest import RUN

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
    event = chip.tick(RUN, 0)
    assert not chip._under_way.hashing.done()
    values[:] = 2  # the next step
    may_hash.set()
    record = chip.commit(RUN, 1, bytes(32))
    snapshot = parse_log(chip.log_bytes())[-2]
    assert (snapshot.kind, snapshot.counter, record.counter) == (K.SNAPSHOT, event.record, event.record + 1)
    assert (snapshot.tick, snapshot.step) == (event.tick, 0)
    values[:] = 1
    assert snapshot.digest == memory.digest().value
    values[:] = 2
    chip.tick(RUN, 1)
    trust = dataclasses.replace(world.trust, snapshot_rate=Fraction(1))
    assert world.check(world.collect(chip), trust=trust).audit.snapshots == 2


def test_record_comes_without_another_command(chip, may_hash):
    chip.tick(RUN, 0)
    size = chip._silicon.state.log_size
    may_hash.set()
    deadline = time.monotonic() + 10
    while chip._silicon.state.log_size == size and time.monotonic() < deadline:
        time.sleep(0.01)
    assert chip._silicon.state.log_size == size + 1
    assert not chip._silicon.state.pending


def test_many_snapshots_in_a_row(chip, values):
    events = []
    for step in range(10):
        values[:] = step
        events.append((step, chip.tick(RUN, step)))
    records = records_of(parse_log(chip.log_bytes()), K.SNAPSHOT)
    assert [record.counter for record in records] == [event.record for _, event in events]
    for (step, _), record in zip(events, records, strict=True):
        values[:] = step
        assert record.digest == DeviceMemory([Region.of("w", values)]).digest().value
    assert len(chip.idle(3)) == 3
    assert chip.utilisation.snapshots == 13


def test_power_lost_while_hashing_shows_as_a_cut_snapshot(chip, world, may_hash):
    chip.tick(RUN, 0)
    chip.lose_power()
    may_hash.set()
    with pytest.raises(MailboxError, match="POWERED_OFF"):
        chip.commit(RUN, 0, bytes(32))
    again = boot(world)
    [gap] = records_of(parse_log(again.log_bytes()), K.POWER_GAP)
    assert (gap.tick, gap.op) == (1, 1)


def test_shutdown_waits_for_the_record(chip, world, may_hash):
    chip.tick(RUN, 0)
    threading.Timer(0.05, may_hash.set).start()
    chip.cut_power()
    again = boot(world)
    records = parse_log(again.log_bytes())
    assert len(records_of(records, K.SNAPSHOT)) == 1
    assert [gap.op for gap in records_of(records, K.POWER_GAP)] == [0]


def test_refusal_behind_a_snapshot_changes_nothing(chip):
    chip.tick(RUN, 0)
    with pytest.raises(MailboxError, match="BAD_ARGUMENT"):
        chip.commit(RUN, 0, b"")
    assert chip.tick(RUN, 1) is not None


def test_hash_that_fails_ends_the_boot(chip, world, monkeypatch):
    def failing(self, algorithm):
        raise MemoryError("no memory")

    monkeypatch.setattr(MemoryCopy, "digest", failing)
    chip.tick(RUN, 0)
    with pytest.raises((MailboxError, MemoryError)):
        chip.commit(RUN, 0, bytes(32))
    with pytest.raises(MailboxError, match="POWERED_OFF"):
        chip.commit(RUN, 0, bytes(32))
    assert records_of(parse_log(boot(world).log_bytes()), K.POWER_GAP)[0].op == 1


def test_commands_that_wait_for_hashes_get_them(chip):
    """The hashing thread never waits for a command that waits for its next hash."""
    for step in range(150):
        chip.tick(RUN, step)
        chip.commit(RUN, step, bytes(32))
    assert chip.utilisation.snapshots == 150
