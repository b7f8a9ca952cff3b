"""What firmware does at each moment at which a dishonest chip may depart: ``Hooks`` is what an honest one does.

Hooks are code of the firmware. A class of chips fixes its hooks (`class C(FirmwareChip, hooks=H)`), so that no host can
hand a chip others, and no call of a host reaches them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from firmware_sim._silicon import Silicon
from firmware_sim.chip import Chip
from firmware_sim.evidence.digest import Digest
from firmware_sim.evidence.envelope import SigningKey
from firmware_sim.identity import Firmware
from firmware_sim.memory import DeviceMemory, MemoryCopy
from firmware_sim.nvram import Disk
from firmware_sim.order import ChipOrder
from firmware_sim.schedule import scheduled

__all__ = ["Draw", "Hooks"]


@dataclass(frozen=True, slots=True)
class Draw:
    """What decides the snapshots of a boot's open epoch: its key, and the threshold of a draw in [0, 2^256]."""

    epoch: int
    key: bytes
    boot: int
    limit: int

    def between(self, start: int, end: int) -> Iterator[int]:
        """The moments in (start, end] at which a snapshot is due, in 2^-32 ticks."""
        return scheduled(self.key, self.boot, start, end, self.limit)


class Hooks:
    """What honest firmware does at each of these moments; a lie overrides those at which it departs from that.

    A hook is given values, and the firmware goes on with what it returns. Each boot has new hooks.

    Attributes:
        silicon: the chip's fuses, storage and folder.
    """

    def __init__(self, silicon: Silicon) -> None:
        self.silicon = silicon

    @classmethod
    def order(cls, order: ChipOrder) -> ChipOrder:
        """Called when a chip is made. An honest maker makes what was ordered."""
        return order

    @classmethod
    def made(cls, folder: Path, order: ChipOrder, disk: Disk) -> None:
        """Called with the original order once the chip's folder is made. An honest maker is done then."""

    def allows(self, image: Firmware) -> bool:
        """Called before a boot. An honest chip boots no image older than one that it has booted."""
        return image.security_version >= self.silicon.state.security_floor

    def booted(self, chip: Chip) -> None:
        """Called once the chip is powered on, before the host has it; the chip takes commands. Honest: nothing."""

    def identity(self) -> str:
        """Called when the host asks for the chip's id. An honest chip gives the fused one."""
        return self.silicon.fuses.secrets.chip_id

    def alias_key(self, image: Firmware) -> SigningKey:
        """Called for each quote. An honest chip signs with the key that its running image derives."""
        return self.silicon.fuses.secrets.alias_key(image)

    def attached(self, memory: DeviceMemory) -> DeviceMemory:
        """Called with the memory that a host attaches, as the chip owns it. An honest chip holds all of it."""
        return memory

    def moments(self, draw: Draw, start: int, end: int) -> Iterator[int]:
        """Called whenever the chip looks for moments in (start, end], in 2^-32 ticks. Honest: all that are drawn."""
        return draw.between(start, end)

    def frozen(self, copy: MemoryCopy) -> MemoryCopy:
        """Called with the copy of the memory that a snapshot takes. An honest chip hashes it."""
        return copy

    def digested(self, digest: Digest) -> Digest:
        """Called with a copy's digest, maybe in another thread. An honest chip records it."""
        return digest

    def closing(self, tick: int) -> bool:
        """Called before an epoch is closed, at that time of the boot; False leaves it open. Honest: True.

        The firmware goes on from what its storage holds then.
        """
        return True

    def quoting(self, nonce: bytes, verifier_id: str) -> None:
        """Called before a quote is made. Honest: nothing."""

    def log(self, data: bytes) -> bytes:
        """Called when the host asks for the log. An honest chip hands over what it recorded."""
        return data

    def ending(self, *, in_order: bool) -> None:
        """Called when the host shuts the chip down, or cuts its power. Honest: nothing."""
