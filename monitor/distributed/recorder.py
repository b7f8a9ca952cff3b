"""Records a job that runs on many processes as the run of one: an inspector needs nothing that is in this folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from monitor.distributed.job import Job
from monitor.distributed.rank import Rank
from monitor.distributed.shadow import Shadow
from monitor.recording.initialising import initialised
from monitor.recording.recorder import Recorder

__all__ = ["DistributedRecorder"]


class DistributedRecorder:
    """Takes and records the steps of a job; made and called by every process of it.

        dist.init_process_group("gloo")
        recorder = DistributedRecorder(job, layout="fsdp2", out="RUN", seed=1)
        for batch in batches:
            recorder.step(batch)
        recorder.finish()

    Rank 0 keeps the run folder and the chips, and holds the whole state for them; the other ranks hold their parts.
    It finds the program of each step on shapes alone, and repeats some of the steps, as ``Recorder`` does: a rank that
    computed something else is noticed there or by an inspector.

    Args:
        layout: ``fsdp2``, ``ddp``, or ``alone`` for one process.
        seed: of the initial weights, of dropout, and of the lab's keys.
        options: further ones of ``Recorder``, such as ``chips`` and ``checkpoint_every``.

    Attributes:
        rank: this process's part.

    Raises:
        CallerError: as ``Rank`` and ``Recorder``.
    """

    def __init__(self, job: Job, *, layout: str, out: str | Path, seed: int = 0, **options: Any) -> None:
        self.rank = Rank(job, layout, seed=seed)
        self._recorder: Recorder | None = None
        if self.rank.rank == 0:
            model = initialised(job.model, seed=seed)
            optimizer = job.optimizer(iter(dict(model.named_parameters()).values()))
            self._recorder = Recorder(model, optimizer, out=out, numerics="exact", seed=seed, **options)
            self._shadow = Shadow(job, seed, self._recorder.meter)

    def step(self, batch: object) -> Tensor:
        """Take the next step on a batch, which every rank is given whole; returns its loss."""
        loss = self.rank.step(batch)
        reached = {f"{kind}/{name}": tensor for (kind, name), tensor in self.rank.state().items()}
        if self._recorder is not None:
            self._recorder.commit_elsewhere(batch, self._shadow.take(self.rank.steps, batch), reached, loss)
        return loss

    def finish(self) -> str:
        """Close the run; returns the digest of the last state, on rank 0, and nothing on the others."""
        return "" if self._recorder is None else self._recorder.finish()
