"""What is on one chip's disk: fuses (written once), firmware, NVRAM state, log, and the lock of the power supply."""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

from firmware_sim import limits
from firmware_sim.errors import ChipwitnessError, EvidenceError
from firmware_sim.evidence import canonical
from firmware_sim.evidence.chiplog import RECORD_BYTES, RecordKind
from firmware_sim.evidence.digest import digest_bytes
from firmware_sim.evidence.envelope import VerifyingKey
from firmware_sim.evidence.pruning import BIRTH, LogCheckpoint
from firmware_sim.evidence.work import NO_WORK, Roofline, Work
from firmware_sim.identity import DeviceSecrets, Firmware, derive_key
from firmware_sim.mailbox import ErrorCode, MailboxError
from firmware_sim.nvram import Disk, LogFile, Nvram, NvramError, move, write_file
from firmware_sim.profiles import NvramProfile

__all__ = ["Fuses", "Silicon", "State", "check_chip_file", "create_silicon", "powered_down"]

_FUSES, _FIRMWARE, _NVRAM, _LOCK = "fuses.json", "firmware.json", "nvram.bin", "power.lock"
_FILE_BYTES = limits.Limit(RECORD_BYTES * limits.CHIP_LOG_RECORDS.most, "bytes of a file in a chip's folder")
_STATE = struct.Struct(f">Q32sIQQQ24s{RECORD_BYTES}sQ{len(BIRTH.to_bytes())}s")


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The chip's persistent state; all the rest follows from the log, which it acknowledges up to `log_size`.

    `tick`, `busy` and `work` are this boot's time, busy ticks and what its meter had counted when this was stored;
    `pending` is 1 and the tick of the first snapshot that is under way, 0 if none is; `security_floor` is the highest
    security version ever booted. `last_record` is the log's last record once more, so that one write to the log may get
    lost. What came before `checkpoint` is released, and took `released` cells.
    """

    log_size: int = 0
    log_head: bytes = bytes(32)
    pending: int = 0
    security_floor: int = 0
    tick: int = 0
    busy: int = 0
    work: Work = NO_WORK
    last_record: bytes = bytes(RECORD_BYTES)
    released: int = 0
    checkpoint: LogCheckpoint = BIRTH

    def to_bytes(self) -> bytes:
        return _STATE.pack(
            self.log_size, self.log_head, self.security_floor, self.pending, self.tick, self.busy,
            self.work.to_bytes(), self.last_record, self.released, self.checkpoint.to_bytes(),
        )  # fmt: skip

    @classmethod
    def from_bytes(cls, data: bytes) -> State:
        if len(data) != _STATE.size:
            raise NvramError(f"chip state has {len(data)} bytes, not {_STATE.size}")
        log_size, log_head, floor, pending, tick, busy, work, last_record, released, checkpoint = _STATE.unpack(data)
        return cls(
            log_size=log_size, log_head=log_head, pending=pending, security_floor=floor, tick=tick, busy=busy,
            work=Work.from_bytes(work), last_record=last_record, released=released,
            checkpoint=LogCheckpoint.from_bytes(checkpoint),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Fuses:
    """Fuses of a chip."""

    secrets: DeviceSecrets
    snapshot_rate: Fraction
    roofline: Roofline
    algorithm: str
    beacon_key: VerifyingKey | None
    nvram: NvramProfile
    log_id: bytes = field(init=False)
    schedule_secret: bytes = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "log_id", derive_key(self.secrets.uds, "log-id"))
        object.__setattr__(self, "schedule_secret", derive_key(self.secrets.uds, "schedule"))

    def to_bytes(self) -> bytes:
        content = {
            "algorithm": self.algorithm,
            "beacon_key": None if self.beacon_key is None else self.beacon_key.raw.hex(),
            "chip_id": self.secrets.chip_id,
            "device_certificate": self.secrets.device_certificate.decode(),
            "maker_certificate": self.secrets.maker_certificate.decode(),
            "nvram_bytes": self.nvram.capacity,
            "flop_rate": self.roofline.flop,
            "moved_rate": self.roofline.moved,
            "quotas": {kind.name: count for kind, count in self.nvram.quotas.items()},
            "snapshot_rate": [self.snapshot_rate.numerator, self.snapshot_rate.denominator],
            "uds": self.secrets.uds.hex(),
        }
        return canonical.encode({"content": content, "digest": str(_fuses_digest(content))})

    @classmethod
    def from_bytes(cls, data: bytes) -> Fuses:
        try:
            document = canonical.decode(data)
            content = document["content"]
            if document["digest"] != str(_fuses_digest(content)):
                raise NvramError("chip fuses do not match their digest")
            beacon_key = content["beacon_key"]
            secrets = DeviceSecrets(
                chip_id=content["chip_id"],
                uds=bytes.fromhex(content["uds"]),
                device_certificate=content["device_certificate"].encode(),
                maker_certificate=content["maker_certificate"].encode(),
            )
            return cls(
                secrets=secrets,
                snapshot_rate=Fraction(*content["snapshot_rate"]),
                roofline=Roofline(flop=content["flop_rate"], moved=content["moved_rate"]),
                algorithm=content["algorithm"],
                beacon_key=None if beacon_key is None else VerifyingKey(bytes.fromhex(beacon_key)),
                nvram=NvramProfile(
                    capacity=content["nvram_bytes"],
                    quotas={RecordKind[name]: count for name, count in content["quotas"].items()},
                ),
            )
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, ChipwitnessError) as error:
            raise NvramError(f"chip fuses are malformed: {error}") from None


class Silicon:
    """An opened chip folder; holds the lock until `close`, so that one chip never runs twice."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        self.folder = folder
        self._process = os.getpid()
        self._disk = disk
        try:
            for path in folder.iterdir():
                check_chip_file(path)
        except OSError as error:
            raise NvramError(f"chip folder {folder} can't be read: {error.strerror}") from None
        except EvidenceError as error:
            raise NvramError(str(error)) from None
        self.fuses = Fuses.from_bytes(_read(folder / _FUSES))
        self._lock = _lock(folder / _LOCK, self.fuses.secrets.chip_id)
        try:
            self.nvram = Nvram(folder / _NVRAM, disk)
            self.state = State.from_bytes(self.nvram.state)
            self.log = self._open_log(self.state)
        except BaseException:
            os.close(self._lock)
            raise

    @property
    def firmware(self) -> Firmware:
        try:
            data = _read(self.folder / _FIRMWARE)
            document = canonical.decode(data)
            image = Firmware(
                name=document["name"],
                security_version=document["security_version"],
                signature=bytes.fromhex(document["signature"]),
            )
            if _encode_firmware(image) == data:
                return image
            raise NvramError("chip firmware is not encoded as a chip encodes it")
        except (LookupError, TypeError, ValueError, ChipwitnessError):
            raise NvramError("chip firmware is malformed") from None

    def install(self, firmware: Firmware) -> None:
        """Make this the image that the next boot starts."""
        temporary = self.folder / (_FIRMWARE + ".new")
        write_file(self._disk, temporary, _encode_firmware(firmware))
        move(self._disk, temporary, self.folder / _FIRMWARE)

    def store(self, state: State) -> None:
        self.nvram.write(state.to_bytes())
        self.state = state

    def recall(self) -> None:
        """Go on from what NVRAM holds, which a command may have stored just before it was interrupted."""
        self.state = State.from_bytes(self.nvram.state)

    def append(self, state: State) -> None:
        """Append `last_record` of a state to the log and acknowledge it with that state, in this order."""
        self.log.append(state.last_record)
        self.store(state)
        self.log.acknowledge()

    def prune(self, state: State) -> None:
        """Release all records before a state's checkpoint: those after it get a file of their own, then the state goes.

        Whatever fails before the state is stored leaves the old file, which the old state names.
        """
        before = self.state.checkpoint.size
        kept = self.log.read()[(state.checkpoint.size - before) * RECORD_BYTES :]
        write_file(self._disk, self.folder / _log_name(state), kept)
        self.store(state)
        self.log.close()
        self.log = self._open_log(state)

    def _open_log(self, state: State) -> LogFile:
        for path in self.folder.glob("log*.bin"):
            if path.name != _log_name(state):
                path.unlink()
        return LogFile(
            self.folder / _log_name(state),
            last=state.last_record,
            size=state.log_size,
            disk=self._disk,
            base=state.checkpoint.size,
        )

    @property
    def is_own(self) -> bool:
        """Whether this is the process that opened the folder, and not a child that inherited its memory."""
        return os.getpid() == self._process

    def close(self) -> None:
        """Close the folder; in a child process that leaves the parent's files and lock as they are."""
        if self._lock < 0:
            return
        self.log.close()
        self.nvram.close()
        if self.is_own:  # a child may hold the descriptor open for longer, and the lock with it
            fcntl.flock(self._lock, fcntl.LOCK_UN)
        os.close(self._lock)
        self._lock = -1


def check_chip_file(path: Path) -> None:
    """EvidenceError if a chip's folder holds what no chip writes: a link, a device, a folder, or more than any log."""
    if path.is_symlink() or not path.is_file():
        raise EvidenceError(f"{path.name!r} in the chip's folder is not a plain file")
    _FILE_BYTES.check(path.stat().st_size)


@contextmanager
def powered_down(folder: Path) -> Iterator[None]:
    """Keep a chip from being powered on; MailboxError if it is."""
    lock = _lock(folder / _LOCK, folder.name)
    try:
        yield
    finally:
        os.close(lock)


def create_silicon(folder: Path, fuses: Fuses, firmware: Firmware, disk: Disk) -> None:
    """Write a new chip's folder, whole or not at all; it must not exist."""
    if folder.exists():
        raise MailboxError(ErrorCode.ALREADY_MANUFACTURED, f"chip folder {folder} exists already")
    temporary = folder.with_name(folder.name + ".new")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    files = {_FUSES: fuses.to_bytes(), _FIRMWARE: _encode_firmware(firmware), _log_name(State()): b"", _LOCK: b""}
    for name, content in files.items():
        write_file(disk, temporary / name, content)
    Nvram.create(temporary / _NVRAM, State().to_bytes(), disk).close()
    move(disk, temporary, folder)


def _log_name(state: State) -> str:
    """Each checkpoint has its own log file, so that the state's one write says which of them counts."""
    return f"log-{state.checkpoint.size}.bin" if state.checkpoint.size else "log.bin"


def _fuses_digest(content: object) -> object:
    return digest_bytes("chip-fuses", canonical.encode(content))


def _encode_firmware(firmware: Firmware) -> bytes:
    return canonical.encode(
        {
            "name": firmware.name,
            "security_version": firmware.security_version,
            "signature": firmware.signature.hex(),
        }
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise NvramError(f"chip file {path} can't be read: {error.strerror}") from None


def _lock(path: Path, chip_id: str) -> int:
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError as error:
        raise NvramError(f"chip file {path} can't be opened: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise MailboxError(ErrorCode.ALREADY_POWERED, f"chip {chip_id} is powered on already") from None
    return descriptor
