"""Work between beacons, on logs of one chip that are made here."""

from __future__ import annotations

import pytest

from firmware_sim import NO_RUN, LogRecord, RecordKind, Unaudited
from inspector.inspection.commits import Beacons

K = RecordKind


def doubts(*said):
    """What is open after records of (kind, busy ticks, time)."""
    law, found = Beacons("c", 60), []
    for number, (kind, busy, time) in enumerate(said):
        record = LogRecord(
            counter=number, kind=kind, boot=1, tick=busy, busy=busy, run_id=NO_RUN, step=time, op=0, digest=bytes(32),
            previous=bytes(32),
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
        ["chip c, record 5: it worked in 9899 seconds without a beacon; 60 seconds are agreed"] * bool(busy)
    )


def test_work_between_near_beacons_is_fine_and_after_the_last_it_is_not():
    good = [(K.BEACON, 0, 100), (K.COMMIT, 2, 1), (K.BEACON, 2, 160), (K.COMMIT, 4, 2)]
    assert doubts(*good, (K.BEACON, 4, 220), (K.QUOTE, 4, 0)) == []
    assert ["after its last beacon" in text for text in doubts(*good, (K.QUOTE, 4, 0))] == [True]
    assert ["before its first beacon" in text for text in doubts((K.COMMIT, 0, 0), (K.COMMIT, 1, 1))] == [True]
