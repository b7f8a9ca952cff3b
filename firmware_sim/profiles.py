"""How large a chip's NVRAM is, what share of it each kind of record has, how much of it is used; and how fast it is.

The capacity is fused when the chip is made. It holds the two slots of the state and a ring of cells, one for each
record that the chip keeps. COMMIT records take no cell: the head in the state folds them, `previous` of the next record
carries that fold, and the records themselves lie with the host, which asked for them. One that is wrong or missing
breaks the chain.

Each kind of record has its own cells, so no flood of one can take those of another: what the host can cause is
refused at its own share, and the share of snapshots is left. A checkpoint that the verifier signed
(`FirmwareChip.prune`) makes all cells before it free again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from firmware_sim.errors import CallerError
from firmware_sim.evidence.chiplog import RECORD_BYTES, RecordKind
from firmware_sim.evidence.work import Roofline
from firmware_sim.nvram import SLOT_BYTES

__all__ = [
    "BENCH",
    "DEFAULT_QUOTAS",
    "DEPLOYMENT",
    "FOLDED",
    "LABORATORY",
    "NvramProfile",
    "NvramStatus",
    "scaled_device",
]

FOLDED = frozenset({RecordKind.COMMIT})
"""Kinds of records that take no cell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NvramProfile:
    """Capacity in bytes, and the most records of each kind between two checkpoints.

    Raises:
        CallerError: a quota is not in [1, 2^32), or all of them together do not fit.
    """

    capacity: int
    quotas: Mapping[RecordKind, int] = field(repr=False)

    def __post_init__(self) -> None:
        if any(type(count) is not int or not 1 <= count < 1 << 32 for count in self.quotas.values()):
            raise CallerError("a quota must be at least 1 and below 2^32")
        needed = sum(count for kind, count in self.quotas.items() if kind not in FOLDED)
        if set(self.quotas) != set(RecordKind) or needed > self.cells:
            raise CallerError(
                f"{needed} records do not fit in the {self.cells} cells of {self.capacity} bytes of NVRAM"
            )

    @property
    def cells(self) -> int:
        """Records that the NVRAM has room for."""
        return (self.capacity - 2 * SLOT_BYTES) // RECORD_BYTES

    def status(self, counts: Mapping[RecordKind, int], *, released: int, changes: int) -> NvramStatus:
        """Return what a log of these records uses, after `released` other cells and so many changes of the state."""
        kept = {kind: count for kind, count in counts.items() if kind not in FOLDED}
        cells = sum(kept.values())
        return NvramStatus(
            capacity=self.capacity,
            used=2 * SLOT_BYTES + RECORD_BYTES * cells,
            records=kept,
            slot_writes=-(-changes // 2),
            cell_writes=-(-(released + cells) // self.cells),
        )

    def with_quotas(self, overrides: Mapping[RecordKind, int]) -> NvramProfile:
        """Return the same memory shared out in another way."""
        return NvramProfile(capacity=self.capacity, quotas={**self.quotas, **overrides})


@dataclass(frozen=True, slots=True, kw_only=True)
class NvramStatus:
    """Use of a chip's NVRAM in bytes, cells in use by kind, and how often the most used slot and cell were written."""

    capacity: int
    used: int
    records: Mapping[RecordKind, int]
    slot_writes: int
    cell_writes: int


_TWO_16 = 1 << 16
DEFAULT_QUOTAS: Mapping[RecordKind, int] = MappingProxyType(
    {
        RecordKind.GENESIS: 1,
        RecordKind.BOOT: _TWO_16,
        RecordKind.EPOCH: 2 * _TWO_16,
        RecordKind.CLOSE_EPOCH: 2 * _TWO_16,
        RecordKind.POWER_OFF: _TWO_16,
        RecordKind.POWER_GAP: _TWO_16,
        RecordKind.REGIONS: _TWO_16,
        RecordKind.COMMIT: 16 * _TWO_16,
        RecordKind.SNAPSHOT: 16 * _TWO_16,
        RecordKind.BEACON: _TWO_16,
        RecordKind.QUOTE: _TWO_16,
        RecordKind.SPENT: 1,
    }
)

BENCH = NvramProfile(capacity=320 << 20, quotas=DEFAULT_QUOTAS)
"""A laboratory's chip: 320 MiB, for a snapshot at each tick and no pruning."""

DEPLOYMENT = NvramProfile(
    capacity=64 << 10,
    quotas=MappingProxyType(
        {
            RecordKind.GENESIS: 1,
            RecordKind.BOOT: 30,
            RecordKind.EPOCH: 48,
            RecordKind.CLOSE_EPOCH: 48,
            RecordKind.POWER_OFF: 28,
            RecordKind.POWER_GAP: 30,
            RecordKind.REGIONS: 30,
            RecordKind.COMMIT: 16 * _TWO_16,
            RecordKind.SNAPSHOT: 100,
            RecordKind.BEACON: 24,
            RecordKind.QUOTE: 30,
            RecordKind.SPENT: 1,
        }
    ),
)
"""A chip in the field: 64 KiB, pruned each year. At 0.1 snapshots a day, 36.5 a year, a year with more than 110 has a
probability below 1e-21 (Poisson)."""


def scaled_device(held: int) -> Roofline:
    """What a device as small as its memory does in a tick, if it is otherwise in the proportions of an H100 SXM.

    That has 80 GB at 3.35 TB/s and 989 TFLOP/s (dense bf16). A tick is a tenth of its second: it reads or writes its
    memory 4.2 times, or computes 295 FLOP for each of those bytes. So the smallest training steps of a model that fills
    its memory take about a tick, and most take more.

    Raises:
        CallerError: no bytes.
    """
    moved = max(held * 335 // 80, 1)
    return Roofline(flop=moved * 989_000 // 3_350, moved=moved)


LABORATORY = scaled_device(1 << 20)
"""A chip of 1 MiB."""
