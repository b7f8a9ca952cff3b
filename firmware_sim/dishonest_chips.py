"""Chips with one lie switched on, behind the same interface as the honest one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from firmware_sim._silicon import Silicon
from firmware_sim.errors import CallerError
from firmware_sim.evidence.chiplog import NO_RUN, RECORD_BYTES, LogRecord, RecordKind, parse_log
from firmware_sim.evidence.digest import Digest
from firmware_sim.evidence.envelope import SigningKey
from firmware_sim.evidence.work import TICK
from firmware_sim.firmware import ChipOrder, FirmwareChip
from firmware_sim.identity import Firmware, MakerCA, derive_key
from firmware_sim.lies import ChipLie
from firmware_sim.memory import DeviceMemory, MemoryCopy
from firmware_sim.nvram import Disk
from firmware_sim.schedule import derive_epoch_key

__all__ = ["LEAKY_FIRMWARE", "OLD_FIRMWARE", "chip_class", "make_chip", "power_on_chip"]

OLD_FIRMWARE = Firmware(name="chipwitness-firmware 0.9", security_version=0)
LEAKY_FIRMWARE = Firmware(name="chipwitness-firmware 1.0 with a leak", security_version=1)
_DONOR_SUFFIX = ".donor"
_CLAIM_FILE = "claimed-id"


def make_chip(lie: ChipLie | None, folder: Path | str, *, disk: Disk | None = None, **order: Any) -> FirmwareChip:
    """Manufacture and boot an honest chip (None) or one that tells this lie; `order` is what `ChipOrder` takes.

    Raises:
        CallerError: no dishonest chip tells this lie.
    """
    return chip_class(lie).manufacture(folder, disk=disk, **order)


def power_on_chip(lie: ChipLie | None, folder: Path | str, **options: Any) -> FirmwareChip:
    """Boot the chip in `folder` with the lie it was made with."""
    return chip_class(lie).power_on(folder, **options)


def chip_class(lie: ChipLie | None) -> type[FirmwareChip]:
    """Return the class that tells the lie, or raise CallerError."""
    if lie is None:
        return FirmwareChip
    found = _CLASSES.get(lie) if isinstance(lie, ChipLie) else None
    if found is None:
        raise CallerError(f"no simulated chip tells the lie {getattr(lie, 'value', lie)!r}")
    return found


class _SkipSnapshots(FirmwareChip):
    def _moments(self, start: int, end: int) -> Iterator[int]:
        return iter(())


class _OpenEpoch(_SkipSnapshots):
    """Closes its epoch at the start of each boot, and not again."""

    def _start(self) -> None:
        super()._start()
        super()._close_epoch()

    def _close_epoch(self) -> int:
        return self._epoch - 1


class _PredictSchedule(FirmwareChip):
    """The leak is code, so it is measured: the chip can't have it and keep the honest firmware's measurement."""

    @classmethod
    def burn(cls, folder: Path, order: ChipOrder, disk: Disk) -> None:
        super().burn(folder, dataclasses.replace(order, firmware=LEAKY_FIRMWARE), disk)

    def predict(self, ticks: int) -> list[int]:
        """Return which of the coming `ticks` hold a snapshot, as distances from now (1 is the next tick)."""
        now = self._time
        return [
            ahead for ahead in range(1, ticks + 1) if any(self._moments(now + (ahead - 1) * TICK, now + ahead * TICK))
        ]


class _SwapWeights(FirmwareChip):
    """Shows `decoy` while a snapshot is taken; zeros in all regions unless the lab set another memory."""

    decoy: DeviceMemory | None = None

    def _freeze(self) -> MemoryCopy | None:
        if self._memory is None:
            return None
        if self.decoy is not None:
            return self.decoy.copy()
        return MemoryCopy([part._replace(data=np.zeros_like(part.data)) for part in self._memory.slices()])


class _HideRegion(FirmwareChip):
    """Hides the last region."""

    def _own_memory(self, memory: DeviceMemory) -> DeviceMemory:
        owned = super()._own_memory(memory)
        return owned.without_last()


class _ReplaySnapshot(FirmwareChip):
    """Finds its first snapshot in its own log, so that it goes on lying after a boot."""

    def _digest(self, frozen: MemoryCopy | None) -> Digest:
        digest = super()._digest(frozen)
        if frozen is None:
            return digest
        taken = (record for record in self._read_log() if record.kind is RecordKind.SNAPSHOT)
        first = next((record for record in taken if record.run_id != NO_RUN), None)
        return digest if first is None else Digest(digest.algorithm, first.digest)


class _RollBackLog(FirmwareChip):
    """Restores, when the epoch is closed for the second inspection, everything to how the boot left it."""

    _quoted = False

    def _start(self) -> None:
        super()._start()
        self._kept = self._silicon.nvram.sequence, self._silicon.state

    def _close_epoch(self) -> int:
        if self._quoted:
            sequence, state = self._kept
            self._silicon.nvram.sequence = sequence - 1
            self._silicon.log.size = state.log_size
            self._silicon.store(state)
            self._forget()
            self._load()
            self._epoch_key = derive_epoch_key(self._fuses.schedule_secret, self._epoch)
        return super()._close_epoch()

    def _quote(self, nonce: bytes, verifier_id: str) -> bytes:
        quote = super()._quote(nonce, verifier_id)
        self._quoted = True
        return quote


class _TruncateLog(FirmwareChip):
    """Hands over the log up to its last snapshot, or without its last record if there is none."""

    def log_bytes(self) -> bytes:
        data = super().log_bytes()
        snapshots = [r.counter for r in parse_log(data) if r.kind is RecordKind.SNAPSHOT]
        kept = snapshots[-1] if snapshots else len(data) // RECORD_BYTES - 1
        return data[: kept * RECORD_BYTES]


class _EditRecord(FirmwareChip):
    """Alters the digest of its first snapshot, or of its boot record if there is none."""

    def log_bytes(self) -> bytes:
        data = bytearray(super().log_bytes())
        records = parse_log(bytes(data))
        victims = [r for kind in (RecordKind.SNAPSHOT, RecordKind.BOOT) for r in records if r.kind is kind]
        start = victims[0].counter * RECORD_BYTES + RECORD_BYTES - 64
        data[start : start + 32] = bytes(byte ^ 0xFF for byte in data[start : start + 32])
        return bytes(data)


class _SpliceLogs(FirmwareChip):
    """Keeps a second, idle chip and shows that one's records from the first boot's epoch on, relinked."""

    _donor: FirmwareChip

    @classmethod
    def burn(cls, folder: Path, order: ChipOrder, disk: Disk) -> None:
        donor = dataclasses.replace(order, chip_id=f"{order.chip_id}-donor")
        FirmwareChip.burn(_donor_folder(folder), donor, disk)
        super().burn(folder, order, disk)

    def _start(self) -> None:
        self._donor = FirmwareChip.power_on(_donor_folder(self._silicon.folder))
        super()._start()

    def _close_epoch(self) -> int:
        self._donor.idle(self.time - self._donor.time)
        self._donor.close_epoch()
        return super()._close_epoch()

    def _quote(self, nonce: bytes, verifier_id: str) -> bytes:
        self._donor.quote(nonce, verifier_id)
        return super()._quote(nonce, verifier_id)

    def log_bytes(self) -> bytes:
        own, foreign = parse_log(super().log_bytes()), parse_log(self._donor.log_bytes())
        seam = next(r.counter for r in own if r.kind is RecordKind.EPOCH) + 1
        return _relink([*own[:seam], *foreign[seam:]])

    def power_off(self) -> None:
        self._donor.power_off()
        super().power_off()

    def cut_power(self) -> None:
        self._donor.cut_power()
        super().cut_power()


class _CloneIdentity(FirmwareChip):
    """Holds the secrets of the chip `clone_of` while it claims to be `chip_id`."""

    @classmethod
    def burn(cls, folder: Path, order: ChipOrder, disk: Disk) -> None:
        if order.clone_of in (None, order.chip_id):
            raise CallerError(f"chip {order.chip_id} needs another chip's id in clone_of")
        super().burn(folder, dataclasses.replace(order, chip_id=order.clone_of), disk)
        (folder / _CLAIM_FILE).write_text(order.chip_id)

    @property
    def chip_id(self) -> str:
        return (self._silicon.folder / _CLAIM_FILE).read_text()


class _RunOldFirmware(FirmwareChip):
    @classmethod
    def burn(cls, folder: Path, order: ChipOrder, disk: Disk) -> None:
        super().burn(folder, dataclasses.replace(order, firmware=OLD_FIRMWARE), disk)

    @classmethod
    def _check_rollback(cls, silicon: Silicon, image: Firmware) -> None:
        return None


class _SignWithAnotherKey(FirmwareChip):
    def _alias_key(self) -> SigningKey:
        return SigningKey.from_private_bytes(derive_key(self._fuses.secrets.uds, "another-key"))


class _OwnMakerCA(FirmwareChip):
    @classmethod
    def burn(cls, folder: Path, order: ChipOrder, disk: Disk) -> None:
        own = MakerCA.create(b"made up by the lab" + order.seed)
        super().burn(folder, dataclasses.replace(order, maker=own), disk)


_CLASSES: Mapping[ChipLie, type[FirmwareChip]] = MappingProxyType(
    {
        ChipLie.SKIP_SNAPSHOTS: _SkipSnapshots,
        ChipLie.OPEN_EPOCH: _OpenEpoch,
        ChipLie.PREDICT_SCHEDULE: _PredictSchedule,
        ChipLie.SWAP_WEIGHTS: _SwapWeights,
        ChipLie.HIDE_REGION: _HideRegion,
        ChipLie.REPLAY_SNAPSHOT: _ReplaySnapshot,
        ChipLie.ROLL_BACK_LOG: _RollBackLog,
        ChipLie.TRUNCATE_LOG: _TruncateLog,
        ChipLie.EDIT_RECORD: _EditRecord,
        ChipLie.SPLICE_LOGS: _SpliceLogs,
        ChipLie.CLONE_IDENTITY: _CloneIdentity,
        ChipLie.RUN_OLD_FIRMWARE: _RunOldFirmware,
        ChipLie.SIGN_WITH_ANOTHER_KEY: _SignWithAnotherKey,
        ChipLie.OWN_MAKER_CA: _OwnMakerCA,
    }
)


def _relink(records: list[LogRecord]) -> bytes:
    """Return the records as a log with right counters and links."""
    parts = []
    previous = bytes(32)
    for number, record in enumerate(records):
        linked = dataclasses.replace(record, counter=number, previous=previous)
        previous = linked.hash()
        parts.append(linked.to_bytes())
    return b"".join(parts)


def _donor_folder(folder: Path | str) -> Path:
    path = Path(folder)
    return path.with_name(path.name + _DONOR_SUFFIX)
