"""A host that wants to hide work, or keep a chip from a snapshot: by its own code in the middle of a command, threads,
forks, kills and numbers without bound. What the chip can't take in time shows in its log."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import struct
import subprocess
import sys
import threading
import time
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from firmware_sim import (
    LABORATORY,
    TICK,
    DeviceMemory,
    FirmwareChip,
    MailboxError,
    Meter,
    RecordKind,
    Region,
    Work,
    parse_log,
    records_of,
)
from firmware_sim.errors import ChipwitnessError
from firmware_sim.memory import MemoryCopy
from firmware_sim.nvram import PosixDisk
from tests.firmware_sim.conftest import RUN, snapshots, work

K = RecordKind
ALWAYS = Fraction(1)


class HostileDisk(PosixDisk):
    """Runs code of the host before or after write number `at`, as a handler of a signal may do that comes then."""

    def __init__(self):
        super().__init__()
        self.handler: Any
        self.writes, self.at, self.after, self.handler = 0, 0, False, None

    def arm(self, at, after, handler):
        self.writes, self.at, self.after, self.handler = 0, at, after, handler

    def write_at(self, descriptor, data, offset):
        self.writes += 1
        now = self.writes == self.at
        if now and not self.after:
            self.handler()
        super().write_at(descriptor, data, offset)
        if now and self.after:
            self.handler()


def boot(world):
    made = FirmwareChip.power_on(world.folder / "chip-1")
    world.chips.append(made)
    return made


def inspect(world, chip, rate=ALWAYS):
    return world.check(world.collect(chip), trust=dataclasses.replace(world.trust, snapshot_rate=rate))


COMMANDS = {
    "commit": lambda chip, world: chip.commit(RUN, 1, bytes(32)),
    "idle": lambda chip, world: chip.idle(2),
    "attach": lambda chip, world: world.attach(chip),
    "close": lambda chip, world: chip.close_epoch(),
    "quote": lambda chip, world: chip.quote(bytes(16), "v"),
    "challenge": lambda chip, world: chip.challenge(bytes(16), "v"),
    "power off": lambda chip, world: chip.power_off(),
}


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("at", range(1, 9))
@pytest.mark.parametrize("command", COMMANDS)
def test_operators_inside_of_a_command_hide_nothing(world, command, at, after):
    """The chip can neither take a snapshot then nor go on without it: its power fails, and the gap tells of both."""
    disk = HostileDisk()
    chip = world.make(snapshot_rate=ALWAYS, disk=disk)
    memory = world.attach(chip)
    work(memory, Fraction(3, 2), operators=5)
    opened = [record.kind for record in parse_log(chip.log_bytes())]
    disk.arm(at, after, lambda: work(memory, 5, operators=50))
    with suppress(ChipwitnessError):
        COMMANDS[command](chip, world)
    ran = disk.writes >= at
    disk.handler = None
    chip.cut_power()
    again = boot(world)
    checked = inspect(world, again)
    if not ran:
        return
    gaps = records_of(checked.records, K.POWER_GAP)
    closed = K.CLOSE_EPOCH in [r.kind for r in checked.records[len(opened) :] if r.boot == 1]
    if not closed:
        assert gaps, "the first tick or moment that is passed takes the power"
        assert gaps[0].op or gaps[0].tick >= 2


def test_few_operators_inside_of_a_command_are_no_accident(world):
    """What passes neither a tick nor a moment needs nothing of the chip: a finalizer may free or copy tensors."""
    disk = HostileDisk()
    chip = world.make(snapshot_rate=ALWAYS, disk=disk)
    memory = world.attach(chip)
    disk.arm(1, False, lambda: work(memory, Fraction(1, 10**6), operators=3))
    chip.commit(RUN, 1, bytes(32))
    work(memory, 2, operators=9)
    assert len(snapshots(chip)) == 2
    inspect(world, chip)


def test_hidden_work_inside_of_a_command_that_is_killed_shows(world, tmp_path):
    """Training in a handler, and SIGKILL at its end: at most a tick is missing, and a snapshot that was due is cut."""
    chip = world.make(snapshot_rate=ALWAYS)
    chip.cut_power()
    child = os.fork()
    if child == 0:
        disk = HostileDisk()
        chip = FirmwareChip.power_on(world.folder / "chip-1", disk=disk)
        memory = world.attach(chip)

        def hide():
            work(memory, 40, operators=400)
            os.kill(os.getpid(), signal.SIGKILL)

        disk.arm(1, True, hide)
        chip.commit(RUN, 1, bytes(32))
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    again = boot(world)
    gap = records_of(inspect(world, again).records, K.POWER_GAP)[-1]
    assert gap.op == 1, "the chip lost its power at the first moment, which is named"


@pytest.mark.parametrize("seed", range(6))
def test_a_kill_at_any_moment_hides_less_than_a_tick(world, seed):
    """SIGKILL while the host works, idles and commits: what had passed by then is in the log, and every snapshot."""
    world.make(snapshot_rate=Fraction(1, 3)).cut_power()
    told = world.folder / "told"
    told.write_bytes(bytes(16))
    code = "import sys; from tests.firmware_sim.test_clock_attacks import live; live(sys.argv[1], sys.argv[2])"
    child = subprocess.Popen([sys.executable, "-c", code, str(world.folder), str(seed)])
    deadline = time.monotonic() + 60
    while struct.unpack(">QQ", told.read_bytes())[0] < TICK and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(random.Random(seed).random() / 10)
    child.kill()
    child.wait()
    busy, idle = struct.unpack(">QQ", told.read_bytes())
    again = boot(world)
    checked = inspect(world, again, Fraction(1, 3))
    gap = records_of(checked.records, K.POWER_GAP)[-1]
    assert gap.tick >= busy // TICK + idle > 0, "no whole tick is hidden"
    assert not any(record.is_late for record in snapshots(again))


def live(folder, seed):
    """Work without end, and write how long that took to a file."""
    rng, step = random.Random(int(seed)), 0
    chip = FirmwareChip.power_on(Path(folder) / "chip-1")
    memory = DeviceMemory([Region.of("w", np.zeros(1 << 19 if int(seed) % 2 else 12, dtype=np.float32))])
    chip.attach(memory, RUN, 0)
    descriptor = os.open(Path(folder) / "told", os.O_WRONLY)
    while True:
        work(memory, Fraction(rng.randrange(1, 90), 100), operators=rng.randrange(1, 9))
        if rng.random() < 0.2:
            chip.idle(rng.randrange(3))
        if rng.random() < 0.3:
            step += 1
            chip.commit(RUN, step, bytes(32))
        told = struct.pack(">QQ", LABORATORY.time(memory.meter.total), chip.utilisation.idle_ticks)
        os.pwrite(descriptor, told, 0)


def test_operators_of_other_threads_while_a_snapshot_waits_make_it_late(world):
    """One thread keeps the chip busy, so that another one's operator waits at a moment; a third one works on."""
    disk = HostileDisk()
    chip = world.make(snapshot_rate=ALWAYS, disk=disk)
    memory = world.attach(chip)

    def others():
        waiting = threading.Thread(target=work, args=(memory, 1))
        waiting.start()
        time.sleep(0.2)
        work_on = threading.Thread(target=lambda: memory.meter.charge(Work(1, 0, 1000)))
        work_on.start()
        work_on.join(1)
        threads.extend([waiting, work_on])

    threads: list[Any] = []
    disk.arm(2, True, others)
    chip.commit(RUN, 1, bytes(32))
    for thread in threads:
        thread.join()
    [record] = snapshots(chip)
    assert record.is_late
    inspect(world, chip)


def test_commands_of_other_threads_make_no_honest_snapshot_late(world):
    """Answers to an inspector, from a thread of their own, beside training in another one."""
    chip = world.make(snapshot_rate=ALWAYS)
    memory, ended = world.attach(chip), threading.Event()

    def train():
        try:
            work(memory, 300, operators=6000)
        finally:
            ended.set()

    thread = threading.Thread(target=train)
    thread.start()
    while not ended.is_set():
        assert chip.utilisation.snapshots <= 300
        assert chip.log_bytes()
        time.sleep(0.001)  # locks of threads are not fair
    thread.join()
    assert len(snapshots(chip)) == 300
    assert not any(record.is_late for record in snapshots(chip))
    assert inspect(world, chip).audit.ticks == 300


def test_epochs_that_close_beside_training_have_one_time(world):
    """The end of an epoch, the start of the next and a quote between operators of another thread."""
    chip = world.make(snapshot_rate=Fraction(1, 50))
    memory, ended = world.attach(chip), threading.Event()

    def train():
        try:
            work(memory, 200, operators=20000)
        finally:
            ended.set()

    thread = threading.Thread(target=train)
    thread.start()
    while not ended.is_set():
        chip.close_epoch()
        chip.challenge(bytes(16), "v")
        time.sleep(0.005)
    thread.join()
    assert inspect(world, chip, Fraction(1, 50)).audit.ticks > 0


def test_finalizers_in_the_hashing_thread_are_kept_out(world, monkeypatch):
    """A finalizer of the host may run in any thread, also in the one in which the chip records a snapshot."""
    disk, refused = HostileDisk(), []
    chip = world.make(snapshot_rate=ALWAYS, disk=disk)
    memory = DeviceMemory([Region.of("w", np.zeros(1 << 19, dtype=np.float32))])
    chip.attach(memory, RUN, 0)
    may_hash, original = threading.Event(), MemoryCopy.digest

    def waiting(self, algorithm):
        assert may_hash.wait(10)
        return original(self, algorithm)

    def finalizer():
        assert threading.current_thread() is not threading.main_thread()
        try:
            chip.commit(RUN, 9, bytes(32))
        except MailboxError as error:
            refused.append(error.code.name)

    monkeypatch.setattr(MemoryCopy, "digest", waiting)
    work(memory)
    disk.arm(1, True, finalizer)
    may_hash.set()
    deadline = time.monotonic() + 10
    while chip._under_way is not None or not refused:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert refused == ["BUSY"]
    assert inspect(world, chip).audit.snapshots == 1


def test_a_forked_copy_of_the_host_wakes_no_chip(world):
    """Work in a child is in another process, where no chip is; it writes nothing to the parent's."""
    chip = world.make(snapshot_rate=ALWAYS)
    memory = world.attach(chip)
    before = chip.log_bytes()
    child = os.fork()
    if child == 0:
        work(memory, 10, operators=100)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert chip.log_bytes() == before
    work(memory, 2, operators=9)
    assert [record.tick for record in snapshots(chip)] == [0, 1]
    inspect(world, chip)


def test_work_goes_on_where_the_memory_changes_in_mid_tick(world):
    """No part of a tick is won by moving to other memory, with the same meter or another one."""
    chip = world.make(snapshot_rate=ALWAYS)
    memory = world.attach(chip)
    for number in range(40):
        work(memory, Fraction(1, 4))
        other = DeviceMemory(memory.regions, meter=memory.meter if number % 2 else Meter())
        chip.attach(other, RUN, number)
        memory = other
    assert chip.time >= 9
    assert len(snapshots(chip)) in (9, 10)
    inspect(world, chip)


def test_memory_that_the_chip_has_left_wakes_it_no_more(world):
    chip = world.make(snapshot_rate=ALWAYS)
    old = world.attach(chip)
    work(old, Fraction(1, 1000))
    chip.attach(DeviceMemory(old.regions), RUN, 1)
    size = len(chip.log_bytes())
    work(old, 5, operators=50)
    assert len(chip.log_bytes()) == size
    assert chip.time == 0


def test_counts_beyond_64_bits_end_the_boot(world):
    """No record can hold them. What came before is in the log."""
    chip = world.make(snapshot_rate=Fraction(0))
    memory = world.attach(chip)
    work(memory, 3, operators=9)
    memory.meter.charge(Work(1, 1 << 64, 0))
    with pytest.raises(MailboxError, match="POWERED_OFF"):
        chip.commit(RUN, 1, bytes(32))
    again = boot(world)
    [gap] = records_of(parse_log(again.log_bytes()), K.POWER_GAP)
    assert gap.tick == 3
    inspect(world, again, Fraction(0))


def test_one_operator_of_thousands_of_ticks_holds_all_its_snapshots(world):
    chip = world.make(snapshot_rate=Fraction(1, 100))
    memory = world.attach(chip)
    work(memory, 5000)
    checked = inspect(world, chip, Fraction(1, 100))
    assert checked.audit.ticks == 5000
    assert checked.audit.snapshots == len(snapshots(chip)) > 20


def test_many_waits_leave_one_entry_in_the_meter(world):
    """A host that lets its chip idle, close epochs and attach memory between two operators fills no list."""
    chip = world.make(snapshot_rate=ALWAYS)
    memory = world.attach(chip)
    for _ in range(200):
        chip.idle(0)
        chip.close_epoch()
    assert len(memory.meter._waiting) == 1


def test_the_smallest_share_counts_what_it_is_of_all_that_ran(world):
    """Rounding down loses less than a unit at a time: not more by moving between two operators."""
    chip = world.make(snapshot_rate=Fraction(0))
    memory = world.memory
    share = memory.byte_count, 1000 * memory.byte_count
    chip.attach(DeviceMemory(memory.regions, meter=memory.meter, share=share), RUN, 0)
    for _ in range(1000):
        memory.meter.charge(Work(1, 0, 4391))
    assert chip.commit(RUN, 1, bytes(32)).work == Work(1, 0, 4391)
