"""A bounded memory: commits that cost no cell, floods that meet their own bounds, checkpoints that free cells."""

from __future__ import annotations

import dataclasses
import hashlib
from fractions import Fraction
from itertools import count
from typing import Any

import numpy as np
import pytest

from firmware_sim import (
    DEPLOYMENT,
    RECORD_BYTES,
    SLOT_BYTES,
    CallerError,
    DeviceMemory,
    ErrorCode,
    EvidenceError,
    FirmwareChip,
    LogCheckpoint,
    LogError,
    LogPosition,
    MailboxError,
    NvramError,
    NvramProfile,
    RecordKind,
    Region,
    RollbackError,
    SigningKey,
    open_log_checkpoint,
    parse_log,
    records_of,
    seal_log_checkpoint,
)
from firmware_sim.service import read_silicon
from tests.firmware_sim.conftest import work

K = RecordKind
RUN = hashlib.sha256(b"run").digest()


@pytest.fixture
def chip(world):
    return world.make(beacon_key=world.beacon_key.verifying, snapshot_rate=Fraction(1, 5))


def boot(world):
    made = FirmwareChip.power_on(world.folder / "chip-1")
    world.chips.append(made)
    return made


def prune(world, chip, checkpoint):
    return chip.prune(seal_log_checkpoint("chip-1", checkpoint, world.beacon_key))


def inspect(world, chip, number=0, **options):
    return world.check(world.collect(chip, number), number=number, **options)


def test_profile_holds_its_quotas_and_no_more():
    assert DEPLOYMENT.capacity == 65536
    assert DEPLOYMENT.cells == (65536 - 2 * SLOT_BYTES) // RECORD_BYTES
    more = {K.SNAPSHOT: DEPLOYMENT.quotas[K.SNAPSHOT] + 18}
    with pytest.raises(CallerError, match="388 records do not fit in the 387 cells of 65536 bytes"):
        DEPLOYMENT.with_quotas(more)
    with pytest.raises(CallerError, match="do not fit"):
        NvramProfile(capacity=65536, quotas={K.BOOT: 1})
    assert DEPLOYMENT.with_quotas({K.COMMIT: 1 << 30}).quotas[K.COMMIT] == 1 << 30


def test_commits_cost_no_cell(chip, world):
    before = chip.nvram
    world.train(chip, 1)
    used = chip.nvram.used
    for step in range(50):
        chip.commit(RUN, step, bytes(32))
    after = chip.nvram
    assert after.used == used == 2 * SLOT_BYTES + RECORD_BYTES * sum(after.records.values())
    assert after.slot_writes >= before.slot_writes + 25
    assert K.COMMIT not in after.records


def test_what_the_chip_keeps_and_what_the_host_committed_are_the_log(chip, world):
    """Each record that the chip keeps holds the fold of the commits before it."""
    memory, commits = world.attach(chip), []
    for step in range(8):
        world.set_step(step)
        commits.append(chip.commit(RUN, step, hashlib.sha256(b"%d" % step).digest()))
        work(memory)
    evidence = world.collect(chip)
    kept = [record for record in parse_log(evidence.log) if record.kind is not K.COMMIT]

    def check(held):
        records = sorted([*kept, *held], key=lambda record: record.counter)
        world.check(dataclasses.replace(evidence, log=b"".join(record.to_bytes() for record in records)))

    check(commits)
    for number, commit in enumerate(commits):
        with pytest.raises(EvidenceError):
            check(commits[:number] + commits[number + 1 :])
        for wrong in ({"step": 9}, {"digest": bytes(32)}, {"run_id": bytes(32)}, {"busy": 0, "tick": 99}):
            with pytest.raises((LogError, EvidenceError)):
                check([*commits[:number], dataclasses.replace(commit, **wrong), *commits[number + 1 :]])


def test_audit_goes_on_from_a_checkpoint(chip, world):
    positions: list[Any]
    since, positions = LogCheckpoint(), []
    for number in range(5):
        world.train(chip, 20, start=20 * number, attach=number == 0)
        if number == 3:
            chip.cut_power()
            chip = boot(world)
            world.attach(chip, 80)
        if number == 4:
            chip.power_off()
            chip = boot(world)
        chip.beacon(world.beacon(chip, number + 1))
        checked = inspect(world, chip, number, since=since, last=positions[-1] if positions else None)
        assert checked.records[0].counter == since.size
        assert checked.audit.busy_ticks == 20
        since = checked.checkpoint()
        positions.append(LogPosition.of(checked.quote))
        free = prune(world, chip, since)
        assert free == chip.nvram.capacity - 2 * SLOT_BYTES
        assert chip.log_bytes() == b""
    evidence = world.collect(chip, 9)
    with pytest.raises(LogError, match="expected GENESIS"):
        world.check(evidence, number=9)
    assert world.check(evidence, number=9, since=since).audit.ticks == 0


def test_pruned_chip_boots_and_remembers(chip, world):
    chip.beacon(world.beacon(chip, 100))
    world.train(chip, 20)
    checked = inspect(world, chip)
    world.train(chip, 20, start=20, attach=False)
    prune(world, chip, checked.checkpoint())
    rest = chip.log_bytes()
    assert parse_log(rest)[0].counter == checked.checkpoint().size
    chip.cut_power()
    chip = boot(world)
    assert chip.boot == 2
    assert chip.log_bytes().startswith(rest)
    with pytest.raises(MailboxError, match="not later than the last one, of time 100"):
        chip.beacon(world.beacon(chip, 99))
    again = inspect(world, chip, 1, since=checked.checkpoint())
    assert again.audit.power_gaps == 1
    assert again.audit.busy_ticks == 20
    assert [path.name for path in (world.folder / "chip-1").glob("log*")] == [f"log-{checked.checkpoint().size}.bin"]


def test_log_from_another_checkpoint_is_refused(chip, world):
    world.train(chip, 10)
    first = inspect(world, chip)
    world.train(chip, 10, start=10, attach=False)
    second = inspect(world, chip, 1)
    prune(world, chip, first.checkpoint())
    evidence = world.collect(chip, 2)
    good = first.checkpoint()
    world.check(evidence, number=2, since=good, last=LogPosition.of(second.quote))
    for name in ("size", "tick", "busy", "boot", "epochs", "head", "journey", "current", "opened", "spent"):
        value = getattr(good, name)
        other = (
            bytes([*value[:-1], value[-1] ^ 1])
            if isinstance(value, bytes)
            else not value
            if value is False
            else value + 1
        )
        with pytest.raises(EvidenceError):
            world.check(evidence, number=2, since=dataclasses.replace(good, **{name: other}))
    with pytest.raises(EvidenceError):
        world.check(evidence, number=2, since=second.checkpoint())
    forged = dataclasses.replace(LogPosition.of(second.quote), head=bytes(32))
    with pytest.raises(RollbackError, match="not the record that ended the log"):
        world.check(evidence, number=2, since=good, last=forged)


def test_chip_refuses_other_checkpoints(chip, world):
    world.train(chip, 10)
    good = inspect(world, chip).checkpoint()
    other = SigningKey.generate(b"x" * 32)
    before = chip.log_bytes()
    for sealed, text in [
        (seal_log_checkpoint("chip-1", good, other), "signed by key"),
        (seal_log_checkpoint("chip-2", good, world.beacon_key), "belongs to another chip"),
        (seal_log_checkpoint("chip-1", dataclasses.replace(good, tick=0), world.beacon_key), "never was"),
        (seal_log_checkpoint("chip-1", dataclasses.replace(good, size=9999), world.beacon_key), "never was"),
        (seal_log_checkpoint("chip-1", LogCheckpoint(), world.beacon_key), "never was"),
        (world.beacon(chip, 1), "envelope has the payload type"),
        (b"", "JSON"),
    ]:
        with pytest.raises(MailboxError, match=text) as caught:
            chip.prune(sealed)
        assert caught.value.code is ErrorCode.BAD_CHECKPOINT
    assert chip.log_bytes() == before
    prune(world, chip, good)
    with pytest.raises(MailboxError, match="never was"):
        prune(world, chip, good)
    with pytest.raises(MailboxError, match="NO_BEACON_KEY"):
        prune(world, world.make("chip-2"), good)


def test_sealed_checkpoint_is_what_was_sealed(chip, world):
    checkpoint = inspect(world, chip).checkpoint()
    sealed = seal_log_checkpoint("chip-1", checkpoint, world.beacon_key)
    assert open_log_checkpoint(sealed, "chip-1", world.beacon_key.verifying) == checkpoint
    assert LogCheckpoint.from_bytes(checkpoint.to_bytes()) == checkpoint
    from firmware_sim.evidence import LOG_CHECKPOINT_TYPE, seal

    values = {
        name: value.hex() if isinstance(value, bytes) else value
        for name, value in dataclasses.asdict(checkpoint).items()
    }
    for wrong in (
        {"size": -1},
        {"size": 1.0},
        {"size": True},
        {"boot": 1 << 32},
        {"head": "00"},
        {"head": "zz" * 32},
        {"more": 1},
    ):
        payload = {"chip_id": "chip-1", **values, **wrong}
        with pytest.raises(EvidenceError, match="malformed log checkpoint"):
            open_log_checkpoint(
                seal(LOG_CHECKPOINT_TYPE, payload, world.beacon_key), "chip-1", world.beacon_key.verifying
            )


def flood(chip, world):
    """Everything that a host can make a chip write, until it writes no more."""
    refusals = set()
    memory = DeviceMemory([Region.of("w", np.zeros(3))])
    times = count(1)
    calls = [
        lambda: chip.attach(memory, RUN, 0),
        lambda: chip.commit(RUN, 0, bytes(32)),
        lambda: chip.beacon(world.beacon(chip, next(times))),
    ]
    for call in calls:
        try:
            for _ in range(200):
                call()
        except MailboxError as error:
            refusals.add(error.code)
    return refusals


def test_flood_leaves_the_reserve(world):
    chip = world.make(beacon_key=world.beacon_key.verifying, nvram=DEPLOYMENT, snapshot_rate=Fraction(1))
    assert flood(chip, world) == {ErrorCode.QUOTA_EXCEEDED}
    quota = DEPLOYMENT.quotas[K.SNAPSHOT]
    assert len(chip.idle(quota)) == quota
    with pytest.raises(MailboxError, match="CHIP_SPENT"):
        chip.idle(1)
    evidence = world.collect(chip)
    checked = world.check(evidence, trust=dataclasses.replace(world.trust, snapshot_rate=Fraction(1)))
    assert checked.audit.snapshots == quota
    assert chip.nvram.used <= 65536
    prune(world, chip, checked.checkpoint())
    assert len(chip.idle(3)) == 3


@pytest.mark.parametrize("kind", [K.BOOT, K.EPOCH, K.QUOTE])
def test_spent_chip_works_again_behind_a_checkpoint(world, kind):
    chip = world.make(beacon_key=world.beacon_key.verifying, nvram=DEPLOYMENT, quotas={kind: 2})
    chip.idle(1)
    for _ in range(3):
        chip.quote(bytes(16), "v")
        if kind is K.EPOCH:
            chip.close_epoch()
        if kind is K.BOOT:
            chip.cut_power()
            chip = boot(world)
    checked = inspect(world, chip)
    assert checked.records[-1].kind is K.SPENT
    with pytest.raises(MailboxError, match="CHIP_SPENT"):
        chip.idle(1)
    before = chip.boot
    prune(world, chip, checked.checkpoint())
    assert chip.boot == before + 1
    work(world.attach(chip))
    again = inspect(world, chip, 1, since=checked.checkpoint())
    assert (again.records[0].kind, again.audit.busy_ticks) == (K.BOOT, 1)
    assert len(records_of(again.records, K.SPENT)) == 0


def test_shortened_log_of_a_pruned_chip_is_refused_at_boot(chip, world):
    prune(world, chip, inspect(world, chip).checkpoint())
    chip.commit(RUN, 0, bytes(32))
    chip.commit(RUN, 1, bytes(32))
    chip.cut_power()
    [path] = (world.folder / "chip-1").glob("log*")
    path.write_bytes(b"")
    with pytest.raises(NvramError, match="its 2 acknowledged records take more"):
        boot(world)


def test_a_look_at_a_pruned_chip(chip, world):
    world.train(chip, 20)
    checkpoint = inspect(world, chip).checkpoint()
    kept = sum(chip.nvram.records.values())
    prune(world, chip, checkpoint)
    chip.power_off()
    view = read_silicon(world.folder / "chip-1")
    assert view.problem is None
    assert [record.kind for record in view.records] == [K.CLOSE_EPOCH, K.POWER_OFF]
    assert (view.log_size, view.log_head) == (checkpoint.size + 2, checkpoint.extend(view.records).head)
    assert view.memory is not None
    assert view.memory.used == 2 * SLOT_BYTES + 2 * RECORD_BYTES
    assert (view.memory.slot_writes, view.memory.cell_writes) == (-(-view.counter // 2), 1)
    assert kept > 2
