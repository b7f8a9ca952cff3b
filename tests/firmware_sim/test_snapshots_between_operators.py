"""A snapshot falls after a secret number of operators, which the chip counts and no host hears of."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firmware_sim import DeviceMemory, FirmwareChip, Meter, RecordKind, Region, Work, decode_epoch_keys, parse_log
from firmware_sim.schedule import operators_until
from tests.firmware_sim.conftest import RUN

ONE = Work(1, 0, 0)
USUAL = 40


@pytest.fixture
def values():
    return np.zeros(16, dtype=np.float32)


@pytest.fixture
def memory(values):
    return DeviceMemory([Region.of("w", values)], meter=Meter())


@pytest.fixture
def chip(world, memory):
    return attached(world, memory)


def attached(world, memory):
    """A chip on whose memory one step of the usual length has run."""
    made = world.make(snapshot_rate=Fraction(1))
    made.attach(memory, RUN, 0)
    made.tick(RUN, 0)
    work(memory, USUAL)
    made.commit(RUN, 1, bytes(32))
    return made


def work(memory, operators):
    for _ in range(operators):
        memory.meter.charge(ONE)


def snapshots(chip):
    return [record for record in parse_log(chip.log_bytes()) if record.kind is RecordKind.SNAPSHOT]


def planned(chip, tick):
    """After how many operators the snapshot of a tick falls, by the key that the chip reveals."""
    chip.close_epoch()
    [key] = chip.reveal()[:1]
    return operators_until(key.key, 1, tick, USUAL)


def audit(world, chip):
    trust = dataclasses.replace(world.trust, snapshot_rate=Fraction(1))
    return world.check(world.collect(chip), trust=trust).audit


@given(key=st.binary(min_size=32, max_size=32), tick=st.integers(0, 1 << 40), usual=st.integers(1, 1 << 40))
def test_moment_lies_within_the_usual_number(key, tick, usual):
    assert 1 <= operators_until(key, 1, tick, usual) <= usual
    assert operators_until(key, 1, tick, 0) == 0


def test_every_moment_is_as_likely():
    drawn = [operators_until(bytes(32), 1, tick, 8) for tick in range(8000)]
    counts = np.bincount(drawn, minlength=9)[1:]
    assert counts.sum() == 8000
    assert ((counts - 1000) ** 2 / 1000).sum() < 24.3  # the 99.9 % point of chi-squared with 7 degrees of freedom


def test_snapshot_shows_memory_between_two_operators(world, chip, memory, values):
    assert chip.tick(RUN, 1) is None, "the host is not told"
    shown = []
    for operator in range(USUAL):
        values[:] = operator + 1  # what this operator writes
        shown.append(memory.digest(chip.algorithm).value)
        memory.meter.charge(ONE)
    chip.commit(RUN, 2, bytes(32))
    first, inside = snapshots(chip)
    assert (first.operators, first.was_forced) == (0, False), "nothing had run before the first tick"
    assert (inside.tick, inside.step, inside.was_forced) == (2, 1, False)
    assert inside.digest == shown[inside.operators - 1]
    assert inside.work == Work(USUAL, 0, 0), "the meter's count is that of the tick"
    assert inside.operators == planned(chip, 2)
    assert audit(world, chip).snapshots == 2


def test_a_tick_that_ends_first_shows_in_the_record(world, chip, memory, values):
    chip.tick(RUN, 1)
    chip.idle(1)
    work(memory, 1)
    chip.tick(RUN, 1)  # one operator since the last tick, so that the snapshot waits for one
    values[:] = 7
    chip.commit(RUN, 1, bytes(32))
    _, early, idle, last = snapshots(chip)
    shown = [(record.operators, record.was_forced) for record in (early, idle, last)]
    assert shown == [(0, True), (0, False), (1, True)]
    assert last.digest == memory.digest(chip.algorithm).value
    assert audit(world, chip).snapshots == 4


def test_questions_of_the_host_do_not_hurry_a_snapshot(chip, memory):
    chip.tick(RUN, 1)
    before = chip.position
    assert chip.utilisation.snapshots == 1
    assert chip.nvram.used
    assert chip.log_bytes()
    work(memory, USUAL)
    assert chip.position[1] == before[1] + 1
    assert not snapshots(chip)[-1].was_forced


def test_a_waiting_snapshot_keeps_its_place_in_nvram(world, memory):
    chip = world.make(snapshot_rate=Fraction(1), quotas={RecordKind.SNAPSHOT: 2})
    chip.attach(memory, RUN, 0)
    chip.tick(RUN, 0)
    work(memory, USUAL)
    chip.tick(RUN, 1)
    with pytest.raises(Exception, match="SNAPSHOT records are used"):
        chip.tick(RUN, 2)
    chip.commit(RUN, 2, bytes(32))
    assert len(snapshots(chip)) == 2


@pytest.mark.parametrize("size", [16, 1 << 19], ids=["hashed at once", "hashed beside"])
def test_power_that_goes_before_the_moment_cuts_no_snapshot(world, size):
    """Nobody knew that one was to come, so that nobody can have cut it on purpose."""
    held = np.zeros(size, dtype=np.float32)
    memory = DeviceMemory([Region.of("w", held)], meter=Meter())
    chip = attached(world, memory)
    chip.tick(RUN, 1)
    chip.cut_power()
    work(memory, USUAL)  # the meter outlives the chip's power
    again = FirmwareChip.power_on(world.folder / "chip-1")
    world.chips.append(again)
    gap = next(record for record in parse_log(again.log_bytes()) if record.kind is RecordKind.POWER_GAP)
    assert gap.op == 0
    found = audit(world, again)
    assert (found.snapshots, found.power_gaps, found.cut_snapshots) == (1, 1, ())


def test_a_missing_snapshot_of_an_earlier_tick_is_found(world, chip, memory):
    """Only that of the very last tick before a power cut may be missing."""
    chip.tick(RUN, 1)
    work(memory, USUAL)
    chip.tick(RUN, 2)
    chip.cut_power()
    again = FirmwareChip.power_on(world.folder / "chip-1")
    world.chips.append(again)
    evidence = world.collect(again)
    from firmware_sim import audit_schedule
    from firmware_sim.schedule import ScheduleError

    records = parse_log(evidence.log)
    keys = decode_epoch_keys(evidence.epoch_keys)
    audit_schedule(records, keys, rate=Fraction(1), chip="chip-1")
    fewer = [record for record in records if (record.kind, record.tick) != (RecordKind.SNAPSHOT, 2)]
    with pytest.raises(ScheduleError, match="no snapshot at boot 1, tick 2"):
        audit_schedule(fewer, keys, rate=Fraction(1), chip="chip-1")


def test_a_large_memory_is_hashed_beside_the_rest_of_the_step(world):
    held = np.zeros(1 << 19, dtype=np.float32)
    memory = DeviceMemory([Region.of("w", held)], meter=Meter())
    chip = attached(world, memory)
    chip.tick(RUN, 1)
    shown = []
    for operator in range(USUAL):
        held[:2] = operator + 1
        shown.append(memory.digest(chip.algorithm).value)
        memory.meter.charge(ONE)
    chip.commit(RUN, 2, bytes(32))
    inside = snapshots(chip)[-1]
    assert inside.digest == shown[inside.operators - 1]
    assert audit(world, chip).snapshots == 2
