"""The prover's storage of snapshotted shards: what each chip hashed, in the lab's private folder, opened on demand.

Retention: of each chip the newest so many that its configuration says (``keep_snapshots``), and older ones not at all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from firmware_sim import Chip, limits
from firmware_sim.errors import EvidenceError
from monitor.files import Files
from monitor.lab.simulated_lab import SimulatedLab

__all__ = ["ShardStorage", "StoredShards"]

_FOLDER = "shards"


class ShardStorage:
    """Keeps what chips hand out of their snapshots.

    Args:
        lab: the lab's private folder.
        keep: how many of each chip's newest stay; 0 for none, which costs nothing.
    """

    def __init__(self, lab: Path, keep: int, files: Files) -> None:
        self._folder, self._keep, self._files = lab / _FOLDER, keep, files

    def collect(self, chips: Iterable[Chip]) -> None:
        """Store what chips have snapshotted since they were last asked; the first time it has them keep it."""
        for chip in chips if self._keep else ():
            folder = self._folder / chip.chip_id
            shards = chip.shards()
            for record, content in shards:
                self._files.replace(folder / _name(record), content)
            if shards:
                for path in sorted(folder.glob("*.bin"))[: -self._keep]:
                    path.unlink()


class StoredShards:
    """The storage of simulated labs, for who asks for drawn snapshots; a chip of several runs has some in each lab's.

    Args:
        labs: their private folders (``RUN.lab``).

    Raises:
        CallerError: one is no lab's folder.
    """

    def __init__(self, labs: Iterable[Path]) -> None:
        self._labs = [(lab, frozenset(SimulatedLab.silicon_of(lab))) for lab in labs]

    def open(self, chip: str, record: int, size: int) -> bytes:
        """What the snapshot with this record number of a chip's log covers, ``size`` bytes at most.

        Raises:
            EvidenceError: the lab does not open it: it is none of these, or it did not keep it.
        """
        for lab in (lab for lab, chips in self._labs if chip in chips):
            with contextlib.suppress(OSError):
                return limits.read_file(lab / _FOLDER / chip / _name(record), limits.Limit(size, "bytes of a shard"))
        raise EvidenceError(f"chip {chip}: its lab does not show the shard of record {record}")


def _name(record: int) -> str:
    return f"{record:020}.bin"
