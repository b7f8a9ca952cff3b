"""Work between beacons, on logs of one chip that are made here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from firmware_sim import BIRTH, NO_RUN, LogRecord, RecordKind, Roofline, Unaudited, Work
from firmware_sim.errors import CallerError, EvidenceError
from inspector.inspection.commits import Beacons, Pace
from inspector.inspection.trust import Trust

K = RecordKind


def doubts(*said):
    """What is open after records of (kind, operators, time)."""
    law, found = Beacons("c", 60), []
    for number, (kind, busy, time) in enumerate(said):
        record = LogRecord(
            counter=number, kind=kind, boot=1, tick=busy, busy=busy, run_id=NO_RUN, step=time, op=0, digest=bytes(32),
            previous=bytes(32), work=Work(busy, 0, 0),
        )  # fmt: skip
        try:
            law.take(record)
        except Unaudited as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("busy", [0, 3])
def test_work_before_a_boot_counts_until_the_next_beacon(busy):
    """A chip that is shut down after hours of work and shown the time anew has worked without a beacon."""
    life = [(K.BOOT, 0, 1), (K.BEACON, 0, 100), (K.CLOSE_EPOCH, busy, 0), (K.POWER_OFF, busy, 0), (K.BOOT, 0, 1)]
    found = doubts(*life, (K.BEACON, 0, 9999), (K.QUOTE, 0, 0))
    assert found == (
        ["chip c, record 5: it worked during 9899 seconds without a beacon; at most 60 seconds are agreed"] * bool(busy)
    )


def test_work_between_near_beacons_is_fine_and_after_the_last_it_is_not():
    good = [(K.BEACON, 0, 100), (K.COMMIT, 2, 1), (K.BEACON, 2, 160), (K.COMMIT, 4, 2)]
    assert doubts(*good, (K.BEACON, 4, 220), (K.QUOTE, 4, 0)) == []
    assert ["after its last beacon" in text for text in doubts(*good, (K.QUOTE, 4, 0))] == [True]
    assert ["before its first beacon" in text for text in doubts((K.COMMIT, 0, 0), (K.COMMIT, 1, 1))] == [True]


def too_much(*said, since=BIRTH):
    """What is impossible after records of (kind, bytes moved, time), on a device that moves ten bytes in a second."""
    law, found = Pace("c", Roofline(flop=1, moved=10), since), []
    for number, (kind, moved, time) in enumerate(said):
        record = LogRecord(
            counter=number, kind=kind, boot=1, tick=0, busy=0, run_id=NO_RUN, step=time, op=0, digest=bytes(32),
            previous=bytes(32), work=Work(1, 0, moved),
        )  # fmt: skip
        try:
            law.take(record)
        except EvidenceError as error:
            found.append(str(error))
    return found


def test_work_needs_no_more_time_than_passed_between_two_beacons():
    """A second more is allowed, since beacons tell whole ones."""
    assert too_much((K.BEACON, 50, 100), (K.COMMIT, 160, 1), (K.BEACON, 999, 110)) == []
    assert too_much((K.BEACON, 50, 100), (K.COMMIT, 161, 1), (K.BEACON, 161, 110)) == [
        "chip c, record 2: the meter counted 0 calls, 0 FLOP, 111 bytes in the 10 seconds between two beacons, "
        "but its device needs at least 11.1 seconds for that"
    ]


def test_work_that_no_beacon_came_before_or_that_came_behind_the_last_record_took_no_known_time():
    assert too_much((K.COMMIT, 9999, 1), (K.BEACON, 9999, 100)) == []
    late = [(K.BEACON, 0, 100), (K.BEACON, 9999, 101)]
    assert too_much(*late) == [], "it was counted while the second beacon was on its way"
    assert too_much(*late, (K.COMMIT, 10500, 1), (K.BEACON, 10500, 102)) != []


def test_work_of_several_boots_adds_up_to_the_next_beacon():
    life = [(K.BEACON, 10, 100), (K.POWER_OFF, 70, 0), (K.BOOT, 0, 1), (K.COMMIT, 60, 1), (K.BEACON, 60, 110)]
    assert len(too_much(*life)) == 1
    assert too_much(*life[:-1], (K.BEACON, 60, 111)) == []


def test_pace_goes_on_from_a_checkpoint():
    since = replace(BIRTH, size=3, boot=1, beacon=100, work=Work(1, 0, 50).to_bytes())
    assert too_much((K.COMMIT, 160, 1), (K.BEACON, 160, 110), since=since) == []
    assert len(too_much((K.COMMIT, 161, 1), (K.BEACON, 161, 110), since=since)) == 1


def test_rates_stand_in_the_trust_file_by_chip(make_run):
    trust = make_run(steps=1).trust
    assert "rates" not in trust.to_json()
    chip = min(trust.chips)
    known = replace(trust, rates={chip: Roofline(flop=10**15, moved=10**12)})
    data = known.to_json()
    assert data["rates"] == {chip: {"flop": 10**15, "moved": 10**12}}
    assert Trust.from_json(data, "here") == known == trust.merge(known)
    with pytest.raises(CallerError, match="disagree about the rates of chip"):
        known.merge(replace(trust, rates={chip: Roofline(flop=1, moved=1)}))
    with pytest.raises(CallerError, match="rates for a chip that it does not list"):
        replace(trust, rates={"stranger": Roofline(flop=1, moved=1)})
    rates: Any
    for rates in (
        [],
        {chip: 5},
        {chip: {"flop": 1}},
        {chip: {"flop": 0, "moved": 1}},
        {chip: {"flop": 1.5, "moved": 1}},
    ):
        with pytest.raises(CallerError, match="here is malformed"):
            Trust.from_json({**data, "rates": rates}, "here")
