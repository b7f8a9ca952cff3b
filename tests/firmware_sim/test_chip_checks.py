"""The checks of a chip's evidence: what honest chips pass, and that every byte and every field counts."""

from __future__ import annotations

import dataclasses
import hashlib
from fractions import Fraction
from typing import Any

import pytest

from firmware_sim import (
    CHIP_GUARDS,
    LABORATORY,
    NO_WORK,
    TICK,
    ZERO_DIGEST,
    CallerError,
    ChipEvidence,
    EpochKey,
    EvidenceError,
    Firmware,
    FirmwareChip,
    IdentityError,
    LogError,
    LogPosition,
    QuoteError,
    RecordKind,
    RollbackError,
    ScheduleError,
    Unaudited,
    audit_schedule,
    check_distinct,
    check_epoch_keys,
    check_extends,
    check_life,
    check_log_chain,
    check_log_quoted,
    check_quote_identity,
    check_quote_time,
    check_registers,
    epoch_spans,
    parse_log,
    records_of,
    scheduled,
    threshold,
)

RUN = hashlib.sha256(b"run").digest()
OF: dict[str, Any] = {"chip": "chip-1", "roofline": LABORATORY}
"""The chip that all evidence here is of."""


@pytest.fixture
def eventful(world):
    """An honest chip that has seen everything: work, idling, beacons, a crash, a clean shutdown, two inspections."""
    chip = world.make(beacon_key=world.beacon_key.verifying)
    chip.beacon(world.beacon(chip, 10))
    world.train(chip, 20)
    chip.cut_power()
    chip = FirmwareChip.power_on(world.folder / "chip-1")
    world.train(chip, 20, start=20)
    chip.idle(20)
    chip.power_off()
    chip = FirmwareChip.power_on(world.folder / "chip-1")
    world.chips.append(chip)
    chip.beacon(world.beacon(chip, 20))
    world.train(chip, 20, start=40)
    return chip


def test_eventful_honest_life_passes_every_inspection(world, eventful):
    last = None
    for number in range(3):
        checked = world.check(world.collect(eventful, number), number=number, last=last)
        last = LogPosition.of(checked.quote)
        world.train(eventful, 10, start=60 + 10 * number, attach=False)
    audit = checked.audit
    # Boots 1 and 2 end epochs 0 and 1; each of the three inspections ends another.
    assert audit.epochs == 5
    assert audit.power_gaps == 1
    assert audit.cut_snapshots == ()
    snapshots = records_of(checked.records, RecordKind.SNAPSHOT)
    assert audit.snapshots == len(snapshots) > 0
    # The crash hides no tick: 20 in boot 1, 40 in boot 2, of which 20 idle, and 40 in boot 3.
    assert audit.ticks == 20 + 40 + 40
    assert audit.busy_ticks == 20 + 20 + 40


def test_every_flipped_byte_of_the_evidence_is_refused(world):
    chip = world.make(snapshot_rate=Fraction(1, 2))
    world.train(chip, 3)
    good = world.collect(chip)
    trust = dataclasses.replace(world.trust, snapshot_rate=Fraction(1, 2))
    world.check(good, trust=trust)
    for field in dataclasses.fields(ChipEvidence):
        data = getattr(good, field.name)
        for index in range(len(data)):
            altered = bytearray(data)
            altered[index] ^= 1 << index % 8
            with pytest.raises(EvidenceError):
                world.check(dataclasses.replace(good, **{field.name: bytes(altered)}), trust=trust)


def test_evidence_cut_or_lengthened_anywhere_is_refused(world):
    chip = world.make()
    world.train(chip, 3)
    good = world.collect(chip)
    for field in dataclasses.fields(ChipEvidence):
        data = getattr(good, field.name)
        for altered in {b"", data[:-1], data[1:], data + b"\n", data + data, data[: len(data) // 2]} - {data}:
            with pytest.raises(EvidenceError):
                world.check(dataclasses.replace(good, **{field.name: altered}))


def test_evidence_of_another_inspection_or_chip_is_refused(world):
    chip, other = world.make(), world.make("chip-2")
    for each in (chip, other):
        world.train(each)
    first, foreign = world.collect(chip), world.collect(other)
    with pytest.raises(QuoteError, match=r"chip chip-1: quote has nonce [0-9a-f]+, expected"):
        world.check(first, number=1)
    with pytest.raises(IdentityError, match="chip chip-1: presents the identity of chip chip-2"):
        world.check(foreign)
    assert first.checkpoint == foreign.checkpoint == b""
    for field in ("chain", "log", "quote", "epoch_keys"):
        with pytest.raises(EvidenceError):
            world.check(dataclasses.replace(first, **{field: getattr(foreign, field)}))


def test_quote_for_another_verifier_is_refused(world):
    from firmware_sim import check_chip

    evidence = world.collect(world.make())
    with pytest.raises(QuoteError, match="quote is for 'inspector-1', expected 'inspector-2'"):
        check_chip(
            evidence, chip_id="chip-1", trust=world.trust, nonce=world.nonce(0), verifier_id="inspector-2", last=None
        )


def test_settings_other_than_agreed_are_refused(world):
    evidence = world.collect(world.make())
    with pytest.raises(QuoteError, match="chip chip-1: snapshot rate is 1/5, expected 1/4"):
        world.check(evidence, trust=dataclasses.replace(world.trust, snapshot_rate=Fraction(1, 4)))
    with pytest.raises(QuoteError, match="snapshot digest is 'sha256-tree/1048576', expected 'blake3'"):
        world.check(evidence, trust=dataclasses.replace(world.trust, snapshot_algorithm="blake3"))


def test_firmware_update_just_before_the_inspection_does_not_hide_old_boots(world):
    """Shavit 2023, section 3: delay the update until just before the inspection."""
    old = Firmware(name="old", security_version=1)
    world.make(firmware=old).power_off()
    new = world.maker.sign_firmware(Firmware(name="new", security_version=2))
    chip = FirmwareChip.power_on(world.folder / "chip-1", firmware=new)
    world.chips.append(chip)
    evidence = world.collect(chip)
    trust = dataclasses.replace(world.trust, measurements=[new.measurement], minimum_security_version=2)
    with pytest.raises(LogError, match=f"log record 1: boot 1 of firmware {old.measurement.value.hex()}, which is not"):
        world.check(evidence, trust=trust)
    both = dataclasses.replace(trust, measurements=[new.measurement, old.measurement])
    with pytest.raises(LogError, match="log record 1: boot 1 has security version 1, below 2"):
        world.check(evidence, trust=both)
    world.check(evidence, trust=dataclasses.replace(both, minimum_security_version=1))


def test_empty_trust_is_the_callers_mistake(world):
    with pytest.raises(CallerError, match="no maker CA is trusted"):
        world.check(world.collect(world.make("chip-2")), trust=dataclasses.replace(world.trust, ca_digests=[]))


@pytest.fixture
def passed(world, eventful):
    return world.check(world.collect(eventful))


@pytest.mark.parametrize(
    ("check", "changes", "message"),
    [
        (check_registers, {"journey": bytes(32)}, "journey register is 0{64}, but its log gives"),
        (check_registers, {"current": bytes(32)}, "current register is 0{64}, but its log gives"),
        (check_log_quoted, {"log_size": 1}, r"log has \d+ records, but its quote gives 1"),
        (check_log_quoted, {"log_head": bytes(32)}, "log ends with head [0-9a-f]{64}, but its quote gives 0{64}"),
        (check_log_quoted, {"nonce": bytes(32)}, "is not the record of this quote, although it is the last one"),
        (check_log_quoted, {"counter": 1}, "counter 1 is below its log's size"),
        (check_quote_time, {"boot": 9}, "quote has boot 9, but its log gives 3"),
        (check_quote_time, {"tick": 10**6}, "quote has tick 1000000, but its log gives 20"),
        (check_quote_time, {"epoch": 9}, "quote has epoch 9, but its log gives 3"),
        (check_quote_time, {"security_version": 9}, "quote has security_version 9, but its log gives 1"),
    ],
)
def test_every_field_of_the_quote_is_held_against_the_log(passed, check, changes, message):
    check(passed.records, passed.quote)
    with pytest.raises(QuoteError, match=f"chip chip-1: .*{message}"):
        check(passed.records, dataclasses.replace(passed.quote, **changes))


@pytest.mark.parametrize("field", ["chip_id", "certificate_digest", "measurement", "security_version"])
def test_quote_is_held_against_the_certificate(passed, field):
    check_quote_identity(passed.quote, passed.identity)
    other = {"chip_id": "x", "security_version": 7}.get(field, passed.identity.maker_digest)
    with pytest.raises(QuoteError, match=f"chip chip-1: quote has {field} "):
        check_quote_identity(dataclasses.replace(passed.quote, **{field: other}), passed.identity)


def test_log_without_boot_or_epoch_is_refused(passed):
    for kind in (RecordKind.BOOT, RecordKind.EPOCH):
        fewer = [record for record in passed.records if record.kind is not kind]
        with pytest.raises(LogError, match=f"log holds no {kind.name} record"):
            check_quote_time(fewer, passed.quote)


def test_no_log_is_not_an_honest_log(passed):
    for check in (
        lambda: check_log_chain([], passed.identity),
        lambda: check_distinct([(passed.identity, [])]),
    ):
        with pytest.raises(LogError, match="chip chip-1: log is empty"):
            check()


def test_counter_must_grow_between_inspections(passed):
    last = LogPosition.of(passed.quote)
    with pytest.raises(RollbackError, match=f"counter {last.counter} has not grown"):
        check_extends(passed.records, passed.quote, last)
    check_extends(passed.records, passed.quote, dataclasses.replace(last, counter=last.counter - 1))


# One change to the eventful log each: (kind of the record, which of them, changes, what the error says).
K = RecordKind
LIFE = [
    (K.GENESIS, 0, {"kind": K.BOOT}, "kind is BOOT at this place"),
    (K.GENESIS, 0, {"boot": 1}, "boot is not 0 in the first record"),
    (K.BOOT, 0, {"kind": K.COMMIT}, "kind is COMMIT while the chip is off"),
    (K.BOOT, 0, {"kind": K.GENESIS}, "kind is GENESIS at this place"),
    (K.BOOT, 1, {"boot": 3}, "boot is 3, expected 2"),
    (K.BOOT, 0, {"tick": 1}, "tick is 1 at boot, expected 0"),
    (K.BOOT, 0, {"op": 0}, "op is 0, expected 1 for how the last boot ended"),
    (K.BOOT, 1, {"op": 1}, "op is 1, expected 0 for how the last boot ended"),
    (K.COMMIT, 0, {"boot": 2}, "boot is 2, expected 1"),
    (K.POWER_OFF, 0, {"tick": 39}, "tick is 39, which leaves 19 idle ticks, fewer than the 20 before"),
    (K.COMMIT, 1, {"tick": 0}, r"tick is 0, which leaves -1 idle ticks, fewer than the 0 before"),
    (K.COMMIT, 0, {"kind": K.BOOT}, "kind is BOOT, with neither a shutdown nor a power gap before it"),
    (K.COMMIT, 0, {"kind": K.EPOCH}, "kind is EPOCH while one is open"),
    (K.EPOCH, 0, {"step": 1}, "step is epoch 1, expected 0"),
    (K.EPOCH, 0, {"kind": K.COMMIT}, "kind is COMMIT while no epoch is open"),
    (K.CLOSE_EPOCH, 0, {"step": 0}, "step is epoch 0, expected 1"),
    (K.CLOSE_EPOCH, 0, {"digest": ZERO_DIGEST}, "digest is not the commitment of the open epoch"),
    (K.CLOSE_EPOCH, 0, {"kind": K.POWER_OFF}, "kind is POWER_OFF while an epoch is open"),
    (K.POWER_GAP, 0, {"tick": 0, "busy": 0}, "busy is 0, but the work that the meter counted takes 20 ticks"),
    (K.POWER_GAP, 0, {"tick": 19}, "tick is 19, which leaves -1 idle ticks, fewer than the 0 before"),
    (K.POWER_GAP, 0, {"work": NO_WORK}, r"work is 0 calls, 0 FLOP, 0 bytes, below 19 calls"),
    (K.POWER_GAP, 0, {"digest": ZERO_DIGEST}, "digest is not the commitment of the epoch that lost its power"),
    (K.POWER_GAP, 0, {"step": 5}, "step is epoch 5, expected 0"),
    (K.POWER_GAP, 0, {"op": 1}, "op is tick 0 and 1, which holds a snapshot or is still to come"),
    (K.POWER_GAP, 0, {"op": 22}, "op is tick 21 and 1, which holds a snapshot or is still to come"),
    (K.GENESIS, 0, {"busy": 1}, "busy is 1 in the first record, expected 0"),
    (K.BOOT, 1, {"busy": 1}, "busy is 1 at boot, expected 0"),
    (K.COMMIT, 1, {"busy": 0}, "busy is 0, but the work that the meter counted takes 1 ticks"),
    (K.POWER_GAP, 0, {"busy": 10**6}, "busy is 1000000, but the work that the meter counted takes 20 ticks"),
    (K.SNAPSHOT, 0, {"busy": 0}, r"busy is 0, but the work that the meter counted takes \d+ ticks"),
    (K.EPOCH, 3, {"tick": 10**6}, "tick is 1000000, but no epoch has been open since tick 20"),
    (K.SNAPSHOT, 1, {"tick": None}, r"tick is \d+, not above \d+ of the one before"),
    (K.BEACON, 1, {"step": 9}, "step is a beacon of 9, not later than that of 10"),
    (K.POWER_OFF, 0, {"kind": K.CLOSE_EPOCH}, "kind is CLOSE_EPOCH while no epoch is open"),
]


@pytest.mark.parametrize(("kind", "which", "changes", "message"), LIFE)
def test_impossible_lives_are_named(passed, kind, which, changes, message):
    check_life(passed.records, **OF)
    victim = records_of(passed.records, kind)[which]
    if changes == {"tick": None}:
        changes = {"tick": records_of(passed.records, kind)[0].tick}
    records = list(passed.records)
    records[victim.counter] = dataclasses.replace(victim, **changes)
    with pytest.raises(LogError, match=f"chip chip-1: log record {victim.counter}: {message}") as caught:
        check_life(records, **OF)
    assert caught.value.record == victim.counter


def test_nothing_comes_after_the_end_of_a_full_log(world):
    chip = world.make(quotas={K.EPOCH: 2})
    world.train(chip, 5)
    chip.close_epoch()
    first = world.check(world.collect(chip))
    [*_, close, spent] = records = first.records
    assert (close.kind, spent.kind) == (K.CLOSE_EPOCH, K.SPENT)
    again = world.check(world.collect(chip, 1), number=1, last=LogPosition.of(first.quote))
    assert again.records == records
    assert again.quote.counter > first.quote.counter
    for more, message in [
        ([dataclasses.replace(close, kind=K.BOOT)], "kind is BOOT after the log was full"),
        ([spent], "kind is SPENT after the log was full"),
    ]:
        with pytest.raises(LogError, match=message):
            check_life([*records, *more], **OF)
    for changes in ({"tick": 99}, {"boot": 2}):
        with pytest.raises(LogError, match="tick is not the time of the record before"):
            check_life([*records[:-1], dataclasses.replace(spent, **changes)], **OF)
    with pytest.raises(LogError, match="kind is SPENT where neither an epoch nor a boot has ended"):
        check_life([*records[:-2], spent], **OF)


def _keys(passed, world):
    return list(world.chips[-1].reveal())


def test_missing_extra_and_moved_snapshots_are_named(world, eventful, passed):
    keys, rate = _keys(passed, world), world.trust.snapshot_rate
    audit_schedule(passed.records, keys, rate=rate, **OF)
    snapshots = records_of(passed.records, RecordKind.SNAPSHOT)
    for victim in snapshots:
        fewer = [record for record in passed.records if record is not victim]
        with pytest.raises(
            ScheduleError, match=rf"no snapshot at boot {victim.boot}, tick {victim.tick}\.\d+ of epoch"
        ):
            audit_schedule(fewer, keys, rate=rate, **OF)
    records = list(passed.records)
    taken = {record.tick for record in snapshots if record.boot == 1}
    commit = next(each for each in records_of(records, RecordKind.COMMIT) if each.tick not in taken)
    records[commit.counter] = dataclasses.replace(commit, kind=RecordKind.SNAPSHOT)
    with pytest.raises(ScheduleError, match=rf"log record {commit.counter}: snapshot at boot 1, tick {commit.tick} of"):
        audit_schedule(records, keys, rate=rate, **OF)


def test_lower_rate_than_agreed_shows_as_missing_snapshots(world, eventful, passed):
    with pytest.raises(ScheduleError, match="no snapshot at"):
        audit_schedule(passed.records, _keys(passed, world), rate=Fraction(1, 2), **OF)


def test_audit_is_bounded(world, eventful, passed):
    with pytest.raises(Unaudited, match=r"its log covers 80 ticks, more than the 50 that an audit covers"):
        audit_schedule(passed.records, _keys(passed, world), rate=world.trust.snapshot_rate, max_ticks=50, **OF)


def test_nothing_audited_is_not_acceptance(world):
    chip = world.make()
    records = [record for record in world.check(world.collect(chip)).records if record.kind is not K.CLOSE_EPOCH][:3]
    assert [span.ended for span in epoch_spans(records, LABORATORY)] == [None]
    with pytest.raises(ScheduleError, match="no epoch has ended"):
        audit_schedule(records, [], rate=world.trust.snapshot_rate, **OF)


def test_open_epoch_may_cover_nothing(world):
    """Its key is not out, so nobody can tell which of its ticks hold a snapshot."""
    chip = world.make()
    world.train(chip, 5)
    chip.close_epoch()
    rate = world.trust.snapshot_rate
    assert audit_schedule(parse_log(chip.log_bytes()), chip.reveal(), rate=rate, **OF).ticks == 5
    chip.idle(3)
    chip.quote(bytes(16), "v")
    message = "chip chip-1: epoch 1 is still open and covers ticks 5.00 to 8.00: its schedule cannot be audited"
    with pytest.raises(ScheduleError, match=message):
        audit_schedule(parse_log(chip.log_bytes()), chip.reveal(), rate=rate, **OF)


def test_snapshot_that_was_cut_belongs_on_the_schedule(world, eventful, passed):
    """Power cuts excuse a snapshot that was due, not one that was not."""
    keys, rate = _keys(passed, world), world.trust.snapshot_rate
    [gap] = records_of(passed.records, K.POWER_GAP)
    [epoch] = [span for span in epoch_spans(passed.records, LABORATORY) if span.ended is gap]
    assert (gap.tick, gap.op) == (20, 0)
    due = [moment // TICK for moment in scheduled(keys[epoch.epoch].key, 1, 0, 20 * TICK, threshold(rate))]

    def cut(missing, first):
        """The log without the snapshots of some ticks, and a power gap that says which was the first under way."""
        left = [r for r in passed.records if (r.kind, r.boot, r.tick in missing) != (K.SNAPSHOT, 1, True)]
        return [dataclasses.replace(r, op=first + 1) if r is gap else r for r in left]

    audit = audit_schedule(cut(due[-1:], due[-1]), keys, rate=rate, **OF)
    assert [record.op for record in audit.cut_snapshots] == [due[-1] + 1]
    with pytest.raises(ScheduleError, match=f"no snapshot at boot 1, tick {due[-2]}"):
        audit_schedule(cut(due[-2:], due[-1]), keys, rate=rate, **OF)
    assert audit_schedule(cut([], 19), keys, rate=rate, **OF).cut_snapshots, "an excuse without need is counted too"


def test_keys_must_be_those_committed(world, eventful, passed):
    keys = _keys(passed, world)
    check_epoch_keys(passed.records, keys, **OF)
    wrong = EpochKey(epoch=1, key=bytes(32))
    cases = [
        (keys[:-1], f"the key of epoch {keys[-1].epoch} is missing"),
        ([keys[0], wrong, *keys[2:]], r"log record \d+: the key of epoch 1 does not open its commitment"),
        ([*keys, EpochKey(epoch=3, key=bytes(32))], "the key of epoch 3 was revealed while the epoch is open"),
        ([*keys, EpochKey(epoch=9, key=bytes(32))], "a key is given for epoch 9, which is not in the log"),
        ([*keys, keys[0]], "two keys are given for one epoch"),
    ]
    for given, message in cases:
        with pytest.raises(ScheduleError, match=f"chip chip-1: {message}"):
            check_epoch_keys(passed.records, given, **OF)
    with pytest.raises(ScheduleError, match=f"the key of epoch {keys[-1].epoch} is missing"):
        audit_schedule(passed.records, keys[:-1], rate=world.trust.snapshot_rate, **OF)
    with pytest.raises(ScheduleError, match="the key of epoch 0 does not open its commitment"):
        check_epoch_keys(passed.records, keys, chip="chip-2", roofline=LABORATORY)


def test_guards_are_the_documented_ones():
    assert len(CHIP_GUARDS) == 15
    with pytest.raises(TypeError):
        CHIP_GUARDS["maker"] = None  # type: ignore[index]
