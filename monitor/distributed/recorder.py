"""Records a job that runs on many processes as the run of one: an inspector needs nothing that is in this folder."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from firmware_sim import NO_WORK, Work
from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import TensorKey
from monitor.distributed.job import Job
from monitor.distributed.job_state import buffers_of, held
from monitor.distributed.lies import lying_rank
from monitor.distributed.metering import Apart, beyond, expected_work
from monitor.distributed.rank import Rank, place
from monitor.distributed.roll_call import DEADLINE, RollCall
from monitor.distributed.shadow import Shadow
from monitor.distributed.statements import Statements, batch_digest, rank_key, write_keys
from monitor.lab.simulated_lab import SimulatedLab, lab_path, simulated_secret
from monitor.loops.optimizers import groups_of, load_groups
from monitor.programs.batches import flatten_batch
from monitor.programs.program import Program
from monitor.recording.loop_state import HostState
from monitor.recording.model_initialisation import initialised
from monitor.recording.recorder import Recorder
from monitor.recording.refusals import shapes_of
from monitor.transcript import STEP, RunFolder

__all__ = ["DistributedRecorder"]

_DIGITS = 12


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
        deadline: seconds for which a rank waits for others to begin a step, an evaluation or the end with it.
        stateful: as of ``Recorder``, made alike on every rank; what rank 0 keeps of them, ``resume`` gives to all.
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
        deadline: float = DEADLINE,
        stateful: Mapping[str, object] | None = None,
        lie: tuple[str, int, int] | None = None,
        **options: Any,
    ) -> None:
        with self._all(f"begins a run of seed {seed}", job, layout, deadline, options):
            self.rank = _rank(job, layout, seed, lie)
            self._recorder: Recorder | None = None
            if self.rank.rank == 0:
                model, optimizer, scaler = self._whole(job, seed)
                options = {**options, "numerics": "exact", "seed": seed, "stateful": stateful}
                self._recorder = Recorder(model, optimizer, out=out, state={"scaler": scaler}, **options)
            self._begin(Path(out))

    @classmethod
    def resume(
        cls,
        job: Job,
        *,
        layout: str,
        out: str | Path,
        deadline: float = DEADLINE,
        stateful: Mapping[str, object] | None = None,
        lie: tuple[str, int, int] | None = None,
        **options: Any,
    ) -> Self:
        """Go on with a run whose processes died, on any layout and number of processes.

        Rank 0 repeats the steps after the last checkpoint in one process, and gives the others their parts. The loop
        goes on with batch ``recorder.steps``, and the job's schedule with the rates of that step; objects under
        ``stateful`` and the optimizer's groups get, on every rank, what rank 0 kept.

        Args:
            job: as in the first part.
            layout: of this part.
            out: the run folder, with the lab's folder next to it, where rank 0 finds them.
            deadline, stateful, lie: as for the first part.
            options: further ones of ``Recorder.resume``, such as ``check_writes``.

        Raises:
            CallerError: as ``Rank`` and ``Recorder.resume``.
            EvidenceError: a committed step does not lead to its committed state again.
        """
        recorder = cls.__new__(cls)
        with recorder._all("goes on with a run", job, layout, deadline, options):
            seed = _shared(_seed_of(Path(out)) if place()[0] == 0 else 0)
            recorder.rank = _rank(job, layout, seed, lie)
            recorder._recorder = None
            reached: dict[TensorKey, Tensor] = {}
            if recorder.rank.rank == 0:
                model, optimizer, scaler = recorder._whole(job, seed)
                options = {**options, "stateful": stateful}
                recorder._recorder = Recorder.resume(model, optimizer, out=out, state={"scaler": scaler}, **options)
                reached = held(dict(model.named_parameters()), buffers_of(model, scaler), optimizer)
            recorder._begin(Path(out), reached)
            recorder._go_on(stateful, Path(out))
        return recorder

    def _all(
        self, act: str, job: Job, layout: str, deadline: float, options: Mapping[str, Any]
    ) -> AbstractContextManager[None]:
        """Begin on all ranks alike, or on none."""
        if "state" in options:
            raise CallerError(
                "a job's state is what its model, optimizer and scaler hold; move all other state into one of these"
            )
        rank, ranks = place()
        store = dist.distributed_c10d._get_default_store() if ranks > 1 else None
        self._calls = RollCall(store, rank, ranks, deadline)
        weakref.finalize(self, self._calls.leave)
        said = {"layout": layout, "micro-batches": f"{job.micro_batches}", "clip": f"{job.clip}"}
        return self._calls.together(act, lambda: said)

    def _whole(self, job: Job, seed: int) -> tuple[nn.Module, Optimizer, GradScaler]:
        """Model, optimizer and scaler of one process."""
        model = initialised(job.model, seed=seed)
        self._optimizer = job.make_optimizer(dict(model.named_parameters()))
        if job.scheduler is not None:
            job.scheduler(self._optimizer)
        return model, self._optimizer, job.scaler()

    def _begin(self, out: Path, reached: Mapping[TensorKey, Tensor] | None = None) -> None:
        """Say which ranks sign the steps from the next one on, and go on from a state if there is one."""
        job, seed, rank = self.rank.job, self.rank.seed, self.rank.rank
        secret = simulated_secret(seed)
        run_id = _shared("" if self._recorder is None else self._recorder.run_id)
        keys = [rank_key(secret, number).verifying for number in range(self.rank.ranks)]
        steps = self._steps = 0
        if self._recorder is not None:
            self._run = self._recorder.leave_to_others()
            self._shadow = Shadow(job, seed, self._run.loop.groups)
            if reached:
                self._shadow.load(reached)
            lab = SimulatedLab.lab_key(SimulatedLab.read_config(lab_path(out)))
            self._steps, steps = self._recorder.steps, self._run.steps
            write_keys(out, run_id, steps + 1, keys, lab)
        self.rank.wire.statements = Statements(out, run_id, rank, rank_key(secret, rank), keys)
        if reached is not None:
            self.rank.load(reached, steps)
        self._look()

    def _go_on(self, stateful: Mapping[str, object] | None, out: Path) -> None:
        """Have each rank's schedule and objects where they were after the last step."""
        host = None if self._recorder is None else self._run.host_state
        self._steps, kept = _shared([self._steps, None if host is None else host.kept])
        self.rank.advance(self._steps)
        if kept is not None:
            HostState(stateful or {}, self.rank.optimizer, lab_path(out)).load(kept)

    @property
    def steps(self) -> int:
        """Number of steps that are recorded, without evaluations."""
        return self._steps

    @property
    def optimizer(self) -> Optimizer:
        """This rank's optimizer, of which a loop may make schedules; all ranks take a step with the same rates."""
        return self.rank.optimizer

    def step(self, batch: object) -> Tensor:
        """Take the next step on a batch, which every rank is given whole; returns its loss.

        Raises:
            CallerError: as for any step; also, on every rank and before anything is computed, where a rank does
                something else, or with another batch or other rates.
        """
        loss = self._take(f"takes step {self.steps + 1}", batch, self.rank.step)
        self._steps += 1
        return loss

    def evaluation(self, batch: object) -> Tensor:
        """Record an evaluation on a batch, which every rank is given whole; returns the sum of micro-batches' scores.

        The model is in ``eval()`` meanwhile, and nothing of the state is written. Raises what ``step`` does.
        """
        return self._take(f"takes an evaluation after step {self.steps}", batch, self.rank.evaluation)

    def _take(self, act: str, batch: object, take: Callable[[object], Tensor]) -> Tensor:
        groups = groups_of(self.rank.optimizer)
        with self._calls.together(act, functools.partial(_alike, batch, groups)):
            statements, recorder = self.rank.statements, self._recorder
            assert statements is not None
            if recorder is not None:
                load_groups(self._optimizer, groups)
                if self._run.host_state is not None:
                    self._run.host_state.require_unchanged()
            statements.between = self._apart.leave()
            loss = take(batch)
            every = self._every(statements.last)
            kind = self.rank.kind
            state = self.rank.state() if kind == STEP else {}
            if recorder is not None:
                said = statements.opened(every, state)
                ran = sum((Work(*each["between"]) for each in said), NO_WORK)
                reached = {f"{kind}/{name}": tensor for (kind, name), tensor in state.items()}
                taken = self._shadow.take(
                    self.rank.steps, batch, self._run.programs.recent, kind=kind, groups=groups, reads=self.rank.reads
                )
                load_groups(self._optimizer, groups_of(self.rank.optimizer))
                hidden = functools.partial(self._hidden, [Work(*each["work"]) for each in said], kind)
                recorder.commit_elsewhere(batch, taken, reached, loss, hidden, ran)
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

    def _hidden(self, works: list[Work], kind: str, program: Program) -> Work:
        """What the ranks' devices count beyond the program; the simulated chips represent all of these."""
        learning = sum(parameter.requires_grad for parameter in self.rank.parameters.values()) if kind == STEP else 0
        try:
            expected = expected_work(program, learning, self.rank.job.micro_batches, self.rank.ranks)
        except EvidenceError as error:
            raise CallerError(f"{error}; create what they share before the first step") from None
        return beyond(works, expected)

    def finish(self) -> str:
        """Close the run, once every rank has called this, and end on all of them together.

        Returns the digest of the last state, on rank 0, and nothing on the others.
        """
        with self._calls.together("calls finish()"):
            self._apart.leave()
            digest = "" if self._recorder is None else self._recorder.finish()
        with self._calls.together("ends the run"):
            self._calls.part()
        return digest


def _alike(batch: object, groups: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What has to be alike on all ranks that take a step: the batch, and the optimizer's hyper-parameters."""
    said = {
        f"{name} of group {number}": f"{value}" for number, group in enumerate(groups) for name, value in group.items()
    }
    shapes = shapes_of(*flatten_batch(batch).values())
    return {**said, "batch": f"{', '.join(shapes)} ({batch_digest(batch)[:_DIGITS]})"}


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
