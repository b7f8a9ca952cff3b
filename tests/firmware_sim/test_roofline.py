"""The meter as a clock: no device does work faster than its roofline."""

from __future__ import annotations

import pytest

from firmware_sim import NO_WORK, LogRecord, RecordKind, Work
from firmware_sim.roofline import Interval, Roofline, intervals

DEVICE = Roofline(flop=1e12, moved=1e9)


def record(kind, step=0, work=NO_WORK):
    return LogRecord(
        counter=0, kind=kind, boot=1, tick=0, busy=0, run_id=bytes(32), step=step, op=0, digest=bytes(32),
        previous=bytes(32), work=work,
    )  # fmt: skip


@pytest.mark.parametrize(("work", "seconds"), [(Work(5, 3 * 10**12, 10**9), 3.0), (Work(5, 10**12, 2 * 10**9), 2.0)])
def test_the_slower_of_arithmetic_and_memory_decides(work, seconds):
    assert DEVICE.seconds(work) == seconds


def test_between_beacons_of_one_boot_the_rest_may_be_idle():
    records = [
        record(RecordKind.BEACON, 100, Work(1, 10**12, 0)),
        record(RecordKind.COMMIT, 7, Work(2, 2 * 10**12, 0)),
        record(RecordKind.BEACON, 110, Work(3, 5 * 10**12, 0)),
        record(RecordKind.BOOT),
        record(RecordKind.BEACON, 500, Work(1, 10**12, 0)),
        record(RecordKind.BEACON, 501, Work(1, 3 * 10**12, 0)),
    ]
    first, second = intervals(records, DEVICE)
    assert first == Interval(start=100, stop=110, busy=4.0)
    assert first.idle == 6.0
    assert second.idle == -1.0, "it counted more than such a device can do"
