"""Records a job that runs on many processes as the run of one: an inspector needs nothing that is in this folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from monitor.distributed.job import Job
from monitor.distributed.lies import lying_rank
from monitor.distributed.rank import Rank, place
from monitor.distributed.shadow import Shadow
from monitor.distributed.statements import Statements, rank_key, write_keys
from monitor.lab.simulated import SimulatedLab, lab_path, simulated_secret
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

    Each rank signs what it read, sent and holds, under ``RUN.ranks`` (``attribution.departures``). Rank 0 keeps the run
    folder and the chips, and holds the whole state for them; the other ranks hold their parts. It finds the program of
    each step on shapes alone, and repeats some of the steps, as ``Recorder`` does: a rank that computed something else
    is noticed there or by an inspector.

    Args:
        layout: ``fsdp2``, ``ddp``, or ``alone`` for one process.
        seed: of the initial weights, of dropout, and of the lab's keys.
        lie: simulates a rank that alters something in one step (``RANK_LIES``): what, its number and the step.
        options: further ones of ``Recorder``, such as ``chips`` and ``checkpoint_every``.

    Attributes:
        rank: this process's part.

    Raises:
        CallerError: as ``Rank`` and ``Recorder``.
    """

    def __init__(
        self,
        job: Job,
        *,
        layout: str,
        out: str | Path,
        seed: int = 0,
        lie: tuple[str, int, int] | None = None,
        **options: Any,
    ) -> None:
        if lie is not None and lie[1] == place()[0]:
            self.rank = lying_rank(lie[0], job, layout, seed=seed, step=lie[2])
        else:
            self.rank = Rank(job, layout, seed=seed)
        self._recorder: Recorder | None = None
        if self.rank.rank == 0:
            model = initialised(job.model, seed=seed)
            optimizer = job.optimizer(iter(dict(model.named_parameters()).values()))
            self._recorder = Recorder(model, optimizer, out=out, numerics="exact", seed=seed, **options)
            self._shadow = Shadow(job, seed)
        secret = simulated_secret(seed)
        run_id = self._run_id()
        if self._recorder is not None:
            keys = [rank_key(secret, number).verifying for number in range(self.rank.ranks)]
            lab = SimulatedLab.lab_key(SimulatedLab.read_config(lab_path(Path(out))))
            write_keys(Path(out), run_id, keys, lab)
        self.rank.statements = Statements(Path(out), run_id, self.rank.rank, rank_key(secret, self.rank.rank))

    def _run_id(self) -> str:
        """The run's name, which rank 0 tells the others."""
        told = [self._recorder.run_id if self._recorder is not None else ""]
        if self.rank.ranks > 1:
            dist.broadcast_object_list(told)
        return told[0]

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
