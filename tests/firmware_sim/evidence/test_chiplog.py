from __future__ import annotations

import dataclasses
import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firmware_sim.errors import CallerError
from firmware_sim.evidence import (
    RECORD_BYTES,
    ZERO_DIGEST,
    LogError,
    LogRecord,
    RecordKind,
    Registers,
    check_chain,
    digest_bytes,
    genesis_digest,
    log_head,
    parse_log,
    replay_registers,
)

HASHES = st.binary(min_size=32, max_size=32)
U64 = st.integers(0, 2**64 - 1)
RECORDS = st.builds(
    LogRecord, counter=U64, kind=st.sampled_from(RecordKind), boot=st.integers(0, 2**32 - 1), tick=U64, busy=U64,
    run_id=HASHES, step=U64, op=U64, digest=HASHES, previous=HASHES,
)  # fmt: skip
GENESIS = genesis_digest("chip", digest_bytes("c", b""), b"l" * 32)


def _chain(*kinds):
    records, previous = [], ZERO_DIGEST
    for number, kind in enumerate(kinds):
        record = LogRecord(
            counter=number, kind=kind, boot=0, tick=0, busy=0, run_id=bytes(32), step=0, op=0,
            digest=GENESIS if kind is RecordKind.GENESIS else bytes([number]) * 32, previous=previous,
        )  # fmt: skip
        records.append(record)
        previous = record.hash()
    return records


LOG = _chain(RecordKind.GENESIS, RecordKind.BOOT, RecordKind.EPOCH, RecordKind.REGIONS, RecordKind.COMMIT)


@given(st.lists(RECORDS, min_size=1, max_size=4))
def test_records_round_trip(records):
    data = b"".join(record.to_bytes() for record in records)
    assert len(data) == RECORD_BYTES * len(records) == 166 * len(records)
    assert parse_log(data) == records


@given(RECORDS, st.data())
def test_every_field_is_bound_by_the_hash(record, data):
    field = data.draw(st.sampled_from([field.name for field in dataclasses.fields(LogRecord)]))
    other = getattr(data.draw(RECORDS), field)
    changed = dataclasses.replace(record, **{field: other})
    assert (changed.hash() == record.hash()) == (changed == record)


@given(RECORDS)
def test_record_hash_is_not_a_bare_hash_of_its_bytes(record):
    assert record.hash() != hashlib.sha256(record.to_bytes()).digest()


def test_genesis_binds_chip_certificate_and_log():
    base = ("chip", digest_bytes("c", b""), b"l" * 32)
    others = [("chi", *base[1:]), (base[0], digest_bytes("c", b"x"), base[2]), (*base[:2], b"m" * 32)]
    assert len({genesis_digest(*arguments) for arguments in [base, *others]}) == 4


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "chip c: log is empty"),
        (bytes(RECORD_BYTES - 1), f"chip c: log record 0: has only {RECORD_BYTES - 1} of {RECORD_BYTES} bytes"),
        (LOG[0].to_bytes() + b"x", f"chip c: log record 1: has only 1 of {RECORD_BYTES} bytes"),
        (LOG[0].to_bytes() + bytes(RECORD_BYTES), "chip c: log record 1: unknown kind 0"),
        (LOG[0].to_bytes()[:9] + b"\xff" + LOG[0].to_bytes()[10:], "chip c: log record 0: unknown kind 255"),
    ],
)
def test_malformed_log_is_refused(data, message):
    with pytest.raises(LogError, match=message):
        parse_log(data, chip="c")


def test_good_chain_passes():
    check_chain(LOG, GENESIS)
    assert log_head(LOG) == LOG[-1].hash()
    with pytest.raises(LogError, match="log is empty"):
        log_head([])


def _changed(number, **changes):
    return [dataclasses.replace(record, **changes) if i == number else record for i, record in enumerate(LOG)]


@pytest.mark.parametrize(
    ("records", "number", "field", "message"),
    [
        ([], None, None, "log is empty"),
        (LOG[1:], 0, "kind", "is BOOT, expected GENESIS"),
        (_changed(0, digest=bytes(32)), 0, "digest", f"expected the chip's genesis {GENESIS.hex()}"),
        (_changed(0, previous=b"x" * 32), 0, "previous", "is not zero in the first record"),
        (_changed(0, run_id=b"x" * 32), 1, "previous", "is not the hash of the record before"),
        (_changed(2, counter=7), 2, "counter", "is 7, expected 2"),
        (_changed(2, digest=bytes(32)), 3, "previous", "is not the hash of the record before"),
        (_changed(2, kind=RecordKind.QUOTE), 3, "previous", "is not the hash of the record before"),
        ([*LOG[:2], *LOG[3:]], 2, "counter", "is 3, expected 2"),
        ([LOG[0], LOG[2], LOG[1], *LOG[3:]], 1, "counter", "is 2, expected 1"),
        ([*LOG, LOG[-1]], 5, "counter", "is 4, expected 5"),
        (_chain(RecordKind.GENESIS, RecordKind.GENESIS), 1, "kind", "is GENESIS, which only the first record may be"),
    ],
)
def test_broken_chain_is_named(records, number, field, message):
    with pytest.raises(LogError) as caught:
        check_chain(records, GENESIS, chip="c")
    assert message in str(caught.value)
    assert (caught.value.record, caught.value.field) == (number, field)
    if number is not None:
        assert str(caught.value).startswith(f"chip c: log record {number}: {field} ")


@given(st.lists(st.sampled_from(RecordKind), max_size=8), st.lists(st.sampled_from(RecordKind), max_size=8))
def test_registers_tell_measured_histories_apart(left, right):
    """Equal registers mean equal measured records at equal places, in the whole life and since the last boot."""

    def measured(records):
        return [r for r in records if r.kind in (RecordKind.BOOT, RecordKind.REGIONS)]

    def since_boot(records):
        starts = [i for i, r in enumerate(records) if r.kind is RecordKind.BOOT]
        return measured(records[starts[-1] if starts else 0 :])

    first, second = _chain(*left), _chain(*right)
    one, two = replay_registers(first), replay_registers(second)
    assert (one.journey == two.journey) == (measured(first) == measured(second))
    assert (one.current == two.current) == (since_boot(first) == since_boot(second))


def test_registers_start_at_zero_and_boot_resets_the_current_one():
    assert replay_registers([LOG[0]]) == Registers(journey=ZERO_DIGEST, current=ZERO_DIGEST)
    registers = replay_registers(LOG)
    again = registers.extend(LOG[1])
    assert again.current == replay_registers(LOG[1:2]).current
    assert again.journey not in (registers.journey, replay_registers(LOG[1:2]).journey)


@pytest.mark.parametrize(
    "change", [{"digest": b""}, {"run_id": bytes(33)}, {"boot": 2**32}, {"tick": -1}, {"busy": 2**64}, {"op": 2**64}]
)
def test_records_cannot_be_built_invalid(change):
    with pytest.raises(CallerError, match="log record: "):
        dataclasses.replace(LOG[0], **change)
