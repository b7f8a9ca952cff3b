from __future__ import annotations

import os

import pytest

from firmware_sim import FirmwareChip
from firmware_sim.errors import DeviceError
from firmware_sim.nvram import MAX_STATE_BYTES, SLOT_BYTES, LogFile, Nvram, NvramError, PosixDisk


class PowerLoss(Exception):
    """The process ends here, as far as the disk is concerned."""


class TearingDisk(PosixDisk):
    """Loses power at system call number `fatal`, of which it still carries out the first `kept` bytes."""

    def __init__(self, fatal: int, kept: int) -> None:
        super().__init__()
        self.calls = 0
        self._fatal = fatal
        self._kept = kept

    def write_at(self, descriptor, data, offset):
        if self._is_fatal():
            super().write_at(descriptor, data[: self._kept], offset)
            raise PowerLoss
        super().write_at(descriptor, data, offset)

    def truncate(self, descriptor, size):
        if self._is_fatal():
            raise PowerLoss
        super().truncate(descriptor, size)

    def _is_fatal(self) -> bool:
        self.calls += 1
        return self.calls == self._fatal


@pytest.fixture
def path(tmp_path):
    return tmp_path / "nvram.bin"


def _read(path):
    nvram = Nvram(path, PosixDisk())
    state = (nvram.sequence, nvram.state)
    nvram.close()
    return state


def test_state_survives_and_its_sequence_counts_writes(path):
    nvram = Nvram.create(path, b"zero", PosixDisk())
    for number in range(1, 6):
        nvram.write(b"state %d" % number)
        assert _read(path) == (number, b"state %d" % number)
    nvram.close()
    nvram.close()
    assert path.stat().st_size == 2 * SLOT_BYTES


@pytest.mark.parametrize("kept", range(0, SLOT_BYTES + 1, 8))
def test_torn_write_leaves_the_old_state_or_the_new(path, kept):
    nvram = Nvram.create(path, b"zero", PosixDisk())
    nvram.write(b"old")
    nvram.close()
    torn = Nvram(path, TearingDisk(1, kept))
    with pytest.raises(PowerLoss):
        torn.write(b"newer")
    torn.close()
    assert _read(path) == ((2, b"newer") if kept == SLOT_BYTES else (1, b"old"))
    again = Nvram(path, PosixDisk())
    again.write(b"after")
    again.close()
    assert _read(path)[1] == b"after"


def test_flipped_byte_never_gives_a_third_state(path):
    nvram = Nvram.create(path, b"zero", PosixDisk())
    nvram.write(b"one")
    nvram.close()
    good = path.read_bytes()
    for index in range(len(good)):
        altered = bytearray(good)
        altered[index] ^= 0x10
        path.write_bytes(altered)
        assert _read(path) in ((0, b"zero"), (1, b"one"))
    path.write_bytes(good)
    assert _read(path) == (1, b"one")


@pytest.mark.parametrize(
    "damage", [lambda data: b"", lambda data: bytes(len(data)), lambda data: data[: SLOT_BYTES - 1]]
)
def test_store_without_a_valid_slot_is_refused(path, damage):
    Nvram.create(path, b"zero", PosixDisk()).close()
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(NvramError, match=r"nvram\.bin holds no valid slot"):
        Nvram(path, PosixDisk())


def test_slots_that_do_not_follow_each_other_are_refused(path):
    """Someone put an old slot back beside a newer one."""
    nvram = Nvram.create(path, b"zero", PosixDisk())
    old = path.read_bytes()[:SLOT_BYTES]
    for number in range(3):
        nvram.write(b"%d" % number)
    nvram.close()
    path.write_bytes(old + path.read_bytes()[SLOT_BYTES:])
    with pytest.raises(NvramError, match="two slots that are not consecutive"):
        Nvram(path, PosixDisk())


def test_swapped_slots_are_refused(path):
    nvram = Nvram.create(path, b"zero", PosixDisk())
    nvram.write(b"one")
    nvram.close()
    data = path.read_bytes()
    path.write_bytes(data[SLOT_BYTES:] + data[:SLOT_BYTES])
    with pytest.raises(NvramError, match="no valid slot"):
        Nvram(path, PosixDisk())


def test_state_is_bounded(path):
    nvram = Nvram.create(path, bytes(MAX_STATE_BYTES), PosixDisk())
    with pytest.raises(DeviceError, match=f"{MAX_STATE_BYTES + 1} does not fit in {MAX_STATE_BYTES}|does not fit"):
        nvram.write(bytes(MAX_STATE_BYTES + 1))
    nvram.close()
    with pytest.raises(NvramError, match="can't be opened"):
        Nvram(path.with_name("missing"), PosixDisk())


def test_disk_error_is_the_devices_fault(path):
    nvram = Nvram.create(path, b"zero", PosixDisk(durable=True))
    nvram.write(b"one")
    nvram.close()
    with pytest.raises(DeviceError, match="chip storage can't be written: Bad file descriptor"):
        nvram.write(b"two")
    with pytest.raises(DeviceError, match="chip storage can't be written: Bad file descriptor"):
        PosixDisk().truncate(-1, 0)


def test_log_drops_only_what_was_never_acknowledged(tmp_path):
    path = tmp_path / "log.bin"
    path.write_bytes(b"")
    log = LogFile(path, last=bytes(4), size=0, disk=PosixDisk())
    for record in (b"aaaa", b"bbbb"):
        log.append(record)
        log.acknowledge()
    log.append(b"cc")
    assert log.read() == b"aaaabbbb"
    log.close()
    log.close()
    again = LogFile(path, last=b"bbbb", size=2, disk=PosixDisk())
    assert again.read() == path.read_bytes() == b"aaaabbbb"
    again.close()
    with pytest.raises(NvramError, match=r"log\.bin has 8 bytes; its 4 acknowledged records take more"):
        LogFile(path, last=b"dddd", size=4, disk=PosixDisk())
    with pytest.raises(NvramError, match="can't be opened"):
        LogFile(tmp_path / "missing", last=bytes(4), size=0, disk=PosixDisk())


@pytest.mark.parametrize("left", [b"aaaa", b"aaaabb", b"aaaa" + bytes(4), b"aaaabbbbcc"])
def test_newest_write_to_the_log_may_get_lost(tmp_path, left):
    path = tmp_path / "log.bin"
    path.write_bytes(left)
    log = LogFile(path, last=b"bbbb", size=2, disk=PosixDisk())
    assert log.read() == path.read_bytes() == b"aaaabbbb"
    log.close()


def test_log_that_shrinks_while_in_use_is_noticed(tmp_path):
    path = tmp_path / "log.bin"
    path.write_bytes(b"aaaabbbb")
    log = LogFile(path, last=b"bbbb", size=2, disk=PosixDisk())
    path.write_bytes(b"aaaa")
    with pytest.raises(NvramError, match="shorter than its 2 acknowledged records"):
        log.read()
    log.close()


@pytest.mark.parametrize("name", ["fuses.json", "firmware.json", "nvram.bin", "log.bin", "power.lock", "more"])
@pytest.mark.parametrize("kind", ["pipe", "link", "huge"])
def test_b22_a_chip_opens_plain_files_of_its_size_alone(world, name, kind):
    """A pipe would never end."""
    chip = world.make()
    chip.power_off()
    path = world.folder / "chip-1" / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to("/dev/zero")
    else:
        path.write_bytes(b"")
        os.truncate(path, 1 << 40)
    with pytest.raises(NvramError, match=r"is not a plain file|bytes of a file in a chip's folder"):
        FirmwareChip.power_on(world.folder / "chip-1")
