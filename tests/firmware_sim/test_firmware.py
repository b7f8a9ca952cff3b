from __future__ import annotations

import hashlib
import shutil
from fractions import Fraction
from typing import Any
from unittest import mock

import numpy as np
import pytest

from firmware_sim import (
    CURRENT_FIRMWARE,
    EMPTY_MEMORY,
    RECORD_BYTES,
    ZERO_DIGEST,
    Beacon,
    BeaconIssuer,
    CallerError,
    ChipFailure,
    DeviceError,
    DeviceMemory,
    ErrorCode,
    EvidenceError,
    Firmware,
    FirmwareChip,
    MailboxError,
    NvramError,
    RecordKind,
    Region,
    SigningKey,
    beacon_digest,
    open_beacon,
    open_quote,
    parse_log,
    read_chain,
    records_of,
    seal_beacon,
)
from tests.firmware_sim.conftest import snapshots, work

RUN = hashlib.sha256(b"run").digest()


def _records(chip, kind=None):
    records = parse_log(chip.log_bytes())
    return records if kind is None else records_of(records, kind)


def _kinds(chip):
    return [record.kind.name for record in _records(chip)]


def test_new_chip_boots_once(world):
    chip = world.make()
    assert _kinds(chip) == ["GENESIS", "BOOT", "EPOCH"]
    assert (chip.chip_id, chip.boot, chip.time) == ("chip-1", 1, 0)


def test_snapshot_is_of_the_memory_at_its_moment_and_is_logged_before_the_next_operator(world):
    chip = world.make(snapshot_rate=Fraction(1))
    memory = world.memory
    attached = chip.attach(memory, RUN, 5)
    assert attached.digest == memory.table_digest().value
    for step in range(5, 8):
        world.set_step(step)
        if step > 5:
            chip.commit(RUN, step, bytes(32))
        work(memory)
        record = _records(chip)[-1]
        digest = memory.digest(chip.algorithm).value
        assert (record.kind, record.digest) == (RecordKind.SNAPSHOT, digest)
        assert (record.run_id, record.step, record.operators, record.is_late) == (RUN, step, 1, False)
        assert (record.boot, record.tick, record.busy) == (1, step - 5, step - 4)
    assert memory.byte_count == 12 * 4 + 12 * 8
    assert chip.utilisation.busy_ticks == chip.utilisation.snapshots == 3
    assert chip.utilisation.bytes_hashed == 3 * memory.byte_count


def test_writes_during_a_snapshot_do_not_reach_it(world, monkeypatch):
    """The chip hashes a copy of its own: who writes to the tensor while it hashes changes nothing."""
    chip = world.make(snapshot_rate=Fraction(1))
    world.set_step(1)
    memory = world.attach(chip)
    expected = world.memory.digest()
    from firmware_sim.memory import MemoryCopy

    original = MemoryCopy.digest

    def tampering(self, algorithm):
        world.set_step(99)
        return original(self, algorithm)

    monkeypatch.setattr(MemoryCopy, "digest", tampering)
    work(memory)
    assert _records(chip)[-1].digest == expected.value
    assert world.memory.digest() != expected


def test_snapshot_that_cannot_be_taken_shows_as_a_power_gap(world, monkeypatch):
    chip = world.make(snapshot_rate=Fraction(1))
    memory = world.attach(chip)
    work(memory)
    with pytest.raises(ValueError, match="cannot resize"):  # memory that a chip holds stays where it is
        world.weights.resize(13, refcheck=False)
    monkeypatch.setattr(DeviceMemory, "copy", mock.Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        work(memory)
    with pytest.raises(MailboxError, match="POWERED_OFF"):
        chip.commit(RUN, 1, bytes(32))
    chip = FirmwareChip.power_on(world.folder / "chip-1")
    world.chips.append(chip)
    [gap] = _records(chip, RecordKind.POWER_GAP)
    assert (gap.tick, gap.busy, gap.op) == (2, 2, 2)


def test_idle_chip_is_watched_too(world):
    chip = world.make(snapshot_rate=Fraction(1))
    events = chip.idle(2)
    assert len(events) == 2
    assert [record.digest for record in _records(chip, RecordKind.SNAPSHOT)] == [EMPTY_MEMORY.value] * 2
    memory = world.attach(chip, 3)
    chip.commit(RUN, 4, bytes(32))
    work(memory)
    [event] = chip.idle(1)
    assert (event.run_id, event.step, event.tick) == (RUN, 4, 3)
    assert _records(chip)[event.record].digest == world.memory.digest().value
    utilisation = chip.utilisation
    assert (utilisation.busy_ticks, utilisation.idle_ticks) == (1, 3)


def test_unscheduled_ticks_leave_no_trace_but_time(world):
    chip = world.make(snapshot_rate=Fraction(0))
    memory = world.attach(chip)
    size = len(chip.log_bytes())
    work(memory, 50, operators=70)
    assert len(chip.log_bytes()) == size
    assert chip.time == 50
    chip.idle(7)
    record = chip.commit(RUN, 50, bytes(32))
    assert (record.tick, record.busy) == (57, 50)


def test_closing_an_epoch_reveals_its_key_and_no_other(world):
    chip = world.make()
    assert chip.reveal() == ()
    work(world.attach(chip))
    chip.idle(3)
    assert chip.close_epoch() == 0
    assert chip.close_epoch() == 1
    assert [key.epoch for key in chip.reveal()] == [0, 1]
    closes = _records(chip, RecordKind.CLOSE_EPOCH)
    assert [(record.step, record.op, record.tick, record.busy) for record in closes] == [(0, 0, 4, 1), (1, 0, 4, 1)]
    assert [record.step for record in _records(chip, RecordKind.EPOCH)] == [0, 1, 2]


def test_epochs_and_chips_have_their_own_keys(world):
    keys = set()
    for chip_id in ("chip-1", "chip-2"):
        chip = world.make(chip_id)
        chip.close_epoch()
        chip.close_epoch()
        keys |= {key.key for key in chip.reveal()}
    assert len(keys) == 4


def test_clean_shutdown_leaves_no_gap_and_a_crash_does(world):
    chip = world.make()
    chip.power_off()
    chip = FirmwareChip.power_on(world.folder / "chip-1")
    assert _kinds(chip)[3:] == ["CLOSE_EPOCH", "POWER_OFF", "BOOT", "EPOCH"]
    chip.idle(7)
    chip.commit(RUN, 0, bytes(32))
    epoch = _records(chip, RecordKind.EPOCH)[-1]
    chip.cut_power()
    chip = FirmwareChip.power_on(world.folder / "chip-1")
    world.chips.append(chip)
    [gap] = _records(chip, RecordKind.POWER_GAP)
    assert (gap.boot, gap.step, gap.digest) == (2, 1, epoch.digest)
    assert (gap.tick, gap.busy) == (7, 0)
    assert [record.op for record in _records(chip, RecordKind.BOOT)] == [1, 1, 0]
    assert (chip.boot, chip.time) == (3, 0)
    assert [key.epoch for key in chip.reveal()] == [0, 1]


def test_chip_that_is_off_answers_nothing(world):
    chip = world.make()
    chip.power_off()
    for command in (
        lambda: chip.commit(RUN, 0, bytes(32)),
        lambda: chip.attach(world.memory, RUN, 0),
        lambda: chip.idle(1),
        lambda: chip.quote(bytes(16), "v"),
        chip.log_bytes,
        chip.close_epoch,
        chip.power_off,
    ):
        with pytest.raises(MailboxError, match="chip-1: chip is powered off") as caught:
            command()
        assert caught.value.code is ErrorCode.POWERED_OFF


def test_chip_runs_only_once_at_a_time(world):
    chip = world.make()
    with pytest.raises(MailboxError, match="chip chip-1 is powered on already") as caught:
        FirmwareChip.power_on(world.folder / "chip-1")
    assert caught.value.code is ErrorCode.ALREADY_POWERED
    assert _kinds(chip) == ["GENESIS", "BOOT", "EPOCH"]


def test_forgotten_chip_loses_its_power(world):
    FirmwareChip.manufacture(world.folder / "x", maker=world.maker, chip_id="x", seed=b"", snapshot_rate=Fraction(0))
    FirmwareChip.power_on(world.folder / "x").cut_power()


def test_folder_is_made_once(world):
    world.make()
    with pytest.raises(MailboxError, match="exists already") as caught:
        world.make()
    assert caught.value.code is ErrorCode.ALREADY_MANUFACTURED


def test_quote_covers_its_own_record_and_shows_each_request(world):
    chip = world.make()
    identity = read_chain(chip.certificate_chain())
    first = open_quote(chip.quote(b"n" * 16, "v"), identity.alias_key)
    second = open_quote(chip.quote(b"m" * 16, "v"), identity.alias_key)
    assert (first.log_size, second.log_size) == (4, 5)
    assert second.counter > first.counter
    assert first.log_head == _records(chip)[3].hash()
    assert len({record.digest for record in _records(chip, RecordKind.QUOTE)}) == 2
    assert (second.boot, second.epoch, second.nonce, second.verifier_id) == (1, 0, b"m" * 16, "v")


def test_firmware_update_changes_the_measurement_and_rollback_is_refused(world):
    update = world.maker.sign_firmware(Firmware(name="firmware 2", security_version=2))
    world.make().power_off()
    folder = world.folder / "chip-1"
    chip = FirmwareChip.power_on(folder, firmware=update)
    assert read_chain(chip.certificate_chain()).measurement == update.measurement
    chip.power_off()
    with pytest.raises(
        MailboxError, match="security version 1 is below 2, which this chip has already booted"
    ) as caught:
        FirmwareChip.power_on(folder, firmware=world.maker.sign_firmware(CURRENT_FIRMWARE))
    assert caught.value.code is ErrorCode.FIRMWARE_ROLLBACK
    chip = FirmwareChip.power_on(folder)
    world.chips.append(chip)
    assert [record.step for record in _records(chip, RecordKind.BOOT)] == [1, 2, 2]


def test_flood_of_commits_leaves_room_for_snapshots(world):
    chip = world.make(snapshot_rate=Fraction(1), quotas={RecordKind.COMMIT: 3, RecordKind.SNAPSHOT: 5})
    for step in range(3):
        chip.commit(RUN, step, bytes(32))
    with pytest.raises(MailboxError, match="all 3 COMMIT records are used") as caught:
        chip.commit(RUN, 3, bytes(32))
    assert caught.value.code is ErrorCode.QUOTA_EXCEEDED
    assert len(chip.idle(5)) == 5


def test_chip_whose_room_for_snapshots_is_used_is_spent_at_once(world):
    """No time passes that it could not record: it closes its epoch right behind the last snapshot."""
    chip = world.make(snapshot_rate=Fraction(1), quotas={RecordKind.SNAPSHOT: 2})
    memory = world.attach(chip)
    work(memory, Fraction(5, 2), operators=20)
    *_, last, close, spent = _records(chip)
    assert [record.kind.name for record in (last, close, spent)] == ["SNAPSHOT", "CLOSE_EPOCH", "SPENT"]
    assert last.work == close.work == spent.work
    assert len(snapshots(chip)) == 2
    before = chip.log_bytes()
    work(memory, 30)
    assert chip.log_bytes() == before
    for command in (lambda: chip.idle(1), lambda: chip.commit(RUN, 0, bytes(32))):
        with pytest.raises(MailboxError) as caught:
            command()
        assert caught.value.code is ErrorCode.CHIP_SPENT
    assert chip.utilisation.busy_ticks == last.busy


def test_chip_that_has_no_room_for_all_snapshots_of_an_operator_ends_before(world):
    """By what it has stored they were not due yet, and the next boot can still take them."""
    chip = world.make(snapshot_rate=Fraction(1), quotas={RecordKind.SNAPSHOT: 2})
    work(world.attach(chip), 3)
    with pytest.raises(MailboxError, match="POWERED_OFF"):
        chip.commit(RUN, 0, bytes(32))
    chip = FirmwareChip.power_on(world.folder / "chip-1")
    world.chips.append(chip)
    with pytest.raises(ChipFailure, match="no room for 3 SNAPSHOT records") as caught:
        chip._room_for([0, 1, 2])
    assert caught.value.code is ErrorCode.LOG_FULL
    assert isinstance(caught.value, DeviceError)
    [gap] = _records(chip, RecordKind.POWER_GAP)
    assert (gap.tick, gap.op) == (0, 0)
    assert len(chip.idle(2)) == 2
    assert _kinds(chip)[-2:] == ["CLOSE_EPOCH", "SPENT"]


def test_quotas_outlast_a_power_cut(world):
    world.make(quotas={RecordKind.COMMIT: 1}).commit(RUN, 0, bytes(32))
    world.chips.pop().cut_power()
    chip = FirmwareChip.power_on(world.folder / "chip-1")
    world.chips.append(chip)
    with pytest.raises(MailboxError, match="QUOTA_EXCEEDED"):
        chip.commit(RUN, 1, bytes(32))


def test_beacons_are_for_one_chip_at_one_place_and_never_go_back(world):
    chip = world.make(beacon_key=world.beacon_key.verifying)
    signed = world.beacon(chip, 100)
    record = chip.beacon(signed)
    assert (record.kind, record.step, record.digest) == (RecordKind.BEACON, 100, beacon_digest(signed).value)
    boot, size = chip.position
    for bad, message in [
        (signed, "is at boot 1 with"),
        (world.beacon(chip, 100), "beacon of time 100 is not later than the last one, of time 100"),
        (world.beacon(chip, 101, chip_id="chip-2"), "beacon is for chip 'chip-2'"),
        (world.beacon(chip, 101, boot=boot + 1), f"at boot {boot + 1} with {size} records"),
        (world.beacon(chip, 101, size=size + 1), f"with {size + 1} records"),
        (world.beacon(chip, 101, key=SigningKey.generate(b"x" * 32)), "signed by key"),
        (signed[:-1], "JSON"),
    ]:
        with pytest.raises(MailboxError, match=message) as caught:
            chip.beacon(bad)
        assert caught.value.code is ErrorCode.BAD_BEACON
    chip.beacon(world.beacon(chip, 101))
    chip.cut_power()
    chip = FirmwareChip.power_on(world.folder / "chip-1")
    world.chips.append(chip)
    with pytest.raises(MailboxError, match="beacon of time 101 is not later than the last one, of time 101"):
        chip.beacon(world.beacon(chip, 101))
    chip.beacon(world.beacon(chip, 102))


def test_chip_without_a_beacon_key_takes_none(world):
    chip = world.make()
    with pytest.raises(MailboxError, match="no verifier's beacon key") as caught:
        chip.beacon(world.beacon(chip, 1))
    assert caught.value.code is ErrorCode.NO_BEACON_KEY


def test_malformed_beacons_are_refused():
    from firmware_sim.beacon import BEACON_PAYLOAD_TYPE
    from firmware_sim.evidence import seal

    key = SigningKey.generate(b"x" * 32)
    good: dict[str, Any] = {"chip_id": "c", "boot": 1, "size": 5, "time": 6}
    assert open_beacon(seal_beacon(Beacon(**good), key), key.verifying) == Beacon(**good)
    payload: Any
    for payload in ([], {"time": 1}, {**good, "chip_id": 1}, {**good, "time": -1}, {**good, "boot": True}):
        with pytest.raises(EvidenceError):
            open_beacon(seal(BEACON_PAYLOAD_TYPE, payload, key), key.verifying)


def test_a_chip_that_was_put_back_to_a_copy_gets_no_beacon(world):
    """A copy's beacon is refused by the verifier, who knows better; one from before, by the chip that has gone on."""
    chip = world.make(beacon_key=world.beacon_key.verifying)
    issuer = BeaconIssuer(world.beacon_key, {})
    chip.beacon(issuer.issue("chip-1", chip.position, 1))
    chip.cut_power()
    shutil.copytree(world.folder / "chip-1", world.folder / "copy")
    chip = FirmwareChip.power_on(world.folder / "chip-1")
    world.train(chip)
    chip.beacon(issuer.issue("chip-1", chip.position, 2))
    chip.cut_power()
    restored = FirmwareChip.power_on(world.folder / "copy")
    world.chips.append(restored)
    with pytest.raises(EvidenceError, match="put back to an earlier state, or two copies of it exist"):
        issuer.issue("chip-1", restored.position, 3)
    with pytest.raises(EvidenceError, match="is not later than its last one, of time 2"):
        issuer.issue("chip-1", (9, 1000), 2)


@pytest.mark.parametrize(
    "command",
    [
        lambda chip: chip.commit(b"short", 0, bytes(32)),
        lambda chip: chip.commit(RUN, -1, bytes(32)),
        lambda chip: chip.commit(RUN, 2**64, bytes(32)),
        lambda chip: chip.commit(RUN, 0, b"short"),
        lambda chip: chip.commit(b"", 0, bytes(32)),
        lambda chip: chip.attach(DeviceMemory([Region.of("w", np.zeros(1))]), b"", 0),
        lambda chip: chip.idle(-1),
        lambda chip: chip.quote(b"short", "v"),
        lambda chip: chip.quote(bytes(65), "v"),
        lambda chip: chip.quote(bytes(16), ""),
        lambda chip: chip.quote(bytes(16), "v" * 201),
    ],
)
def test_bad_arguments_change_nothing(world, command):
    chip = world.make()
    with pytest.raises(MailboxError, match=r"mailbox error 101, BAD_ARGUMENT") as caught:
        command(chip)
    assert isinstance(caught.value, CallerError)
    assert _kinds(chip) == ["GENESIS", "BOOT", "EPOCH"]
    assert chip.time == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"snapshot_rate": Fraction(2)}, "not between 0 and 1"),
        ({"algorithm": "sha256"}, "unknown snapshot digest 'sha256'"),
        ({"quotas": {RecordKind.COMMIT: 0}}, "quota must be at least 1"),
        ({"chip_id": "a/b"}, "is not 1 to 64 letters"),
    ],
)
def test_orders_that_make_no_sense_leave_no_folder(world, options, message):
    settings = {"maker": world.maker, "chip_id": "x", "seed": b"", "snapshot_rate": Fraction(0), **options}
    with pytest.raises(CallerError, match=message):
        FirmwareChip.manufacture(world.folder / "x", **settings)
    assert not (world.folder / "x").exists()


@pytest.mark.parametrize("name", ["fuses.json", "firmware.json", "nvram.bin", "log.bin"])
def test_altered_chip_does_not_boot_as_if_nothing_had_happened(world, name):
    """Every seventh byte of the chip's files flipped: an error, or a boot that loses the last NVRAM write at most.

    The log's last record is in the NVRAM too, so it comes back.
    """
    chip = world.make(snapshot_rate=Fraction(1))
    chip.idle(1)
    chip.power_off()
    path = world.folder / "chip-1" / name
    good = {file: file.read_bytes() for file in path.parent.iterdir()}
    log = good[path.with_name("log.bin")]
    for index in range(0, len(good[path]), 7):
        altered = bytearray(good[path])
        altered[index] ^= 1 << index % 8
        path.write_bytes(altered)
        try:
            again = FirmwareChip.power_on(path.parent)
        except (EvidenceError, MailboxError):
            path.write_bytes(good[path])
        else:
            data = again.log_bytes()
            again.cut_power()
            if name == "nvram.bin":
                assert data.startswith(log[:-RECORD_BYTES])
            else:
                assert (name, index // RECORD_BYTES) == ("log.bin", len(log) // RECORD_BYTES - 1)
                assert data.startswith(log)
            for file, content in good.items():
                file.write_bytes(content)


@pytest.mark.parametrize("damage", ["shorten", "remove"])
def test_shortened_log_is_refused_at_boot(world, damage):
    world.make().cut_power()
    path = world.folder / "chip-1" / "log.bin"
    if damage == "shorten":
        path.write_bytes(path.read_bytes()[: -RECORD_BYTES - 1])
        message = r"log\.bin has 331 bytes; its 3 acknowledged records take more"
    else:
        path.unlink()
        message = "can't be opened"
    with pytest.raises(NvramError, match=message):
        FirmwareChip.power_on(path.parent)


def test_missing_chip_is_named(world):
    with pytest.raises(NvramError, match="can't be read: No such file"):
        FirmwareChip.power_on(world.folder / "none")


def test_self_test_runs_before_service(world, monkeypatch):
    world.make().cut_power()
    monkeypatch.setattr("firmware_sim._power._RFC8032_SIGNATURE", "00" * 32)
    with pytest.raises(ChipFailure, match="self-test failed") as caught:
        FirmwareChip.power_on(world.folder / "chip-1")
    assert caught.value.code is ErrorCode.SELF_TEST_FAILED


def test_secrets_stay_in_the_chip(world):
    chip = world.make()
    world.train(chip)
    evidence = world.collect(chip)
    secrets = chip._fuses.secrets
    hidden = [
        secrets.uds,
        secrets.device_key.private_bytes(),
        chip._alias_key().private_bytes(),
        chip._fuses.schedule_secret,
        chip._epoch_key,
        world.maker._key.private_bytes(),
    ]
    shown = evidence.chain + evidence.log + evidence.quote + evidence.epoch_keys
    assert not any(secret in shown or secret.hex().encode() in shown for secret in hidden)
    files = b"".join(file.read_bytes() for file in (world.folder / "chip-1").iterdir())
    assert world.maker._key.private_bytes() not in files
    assert world.maker._key.private_bytes().hex().encode() not in files


def test_first_record_ties_the_log_to_the_chip(world):
    first = _records(world.make())[0]
    assert first.previous == ZERO_DIGEST
    assert first.run_id != _records(world.make("chip-2"))[0].run_id
