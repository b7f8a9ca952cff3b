"""A checkpoint file with its standing: what was signed is what is read, and nothing else is."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firmware_sim import (
    NO_RUN,
    NO_WORK,
    EvidenceError,
    LogCheckpoint,
    LogError,
    LogRecord,
    RecordKind,
    SigningKey,
    Work,
)
from firmware_sim.evidence import (
    NEWBORN,
    RECORD_BYTES,
    SignatureError,
    Standing,
    canonical,
    chips_part,
    log_extent,
    logs_contradict,
    open_acceptance,
    open_log_checkpoint,
    read_acceptance,
    seal,
    seal_acceptance,
)
from firmware_sim.evidence.acceptance import LOG_STANDING_TYPE, Drawn, Heard

KEY, OTHER = SigningKey.generate(b"k" * 32), SigningKey.generate(b"o" * 32)
RUN, NEXT = b"r" * 32, b"n" * 32
K = RecordKind
CHECKPOINT = LogCheckpoint(size=7, boot=2, tick=5, busy=3, epochs=2, head=b"h" * 32)
STANDING = Standing(
    runs={RUN: Heard(3, 5, b"d" * 32), NEXT: Heard(0, 0)}, attached=RUN, before=Work(1, 2, 3), counted=2
)
DRAWN = Drawn(trials=9, time=7 << 32, due=2)
SEALED = seal_acceptance("chip-1", CHECKPOINT, STANDING, KEY)


def record(number, kind, *, run=NO_RUN, step=0, work=NO_WORK, previous=bytes(32)):
    return LogRecord(
        counter=number, kind=kind, boot=1, tick=0, busy=0, run_id=run, step=step, op=0, digest=bytes(32),
        previous=previous, work=work,
    )  # fmt: skip


def log(*records):
    return b"".join(each.to_bytes() for each in records)


def test_what_was_sealed_is_opened():
    assert open_acceptance(SEALED, "chip-1", [OTHER.verifying, KEY.verifying]) == (CHECKPOINT, STANDING)
    assert open_log_checkpoint(chips_part(SEALED), "chip-1", KEY.verifying) == CHECKPOINT
    assert read_acceptance(SEALED, "chip-1") == (CHECKPOINT, KEY.verifying.key_id)
    assert seal_acceptance("chip-1", *open_acceptance(SEALED, "chip-1", [KEY.verifying]), KEY) == SEALED
    drawn = dataclasses.replace(STANDING, drawn=DRAWN)
    again = seal_acceptance("chip-1", CHECKPOINT, drawn, KEY)
    assert open_acceptance(again, "chip-1", [KEY.verifying]) == (CHECKPOINT, drawn)
    assert drawn.extend([record(7, K.BOOT)]).drawn == DRAWN


def test_whoever_else_signed_it_counts_for_nothing():
    for keys in ([], [OTHER.verifying]):
        with pytest.raises(SignatureError, match="not signed by any inspectorate"):
            open_acceptance(SEALED, "chip-1", keys)
    mixed = canonical.decode(SEALED)
    mixed["standing"] = canonical.decode(seal_acceptance("chip-1", CHECKPOINT, STANDING, OTHER))["standing"]
    with pytest.raises(SignatureError, match="signed by key"):
        open_acceptance(canonical.encode(mixed), "chip-1", [KEY.verifying])


def test_of_another_chip_moment_or_of_birth():
    later = canonical.decode(seal_acceptance("chip-1", dataclasses.replace(CHECKPOINT, head=b"x" * 32), STANDING, KEY))
    mixed = canonical.encode({**canonical.decode(SEALED), "standing": later["standing"]})
    for sealed, chip, text in (
        (SEALED, "chip-2", "belongs to another chip"),
        (mixed, "chip-1", "another chip or another record"),
        (seal_acceptance("chip-1", LogCheckpoint(), NEWBORN, KEY), "chip-1", "at record 0"),
        (b"{}", "chip-1", "not a log checkpoint"),
        (b"", "chip-1", "JSON"),
        (chips_part(SEALED), "chip-1", "not a log checkpoint"),
    ):
        with pytest.raises(EvidenceError, match=text):
            open_acceptance(sealed, chip, [KEY.verifying])


@pytest.mark.parametrize(
    "change",
    [
        {"more": 1},
        {"runs": []},
        {"runs": {"zz": [1, 1]}},
        {"runs": {RUN.hex(): [1]}},
        {"runs": {RUN.hex(): [1, -1, "00" * 32]}},
        {"runs": {RUN.hex(): [True, 1, "00" * 32]}},
        {"runs": {RUN.hex(): 1}},
        {"runs": {RUN.hex(): [3, 5]}},
        {"runs": {RUN.hex(): [3, 5, "00"]}},
        {"runs": {}},
        {"attached": "00"},
        {"before": "00"},
        {"before": None},
        {"counted": 1.0},
        {"counted": -1},
        {"books": []},
        {"books": {"zz": [[1, 1, 1]]}},
        {"books": {RUN.hex(): []}},
        {"books": {RUN.hex(): [[1, 1]]}},
        {"books": {RUN.hex(): [[1, 1, -1]]}},
        {"books": {RUN.hex(): [[1, 1, 1]] * 17}},
        {"drawn": {}},
        {"drawn": [1, 1]},
        {"drawn": [1, 1, -1]},
    ],
)
def test_a_malformed_standing_is_refused(change):
    parts = canonical.decode(SEALED)
    payload = {
        "chip_id": "chip-1",
        "head": CHECKPOINT.head.hex(),
        "runs": {run.hex(): [heard.last, heard.most, heard.head.hex()] for run, heard in STANDING.runs.items()},
        "attached": STANDING.attached.hex(),
        "before": STANDING.before.to_bytes().hex(),
        "counted": STANDING.counted,
    }
    for told, passes in ((payload, True), ({**payload, **change}, False)):
        parts["standing"] = canonical.decode(seal(LOG_STANDING_TYPE, told, KEY))
        if passes:
            assert open_acceptance(canonical.encode(parts), "chip-1", [KEY.verifying])[1] == STANDING
            continue
        with pytest.raises(EvidenceError, match="standing in a log checkpoint is malformed"):
            open_acceptance(canonical.encode(parts), "chip-1", [KEY.verifying])


def test_a_file_holds_so_many_runs_and_no_more():
    many = Standing(runs={number.to_bytes(32, "big"): Heard(1, 1) for number in range(4096)})
    assert open_acceptance(seal_acceptance("c", CHECKPOINT, many, KEY), "c", [KEY.verifying])[1] == many
    more = Standing(runs={**many.runs, RUN: Heard(1, 1)})
    with pytest.raises(EvidenceError, match="4097 runs in a log checkpoint"):
        seal_acceptance("c", CHECKPOINT, more, KEY)


def test_standing_follows_the_records():
    life = [
        record(0, K.GENESIS),
        record(1, K.BOOT),
        record(2, K.REGIONS, run=RUN, work=Work(9, 9, 9)),
        record(3, K.COMMIT, run=RUN, step=0),
        record(4, K.COMMIT, run=RUN, step=1),
        record(5, K.POWER_GAP),
        record(6, K.BOOT),
        record(7, K.REGIONS, run=RUN, step=1),
        record(8, K.COMMIT, run=RUN, step=0),
        record(9, K.COMMIT, run=RUN, step=1),
        record(10, K.COMMIT, run=RUN, step=2),
    ]
    ends = [NEWBORN.extend(life[:end]) for end in range(len(life) + 1)]
    assert ends[3] == Standing(attached=RUN, before=Work(9, 9, 9))
    assert ends[4] == Standing(attached=RUN, before=Work(9, 9, 9), runs={RUN: Heard(0, 0)}, counted=1)
    assert ends[5] == Standing(attached=RUN, before=Work(9, 9, 9), runs={RUN: Heard(1, 1)}, counted=1)
    assert ends[7] == Standing(runs={RUN: Heard(1, 1)})
    assert ends[9] == Standing(attached=RUN, runs={RUN: Heard(0, 1)}, counted=1)
    assert (ends[9].newest, ends[7].newest) == (0, None)
    assert ends[11] == Standing(attached=RUN, runs={RUN: Heard(2, 2)}, counted=1)
    for cut in range(len(life)):
        assert ends[cut].extend(life[cut:]) == ends[-1]


@given(st.integers(1, 12).flatmap(lambda size: st.tuples(st.just(size), *[st.integers(0, size)] * 4)), st.data())
def test_parts_of_one_log_do_not_contradict_each_other_and_parts_of_two_do(places, data):
    size, *ends = places
    (first, stop), (start, end) = sorted(ends[:2]), sorted(ends[2:])
    records, previous = [], bytes(32)
    for number in range(size):
        records.append(record(number, K.COMMIT, step=number, previous=previous))
        previous = records[-1].hash()
    if first == stop or start == end:
        return
    one, other = log(*records[first:stop]), log(*records[start:end])
    assert log_extent(one) == (first, stop)
    assert not logs_contradict(one, other)
    assert not logs_contradict(other, one)
    both = sorted({*range(first, stop)} & {*range(start, end)})
    if both:
        place = (data.draw(st.sampled_from(both)) - start) * RECORD_BYTES + data.draw(st.integers(8, RECORD_BYTES - 1))
        changed = bytearray(other)
        changed[place] ^= 1
        assert logs_contradict(one, bytes(changed))
        assert logs_contradict(bytes(changed), one)
    elif start == stop:
        changed = dataclasses.replace(records[start - 1], op=1)
        assert logs_contradict(log(*records[first : start - 1], changed), other)


def test_a_log_that_is_no_number_of_records_has_no_extent():
    for content in (b"", bytes(RECORD_BYTES + 1)):
        with pytest.raises(LogError, match="not a whole number of records"):
            log_extent(content)
