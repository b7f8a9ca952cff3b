"""Laws of a chip's clock: whatever happens to it, its log holds exactly the snapshots that its keys demand."""

from __future__ import annotations

import dataclasses
import tempfile
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firmware_sim import (
    CURRENT_FIRMWARE,
    DEFAULT_ALGORITHM,
    NO_WORK,
    TICK,
    ChipTrust,
    DeviceMemory,
    EvidenceError,
    FirmwareChip,
    LogCheckpoint,
    LogError,
    LogPosition,
    MakerCA,
    Meter,
    RecordKind,
    Region,
    Roofline,
    ScheduleError,
    SigningKey,
    Work,
    audit_schedule,
    check_chip,
    check_life,
    collect_evidence,
    parse_log,
    records_of,
    scheduled,
    seal_log_checkpoint,
    threshold,
)
from firmware_sim.roofline import time_of
from firmware_sim.schedule import derive_epoch_key
from tests.firmware_sim.conftest import RUN, snapshots

K = RecordKind
MAKER = MakerCA.create(b"maker")
VERIFIER = SigningKey.generate(b"v" * 32)
RATE = Fraction(1, 2)
DEVICE = Roofline(flop=900, moved=700)
"""So slow that a tick is not a whole number of most operators."""


class Fleet:
    """Chips of several sizes that hold a state together, and a clock of each that was kept beside.

    `periods` holds of each chip the times between which an epoch was open: boot, epoch, start, end.
    """

    def __init__(self, folder, sizes, *, rate=RATE):
        self.folder, self.sizes, self.rate = folder, sizes, rate
        self.values = [np.zeros(size, dtype=np.uint8) for size in sizes]
        self.meter, self.step = Meter(), 0
        self.chips = [
            FirmwareChip.manufacture(
                folder / f"chip-{number}", maker=MAKER, chip_id=f"chip-{number}", seed=b"s", snapshot_rate=rate,
                roofline=DEVICE, beacon_key=VERIFIER.verifying,
            )
            for number in range(len(sizes))
        ]  # fmt: skip
        self.since = [LogCheckpoint()] * len(sizes)
        self.last: list[LogPosition | None] = [None] * len(sizes)
        self.periods: list[list[Any]] = [[] for _ in sizes]
        self.epochs, self.boots = [0] * len(sizes), [1] * len(sizes)
        self.kept, self.seen = [NO_WORK] * len(sizes), [NO_WORK] * len(sizes)
        self.idled, self.began = [0] * len(sizes), [0] * len(sizes)
        self.taken: list[set[Any]] = [set() for _ in sizes]
        self.attach()

    def renew(self):
        """The chips move to other memory, with another meter; on the old one work goes on, which is not theirs."""
        old = self.meter
        for number in range(len(self.sizes)):
            self._settle(number)
        self.meter, self.seen = Meter(), [NO_WORK] * len(self.sizes)
        self.meter.charge(Work(5, 10**6, 10**6))  # by somebody else, before
        self.seen = [self.meter.total] * len(self.sizes)
        self.attach()
        old.charge(Work(1, 10**6, 10**6))

    def attach(self):
        """Each chip holds its part."""
        for number in range(len(self.sizes)):
            self._settle(number)
        for number, (chip, values) in enumerate(zip(self.chips, self.values, strict=True)):
            share = (self.sizes[number], sum(self.sizes))
            chip.attach(DeviceMemory([Region.of("w", values)], meter=self.meter, share=share), RUN, self.step)
            self.seen[number] = self.meter.total

    def charge(self, flop, moved):
        self.meter.charge(Work(1, flop, moved))

    def idle(self, ticks):
        for number, chip in enumerate(self.chips):
            chip.idle(ticks)
            self.idled[number] += ticks

    def commit(self):
        self.step += 1
        for chip in self.chips:
            chip.commit(RUN, self.step, bytes(32))

    def close(self, number):
        self._end(number)
        self.chips[number].close_epoch()

    def quote(self, number):
        self.chips[number].quote(bytes(16), "v")

    def cut(self, number):
        self._end(number)
        self.chips[number].cut_power()
        self._boot(number)

    def shut_down(self, number):
        self._end(number)
        self.chips[number].power_off()
        self._boot(number)

    def inspect(self, number, *, prune=False):
        self._end(number)
        chip = self.chips[number]
        evidence = collect_evidence(chip, bytes(32), "v")
        trust = ChipTrust(
            ca_digests=[MAKER.certificate_digest],
            measurements=[CURRENT_FIRMWARE.measurement],
            minimum_security_version=1,
            snapshot_rate=self.rate,
            snapshot_algorithm=DEFAULT_ALGORITHM,
        )
        since, last = self.since[number], self.last[number]
        checked = check_chip(
            evidence, chip_id=chip.chip_id, trust=trust, nonce=bytes(32), verifier_id="v", last=last, since=since
        )
        assert checked.audit is not None
        assert checked.audit.cut_snapshots == ()
        assert not any(record.is_late for record in records_of(checked.records, K.SNAPSHOT))
        self.taken[number] |= {(r.counter, r.boot, r.tick) for r in records_of(checked.records, K.SNAPSHOT)}
        self.last[number] = LogPosition.of(checked.quote)
        if prune:
            self.since[number] = checked.checkpoint()
            chip.prune(seal_log_checkpoint(chip.chip_id, self.since[number], VERIFIER))
        return checked

    def demanded(self, number):
        """Boot and tick of all snapshots that the chip's keys demand by the clock that was kept beside."""
        secret, found = self.chips[number]._fuses.schedule_secret, []
        for boot, epoch, start, end in self.periods[number]:
            key = derive_epoch_key(secret, epoch)
            found += [(boot, moment // TICK) for moment in scheduled(key, boot, start, end, threshold(self.rate))]
        return found

    def _settle(self, number):
        share = (self.sizes[number], sum(self.sizes))
        self.kept[number] += (self.meter.total - self.seen[number]).share(*share)
        self.seen[number] = self.meter.total

    def _now(self, number):
        share = (self.sizes[number], sum(self.sizes))
        work = self.kept[number] + (self.meter.total - self.seen[number]).share(*share)
        return DEVICE.time(work) + self.idled[number] * TICK

    def _end(self, number):
        now = self._now(number)
        self.periods[number].append((self.boots[number], self.epochs[number], self.began[number], now))
        self.epochs[number] += 1
        self.began[number] = now

    def _boot(self, number):
        self.chips[number] = FirmwareChip.power_on(self.folder / f"chip-{number}")
        self.boots[number] += 1
        self.kept[number], self.idled[number], self.began[number] = NO_WORK, 0, 0
        memory = DeviceMemory(
            [Region.of("w", self.values[number])], meter=self.meter, share=(self.sizes[number], sum(self.sizes))
        )
        self.chips[number].attach(memory, RUN, self.step)
        self.seen[number] = self.meter.total


def each_of(chips):
    return st.integers(0, chips - 1)


def lives(chips):
    """Lists of calls of a fleet of so many chips."""
    charge = st.tuples(st.just("charge"), st.integers(0, 3000), st.integers(0, 3000))
    events = st.one_of(
        st.tuples(st.just("idle"), st.integers(0, 3)),
        st.just(("commit",)),
        st.sampled_from([("attach",), ("renew",)]),
        st.tuples(st.sampled_from(["close", "quote", "cut", "shut_down"]), each_of(chips)),
    )
    return st.lists(st.one_of(charge, charge, charge, events), max_size=25)


FLEETS = st.sampled_from([(7,), (5, 5), (1, 3, 50)])
LIVES = FLEETS.flatmap(lambda sizes: st.tuples(st.just(sizes), lives(len(sizes))))


def live(fleet, calls):
    for name, *arguments in calls:
        getattr(fleet, name)(*arguments)


@settings(max_examples=80)
@given(LIVES)
def test_any_life_holds_exactly_the_snapshots_that_its_keys_demand(life):
    """By a clock that the test keeps of its own, from nothing but the work that it did."""
    sizes, calls = life
    with tempfile.TemporaryDirectory() as folder:
        fleet = Fleet(Path(folder), sizes)
        live(fleet, calls)
        for number, chip in enumerate(fleet.chips):
            fleet.inspect(number)
            found = [(boot, tick) for _, boot, tick in sorted(fleet.taken[number])]
            assert found == fleet.demanded(number)
            chip.cut_power()


@settings(max_examples=40)
@given(LIVES, st.lists(st.booleans(), min_size=25, max_size=25))
def test_inspections_and_pruning_in_the_middle_of_ticks_lose_none(life, prunes):
    sizes, calls = life
    with tempfile.TemporaryDirectory() as folder:
        fleet = Fleet(Path(folder), sizes)
        for call, prune in zip(calls, prunes, strict=False):
            live(fleet, [call])
            fleet.inspect(len(call) % len(sizes), prune=prune)
        for number, chip in enumerate(fleet.chips):
            fleet.inspect(number)
            found = [(boot, tick) for _, boot, tick in sorted(fleet.taken[number])]
            assert found == fleet.demanded(number)
            chip.cut_power()


@settings(max_examples=40)
@given(LIVES)
def test_time_never_falls(life):
    sizes, calls = life
    with tempfile.TemporaryDirectory() as folder:
        fleet = Fleet(Path(folder), sizes)
        before = [(1, 0)] * len(sizes)
        for call in calls:
            live(fleet, [call])
            now = [(chip.boot, chip.time) for chip in fleet.chips]
            assert all(old <= new for old, new in zip(before, now, strict=True))
            before = now
        for chip in fleet.chips:
            logged = [time_of(r, DEVICE) for r in parse_log(chip.log_bytes()) if r.boot == chip.boot]
            kinds = [r.kind for r in parse_log(chip.log_bytes()) if r.boot == chip.boot]
            steady = [time for time, kind in zip(logged, kinds, strict=True) if kind is not K.SNAPSHOT]
            assert steady == sorted(steady)
            assert chip.time * TICK <= steady[-1] + (chip.time + 1) * TICK
            chip.cut_power()


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 3000)), min_size=1, max_size=30), FLEETS)
def test_the_first_operator_that_passes_a_moment_takes_the_snapshot(works, sizes):
    """Of each chip by its share, from the revealed key."""
    with tempfile.TemporaryDirectory() as folder:
        fleet = Fleet(Path(folder), sizes, rate=Fraction(1))
        for flop, moved in works:
            fleet.charge(flop, moved)
        for number, chip in enumerate(fleet.chips):
            share = (sizes[number], sum(sizes))
            chip.close_epoch()
            [key] = chip.reveal()
            total, expected, before = NO_WORK, [], 0
            for count, (flop, moved) in enumerate(works, start=1):
                total += Work(1, flop, moved)
                now = DEVICE.time(total.share(*share))
                due = scheduled(key.key, 1, before, now, threshold(Fraction(1)))
                expected += [(moment // TICK, count, total.share(*share), False) for moment in due]
                before = now
            assert [(r.tick, r.operators, r.work, r.is_late) for r in snapshots(chip)] == expected
            chip.cut_power()


@pytest.fixture
def lived(tmp_path):
    """Records and keys of a chip that worked, idled, closed epochs in mid-tick and lost its power."""
    fleet = Fleet(tmp_path, (7,))
    for number in range(60):
        fleet.charge(13 * number, 300)
        if number % 7 == 0:
            fleet.commit()
        if number % 11 == 0:
            fleet.idle(2)
        if number in (17, 40):
            fleet.close(0)
        if number == 30:
            fleet.cut(0)
    checked = fleet.inspect(0)
    [chip] = fleet.chips
    yield checked.records, chip.reveal()
    chip.cut_power()


def audit(records, keys):
    check_life(records, chip="chip-0", roofline=DEVICE)
    return audit_schedule(records, keys, rate=RATE, roofline=DEVICE, chip="chip-0")


def test_no_snapshot_can_be_left_out(lived):
    records, keys = lived
    taken = records_of(records, K.SNAPSHOT)
    assert audit(records, keys).snapshots == len(taken) > 10
    for victim in taken:
        with pytest.raises(ScheduleError, match=f"no snapshot at boot {victim.boot}, tick {victim.tick}"):
            audit([record for record in records if record is not victim], keys)


@pytest.mark.parametrize("shift", [-2, -1, 1, 2])
def test_no_snapshot_can_be_said_to_be_of_another_tick(lived, shift):
    records, keys = lived
    for victim in records_of(records, K.SNAPSHOT):
        if victim.tick + shift >= 0:
            moved = [r if r is not victim else dataclasses.replace(r, tick=r.tick + shift) for r in records]
            with pytest.raises(EvidenceError, match=r"tick|snapshot"):
                audit(moved, keys)


def test_no_snapshot_can_stand_elsewhere_in_the_log(lived):
    """Behind the next record that has a time of its own, or before the last: it stands between other times then."""
    records, keys = list(lived[0]), lived[1]
    tried = 0
    for place, victim in enumerate(records):
        if victim.kind is not K.SNAPSHOT:
            continue
        for other in (place - 1, place + 1):
            beside = records[other]
            before, after = sorted((place, other))
            same = beside.kind is K.SNAPSHOT or time_of(records[before - 1], DEVICE) == time_of(records[after], DEVICE)
            if same:
                continue
            moved = [*records]
            moved[place], moved[other] = beside, victim
            with pytest.raises(EvidenceError):
                audit(moved, keys)
            tried += 1
    assert tried > 10


def test_no_snapshot_can_be_added(lived):
    records, keys = lived
    for record in records:
        if record.kind is K.COMMIT:
            for tick in {record.tick, record.tick + 1}:
                extra = dataclasses.replace(record, kind=K.SNAPSHOT, tick=tick)
                if not any((r.kind, r.boot, r.tick) == (K.SNAPSHOT, r.boot, tick) for r in records):
                    with pytest.raises(EvidenceError):
                        audit([*records[: record.counter], extra, *records[record.counter :]], keys)


@pytest.mark.parametrize("kind", [K.COMMIT, K.SNAPSHOT, K.CLOSE_EPOCH, K.POWER_GAP, K.QUOTE, K.EPOCH, K.BOOT])
@pytest.mark.parametrize("wrong", [-1, 1, 1 << 40])
def test_busy_ticks_are_those_of_the_work(lived, kind, wrong):
    records, _ = lived
    for victim in records_of(records, kind):
        if victim.busy + wrong >= 0:
            altered = [r if r is not victim else dataclasses.replace(r, busy=r.busy + wrong) for r in records]
            with pytest.raises(LogError, match="busy is"):
                check_life(altered, chip="chip-0", roofline=DEVICE)


def test_work_that_takes_another_time_shows(lived):
    """A record whose meter is made to fit its busy ticks still stands between those of its neighbours."""
    records, _ = lived
    victims = [r for r in records if r.kind is K.COMMIT and r.work != NO_WORK]
    for victim in victims:
        for work in (NO_WORK, Work(victim.work.calls, 0, 0), victim.work + Work(0, 0, 10**6)):
            if DEVICE.time(work) // TICK != victim.busy:
                altered = [r if r is not victim else dataclasses.replace(r, work=work) for r in records]
                with pytest.raises(LogError, match=r"busy is|work is"):
                    check_life(altered, chip="chip-0", roofline=DEVICE)


def test_a_slower_roofline_than_quoted_is_another_time(lived):
    """All that was said of time is by one roofline, which the quote names: by no other does the log hold together."""
    records, _ = lived
    for other in (Roofline(flop=1100, moved=700), Roofline(flop=900, moved=350), Roofline(flop=10**9, moved=10**9)):
        with pytest.raises(LogError, match="busy is"):
            check_life(records, chip="chip-0", roofline=other)
