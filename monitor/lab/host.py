"""The host of a lab's chips: it shows them the memory, commits each step to disk and then to them.

A step is durable on disk before the chips hear of it, and the chips hear of it before they may snapshot it: so after a
crash no chip holds a snapshot that the transcript does not explain.

The beacons of a simulated world: its inspectorate shows each chip the time, by a simulated clock.

The prover's storage of snapshotted shards: what each chip hashed, in the lab's private folder, opened on demand.

Retention: of each chip the newest so many that its configuration says (``keep_snapshots``), and older ones not at all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from firmware_sim import Beacon, BeaconIssuer, Chip, RecordKind, limits, parse_log
from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import canonical
from monitor.files import Files
from monitor.lab.simulated_lab import STEP_SECONDS, LabConfig, SimulatedLab
from monitor.replay.moment import Moment
from monitor.sharding import ShardedMemory
from monitor.transcript import parse_time
from monitor.transcript.leaf import Leaf

if TYPE_CHECKING:
    from monitor.declaration.statement import Declaration
    from monitor.lab.simulated_lab import SimulatedLab
    from monitor.transcript import Batches, Staged, TranscriptWriter

__all__ = ["Host", "ShardStorage", "SimulatedBeacons", "StoredShards"]


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


class SimulatedBeacons:
    """Shows chips beacons, and remembers the last of each next to the runs, on the inspectorate's side.

    A step takes a simulated minute, so that a seed repeats a run.
    """

    def __init__(self, config: LabConfig, folder: Path, files: Files) -> None:
        """``folder`` is the lab's own; chips that go on from an earlier run have that one's beacons."""
        self._files = files
        self._shown: set[str] = set()
        home = folder if config.silicon is None else Path(config.silicon).parent
        self._path = home.with_name(f"{home.name.removesuffix('.lab')}.beacons.json")
        self._started = int(parse_time(config.begin).timestamp())
        self._every = config.beacon_every
        last = {}
        if self._path.exists():
            try:
                last = {each["chip_id"]: Beacon(**each) for each in canonical.decode(self._path.read_bytes())}
            except (OSError, KeyError, TypeError, ValueError) as error:
                raise CallerError(f"cannot read the simulated inspectorate's beacons {self._path}: {error}") from None
        self._issuer = BeaconIssuer(SimulatedLab.inspectorate_key(config), last)

    def after(self, step: int, chips: Iterable[Chip]) -> None:
        """Show them one where one is due after a step."""
        if self._every and step % self._every == 0:
            self.show(step, chips)

    def show(self, step: int, chips: Iterable[Chip]) -> None:
        """Show each chip a beacon of the time after a step; EvidenceError if one was put back to a copy."""
        if not self._every:
            return
        for chip in chips:
            time = max(self._started + STEP_SECONDS * step, self._newest(chip) + 1)
            chip.beacon(self._issuer.issue(chip.chip_id, chip.position, time))
            self._shown.add(chip.chip_id)
        last = sorted(self._issuer.last.items())
        self._files.replace(self._path, canonical.encode([asdict(beacon) for _, beacon in last]))

    def _newest(self, chip: Chip) -> int:
        """Time of the last beacon that a chip was shown; a process that died may not have remembered it."""
        last = self._issuer.last.get(chip.chip_id)
        remembered = 0 if last is None else last.time
        if chip.chip_id in self._shown:
            return remembered
        log = chip.log_bytes()
        shown = [each.step for each in parse_log(log) if each.kind is RecordKind.BEACON] if log else []
        return max(remembered, *shown, 0)


class Speaking(Protocol):
    """How a lab speaks to its chips and for them; ``monitor.lab.conduct.Conduct`` is how it does so honestly."""

    keeps_leaves: bool

    def head(self, step: int, shard: int, host: Host) -> bytes:
        """Root of the log of steps that the chip with a shard receives after a step."""

    def rest(self, host: Host) -> None:
        """Called when the chips have heard of a step, and before the next one begins."""

    def hand_over(self, shard: int, evidence: dict[str, bytes], host: Host) -> dict[str, bytes]:
        """The evidence files of the chip that holds a shard, as the lab hands them over."""


class Host:
    """Commits the steps of a recorded run to disk and chips.

    Attributes:
        memory: the state that the chips hold.
        batches: what the steps train on.
        leaves: all committed ones, where the lab keeps them.
        moment: the last step that was taken; None before the first.
        heard: heads of steps to come that chips have heard of already.
    """

    def __init__(
        self,
        declared: Declaration,
        memory: ShardedMemory,
        batches: Batches,
        lab: SimulatedLab,
        writer: TranscriptWriter,
        speaking: Speaking,
        run_id: bytes,
    ) -> None:
        self.declared = declared
        self.memory = memory
        self.batches = batches
        self.lab = lab
        self.writer = writer
        self.leaves: list[Leaf] = []
        self.moment: Moment | None = None
        self.heard: dict[int, bytes] = {}
        self._speaking = speaking
        self._run_id = run_id
        self._beacons = SimulatedBeacons(lab.config, lab.folder, lab.files)
        self._shards = ShardStorage(lab.folder, lab.config.keep_snapshots, lab.files)

    def attach_memory(self, step: int) -> None:
        """Show every chip its shard of the memory, from a step on, and the time."""
        self.show_time(step)
        for chip, shard in zip(self.lab.chips, self.memory.shards, strict=True):
            chip.attach(shard, self._run_id, step)

    def show_time(self, step: int) -> None:
        """Hand every chip a beacon, where the inspectorate gives any."""
        self._beacons.show(step, (*self.lab.chips, *self.lab.idle))

    def idle_chips(self) -> None:
        """Let one tick without work pass on every chip."""
        for chip in self.lab.chips:
            chip.idle(1)

    def commit(self, leaf: Leaf, files: Mapping[str, bytes | Staged]) -> None:
        """Write a step to disk, then tell the chips; CallerError if they have heard of another one in its place."""
        self.writer.append(leaf, files, heard=self.heard.get(leaf.step))
        self.keep(leaf)
        self.announce(leaf.step)

    def keep(self, leaf: Leaf) -> None:
        """Remember a committed leaf, where the lab keeps them."""
        if self._speaking.keeps_leaves:
            self.leaves.append(leaf)

    def announce(self, step: int) -> None:
        """Tell the chips the head of the log that ends with ``step``."""
        for shard, chip in enumerate(self.lab.chips):
            chip.commit(self._run_id, step, self._speaking.head(step, shard, self))
        self._speaking.rest(self)
        self._beacons.after(step, (*self.lab.chips, *self.lab.idle))
        for chip in self.lab.idle:
            chip.idle(1)
        self.store_shards()

    def store_shards(self) -> None:
        """Store what the chips have snapshotted, where the lab keeps any of it."""
        self._shards.collect(self.lab.chips)

    def root(self, step: int) -> bytes:
        """Root of the log of steps that ends with ``step``."""
        return self.writer.tree.root(step + 1)

    def hand_over(self, shard: int, evidence: dict[str, bytes]) -> dict[str, bytes]:
        """Return a chip's evidence files as this lab hands them over."""
        return self._speaking.hand_over(shard, evidence, self)
