"""Records a run of a preset: each step under controlled numerics, committed to disk, to the log and to the chips."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from firmware_sim import Chip
from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import digest_bytes
from monitor import numerics
from monitor._conduct import Conduct
from monitor.program import step_flop
from monitor.training import Training
from monitor.transcript import Leaf, RunData, TranscriptWriter, encode_state
from monitor.transcript.layout import checkpoint_path, log_path

__all__ = ["PresetRecorder", "loss_bits", "make_leaf"]


def loss_bits(loss: Tensor) -> str:
    """The FP32 bits of a scalar loss as 8 hex digits."""
    return f"{int(np.float32(loss.item()).view(np.uint32)):08x}"


def make_leaf(training: Training, *, batch_root: bytes, log: bytes, loss: Tensor) -> Leaf:
    """Return the leaf of the step that ``training`` has just taken."""
    return Leaf(
        step=training.step,
        batch=batch_root.hex(),
        state=training.memory.digest(),
        log=str(digest_bytes("rounding-log", log)),
        loss=loss_bits(loss),
        flop=step_flop(training.task),
    )


class PresetRecorder:
    """Takes a preset's training from one committed step to the next.

    A step is durable on disk before the chips hear of it, and the chips hear of it before they may snapshot it: so
    after a crash no chip holds a snapshot that the transcript does not explain.
    """

    def __init__(
        self,
        training: Training,
        data: RunData,
        writer: TranscriptWriter,
        chips: Sequence[Chip],
        *,
        run_id: bytes,
        conduct: Conduct,
        idle: Sequence[Chip] = (),
    ) -> None:
        self.training = training
        self.data = data
        self.leaves: list[Leaf] = []
        self._writer = writer
        self._chips = chips
        self._idle = idle
        self._run_id = run_id
        self._conduct = conduct

    def commit_initial_state(self) -> Leaf:
        """Commit W_0 as step 0."""
        leaf = Leaf(step=0, batch="", state=self.training.memory.digest(), log="", loss="", flop=0)
        self._commit(leaf, {checkpoint_path(0): encode_state(self.training.memory.export())})
        return leaf

    def record_step(self) -> Leaf:
        """Take, record and commit the next step."""
        step = self.training.step + 1
        task = self.training.task
        batch = self._batch(step)
        log, loss = self._conduct.record(step, self.training, lambda: self._take(step, batch))
        leaf = self._leaf(step, log, loss)
        files = {log_path(step): log}
        if step % task.checkpoint_every == 0 or step == task.steps:
            files[checkpoint_path(step)] = encode_state(self.training.memory.export())
        self._commit(leaf, files)
        self._conduct.after_step(step, self)
        return leaf

    def replay_step(self, committed: Leaf, log: bytes) -> None:
        """Take a step that is committed already, with its committed log, after a crash."""
        step = self.training.step + 1
        batch = self._batch(step)
        name, observer, bound = self.training.task.numerics, self._conduct.observer(step), self._conduct.bound
        with numerics.replaying(name, log, bound=bound, observer=observer):
            loss = self._take(step, batch)
        if self._leaf(step, log, loss) != committed:
            raise EvidenceError(f"step {step} does not replay to its committed state; this run cannot be resumed")
        self._conduct.after_step(step, self)

    def attach_memory(self, step: int) -> None:
        """Show every chip its shard of the memory, from a step on."""
        for chip, shard in zip(self._chips, self.training.memory.shards, strict=True):
            chip.attach(shard, self._run_id, step)

    def tick_chips(self, step: int) -> None:
        """Let one tick of work pass on every chip; the host claims that memory holds the state after ``step``."""
        for chip in self._chips:
            chip.tick(self._run_id, step)

    def idle_chips(self) -> None:
        """Let one tick without work pass on every chip."""
        for chip in self._chips:
            chip.idle(1)

    def announce(self, step: int) -> None:
        """Tell the chips the head of the log that ends with ``step``, and let one tick pass."""
        for shard, chip in enumerate(self._chips):
            chip.commit(self._run_id, step, self._conduct.head(step, shard, self))
        self._conduct.tick(step, self)
        for chip in self._idle:
            chip.idle(1)

    def root(self, step: int) -> bytes:
        """Root of the log of steps that ends with ``step``."""
        return self._writer.tree.root(step + 1)

    def _leaf(self, step: int, log: bytes, loss: Tensor) -> Leaf:
        self._conduct.before_commit(step, self.training)
        leaf = make_leaf(self.training, batch_root=self.data.batch_root(step), log=log, loss=loss)
        return self._conduct.declare(leaf)

    def _batch(self, step: int) -> Mapping[str, Tensor]:
        declared = self.data.batch(self._conduct.order(step, self.training.task.steps))
        return self._conduct.batch(step, declared)

    def _take(self, step: int, batch: Mapping[str, Tensor]) -> Tensor:
        rate = self._conduct.learning_rate(step, self.training.task.learning_rate_at(step))
        return self.training.take_step(batch, learning_rate=rate)

    def hand_over(self, shard: int, evidence: dict[str, bytes]) -> dict[str, bytes]:
        """Return a chip's evidence files as this lab hands them over."""
        return self._conduct.hand_over(shard, evidence, self)

    def _commit(self, leaf: Leaf, files: dict[str, bytes]) -> None:
        self._writer.append(leaf, files)
        self.leaves.append(leaf)
        self.announce(leaf.step)
