"""The meter as a clock: no device does work faster than its roofline."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firmware_sim import LABORATORY, NO_WORK, TICK, CallerError, LogRecord, RecordKind, Roofline, Work, scaled_device
from firmware_sim.roofline import Interval, intervals, time_of

DEVICE = Roofline(flop=10**12, moved=10**9)
COUNTS = st.integers(0, 2**64 - 1)
WORKS = st.builds(Work, COUNTS, COUNTS, COUNTS)
DEVICES = st.builds(Roofline, flop=st.integers(1, 2**64 - 1), moved=st.integers(1, 2**64 - 1))


def record(kind, step=0, work=NO_WORK, tick=0, busy=0):
    return LogRecord(
        counter=0, kind=kind, boot=1, tick=tick, busy=busy, run_id=bytes(32), step=step, op=0, digest=bytes(32),
        previous=bytes(32), work=work,
    )  # fmt: skip


@pytest.mark.parametrize(("work", "seconds"), [(Work(5, 3 * 10**12, 10**9), 3.0), (Work(5, 10**12, 2 * 10**9), 2.0)])
def test_the_slower_of_arithmetic_and_memory_decides(work, seconds):
    assert DEVICE.seconds(work) == seconds


@given(DEVICES, WORKS, WORKS)
def test_time_never_falls_and_is_that_of_the_slower_count(device, work, more):
    """To the 2^-32 tick: whole work takes no less than its parts would side by side, and no more than one after the
    other, but for what rounding down leaves out."""
    one, other, both = device.time(work), device.time(more), device.time(work + more)
    assert max(one, other) <= both <= one + other + 1
    assert device.time(work) == max(device.time(Work(0, work.flop, 0)), device.time(Work(0, 0, work.moved)))
    assert device.time(Work(work.calls, 0, 0)) == 0, "calls alone take no time"


@given(DEVICES, st.integers(1, 2**80))
def test_the_least_work_that_takes_a_time_is_the_least(device, time):
    flop, moved = device.least(time)
    assert device.time(Work(0, flop, 0)) >= time > device.time(Work(0, flop - 1, 0))
    assert device.time(Work(0, 0, moved)) >= time > device.time(Work(0, 0, moved - 1))


@given(DEVICES, WORKS, st.integers(0, 1000))
def test_a_record_holds_its_time_to_the_last_bit(device, work, idle):
    busy = device.time(work) // TICK
    if busy + idle < 1 << 64:
        made = record(RecordKind.COMMIT, work=work, tick=busy + idle, busy=busy)
        assert time_of(made, device) == device.time(work) + idle * TICK


@pytest.mark.parametrize("rates", [(0, 1), (1, 0), (1 << 64, 1), (1.5, 1), (True, 1), (-1, 1)])
def test_rates_that_no_device_has_are_refused(rates):
    with pytest.raises(CallerError, match="a device's rates must be whole numbers"):
        Roofline(flop=rates[0], moved=rates[1])


def test_a_scaled_device_keeps_the_proportions():
    assert scaled_device(1 << 20) == LABORATORY
    whole = scaled_device(80 * 10**9)
    assert (whole.moved, whole.flop) == (335 * 10**9, 98_900_000_000_000)  # a tenth of a second of an H100 SXM


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
