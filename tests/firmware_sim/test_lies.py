"""Every chip lie: which guard catches it, what the error says, and that the lie passes once the guards are off."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from fractions import Fraction

import pytest

from firmware_sim import (
    CHIP_LIES,
    LABORATORY,
    LEAKY_FIRMWARE,
    OLD_FIRMWARE,
    CallerError,
    CloneError,
    EvidenceError,
    IdentityError,
    LogError,
    LogPosition,
    QuoteError,
    RecordKind,
    RollbackError,
    ScheduleError,
    SignatureError,
    SnapshotError,
    audit_schedule,
    check_distinct,
    check_regions,
    check_snapshot,
    chip_class,
    make_chip,
    open_quote,
    parse_log,
    read_chain,
    records_of,
)
from firmware_sim.lies import find_lie
from tests.firmware_sim.conftest import work
from tests.guards import without

RUN = hashlib.sha256(b"run").digest()

CAUGHT_BY_CHIP_EVIDENCE = [
    (
        "open-epoch",
        ScheduleError,
        r"chip chip-1: epoch 1 is still open and covers ticks 0\.00 to \d+",
        {"schedule"},
    ),
    (
        "skip-snapshots",
        ScheduleError,
        r"chip chip-1: no snapshot at boot 1, tick \d+\.\d+ of epoch 0",
        {"schedule"},
    ),
    (
        "predict-schedule",
        IdentityError,
        r"chip chip-1: firmware measurement sha256:[0-9a-f]{64} is not allowed",
        {"firmware", "boots"},
    ),
    (
        "truncate-log",
        QuoteError,
        r"chip chip-1: log has \d+ records, but its quote gives \d+",
        {"log quoted", "registers", "quote time", "epoch keys", "schedule"},
    ),
    (
        "edit-record",
        LogError,
        r"chip chip-1: log record \d+: previous is not the hash of the record before",
        {"log chain"},
    ),
    (
        "splice-logs",
        QuoteError,
        r"chip chip-1: log has \d+ records, but its quote gives \d+",
        {"log quoted", "registers", "quote time", "epoch keys", "life", "schedule"},
    ),
    (
        "clone-identity",
        IdentityError,
        r"chip chip-1: presents the identity of chip chip-0",
        {"expected chip"},
    ),
    (
        "run-old-firmware",
        IdentityError,
        r"chip chip-1: firmware security version 0 is below 1",
        {"firmware", "boots"},
    ),
    ("own-maker-ca", IdentityError, r"chip chip-1: maker CA sha256:[0-9a-f]{64} is not trusted", {"maker"}),
]


@pytest.mark.parametrize(("lie", "error", "message", "guards"), CAUGHT_BY_CHIP_EVIDENCE)
def test_lie_is_caught_and_passes_without_its_guards(world, lie, error, message, guards):
    chip = world.make(lie=lie)
    world.train(chip)
    evidence = world.collect(chip)
    trust = world.trust
    if lie == "run-old-firmware":
        trust = dataclasses.replace(trust, measurements=[*trust.measurements, OLD_FIRMWARE.measurement])
    with pytest.raises(error) as caught:
        world.check(evidence, trust=trust)
    assert re.match(message, str(caught.value)), str(caught.value)
    with without(*guards):
        world.check(evidence, trust=trust)


def test_skipped_snapshots_are_caught_as_often_as_predicted(world):
    """n = 200 chips (seeds 0 to 199) idle for 8 ticks at rate 1/10 and take no snapshot. Caught with probability
    1 - 0.9^8 = 0.5695; the count is off by 5 standard deviations (of 7.0) with probability < 1e-6."""
    rate, ticks, chips = Fraction(1, 10), 8, 200
    predicted = float(1 - (1 - rate) ** ticks)
    caught = 0
    for number in range(chips):
        chip = world.make(f"chip-{number}", "skip-snapshots", seed=b"%d" % number, snapshot_rate=rate)
        chip.idle(ticks)
        chip.close_epoch()
        records = parse_log(chip.log_bytes())
        try:
            audit_schedule(records, chip.reveal(), rate=rate, roofline=LABORATORY, chip=chip.chip_id)
        except ScheduleError:
            caught += 1
        chip.cut_power()
    assert predicted == pytest.approx(0.5695, abs=1e-4)
    assert abs(caught - chips * predicted) < 5 * (chips * predicted * (1 - predicted)) ** 0.5


def test_chip_that_signs_with_another_key_is_caught(world):
    chip = world.make(lie="sign-with-another-key")
    world.train(chip)
    evidence = world.collect(chip)
    with pytest.raises(SignatureError, match="envelope is signed by key"):
        world.check(evidence)
    # The quote itself is sound: under the key that signed it, everything else passes.
    quote = open_quote(evidence.quote, chip._alias_key().verifying)
    assert quote.log_size == len(parse_log(evidence.log))


def test_rolled_back_log_is_caught_by_what_the_inspector_remembers(world):
    chip = world.make(lie="roll-back-log")
    world.train(chip)
    first = world.check(world.collect(chip))
    evidence = world.collect(chip, 1)
    last = LogPosition.of(first.quote)
    with pytest.raises(RollbackError, match=rf"log has \d+ records, but had {last.size} at the last inspection"):
        world.check(evidence, number=1, last=last)
    world.check(evidence, number=1, last=None)


def test_rolled_back_log_grown_past_its_old_size_is_caught(world):
    chip = world.make(lie="roll-back-log")
    world.train(chip)
    last = LogPosition.of(world.check(world.collect(chip)).quote)
    chip.close_epoch()
    world.train(chip, 60)
    chip._hooks.quoted = False
    evidence = world.collect(chip, 1)
    assert len(parse_log(evidence.log)) > last.size
    with pytest.raises(RollbackError, match=rf"record {last.size - 1}: is not the record that ended the log"):
        world.check(evidence, number=1, last=last)


def test_clone_that_an_accomplice_answers_for_is_caught_in_the_fleet(world):
    original, clone = world.make("chip-0"), world.make("chip-1", "clone-identity")
    cases = []
    for chip in (original, clone):
        world.train(chip)
        checked = world.check(world.collect(chip), chip_id="chip-0")
        cases.append((checked.identity, checked.records))
    with pytest.raises(CloneError, match="chip chip-0: chip number 1 is a clone of chip number 0"):
        check_distinct(cases)
    check_distinct(cases[:1])


def test_honest_chips_that_were_pruned_are_no_clones(world):
    """Their logs begin with no genesis, and with no run: what is left names no log."""
    cases = []
    for name in ("chip-0", "chip-1"):
        chip = world.make(name)
        world.train(chip)
        checked = world.check(world.collect(chip), chip_id=name)
        cases.append((checked.identity, [each for each in checked.records if each.counter > 1]))
    check_distinct(cases)


@pytest.mark.parametrize("lie", ["swap-weights", "replay-snapshot"])
def test_lie_about_content_is_caught_by_the_replayed_memory(world, lie):
    """Chip evidence alone is in order here: only the memory that the replay gives can contradict it."""
    chip = world.make(lie=lie)
    world.train(chip)
    snapshots = records_of(world.check(world.collect(chip)).records, RecordKind.SNAPSHOT)
    liars = [record for record in snapshots if not _is_explained(world, record)]
    assert len(snapshots) >= 2
    assert len(liars) >= len(snapshots) - 1


def test_honest_snapshots_are_explained_by_the_replayed_memory(world):
    chip = world.make()
    world.train(chip)
    snapshots = records_of(world.check(world.collect(chip)).records, RecordKind.SNAPSHOT)
    assert snapshots
    assert all(_is_explained(world, record) for record in snapshots)


def _is_explained(world, record):
    world.set_step(record.step)
    try:
        check_snapshot(record, world.memory.digest(), chip="chip-1")
    except SnapshotError:
        return False
    return True


def test_unexplained_snapshot_is_named(world):
    chip = world.make()
    world.train(chip)
    record = records_of(world.check(world.collect(chip)).records, RecordKind.SNAPSHOT)[0]
    named = f"chip chip-1: log record {record.counter}: snapshot of step {record.step} is {record.digest.hex()}"
    world.set_step(record.step + 1)
    with pytest.raises(SnapshotError, match=named):
        check_snapshot(record, world.memory.digest(), chip="chip-1")


def test_hidden_region_is_caught_by_the_declared_table(world):
    honest, liar = world.make("chip-0"), world.make("chip-1", "hide-region")
    table = world.memory.table_digest()
    for chip in (honest, liar):
        world.train(chip)
    honest_records = world.check(world.collect(honest), chip_id="chip-0").records
    check_regions(honest_records, RUN, table, chip="chip-0")
    records = world.check(world.collect(liar)).records
    with pytest.raises(SnapshotError, match=r"chip chip-1: log record 3: region table is [0-9a-f]{64}, expected"):
        check_regions(records, RUN, table, chip="chip-1")
    with pytest.raises(SnapshotError, match="it never attached memory for run"):
        check_regions(records, bytes(32), table, chip="chip-1")


def test_leaky_chip_predicts_its_schedule_and_is_measured(world):
    chip = world.make(lie="predict-schedule")
    memory, found = world.attach(chip), []
    predicted = chip.predict(200)
    for tick in range(1, 201):
        before = chip.position
        work(memory)
        found += [tick] if chip.position != before else []
    assert predicted == found != []
    assert read_chain(chip.certificate_chain()).measurement == LEAKY_FIRMWARE.measurement


@pytest.mark.parametrize("lie", [None, *CHIP_LIES])
def test_dishonest_chip_survives_a_power_cut(world, lie):
    chip = world.make(lie=lie)
    world.train(chip, 10)
    chip.cut_power()
    again = chip_class(lie).power_on(world.folder / "chip-1")
    world.chips.append(again)
    assert again.boot == 2
    assert again.chip_id == "chip-1"
    again.power_off()


def test_lie_that_no_chip_tells_is_refused(world):
    with pytest.raises(CallerError, match="unknown lie 'extra-steps'; there are skip-snapshots, predict-schedule"):
        make_chip("extra-steps", world.folder / "x")


@pytest.mark.parametrize("lie", CHIP_LIES.values(), ids=CHIP_LIES)
def test_lies_are_described_in_one_line(lie):
    assert find_lie(CHIP_LIES, lie.name) is lie
    assert lie.text
    assert "\n" not in lie.text


def test_earlier_names_of_lies_are_known():
    renamed = {"new": dataclasses.replace(CHIP_LIES["swap-weights"], name="new", aliases=("old",))}
    assert find_lie(renamed, "old").name == "new"


def test_errors_of_evidence_blame_the_lab():
    for error in (CloneError, RollbackError, SnapshotError, ScheduleError, QuoteError, LogError, IdentityError):
        assert issubclass(error, EvidenceError)
