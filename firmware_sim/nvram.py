"""Persistent state of a chip: a small two-slot store and an append-only log file.

Law: power may fail before, after or in the middle of any write; at the next boot the store holds the old state or the
new one, never a mixture, and the log holds exactly the records that the store acknowledges. What was written is read
back: a write that is lost, short or flips a bit is written again, and one that fails thrice ends the boot. The store
keeps the last record too, so a disk that loses the newest write to the log later does no harm. Power loss is the end of
the process; with `durable` every write is also flushed to the disk, so the law survives the host's own power loss.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from firmware_sim.errors import DeviceError, EvidenceError

__all__ = [
    "SLOT_BYTES",
    "Disk",
    "LogFile",
    "Nvram",
    "NvramError",
    "PosixDisk",
    "move",
    "write_file",
    "write_through",
]

SLOT_BYTES = 640
_HEADER = struct.Struct(">8sQH")
_MAGIC = b"CWNVRAM1"
_DIGEST_BYTES = 32
_ATTEMPTS = 3
MAX_STATE_BYTES = SLOT_BYTES - _HEADER.size - _DIGEST_BYTES


class NvramError(EvidenceError):
    """The chip's persistent state was altered: no slot is valid, or the log is not what the state acknowledges."""


class Disk(Protocol):
    """The system calls that persistence needs; tests make each of them fail in turn."""

    def write_at(self, descriptor: int, data: bytes, offset: int) -> None: ...

    def truncate(self, descriptor: int, size: int) -> None: ...

    def flush(self, descriptor: int) -> None: ...

    def write_file(self, path: Path, data: bytes) -> None: ...

    def move(self, source: Path, target: Path) -> None: ...


class PosixDisk:
    """The real disk."""

    def __init__(self, *, durable: bool = False) -> None:
        self._durable = durable

    def write_at(self, descriptor: int, data: bytes, offset: int) -> None:
        view = memoryview(data)
        try:
            while view:
                written = os.pwrite(descriptor, view, offset)
                view, offset = view[written:], offset + written
        except OSError as error:
            raise _unwritten(error) from None

    def truncate(self, descriptor: int, size: int) -> None:
        try:
            os.ftruncate(descriptor, size)
        except OSError as error:
            raise _unwritten(error) from None

    def flush(self, descriptor: int) -> None:
        if self._durable:
            os.fdatasync(descriptor)

    def write_file(self, path: Path, data: bytes) -> None:
        """Write a whole file, new or not."""
        try:
            with path.open("wb") as file:
                file.write(data)
                file.flush()
                self.flush(file.fileno())
            self._flush_names(path)
        except OSError as error:
            raise _unwritten(error) from None

    def move(self, source: Path, target: Path) -> None:
        """Give a file or folder another name, in one step."""
        try:
            os.replace(source, target)
            self._flush_names(target)
        except OSError as error:
            raise _unwritten(error) from None

    def _flush_names(self, path: Path) -> None:
        """Flush the folder that a file lies in."""
        if self._durable:
            descriptor = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _unwritten(error: OSError) -> DeviceError:
    return DeviceError(f"chip storage can't be written: {error.strerror}")


def _until(done: Callable[[], bool], write: Callable[[], None]) -> None:
    """Write until reading back says that it is done."""
    for _ in range(_ATTEMPTS):
        write()
        if done():
            return
    raise DeviceError(f"chip storage did not hold what was written to it, in {_ATTEMPTS} attempts")


def write_through(disk: Disk, descriptor: Callable[[], int], data: bytes, offset: int) -> None:
    """Write bytes and read them back; DeviceError where the disk does not take them.

    Meanwhile the file may be closed, in a handler of a signal: what `descriptor` returns then is none.
    """

    def write() -> None:
        disk.write_at(descriptor(), data, offset)
        disk.flush(descriptor())

    def is_done() -> bool:
        try:
            return os.pread(descriptor(), len(data), offset) == data
        except OSError as error:
            raise DeviceError(f"chip storage can't be read: {error.strerror}") from None

    _until(is_done, write)


def write_file(disk: Disk, path: Path, data: bytes) -> None:
    """Write a whole file and read it back; DeviceError where the disk does not take it."""
    _until(lambda: path.exists() and path.read_bytes() == data, lambda: disk.write_file(path, data))


def move(disk: Disk, source: Path, target: Path) -> None:
    """Give a file or folder another name and look whether it has it."""
    _until(lambda: target.exists() and not source.exists(), lambda: disk.move(source, target))


class Nvram:
    """One bounded state (at most `MAX_STATE_BYTES`) with a monotonic sequence number, in two slots written in turn.

    Slot: magic, sequence, length, state (zero-padded), SHA-256 of all that. The valid slot with the higher sequence
    holds the state, so a torn write leaves the other slot's.
    """

    def __init__(self, path: Path, disk: Disk) -> None:
        self._disk = disk
        try:
            self._descriptor = os.open(path, os.O_RDWR)
        except OSError as error:
            raise NvramError(f"chip state {path.name} can't be opened: {error.strerror}") from None
        slots = [self._read(number) for number in (0, 1)]
        valid = [slot for slot in slots if slot is not None]
        if not valid:
            self.close()
            raise NvramError(f"chip state {path.name} holds no valid slot")
        self.sequence, self.state = max(valid)
        if len(valid) == 2 and abs(valid[0][0] - valid[1][0]) != 1:
            self.close()
            raise NvramError(f"chip state {path.name} holds two slots that are not consecutive")

    @classmethod
    def create(cls, path: Path, state: bytes, disk: Disk) -> Nvram:
        """Return a new store."""
        write_file(disk, path, _slot(0, state) + bytes(SLOT_BYTES))
        return cls(path, disk)

    def write(self, state: bytes) -> None:
        """Replace the state; the sequence number grows by one."""
        sequence = self.sequence + 1
        slot = _slot(sequence, state)
        write_through(self._disk, lambda: self._descriptor, slot, (sequence % 2) * SLOT_BYTES)
        self.sequence, self.state = sequence, state

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _read(self, number: int) -> tuple[int, bytes] | None:
        data = os.pread(self._descriptor, SLOT_BYTES, number * SLOT_BYTES)
        if len(data) != SLOT_BYTES:
            return None
        body, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
        magic, sequence, length = _HEADER.unpack_from(body)
        if magic != _MAGIC or length > MAX_STATE_BYTES or hashlib.sha256(body).digest() != digest:
            return None
        if sequence % 2 != number:
            return None
        return sequence, body[_HEADER.size : _HEADER.size + length]


class LogFile:
    """Fixed-size records, appended. Only what `size` (from the chip's state) acknowledges counts."""

    def __init__(self, path: Path, *, last: bytes, size: int, disk: Disk, base: int = 0) -> None:
        """Open the log; a longer file was cut while an append was under way, and its unacknowledged tail goes.

        Args:
            last: the last of the `size` acknowledged records, which is written again if the disk has lost it; its
                length is that of every record.
            base: how many records came before the file's first, and lie elsewhere.

        Raises:
            NvramError: the file is missing or lacks more than the last record.
        """
        self._record_bytes = len(last)
        self._disk = disk
        self._base = base
        self.size = size
        held = size - base
        try:
            self._descriptor = os.open(path, os.O_RDWR)
        except OSError as error:
            raise NvramError(f"chip log {path.name} can't be opened: {error.strerror}") from None
        try:
            length = os.fstat(self._descriptor).st_size
            if length < (held - 1) * len(last):
                raise NvramError(f"chip log {path.name} has {length} bytes; its {held} acknowledged records take more")
            if length > held * len(last):
                self._cut(held * len(last))
            if held:
                self._restore(last, (held - 1) * len(last))
        except BaseException:
            self.close()
            raise

    def append(self, record: bytes) -> None:
        """Write `record` behind the acknowledged ones; `acknowledge` makes it one of them."""
        offset = (self.size - self._base) * self._record_bytes
        write_through(self._disk, lambda: self._descriptor, record, offset)

    def _cut(self, length: int) -> None:
        _until(
            lambda: os.fstat(self._descriptor).st_size == length, lambda: self._disk.truncate(self._descriptor, length)
        )

    def _restore(self, last: bytes, offset: int) -> None:
        if os.pread(self._descriptor, len(last), offset) != last:
            write_through(self._disk, lambda: self._descriptor, last, offset)

    def acknowledge(self) -> None:
        self.size += 1

    def read(self) -> bytes:
        """Return the acknowledged records."""
        wanted = (self.size - self._base) * self._record_bytes
        parts, offset = [], 0
        while offset < wanted:
            part = os.pread(self._descriptor, wanted - offset, offset)
            if not part:
                raise NvramError(f"chip log is shorter than its {self.size} acknowledged records")
            parts.append(part)
            offset += len(part)
        return b"".join(parts)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _slot(sequence: int, state: bytes) -> bytes:
    if len(state) > MAX_STATE_BYTES:
        raise DeviceError(f"chip state of {len(state)} bytes does not fit in {MAX_STATE_BYTES}")
    body = _HEADER.pack(_MAGIC, sequence, len(state)) + state
    body += bytes(SLOT_BYTES - _DIGEST_BYTES - len(body))
    return body + hashlib.sha256(body).digest()
