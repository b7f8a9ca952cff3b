"""A snapshot falls at a secret moment of the chip's time, after the operator that passes it; no host hears of it."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import numpy as np
import pytest

from firmware_sim import (
    LABORATORY,
    TICK,
    DeviceMemory,
    FirmwareChip,
    Meter,
    RecordKind,
    Region,
    Work,
    audit_schedule,
    decode_epoch_keys,
    parse_log,
)
from firmware_sim.schedule import ScheduleError, moment_of
from tests.firmware_sim.conftest import RUN, snapshots, work

USUAL = 40
"""Operators of a tick."""


@pytest.fixture(params=[16, 1 << 19], ids=["hashed at once", "hashed beside"])
def values(request):
    return np.zeros(request.param, dtype=np.float32)


@pytest.fixture
def memory(values):
    return DeviceMemory([Region.of("w", values)], meter=Meter())


@pytest.fixture
def chip(world, memory):
    made = world.make(snapshot_rate=Fraction(1))
    made.attach(memory, RUN, 0)
    return made


def moments(chip, ticks):
    """The moments of the first ticks of boot 1, by the key that the chip reveals."""
    chip.close_epoch()
    return [moment_of(chip.reveal()[0].key, 1, tick) for tick in range(ticks)]


def audit(world, chip):
    trust = dataclasses.replace(world.trust, snapshot_rate=Fraction(1))
    return world.check(world.collect(chip), trust=trust).audit


def test_snapshot_shows_memory_after_the_operator_that_passes_its_moment(world, chip, memory, values):
    shown, times = [], []
    for operator in range(3 * USUAL):
        values[:2] = operator + 1  # what this operator writes
        shown.append(memory.digest(chip.algorithm).value)
        work(memory, Fraction(1, USUAL))
        times.append(LABORATORY.time(memory.meter.total))
    work(memory, Fraction(1, USUAL))
    taken = snapshots(chip)
    for record, moment in zip(taken, moments(chip, 3), strict=True):
        operator = next(number for number, time in enumerate(times) if time >= moment)
        assert (record.tick, record.operators, record.is_late) == (moment // TICK, operator + 1, False)
        assert LABORATORY.time(record.work) == times[operator]
        assert record.digest == shown[operator]
    assert audit(world, chip).snapshots == 3


def test_whichever_count_passes_the_moment_takes_it(world, chip, memory):
    """Products as well as bytes are time: the slower of the two."""
    times = []
    for number in range(4 * USUAL):
        flop, moved = (1, 0) if number % 2 else (0, 1)
        memory.meter.charge(Work(1, flop * LABORATORY.flop // 9, moved * LABORATORY.moved // 11))
        times.append(LABORATORY.time(memory.meter.total))
    ticks = times[-1] // TICK
    assert ticks > 7
    taken = snapshots(chip)
    for record, moment in zip(taken, moments(chip, ticks + 1), strict=False):
        assert record.operators == 1 + next(number for number, time in enumerate(times) if time >= moment)
    assert len(taken) in (ticks, ticks + 1)
    assert audit(world, chip).snapshots == len(taken)


def test_calls_that_take_no_time_pass_no_moment(world, chip, memory):
    for _ in range(1000):
        memory.meter.charge(Work(1, 0, 0))
    assert snapshots(chip) == []
    assert chip.commit(RUN, 1, bytes(32)).work == Work(1000, 0, 0)
    assert audit(world, chip).ticks == 0


def test_coordinate_is_what_was_committed_last(world, chip, memory):
    work(memory)
    chip.commit(RUN, 5, bytes(32))
    work(memory, operators=USUAL)
    chip.attach(memory, bytes(32), 7)
    work(memory)
    first, second, third = snapshots(chip)
    assert [(each.run_id, each.step) for each in (first, second, third)] == [(RUN, 0), (RUN, 5), (bytes(32), 7)]
    assert (first.operators, third.operators) == (1, 1)
    assert 1 <= second.operators <= USUAL


def test_idle_time_shifts_the_moments_that_follow(world, chip, memory):
    """The clock goes by work and idle ticks alike."""
    work(memory, Fraction(1, 2), operators=USUAL)
    before = len(snapshots(chip))
    chip.idle(2)
    work(memory, Fraction(1, 2), operators=USUAL)
    taken = snapshots(chip)
    assert [record.tick for record in taken] == [0, 1, 2]
    assert before <= 1
    first, *_ = moments(chip, 3)
    assert before == (first <= TICK // 2)
    assert audit(world, chip).ticks == 3


def test_questions_of_the_host_do_not_hurry_a_snapshot(chip, memory):
    work(memory, Fraction(1, 1000))
    before = chip.position
    assert chip.utilisation.snapshots == 0
    assert chip.nvram.used
    assert chip.log_bytes()
    assert chip.position == before
    work(memory, operators=USUAL)
    assert chip.position[1] == before[1] + 1
    assert not snapshots(chip)[-1].is_late


def test_the_host_is_told_nothing(chip, memory):
    """No command but `idle` returns anything that depends on the schedule, and that only of what has passed."""
    work(memory, 3, operators=USUAL)
    assert [event.tick for event in chip.idle(2)] == [3, 4]


def test_power_that_goes_before_the_moment_cuts_no_snapshot(world, chip, memory):
    """Nobody knew that one was to come, so that nobody can have cut it on purpose."""
    work(memory)
    chip.cut_power()
    work(memory, 3, operators=USUAL)  # the meter outlives the chip's power
    again = FirmwareChip.power_on(world.folder / "chip-1")
    world.chips.append(again)
    gap = next(record for record in parse_log(again.log_bytes()) if record.kind is RecordKind.POWER_GAP)
    assert (gap.tick, gap.op) == (1, 0)
    found = audit(world, again)
    assert (found.snapshots, found.power_gaps, found.cut_snapshots) == (1, 1, ())


def test_a_missing_snapshot_before_a_power_cut_is_found(world, chip, memory):
    """Only those that the cut names may be missing."""
    work(memory, 2, operators=USUAL)
    chip.cut_power()
    again = FirmwareChip.power_on(world.folder / "chip-1")
    world.chips.append(again)
    evidence = world.collect(again)
    records = parse_log(evidence.log)
    keys = decode_epoch_keys(evidence.epoch_keys)
    audit_schedule(records, keys, rate=Fraction(1), roofline=LABORATORY, chip="chip-1")
    for tick in range(2):
        fewer = [record for record in records if (record.kind, record.tick) != (RecordKind.SNAPSHOT, tick)]
        with pytest.raises(ScheduleError, match=f"no snapshot at boot 1, tick {tick}"):
            audit_schedule(fewer, keys, rate=Fraction(1), roofline=LABORATORY, chip="chip-1")


def test_an_epoch_that_closes_within_a_tick_holds_what_lies_in_it(world, chip, memory):
    """Moments are of one epoch each: the part of a tick before its end belongs to the old key, the rest to the new."""
    for _ in range(60):
        work(memory, Fraction(1, 3), operators=2)
        chip.close_epoch()
    found = audit(world, chip)
    assert found.epochs == 61
    ticks = [record.tick for record in snapshots(chip)]
    assert ticks == sorted(ticks)
    assert found.snapshots == len(ticks) > len(set(ticks)), "some ticks hold a snapshot of each of two epochs"
