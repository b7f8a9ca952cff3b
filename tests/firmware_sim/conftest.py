"""A small world: one maker, one inspector, chips with a little memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from firmware_sim import (
    CURRENT_FIRMWARE,
    DEFAULT_ALGORITHM,
    LABORATORY,
    Beacon,
    CheckedChip,
    ChipEvidence,
    ChipTrust,
    DeviceMemory,
    FirmwareChip,
    LogPosition,
    LogRecord,
    MakerCA,
    RecordKind,
    Region,
    SigningKey,
    Work,
    check_chip,
    collect_evidence,
    make_chip,
    parse_log,
    records_of,
    seal_beacon,
)

settings.register_profile("seeded", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("seeded")

RATE = Fraction(1, 5)
RUN = hashlib.sha256(b"run").digest()
VERIFIER = "inspector-1"


def work(memory: DeviceMemory, ticks: Fraction | int = 1, *, operators: int = 1) -> None:
    """Run operators on a memory, all alike, that take a chip of the laboratory so many ticks together."""
    moved = [int(LABORATORY.moved * Fraction(ticks) * number / operators) for number in range(operators + 1)]
    for before, after in pairwise(moved):
        memory.meter.charge(Work(1, 0, after - before))


def snapshots(chip: FirmwareChip) -> list[LogRecord]:
    """The snapshots in a chip's log."""
    return records_of(parse_log(chip.log_bytes()), RecordKind.SNAPSHOT)


class World:
    """Makes chips, runs them over a memory that changes with each step, and inspects them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.maker = MakerCA.create(b"maker")
        self.beacon_key = SigningKey.generate(b"b" * 32)
        self.trust = ChipTrust(
            ca_digests=[self.maker.certificate_digest],
            measurements=[CURRENT_FIRMWARE.measurement],
            minimum_security_version=1,
            snapshot_rate=RATE,
            snapshot_algorithm=DEFAULT_ALGORITHM,
        )
        self.weights = np.zeros(12, dtype=np.float32)
        self.moments = np.zeros((3, 4), dtype=np.float64)
        self.chips: list[FirmwareChip] = []
        self.attached: dict[FirmwareChip, DeviceMemory] = {}

    @property
    def memory(self) -> DeviceMemory:
        return DeviceMemory(
            [Region.of("layer.weight", self.weights), Region.of("layer.weight", self.moments, kind="optimizer")]
        )

    def make(self, chip_id: str = "chip-1", lie: str | None = None, **options: Any) -> FirmwareChip:
        settings = {"maker": self.maker, "seed": b"seed", "snapshot_rate": RATE, "clone_of": "chip-0", **options}
        chip = make_chip(lie, self.folder / chip_id, chip_id=chip_id, **settings)
        self.chips.append(chip)
        return chip

    def beacon(self, chip: FirmwareChip, time: int, key: SigningKey | None = None, **changes: Any) -> bytes:
        """A beacon for a chip where it stands."""
        boot, size = chip.position
        named = {"chip_id": chip.chip_id, "boot": boot, "size": size, "time": time, **changes}
        return seal_beacon(Beacon(**named), self.beacon_key if key is None else key)

    def set_step(self, step: int) -> None:
        self.weights[:] = step
        self.moments[:] = step / 2

    def attach(self, chip: FirmwareChip, step: int = 0) -> DeviceMemory:
        """Give a chip the weights as its memory; `work` on what it returns is the chip's."""
        memory = self.memory
        chip.attach(memory, RUN, step)
        self.attached[chip] = memory
        return memory

    def train(self, chip: FirmwareChip, steps: int = 30, *, start: int = 0, attach: bool = True) -> None:
        """Commit steps and let each be followed by a tick of work on the state that it left."""
        memory = self.attach(chip, start) if attach else self.attached[chip]
        for step in range(start, start + steps):
            self.set_step(step)
            chip.commit(RUN, step, hashlib.sha256(b"%d" % step).digest())
            work(memory)

    @staticmethod
    def nonce(number: int) -> bytes:
        return hashlib.sha256(b"nonce %d" % number).digest()

    def collect(self, chip: FirmwareChip, number: int = 0) -> ChipEvidence:
        return collect_evidence(chip, self.nonce(number), VERIFIER)

    def check(
        self,
        evidence: ChipEvidence,
        *,
        chip_id: str = "chip-1",
        number: int = 0,
        last: LogPosition | None = None,
        trust: ChipTrust | None = None,
        **options: Any,
    ) -> CheckedChip:
        return check_chip(
            evidence,
            chip_id=chip_id,
            trust=trust or self.trust,
            nonce=self.nonce(number),
            verifier_id=VERIFIER,
            last=last,
            **options,
        )


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    for chip in made.chips:
        chip.cut_power()
