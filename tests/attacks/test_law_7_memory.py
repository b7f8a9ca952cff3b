"""Laws 1 and 7: a chip reads its memory itself, when a snapshot is due, and nobody answers in the memory's place.

Rows A48 and A49. Each host is a process of its own: a fault ends it, and where it is the host's it could answer it.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest

from firmware_sim import DeviceMemory, FirmwareChip, Region, parse_log
from firmware_sim.evidence.chiplog import ZERO_DIGEST, RecordKind
from inspector.inspection.guards import Settings
from inspector.inspection.inspection import inspect
from inspector.inspection.verdict import Outcome

ROOT = Path(__file__).parents[2]
HOST = """
import ctypes, mmap, os, sys
import numpy as np
from fractions import Fraction
from pathlib import Path
from firmware_sim import LABORATORY, DeviceMemory, FirmwareChip, MailboxError, MakerCA, Region, Work
from tests.guards import off

folder, way, *guards = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)
chip = FirmwareChip.manufacture(
    folder + "/chip", maker=MakerCA.create(b"maker"), chip_id="chip", seed=b"seed", snapshot_rate=Fraction(1)
)
if way in ("file", "cut file", "shared"):
    Path(folder, "file").write_bytes(bytes([7]) * 4096)
    file = os.open(folder + "/file", os.O_RDWR)
    held = mmap.mmap(file, 4096, flags=mmap.MAP_SHARED if way == "shared" else mmap.MAP_PRIVATE)
else:
    held = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    held[:] = bytes([7]) * 4096
array = np.frombuffer(memoryview(held), np.uint8)
if way == "served":
    faults = libc.syscall(323, os.O_CLOEXEC | 1)  # userfaultfd, of user mode alone
    if faults < 0:
        sys.exit(77)
    api = (ctypes.c_uint64 * 3)(0xAA)
    assert not libc.ioctl(faults, ctypes.c_ulong(0xC018AA3F), api)
    span = (ctypes.c_uint64 * 4)(array.ctypes.data, 4096, 1)
    assert not libc.ioctl(faults, ctypes.c_ulong(0xC020AA00), span)
memory = DeviceMemory([Region.of("w", array)])
with off(*guards):
    try:
        chip.attach(memory, b"r" * 32, 0)
    except MailboxError as error:
        print(error)
        sys.exit(9)
    address = ctypes.c_void_p(array.ctypes.data)
    if way == "protected":
        assert not libc.mprotect(address, ctypes.c_size_t(4096), 0)
    elif way == "gone":
        assert not libc.munmap(address, ctypes.c_size_t(4096))
    elif way == "cut file":
        os.ftruncate(file, 0)
    memory.meter.charge(Work(1, 0, LABORATORY.moved))
    chip.commit(b"r" * 32, 1, bytes(32))
    os._exit(0)
"""


@pytest.fixture
def host(tmp_path):
    """Runs a host whose chip takes a snapshot in its first tick; returns how it ended, and the chip, booted again."""

    def run(way, *guards):
        child = subprocess.run(
            [sys.executable, "-c", HOST, tmp_path, way, *guards], capture_output=True, text=True, cwd=ROOT
        )
        return child, parse_log(_booted(tmp_path).log_bytes())

    chips = []

    def _booted(folder):
        chips.append(FirmwareChip.power_on(folder / "chip"))
        return chips[-1]

    yield run
    for chip in chips:
        chip.cut_power()


def test_a48_a_chip_reads_past_the_rights_of_a_page(host, tmp_path):
    child, records = host("protected")
    assert child.returncode == 0, child.stderr
    [snapshot] = [record for record in records if record.kind is RecordKind.SNAPSHOT]
    held = DeviceMemory([Region.of("w", _sevens())])
    assert snapshot.digest == held.digest().value


def test_a48_guard_off_the_read_is_a_fault_of_the_host(host):
    child, records = host("protected", "memory read by the kernel")
    assert child.returncode == -signal.SIGSEGV
    assert not [record for record in records if record.kind is RecordKind.SNAPSHOT]
    [gap] = [record for record in records if record.kind is RecordKind.POWER_GAP]
    assert gap.op == 1, "it was due before it was read"


def test_memory_that_is_gone_is_said_to_be(host):
    child, records = host("gone")
    assert child.returncode == 0, child.stderr
    [snapshot] = [record for record in records if record.kind is RecordKind.SNAPSHOT]
    assert snapshot.digest == ZERO_DIGEST


@pytest.mark.parametrize(
    ("way", "says"),
    [("file", "a mapped file"), ("shared", "shared with other processes"), ("served", "served by userfaultfd")],
)
def test_a49_memory_that_others_may_change_is_refused(host, way, says):
    child, _ = host(way)
    if child.returncode == 77:
        pytest.skip("this system lets nobody serve faults")
    assert child.returncode == 9
    assert f"region 'w': its memory is {says}; clone the tensor" in child.stdout


def test_a49_guards_off_who_cuts_the_file_kills_the_host_at_the_snapshot(host):
    child, records = host("cut file", "memory of one process", "memory read by the kernel")
    assert child.returncode == -signal.SIGBUS
    assert not [record for record in records if record.kind is RecordKind.SNAPSHOT]


def _sevens():
    import numpy as np

    return np.full(4096, 7, np.uint8)


def test_an_inspector_says_that_memory_was_gone(make_run, devices, monkeypatch):
    """The chips of this lab find none of theirs."""

    def gone(*_):
        raise OSError("gone")

    monkeypatch.setattr("firmware_sim.memory.MemoryCopy.refill", gone)
    recorded = make_run(steps=4, chips=1, rate=Fraction(1), checkpoint_every=2)
    monkeypatch.undo()
    settings = Settings(samples=1, seed="x", devices=("sse41",))
    verdict = inspect([recorded.run], recorded.trust, settings, now=recorded.now, worker=devices.run)
    assert verdict.outcome is Outcome.REJECT
    assert "its memory was gone when a snapshot was due" in verdict.reasons[0].text
