"""The host of a lab's chips: it shows them the memory, commits each step to disk and then to them.

A step is durable on disk before the chips hear of it, and the chips hear of it before they may snapshot it: so after a
crash no chip holds a snapshot that the transcript does not explain.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from monitor.lab.beacons import SimulatedBeacons
from monitor.lab.shards import ShardStorage
from monitor.replay.moment import Moment
from monitor.sharding import ShardedMemory
from monitor.transcript.leaf import Leaf

if TYPE_CHECKING:
    from monitor.declaration.statement import Declaration
    from monitor.lab.simulated_lab import SimulatedLab
    from monitor.transcript import Batches, Staged, TranscriptWriter

__all__ = ["Host"]


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
