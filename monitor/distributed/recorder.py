"""Records a job that runs on many processes as the run of one: an inspector needs nothing that is in this folder."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from firmware_sim import NO_WORK, Work
from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import TensorKey
from monitor.distributed.job import Job
from monitor.distributed.job_state import held
from monitor.distributed.lies import lying_rank
from monitor.distributed.metering import Apart, beyond, expected_work
from monitor.distributed.rank import Rank, place
from monitor.distributed.shadow import Shadow
from monitor.distributed.statements import Statements, rank_key, write_keys
from monitor.lab.simulated_lab import SimulatedLab, lab_path, simulated_secret
from monitor.programs.program import Program
from monitor.recording.model_initialisation import initialised
from monitor.recording.recorder import Recorder
from monitor.transcript import RunFolder

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
    each step without values, and repeats some of the steps, as ``Recorder`` does: a rank that computed something else
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
        self.rank = _rank(job, layout, seed, lie)
        self._recorder: Recorder | None = None
        if self.rank.rank == 0:
            model, optimizer = _whole(job, seed)
            self._recorder = Recorder(model, optimizer, out=out, numerics="exact", seed=seed, **options)
            self._recorder.leave_to_others()
        self._begin(Path(out))

    @classmethod
    def resume(
        cls,
        job: Job,
        *,
        layout: str,
        out: str | Path,
        lie: tuple[str, int, int] | None = None,
        **options: Any,
    ) -> Self:
        """Go on with a run whose processes died, on any layout and number of processes.

        Rank 0 repeats the steps after the last checkpoint in one process, and gives the others their parts. The loop
        goes on with batch ``recorder.steps``.

        Args:
            job: as in the first part.
            layout: of this part.
            out: the run folder, with the lab's folder next to it, where rank 0 finds them.
            lie: as for the first part.
            options: further ones of ``Recorder.resume``, such as ``check_writes``.

        Raises:
            CallerError: as ``Rank`` and ``Recorder.resume``.
            EvidenceError: a committed step does not lead to its committed state again.
        """
        recorder = cls.__new__(cls)
        seed = _shared(_seed_of(Path(out)) if place()[0] == 0 else 0)
        recorder.rank = _rank(job, layout, seed, lie)
        recorder._recorder = None
        reached: dict[TensorKey, Tensor] = {}
        if recorder.rank.rank == 0:
            model, optimizer = _whole(job, seed)
            recorder._recorder = Recorder.resume(model, optimizer, out=out, **options)
            recorder._recorder.leave_to_others()
            reached = held(dict(model.named_parameters()), dict(model.named_buffers()), optimizer)
        recorder._begin(Path(out), reached)
        return recorder

    def _begin(self, out: Path, reached: Mapping[TensorKey, Tensor] | None = None) -> None:
        """Say which ranks sign the steps from the next one on, and go on from a state if there is one."""
        job, seed, rank = self.rank.job, self.rank.seed, self.rank.rank
        secret = simulated_secret(seed)
        run_id = _shared("" if self._recorder is None else self._recorder.run_id)
        keys = [rank_key(secret, number).verifying for number in range(self.rank.ranks)]
        if self._recorder is not None:
            self._shadow = Shadow(job, seed)
            if reached:
                self._shadow.load(reached)
            lab = SimulatedLab.lab_key(SimulatedLab.read_config(lab_path(out)))
            write_keys(out, run_id, self._recorder.steps + 1, keys, lab)
        self.rank.wire.statements = Statements(out, run_id, rank, rank_key(secret, rank), keys)
        if reached is not None:
            self.rank.load(reached, 0 if self._recorder is None else self._recorder.steps)
        self._look()

    @property
    def steps(self) -> int:
        """Number of steps that are recorded."""
        return self.rank.steps

    def step(self, batch: object) -> Tensor:
        """Take the next step on a batch, which every rank is given whole; returns its loss."""
        statements = self.rank.statements
        assert statements is not None
        statements.between = self._apart.leave()
        loss = self.rank.step(batch)
        every = self._every(statements.last)
        state = self.rank.state()
        if self._recorder is not None:
            said = statements.opened(every, state)
            ran = sum((Work(*each["between"]) for each in said), NO_WORK)
            reached = {f"{kind}/{name}": tensor for (kind, name), tensor in state.items()}
            taken = self._shadow.take(self.rank.steps, batch, self._recorder.recent_programs)
            hidden = functools.partial(self._hidden, [Work(*each["work"]) for each in said])
            self._recorder.commit_elsewhere(batch, taken, reached, loss, hidden, ran)
        self._look()
        return loss

    def _look(self) -> None:
        """From now on count what this rank's loop does with its part of the state."""
        self._apart = Apart(self, self.rank.tensors())

    def _every(self, statement: bytes) -> list[bytes]:
        """What each rank signed of the step, on rank 0; nothing on the others."""
        if self.rank.ranks == 1:
            return [statement]
        found: list[Any] | None = None if self.rank.rank else [None] * self.rank.ranks
        dist.gather_object(statement, found)
        return found or []

    def _hidden(self, works: list[Work], program: Program) -> Work:
        """What the ranks' devices count beyond the program; the simulated chips represent all of these."""
        learning = sum(parameter.requires_grad for parameter in self.rank.parameters.values())
        try:
            expected = expected_work(program, learning, self.rank.job.micro_batches, self.rank.ranks)
        except EvidenceError as error:
            raise CallerError(f"{error}; make what they share before the first step") from None
        return beyond(works, expected)

    def finish(self) -> str:
        """Close the run; returns the digest of the last state, on rank 0, and nothing on the others."""
        self._apart.leave()
        return "" if self._recorder is None else self._recorder.finish()


def _whole(job: Job, seed: int) -> tuple[nn.Module, Optimizer]:
    """The model and the optimizer of one process."""
    model = initialised(job.model, seed=seed)
    return model, job.optimizer(iter(dict(model.named_parameters()).values()))


def _seed_of(out: Path) -> int:
    """The seed that a run declares."""
    lab = SimulatedLab.lab_key(SimulatedLab.read_config(lab_path(out)))
    return RunFolder(out, lab.verifying).declared.seed


def _rank(job: Job, layout: str, seed: int, lie: tuple[str, int, int] | None) -> Rank:
    if lie is not None and lie[1] == place()[0]:
        return lying_rank(lie[0], job, layout, seed=seed, step=lie[2])
    return Rank(job, layout, seed=seed)


def _shared(value: Any) -> Any:
    """What rank 0 says."""
    shared = [value]
    if place()[1] > 1:
        dist.broadcast_object_list(shared)
    return shared[0]
