"""What a maker needs to know to make a chip."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from firmware_sim.errors import CallerError
from firmware_sim.evidence.chiplog import RecordKind
from firmware_sim.evidence.digest import BLAKE3, DEFAULT_ALGORITHM
from firmware_sim.evidence.envelope import VerifyingKey
from firmware_sim.evidence.work import Roofline
from firmware_sim.identity import CURRENT_FIRMWARE, Firmware, MakerCA
from firmware_sim.profiles import BENCH, LABORATORY, NvramProfile
from firmware_sim.schedule import threshold

__all__ = ["ChipOrder"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipOrder:
    """A maker's order of a chip; all of the chip's secrets follow from `seed` and `chip_id`.

    `snapshot_rate` is in snapshots per tick, in [0, 1]; `roofline` is what the device does in a tick
    at most; `beacon_key` is the verifier's, for beacons and log checkpoints; `nvram` says how large the chip's memory
    is, and `quotas` overrides how many records of a kind it takes. Only a dishonest chip that clones another one reads
    `clone_of`.
    """

    maker: MakerCA
    chip_id: str
    seed: bytes
    snapshot_rate: Fraction
    roofline: Roofline = LABORATORY
    firmware: Firmware = CURRENT_FIRMWARE
    algorithm: str = DEFAULT_ALGORITHM
    beacon_key: VerifyingKey | None = None
    nvram: NvramProfile = BENCH
    quotas: Mapping[RecordKind, int] = field(default_factory=dict)
    clone_of: str | None = None

    def __post_init__(self) -> None:
        threshold(self.snapshot_rate)
        if self.algorithm not in (DEFAULT_ALGORITHM, BLAKE3):
            raise CallerError(f"unknown snapshot digest {self.algorithm!r}; there are {DEFAULT_ALGORITHM}, {BLAKE3}")
