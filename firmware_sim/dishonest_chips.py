"""Chips with one lie switched on, behind the same interface as the honest one."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from firmware_sim._silicon import Silicon
from firmware_sim.chip import Chip
from firmware_sim.errors import CallerError
from firmware_sim.evidence.chiplog import NO_RUN, RECORD_BYTES, LogRecord, RecordKind, parse_log
from firmware_sim.evidence.digest import Digest
from firmware_sim.evidence.envelope import SigningKey
from firmware_sim.evidence.work import TICK
from firmware_sim.firmware import FirmwareChip
from firmware_sim.hooks import Draw, Hooks
from firmware_sim.identity import Firmware, MakerCA, derive_key
from firmware_sim.lies import Chance, Lie, Scenery, find_lie
from firmware_sim.memory import DeviceMemory, MemoryCopy
from firmware_sim.nvram import Disk
from firmware_sim.order import ChipOrder

__all__ = ["CHIP_LIES", "LEAKY_FIRMWARE", "OLD_FIRMWARE", "ChipLie", "chip_class", "make_chip", "power_on_chip"]

OLD_FIRMWARE = Firmware(name="chipwitness-firmware 0.9", security_version=0)
LEAKY_FIRMWARE = Firmware(name="chipwitness-firmware 1.0 with a leak", security_version=1)
_DONOR_SUFFIX = ".donor"
_CLAIM_FILE = "claimed-id"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipLie(Lie):
    """A lie of a chip; `chip` is the class of those that tell it."""

    chip: type[FirmwareChip]


CHIP_LIES: dict[str, ChipLie] = {}
"""The lies of this file, by name."""

_Kind = TypeVar("_Kind", bound=type[Hooks] | type[FirmwareChip])


def _tells(name: str, text: str, chance: Chance, found_by: str = "", **more: Any) -> Callable[[_Kind], _Kind]:
    """Describe the lie that hooks, or chips with hooks, tell; `more` is what else `Lie` takes."""

    def describe(kind: _Kind) -> _Kind:
        is_chip = issubclass(kind, FirmwareChip)
        chip = kind if is_chip else types.new_class(f"{kind.__name__}Chip", (FirmwareChip,), {"hooks": kind})
        found = frozenset(found_by.split())
        CHIP_LIES[name] = ChipLie(
            name=name, text=text, chance=chance, found_by=found, chip=cast(type[FirmwareChip], chip), **more
        )
        return kind

    return describe


def make_chip(lie: str | None, folder: Path | str, *, disk: Disk | None = None, **order: Any) -> FirmwareChip:
    """Manufacture and boot an honest chip (None) or one that tells this lie; `order` is what `ChipOrder` takes.

    Raises:
        CallerError: no dishonest chip tells this lie.
    """
    return chip_class(lie).manufacture(folder, disk=disk, **order)


def power_on_chip(lie: str | None, folder: Path | str, **options: Any) -> FirmwareChip:
    """Boot the chip in `folder` with the lie it was made with."""
    return chip_class(lie).power_on(folder, **options)


def chip_class(lie: str | None) -> type[FirmwareChip]:
    """Return the class of chips that tell the lie, or raise CallerError."""
    return FirmwareChip if lie is None else find_lie(CHIP_LIES, lie).chip


@_tells("skip-snapshots", "takes no snapshot although the schedule demands it", Chance.SNAPSHOT, "schedule")
class _SkipSnapshots(Hooks):
    def moments(self, draw: Draw, start: int, end: int) -> Iterator[int]:
        return iter(())


class _LeakSchedule(Hooks):
    """The leak is code, so it is measured: the chip can't have it and keep the honest firmware's measurement."""

    draw = Draw(0, b"", 0, 0)

    @classmethod
    def order(cls, order: ChipOrder) -> ChipOrder:
        return dataclasses.replace(order, firmware=LEAKY_FIRMWARE)

    def moments(self, draw: Draw, start: int, end: int) -> Iterator[int]:
        self.draw = draw
        return super().moments(draw, start, end)


@_tells("predict-schedule", "tells the lab beforehand when a snapshot will fall", Chance.CHIP, "identity")
class _LeakyChip(FirmwareChip, hooks=_LeakSchedule):
    def __init__(self, silicon: Silicon, firmware: Firmware, hooks: Hooks) -> None:
        super().__init__(silicon, firmware, hooks)
        self.leak = cast(_LeakSchedule, hooks)

    def predict(self, ticks: int) -> list[int]:
        """Return which of the coming `ticks` hold a snapshot, as distances from now (1 is the next tick)."""
        draw, edges = self.leak.draw, [(self.time + ahead) * TICK for ahead in range(ticks + 1)]
        return [ahead for ahead in range(1, ticks + 1) if any(draw.between(edges[ahead - 1], edges[ahead]))]


@_tells("swap-weights", "shows other weights while a snapshot is taken", Chance.SNAPSHOT, "snapshot")
class _SwapWeights(Hooks):
    """Shows zeros in all regions."""

    def frozen(self, copy: MemoryCopy) -> MemoryCopy:
        return MemoryCopy([part._replace(data=np.zeros_like(part.data)) for part in copy.slices])


@_tells("hide-region", "leaves a memory region out of table and snapshots", Chance.CHIP, "commitment snapshot")
class _HideRegion(Hooks):
    """Hides the last region."""

    def attached(self, memory: DeviceMemory) -> DeviceMemory:
        return memory.without_last()


@_tells("replay-snapshot", "records its first snapshot's digest again and again", Chance.SECOND_SNAPSHOT, "snapshot")
class _ReplaySnapshot(Hooks):
    """Finds its first snapshot in its own log, so that it goes on lying after a boot."""

    first: bytes | None = None

    def booted(self, chip: Chip) -> None:
        taken = (record for record in parse_log(chip.log_bytes()) if record.kind is RecordKind.SNAPSHOT)
        shown = [record.digest for record in taken if record.run_id != NO_RUN]
        self.first = shown[0] if shown else None

    def digested(self, digest: Digest) -> Digest:
        self.first = self.first or digest.value
        return Digest(digest.algorithm, self.first)


@_tells(
    "roll-back-log",
    "after an inspection restores log, counter and state from before",
    Chance.APART,
    scenery=Scenery.APART,
)
class _RollBackLog(Hooks):
    """Restores, when the epoch is closed for the second inspection, everything to how the boot left it."""

    quoted = False

    def booted(self, chip: Chip) -> None:
        self.kept = self.silicon.nvram.sequence, self.silicon.state

    def closing(self, tick: int) -> bool:
        sequence, state = self.kept
        if self.quoted and state.checkpoint == self.silicon.state.checkpoint:
            self.silicon.nvram.sequence = sequence - 1
            self.silicon.log.size = state.log_size
            self.silicon.store(state)
        return True

    def quoting(self, nonce: bytes, verifier_id: str) -> None:
        self.quoted = True


@_tells("truncate-log", "hands over its log without the end", Chance.CHIP, "log-chain schedule commitment")
class _TruncateLog(Hooks):
    """Hands over the log up to its last snapshot, or without its last record if there is none."""

    def log(self, data: bytes) -> bytes:
        snapshots = [r.counter for r in parse_log(data) if r.kind is RecordKind.SNAPSHOT]
        kept = snapshots[-1] if snapshots else len(data) // RECORD_BYTES - 1
        return data[: kept * RECORD_BYTES]


@_tells(
    "edit-record", "hands over its log with one record altered", Chance.CHIP, "log-chain snapshot commitment schedule"
)
class _EditRecord(Hooks):
    """Alters the digest of its first snapshot, or of its boot record if there is none."""

    def log(self, data: bytes) -> bytes:
        records = parse_log(data)
        victims = [r for kind in (RecordKind.SNAPSHOT, RecordKind.BOOT) for r in records if r.kind is kind]
        start = victims[0].counter * RECORD_BYTES + RECORD_BYTES - 64
        return data[:start] + bytes(byte ^ 0xFF for byte in data[start : start + 32]) + data[start + 32 :]


@_tells(
    "splice-logs",
    "hands over its log with an idle chip's records in place of its own, relinked",
    Chance.CHIP,
    "log-chain schedule commitment identity",
)
class _SpliceLogs(Hooks):
    """Keeps a second, idle chip and shows that one's records from the first boot's epoch on, relinked."""

    donor: FirmwareChip

    @classmethod
    def made(cls, folder: Path, order: ChipOrder, disk: Disk) -> None:
        FirmwareChip.burn(_donor_folder(folder), dataclasses.replace(order, chip_id=f"{order.chip_id}-donor"), disk)

    def booted(self, chip: Chip) -> None:
        self.donor = FirmwareChip.power_on(_donor_folder(self.silicon.folder))

    def closing(self, tick: int) -> bool:
        self.donor.idle(tick - self.donor.time)
        self.donor.close_epoch()
        return True

    def quoting(self, nonce: bytes, verifier_id: str) -> None:
        self.donor.quote(nonce, verifier_id)

    def log(self, data: bytes) -> bytes:
        own, foreign = parse_log(data), parse_log(self.donor.log_bytes())
        seam = next(r.counter for r in own if r.kind is RecordKind.EPOCH) + 1
        return _relink([*own[:seam], *foreign[seam:]])

    def ending(self, *, in_order: bool) -> None:
        self.donor.power_off() if in_order else self.donor.cut_power()


@_tells("clone-identity", "presents the identity of another chip", Chance.APART, "clone", scenery=Scenery.APART)
class _CloneIdentity(Hooks):
    """Holds the secrets of the chip `clone_of` while it claims to be `chip_id`."""

    @classmethod
    def order(cls, order: ChipOrder) -> ChipOrder:
        if order.clone_of in (None, order.chip_id):
            raise CallerError(f"chip {order.chip_id} needs another chip's id in clone_of")
        return dataclasses.replace(order, chip_id=order.clone_of)

    @classmethod
    def made(cls, folder: Path, order: ChipOrder, disk: Disk) -> None:
        (folder / _CLAIM_FILE).write_text(order.chip_id)

    def identity(self) -> str:
        return (self.silicon.folder / _CLAIM_FILE).read_text()


@_tells("run-old-firmware", "runs withdrawn firmware with a lower security version", Chance.CHIP, "identity")
class _RunOldFirmware(Hooks):
    @classmethod
    def order(cls, order: ChipOrder) -> ChipOrder:
        return dataclasses.replace(order, firmware=OLD_FIRMWARE)

    def allows(self, image: Firmware) -> bool:
        return True


@_tells("sign-with-another-key", "signs quotes with a key that its certificate does not name", Chance.CHIP)
class _SignWithAnotherKey(Hooks):
    def alias_key(self, image: Firmware) -> SigningKey:
        return SigningKey.from_private_bytes(derive_key(self.silicon.fuses.secrets.uds, "another-key"))


@_tells(
    "open-epoch",
    "leaves the epoch open in which it skips snapshots, so that no one can audit it",
    Chance.CHIP,
    "schedule",
)
class _OpenEpoch(_SkipSnapshots):
    """Closes its epoch at the start of each boot, and not again."""

    open = False

    def booted(self, chip: Chip) -> None:
        chip.close_epoch()
        self.open = True

    def closing(self, tick: int) -> bool:
        return not self.open


@_tells("own-maker-ca", "comes from a maker that the lab made up", Chance.CHIP, "identity")
class _OwnMakerCA(Hooks):
    @classmethod
    def order(cls, order: ChipOrder) -> ChipOrder:
        return dataclasses.replace(order, maker=MakerCA.create(b"made up by the lab" + order.seed))


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
