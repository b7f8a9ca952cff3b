"""The chip as a host and an inspector see it.

Time is (boot, tick) by the chip's own clock: what its meter has counted, by the roofline of its device, and the ticks
that it was idle (`firmware_sim.audit`). The host has no say in it. It tells the chip where it is, with `attach` and
`commit`; a snapshot falls between two of the operators that run on the memory, at a moment that no one knows before,
and carries what the host said last. Idle time is what an injected clock says. Here that is simulated, by `idle`.

Whatever a method records is in NVRAM before the method returns, and each tick before its work goes on: taking the power
hides no tick that has passed. The one exception is a snapshot of much memory: NVRAM says that it is under way, and its
record follows once the copy is hashed, before anything else is recorded.

Arguments are of exact types. A refusal is a `MailboxError` with a number and has changed nothing. A chip that is in the
middle of a command when a tick or a moment is passed, by operators in a handler of a signal for instance, loses its
power, and the gap names the snapshot that was due. Operators of another thread that run while a snapshot waits for a
command to end make it late: its record says so, which no inspector accepts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NoReturn, SupportsIndex

from firmware_sim.evidence.chiplog import LogRecord
from firmware_sim.evidence.digest import digest_list
from firmware_sim.memory import DeviceMemory
from firmware_sim.schedule import EpochKey

__all__ = ["EMPTY_MEMORY", "Chip", "SnapshotEvent", "Utilisation"]

EMPTY_MEMORY = digest_list("device-memory", [], allow_empty=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotEvent:
    """A snapshot that is record number `record` of the chip's log, with its digest, once its copy is hashed.

    The host hears only of those that fall while it lets the chip idle.
    """

    chip_id: str
    record: int
    boot: int
    tick: int
    run_id: bytes
    step: int
    bytes_hashed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Utilisation:
    """Counts since the last boot."""

    busy_ticks: int
    idle_ticks: int
    snapshots: int
    bytes_hashed: int


class Chip(ABC):
    """The interface of a chip, honest or not, to host and inspector."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError("a chip cannot be copied or pickled")

    @property
    @abstractmethod
    def chip_id(self) -> str: ...

    @abstractmethod
    def attach(self, memory: DeviceMemory, run_id: bytes, step: int) -> LogRecord:
        """Take `memory` as the chip's memory from `step` of the run on; logs the region table's digest."""

    @abstractmethod
    def commit(self, run_id: bytes, step: int, digest: bytes) -> LogRecord:
        """Log 32 bytes that the host commits to for (run, step)."""

    @abstractmethod
    def idle(self, ticks: int) -> list[SnapshotEvent]:
        """Let the injected clock say that `ticks` passed without work; returns the snapshots that fell in them."""

    def shards(self) -> list[tuple[int, bytes]]:
        """Return record number and bytes (`MemoryCopy.to_bytes`) of the snapshots since the last call, once.

        A chip keeps such copies from the first call on, of its newest few snapshots. It need not have any to give.
        """
        return []

    @abstractmethod
    def beacon(self, signed: bytes) -> LogRecord:
        """Log a verifier's beacon: it is for this chip's `position`, and later than the one before."""

    @property
    @abstractmethod
    def position(self) -> tuple[int, int]:
        """Its boot, and how many records its log holds."""

    @abstractmethod
    def prune(self, signed: bytes) -> int:
        """Release all records before a log checkpoint that the verifier signed; returns the bytes of memory free."""

    @abstractmethod
    def close_epoch(self) -> int:
        """End the open epoch, start the next unless the log is full, and return the number of the one that ended."""

    @abstractmethod
    def reveal(self) -> tuple[EpochKey, ...]:
        """Return the keys of all epochs that have ended."""

    @abstractmethod
    def quote(self, nonce: bytes, verifier_id: str) -> bytes:
        """Return a sealed quote over identity, log and registers, after logging that it was asked for."""

    @abstractmethod
    def challenge(self, nonce: bytes, verifier_id: str) -> bytes:
        """Answer a verifier at once: `close_epoch`, then `quote`, and no other command in between."""

    @abstractmethod
    def log_bytes(self) -> bytes:
        """Return the log."""

    @abstractmethod
    def certificate_chain(self) -> bytes:
        """Return the chain alias, device, maker as PEM."""

    @abstractmethod
    def power_off(self) -> None:
        """Shut down in order: the epoch is closed and the next boot shows no power gap."""

    @abstractmethod
    def cut_power(self) -> None:
        """End at once and keep nothing but the meter, as a crash of the host would; the next boot logs a power gap."""

    @property
    @abstractmethod
    def utilisation(self) -> Utilisation: ...
