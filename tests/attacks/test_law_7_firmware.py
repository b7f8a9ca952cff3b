"""Laws 7 and 8 at the chip's mailbox: firmware runs no code of the host, and no call or accident undoes an honest chip.

A chip refuses what it can't do with a number and changes nothing; at its limits it still answers an inspection.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

import monitor.sharding
from analysis.cli import main
from analysis.commands.runs import trust_path
from firmware_sim import (
    CURRENT_FIRMWARE,
    DEFAULT_ALGORITHM,
    RECORD_BYTES,
    CallerError,
    ChipTrust,
    DeviceMemory,
    ErrorCode,
    EvidenceError,
    Firmware,
    FirmwareChip,
    MailboxError,
    MakerCA,
    NvramError,
    PosixDisk,
    RecordKind,
    Region,
    check_chip,
    collect_evidence,
    parse_log,
    records_of,
)
from firmware_sim.hooks import Hooks
from firmware_sim.memory import MemoryCopy
from tests.guards import off

pytestmark = pytest.mark.usefixtures("kept_devices")

ACCEPT, REJECT, INCONCLUSIVE = 0, 1, 3
NOW = ("--now", "2026-01-01T00:30:00Z")
RUN = hashlib.sha256(b"run").digest()
NONCE = bytes(32)
MAKER = MakerCA.create(b"maker")
TRUST = ChipTrust(
    ca_digests=[MAKER.certificate_digest],
    measurements=[CURRENT_FIRMWARE.measurement],
    minimum_security_version=1,
    snapshot_rate=Fraction(1),
    snapshot_algorithm=DEFAULT_ALGORITHM,
)


@pytest.fixture
def chips():
    """Chips to take the power from at the end."""
    made: list[Any] = []
    yield made
    for chip in made:
        chip.cut_power()


@pytest.fixture
def make(tmp_path, chips):
    """Returns a function that makes the chip of this test, attached to a little memory."""

    def make_chip(**options):
        chip = FirmwareChip.manufacture(
            tmp_path / "chip", maker=MAKER, chip_id="chip-1", seed=b"seed", snapshot_rate=Fraction(1), **options
        )
        chips.append(chip)
        chip.attach(DeviceMemory([Region.of("w", np.arange(6, dtype=np.float32))]), RUN, 0)
        return chip

    return make_chip


@pytest.fixture
def boot(tmp_path, chips):
    """Returns a function that boots the chip of this test again."""

    def power_on(**options):
        chips.append(FirmwareChip.power_on(tmp_path / "chip", **options))
        return chips[-1]

    return power_on


def check(chip):
    """Inspect a chip as an inspector who trusts its maker does; returns its records."""
    evidence = collect_evidence(chip, NONCE, "v")
    return check_chip(evidence, chip_id="chip-1", trust=TRUST, nonce=NONCE, verifier_id="v", last=None).records


def inspect(recorded, capsys):
    """Inspect a run with all its chips; returns exit code and output."""
    trust_path(recorded.run).write_text(json.dumps(recorded.trust.to_json()))
    words = ["inspect", recorded.run, "--trust", trust_path(recorded.run), "--samples", 2, "--device", "sse41", *NOW]
    capsys.readouterr()
    code = main([str(word) for word in words])
    return code, capsys.readouterr().out


# A9: memory whose methods are the host's.


class Peeking(np.ndarray):
    """The chip's memory holds something else, and shows the declared weights when a snapshot looks at it."""

    looked = 0
    shown: torch.Tensor

    def reshape(self, *shape):  # type: ignore[override]
        Peeking.looked += 1
        return self.shown.numpy().reshape(*shape)


def peeking_region(*, tensor, **fields):
    hidden = np.full(tuple(tensor.shape), 7, dtype=fields["dtype"]).view(Peeking)
    hidden.shown = tensor
    return Region(tensor=hidden, **fields)


@pytest.fixture
def record_peeking(make_run, monkeypatch):
    """Records a run of a lab whose chips hold something else than it trains."""

    def record():
        Peeking.looked = 0
        with monkeypatch.context() as lab:
            lab.setattr(monitor.sharding, "Region", peeking_region)
            return make_run(chips=2, steps=4, rate=Fraction(1))

    return record


def test_a9_memory_that_runs_host_code(record_peeking):
    with pytest.raises(CallerError, match="is of type 'Peeking', not a plain NumPy array or torch tensor"):
        record_peeking()
    assert Peeking.looked == 0


def test_a9_guard_off_memory_that_runs_host_code(record_peeking, capsys):
    with off("plain memory"):
        recorded = record_peeking()
    assert Peeking.looked > 0
    code, out = inspect(recorded, capsys)
    assert code == ACCEPT, out


class HostMemory(DeviceMemory):
    def copy(self, reuse=None):
        raise AssertionError("host code ran")


def alter_snapshot(make):
    """The host writes to what the chip handed out of a snapshot that is being hashed; returns the chip."""
    chip = make()
    chip.attach(DeviceMemory([Region.of("w", np.zeros(1 << 19, dtype=np.float32))]), RUN, 3)
    [event] = chip.idle(1)
    for field in dataclasses.fields(event):
        assert type(getattr(event, field.name)) in (str, bytes, int)  # nothing that firmware waits for or calls
    object.__setattr__(event, "step", 2)
    return chip


@pytest.fixture
def slow_hash(monkeypatch):
    """The host is done before the hash is."""
    original = MemoryCopy.digest

    def waiting(self, algorithm):
        time.sleep(0.2)
        return original(self, algorithm)

    monkeypatch.setattr(MemoryCopy, "digest", waiting)


def test_a_host_that_alters_a_snapshot_under_way(make, slow_hash):
    chip = alter_snapshot(make)
    assert [record.step for record in records_of(check(chip), RecordKind.SNAPSHOT)] == [3]


def test_guard_off_a_host_alters_a_snapshot_under_way(make, slow_hash):
    with off("snapshot of its own"):
        chip = alter_snapshot(make)
    assert [record.step for record in records_of(check(chip), RecordKind.SNAPSHOT)] == [2]


def test_a9_memory_object_of_the_host(make):
    chip = make()
    with pytest.raises(MailboxError, match="a memory is of type DeviceMemory") as caught:
        chip.attach(HostMemory([Region.of("w", np.zeros(3))]), RUN, 0)
    assert caught.value.code is ErrorCode.BAD_ARGUMENT
    chip.idle(1)
    assert len(records_of(check(chip), RecordKind.SNAPSHOT)) == 1


# B10: arguments.


class Number(int):
    """An integer whose methods are the host's."""


BAD_CALLS = {
    "fractional step": lambda chip: chip.commit(RUN, 1.5, bytes(32)),
    "truth value": lambda chip: chip.commit(RUN, True, bytes(32)),
    "NumPy step": lambda chip: chip.commit(RUN, np.int64(1), bytes(32)),
    "subclass of int": lambda chip: chip.commit(RUN, Number(1), bytes(32)),
    "no step": lambda chip: chip.commit(RUN, None, bytes(32)),
    "bytearray": lambda chip: chip.commit(bytearray(RUN), 1, bytes(32)),
    "text as run": lambda chip: chip.commit("r" * 32, 1, bytes(32)),
    "NumPy ticks": lambda chip: chip.idle(np.int64(1)),
    "fractional ticks": lambda chip: chip.idle(0.5),
    "ticks without end": lambda chip: chip.idle(10**5000),
    "text as digest": lambda chip: chip.commit(RUN, 1, "d" * 32),
    "array as digest": lambda chip: chip.commit(RUN, 1, np.zeros(32, dtype=np.uint8)),
    "list as memory": lambda chip: chip.attach([np.zeros(3)], RUN, 1),
    "no memory": lambda chip: chip.attach(None, RUN, 1),
    "text as nonce": lambda chip: chip.quote("n" * 16, "v"),
    "bytes as verifier": lambda chip: chip.quote(NONCE, b"v"),
    "lone surrogate": lambda chip: chip.quote(NONCE, "\ud800"),
    "escape sequence": lambda chip: chip.quote(NONCE, "v\x1b[2J"),
    "text as beacon": lambda chip: chip.beacon("{}"),
    "endless beacon": lambda chip: chip.beacon(bytes(1 << 20)),
}


@pytest.mark.parametrize("call", BAD_CALLS.values(), ids=BAD_CALLS)
def test_b10_arguments_of_other_types(make, call):
    chip = make()
    chip.idle(1)
    before = chip.log_bytes()
    with pytest.raises(MailboxError) as caught:
        call(chip)
    assert caught.value.code is ErrorCode.BAD_ARGUMENT
    assert len(str(caught.value)) < 300
    assert (chip.log_bytes(), chip.time) == (before, 1)
    check(chip)


def test_b10_guard_off_arguments_of_other_types(make, boot):
    chip = make()
    chip.idle(1)
    with off("exact arguments"), pytest.raises(Exception, match="required argument is not an integer"):
        chip.commit(RUN, 1.5, bytes(32))
    with pytest.raises(MailboxError, match="POWERED_OFF"):
        chip.idle(1)
    [gap] = records_of(parse_log(boot().log_bytes()), RecordKind.POWER_GAP)
    assert (gap.tick, gap.op) == (1, 0)


# B10: threads.


class MeetingDisk(PosixDisk):
    """Threads that write records at one time wait for each other in the middle of it."""

    def __init__(self, threads):
        super().__init__()
        self.meeting = threading.Barrier(threads)
        self.waits = False

    def write_at(self, descriptor, data, offset):
        if self.waits and len(data) == RECORD_BYTES:
            with contextlib.suppress(threading.BrokenBarrierError):  # the others were not let in
                self.meeting.wait(0.3)
        super().write_at(descriptor, data, offset)


def commit_at_once(chip, disk):
    disk.waits = True
    threads = [threading.Thread(target=chip.commit, args=(RUN, step, bytes(32))) for step in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    disk.waits = False


def test_b10_threads_that_commit_at_once(make):
    disk = MeetingDisk(3)
    chip = make(disk=disk)
    commit_at_once(chip, disk)
    assert {record.step for record in records_of(check(chip), RecordKind.COMMIT)} == {0, 1, 2}


def test_b10_guard_off_threads_that_commit_at_once(make):
    disk = MeetingDisk(3)
    chip = make(disk=disk)
    with off("one command at a time"):
        commit_at_once(chip, disk)
        with pytest.raises(EvidenceError, match="log record 5: unknown kind 0"):
            check(chip)


def test_b10_command_from_within_a_command(make, monkeypatch):
    """A signal's handler, or a finalizer, runs in the thread of the command that it interrupts."""
    chip = make()
    disk = chip._silicon.nvram._disk
    refused = []

    def interrupted(descriptor, data, offset):
        with pytest.raises(MailboxError) as caught:
            chip.commit(RUN, 9, bytes(32))
        refused.append(caught.value.code)
        PosixDisk.write_at(disk, descriptor, data, offset)

    monkeypatch.setattr(disk, "write_at", interrupted)
    chip.commit(RUN, 0, bytes(32))
    monkeypatch.undo()
    assert refused == [ErrorCode.BUSY] * 2
    assert [record.step for record in records_of(check(chip), RecordKind.COMMIT)] == [0]


# B10: fork.


def in_child(function):
    """Run a function in a forked child; returns its exit code, 1 where it failed."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = function()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def commit_twice(chip):
    try:
        chip.commit(RUN, 7, bytes(32))
        chip.commit(RUN, 8, bytes(32))
    except MailboxError as error:
        return error.code.value
    return 0


def test_b10_child_process(make, boot):
    chip = make()
    before = chip.log_bytes()
    assert in_child(lambda: commit_twice(chip)) == ErrorCode.FOREIGN_PROCESS
    assert chip.log_bytes() == before
    chip.commit(RUN, 0, bytes(32))
    chip.power_off()
    assert [record.step for record in records_of(check(boot()), RecordKind.COMMIT)] == [0]


def test_b10_guard_off_child_process(make, boot):
    chip = make()
    with off("own process"):
        assert in_child(lambda: commit_twice(chip)) == 0
    chip.commit(RUN, 0, bytes(32))
    chip.cut_power()
    with pytest.raises(EvidenceError, match="chip chip-1: log record 5: previous is not the hash"):
        boot()


@pytest.fixture
def lasting_child(make):
    """A chip, and a child process that outlives its power."""
    chip = make()
    waiting, ended = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ended)
        os.read(waiting, 1)
        os._exit(0)
    yield chip
    os.close(ended)
    os.waitpid(child, 0)
    os.close(waiting)


def test_b10_child_that_outlives_the_power(lasting_child, boot):
    lasting_child.cut_power()
    check(boot())


def test_b10_guard_off_child_that_outlives_the_power(lasting_child, boot):
    with off("unlocked by its process"):
        lasting_child.cut_power()
    with pytest.raises(MailboxError, match="chip-1 is powered on already"):
        boot()


EXIT_OF_A_CHILD = """
import os, sys
from fractions import Fraction
from firmware_sim import FirmwareChip, MailboxError, MakerCA

chip = FirmwareChip.manufacture(
    sys.argv[1], maker=MakerCA.create(b"maker"), chip_id="chip-1", seed=b"seed", snapshot_rate=Fraction(1)
)
if os.fork() == 0:
    sys.exit()
os.wait()
chip.idle(1)
try:
    FirmwareChip.power_on(sys.argv[1])
except MailboxError as error:
    print(error.code.name)
"""


def test_b10_exit_of_a_child(tmp_path, boot):
    """The exit of a child, exit handlers and all, leaves the parent's chip on and locked."""
    words = [sys.executable, "-c", EXIT_OF_A_CHILD, str(tmp_path / "chip")]
    ended = subprocess.run(words, capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == ("ALREADY_POWERED\n", "")
    assert len(records_of(check(boot()), RecordKind.SNAPSHOT)) == 1


# B10: firmware.

LAST = Firmware(name="the end of all updates", security_version=2**32 - 1)


def test_b10_firmware_of_the_last_version(make, boot):
    make().power_off()
    for image in (LAST, MakerCA.create(b"the lab").sign_firmware(LAST)):
        with pytest.raises(MailboxError, match="is not signed by the maker of chip chip-1") as caught:
            boot(firmware=image)
        assert caught.value.code is ErrorCode.FIRMWARE_UNSIGNED
    check(boot())


def test_b10_guard_off_firmware_of_the_last_version(make, boot):
    make().power_off()
    with off("signed firmware"):
        boot(firmware=LAST).power_off()
    with pytest.raises(
        MailboxError, match=r"is below 4294967295, which this chip has already booted .*FIRMWARE_ROLLBACK"
    ):
        boot(firmware=MAKER.sign_firmware(CURRENT_FIRMWARE))


# B10: quotas.


def boot_until_spent(make, boot):
    chip = make(quotas={RecordKind.BOOT: 2})
    for _ in range(3):
        chip.cut_power()
        chip = boot()
    return chip


def close_until_spent(make, boot):
    chip = make(quotas={RecordKind.EPOCH: 2})
    chip.idle(1)
    for _ in range(3):
        chip.close_epoch()
    return chip


def quote_until_spent(make, boot):
    chip = make(quotas={RecordKind.QUOTE: 2})
    chip.idle(1)
    for number in range(4):
        chip.quote(bytes([number]) * 16, "v")
    return chip


def end_epochs_until_spent(make, boot):
    chip = make(quotas={RecordKind.CLOSE_EPOCH: 2})
    chip.idle(1)
    for _ in range(3):
        chip.close_epoch()
    return chip


def lose_power_until_spent(make, boot):
    chip = make(quotas={RecordKind.POWER_GAP: 2})
    for _ in range(3):
        chip.cut_power()
        chip = boot()
    return chip


EXHAUSTED = [boot_until_spent, close_until_spent, quote_until_spent, end_epochs_until_spent, lose_power_until_spent]


@pytest.mark.parametrize("exhaust", EXHAUSTED)
def test_b10_quota_used_up(make, boot, exhaust):
    chip = exhaust(make, boot)
    records = check(chip)
    assert records[-1].kind is RecordKind.SPENT
    for call in (
        lambda: chip.idle(1),
        lambda: chip.commit(RUN, 0, bytes(32)),
        lambda: chip.attach(DeviceMemory([Region.of("w", np.zeros(3))]), RUN, 0),
    ):
        with pytest.raises(MailboxError) as caught:
            call()
        assert caught.value.code is ErrorCode.CHIP_SPENT
    for _ in range(3):
        chip.cut_power()
        chip = boot()
        assert check(chip) == records
    chip.power_off()
    assert check(boot()) == records


@pytest.mark.parametrize("exhaust", EXHAUSTED)
def test_b10_guard_off_quota_used_up(make, boot, exhaust):
    with off("room for evidence"), pytest.raises(MailboxError, match=r"records are used .*QUOTA_EXCEEDED"):
        exhaust(make, boot)


def test_b10_spent_chip_keeps_its_firmware(make, boot):
    close_until_spent(make, boot).power_off()
    with pytest.raises(MailboxError, match="with the firmware that it last booted only") as caught:
        boot(firmware=MAKER.sign_firmware(Firmware(name="update", security_version=2)))
    assert caught.value.code is ErrorCode.CHIP_SPENT
    check(boot())


def test_b10_spent_chip_in_an_inspection(make_run, monkeypatch, capsys):
    def make(lie, folder, **order):
        return FirmwareChip.manufacture(folder, quotas={RecordKind.EPOCH: 1}, **order)

    monkeypatch.setattr("monitor.lab.simulated_lab.make_chip", make)
    code, out = inspect(make_run(chips=2, steps=4, rate=Fraction(1)), capsys)
    assert code == ACCEPT, out


# B10: a lost write.


def lose_last_record(folder):
    path = folder / "log.bin"
    path.write_bytes(path.read_bytes()[:-RECORD_BYTES])


def test_b10_lost_write_to_the_log(make, boot, tmp_path):
    chip = make()
    chip.commit(RUN, 0, bytes(32))
    chip.cut_power()
    lose_last_record(tmp_path / "chip")
    assert len(records_of(check(boot()), RecordKind.COMMIT)) == 1


def test_b10_guard_off_lost_write_to_the_log(make, boot, tmp_path):
    make().cut_power()
    lose_last_record(tmp_path / "chip")
    with off("lost write"), pytest.raises(NvramError, match="shorter than its 4 acknowledged records"):
        boot()


# B10: a long life.


class NeverDraws(Hooks):
    def moments(self, draw, start, end):
        return iter(())


class LongIdle(FirmwareChip, hooks=NeverDraws):
    """Idles as fast as one that never draws, which at rate 0 comes to the same."""


@pytest.fixture
def inspect_long_life(make_run, monkeypatch, capsys):
    def make(lie, folder, **order):
        chip = LongIdle.manufacture(folder, **order)
        chip.idle(1 << 24)
        return chip

    def call():
        monkeypatch.setattr("monitor.lab.simulated_lab.make_chip", make)
        return inspect(make_run(chips=2, steps=2, rate=Fraction(0)), capsys)

    return call


def test_b10_long_life(inspect_long_life):
    code, out = inspect_long_life()
    assert code == INCONCLUSIVE, out
    assert "chip lab-chip-0000: its log covers 16777218 ticks, more than the 2097152 that an audit covers" in out


def test_b10_guard_off_long_life(inspect_long_life):
    with off("long life"):
        code, out = inspect_long_life()
    assert code == REJECT, out
