"""One process of a distributed job: its micro-batches, its pieces of the gradients, its part of the update."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Set
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from firmware_sim import NO_WORK
from firmware_sim.errors import CallerError
from firmware_sim.evidence import TensorKey
from monitor.distributed.job import Job
from monitor.distributed.job_state import buffers_of, held, owner, require_one_order
from monitor.distributed.layouts import LAYOUTS, RankLayout, gathered, local
from monitor.distributed.metering import RankMeter
from monitor.distributed.session import rank_session
from monitor.distributed.statements import Label, Statements
from monitor.distributed.wire import Wire
from monitor.environment import check_subnormals
from monitor.programs.keys import RecordedKeys
from monitor.recording.micro_batches import micro_batch, total
from monitor.recording.model_initialisation import initialised
from monitor.transcript import EVALUATION, STEP

__all__ = ["Rank", "place"]

_BACKENDS = ("gloo", "nccl")
_OF_PARAMETER = ("weight", "gradient", "optimizer")


class Rank:
    """This process's part of a job, in the process group that is open; in none, all of it.

    Args:
        layout: ``fsdp2`` or ``ddp``; on one process it is ``alone``, whatever is given.
        seed: of the initial weights and of dropout.

    Attributes:
        wire: its end of the step's collectives.
        rank, ranks: this process's number, and how many there are.
        steps: taken so far, evaluations among them.
        kind: ``STEP`` or ``EVALUATION``, of the last or open one.
        scheduler: of the optimizer's rates, if the job has one.
        work: what its meter counted in the last step, without bytes.
        moved: bytes that went into the last step's collectives, by kind.
        reads: values that the last step read after its backward passes, such as whether a scaler found infinities.
        norm: of all gradients together, by which the last step clipped them; None without clipping.

    Raises:
        CallerError: a layout or process group whose bits are not known to be equal, or ranks that do not share the
            micro-batches evenly.
    """

    def __init__(self, job: Job, layout: str, *, seed: int) -> None:
        if layout not in LAYOUTS:
            raise CallerError(
                f"unknown layout {layout!r}; choose {', '.join(LAYOUTS)}: hybrid sharding, tensor and pipeline "
                "parallelism are refused, because they add in a different order"
            )
        if place()[1] == 1:
            layout = "alone"  # FSDP2 on one process skips what replaces its reduce-scatter
        check_subnormals()
        self.job, self.seed, self.steps = job, seed, 0
        self.rank, self.ranks = place()
        _require_even(job.micro_batches, self.ranks)
        self.wire = self.make_wire()
        self.norm: Tensor | None = None
        self.work, self.moved, self.reads = NO_WORK, dict[str, int](), list[Any]()
        model = initialised(job.model, seed=seed)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.dtype != torch.float32:
                raise CallerError(
                    f"{name} is trained in {str(parameter.dtype).removeprefix('torch.')}, but ranks add gradients in "
                    "FP32; keep weights in FP32, and compute in half precision by autocast in the loss"
                )
        self._scaler, self.kind, self._passed = job.scaler(), STEP, 0
        self._buffers = buffers_of(model, self._scaler)
        self.layout: RankLayout = LAYOUTS[layout](job, model, self.wire)
        self.parameters = self.layout.parameters
        self.optimizer = job.make_optimizer(self.parameters)
        self.scheduler = None if job.scheduler is None else job.scheduler(self.optimizer)

    @property
    def statements(self) -> Statements | None:
        """What signs for this rank, where somebody wants it."""
        return self.wire.statements

    def make_wire(self) -> Wire:
        """This rank's end of the collectives."""
        return Wire(self.rank, self.ranks)

    def step(self, batch: object) -> Tensor:
        """Take this rank's part of the next step; returns the loss of all micro-batches, the same on every rank.

        Args:
            batch: the whole batch; this rank reads its micro-batches of it.
        """
        take = partial(self.job.take_step, self.layout.model, self.optimizer, self._scaler)
        loss = self._take(batch, STEP, partial(take, clip=None if self.job.clip is None else self._clip))
        self.advance(1)
        return loss

    def advance(self, steps: int) -> None:
        """Take the job's schedule further, if it has one."""
        with warnings.catch_warnings(action="ignore"):  # of updates that did not come before, or a scaler has skipped
            for _ in range(steps if self.scheduler is not None else 0):
                self.scheduler.step()  # type: ignore[union-attr]

    def evaluation(self, batch: object) -> Tensor:
        """Take this rank's part of an evaluation, as ``step`` does; nothing of the state is written."""
        return self._take(batch, EVALUATION, partial(self.job.evaluate, self.layout.model))

    def _take(self, batch: object, kind: str, take: Any) -> Tensor:
        number, self.kind = self.steps + 1, kind
        joins = getattr(self.layout.model, "_join_config", None)
        if joins is not None and joins.enable:
            raise CallerError(
                "Join lets ranks take part without a batch, but each rank computes a part of every recorded step; "
                "remove Join, and give every rank the same whole batches"
            )
        keys, meter = RecordedKeys(self.seed, number), RankMeter()
        if self.statements is not None:
            self.statements.begin(number)
        with rank_session("exact", keys, self.seed, number, meter):
            loss: Tensor = take(parts=self._parts(batch, keys, meter), add=self._added)
        self.steps, self.work, self.moved = number, meter.total, meter.moved
        self.reads = [value for _, value in meter.session.statistics.items[self._passed :]]
        self.close()
        return loss

    def _parts(self, batch: object, keys: RecordedKeys, meter: RankMeter) -> Iterator[Any]:
        """This rank's micro-batches; after each one its gradients are on their way."""
        count = self.job.micro_batches
        versions = {name: buffer._version for name, buffer in self._buffers.items()}
        for turn in range(count // self.ranks):
            self.layout.reduction.begin(meter.session, turn, last=turn == count // self.ranks - 1)
            micro = self.layout.reduction.micro
            with keys.stream(micro + 1):
                part = micro_batch(batch, micro, count)
                with meter.session.aside():
                    part = self.read(part, micro)
                yield part
            (self.layout.settle if self.kind == STEP else self.layout.rest)()
        for name, buffer in self._buffers.items():
            if buffer._version != versions[name]:
                raise CallerError(
                    f"buffer {name} is written in each micro-batch; ranks take micro-batches in no common order: train "
                    "such a model on one process"
                )
        self._passed = len(meter.session.statistics.items)

    def _added(self, losses: list[Tensor]) -> Tensor:
        """The loss of all ranks' micro-batches, given this rank's; then all compare what came to them."""
        with self.layout.reduction.session.aside():
            own = torch.stack(losses).view(torch.int32)
            every = own if self.ranks == 1 else self.wire.to_all(Label("loss", ()), own).T.reshape(-1)
            self.wire.settle()
        return total(list(every.view(torch.float32)))

    def read(self, part: Any, micro: int) -> Any:
        """What this rank trains on as a micro-batch."""
        if self.statements is not None:
            self.statements.read(part, micro)
        return part

    def norms(self) -> list[Tensor]:
        """Norm of each whole gradient, as this rank takes it."""
        return self.layout.norms()

    def close(self) -> None:
        """The step has ended."""
        if self.statements is not None:
            self.statements.close(self.work, self.moved, self.shards() if self.kind == STEP else {})

    def _clip(self) -> None:
        gradients = [local(each.grad) for each in self.parameters.values() if each.grad is not None]
        with torch.no_grad():
            norms = self.norms()
            if self.statements is not None:
                with self.layout.reduction.session.aside():
                    self.statements.norms(norms)
            self.norm = self.job.clipped(gradients, norms)

    def shards(self) -> dict[TensorKey, tuple[int, Tensor]]:
        """What lies on this rank of weights, gradients and optimizer state, and from which element on."""
        found = {}
        for key, tensor in self._tensors().items():
            mine = local(tensor)
            is_cut = mine.numel() != tensor.numel()
            found[key] = (self.layout.reduction.pieces[owner(*key)][self.rank][0] if is_cut else 0, mine)
        return found

    def state(self) -> dict[TensorKey, Tensor]:
        """The whole state, made of all ranks' parts, on rank 0; nothing on the others, which take part."""
        found: dict[TensorKey, Tensor] = {}
        with torch.no_grad():
            tensors = self._tensors()
            if self.ranks > 1:
                require_one_order(tensors.items(), self._device)
            for key, tensor in tensors.items():
                value = gathered(tensor, self.rank, self.ranks)
                if value is not None:
                    found[key] = value
        return found

    def load(self, state: Mapping[TensorKey, Tensor], steps: int) -> None:
        """Go on from a whole state, whatever number of ranks it comes from: that of rank 0; the others may give none.

        Args:
            state: as ``state`` gives it; without the gradients and optimizer state that do not exist yet.

        Raises:
            CallerError: the state of another job.
        """
        shared: list[Any] = [[(*key, tuple(each.shape), each.dtype) for key, each in state.items()], steps]
        if self.ranks > 1:
            dist.broadcast_object_list(shared)
        entries, self.steps = shared
        if self.statements is not None:
            self.statements.begin(self.steps + 1)
        self._require_mine({(kind, name) for kind, name, _, _ in entries})
        self.optimizer.state.clear()
        self.optimizer.zero_grad()
        device = self._device
        with torch.no_grad():
            for kind, name, shape, dtype in entries:
                is_given = self.rank == 0
                value = state[kind, name].to(device) if is_given else torch.empty(shape, dtype=dtype, device=device)
                value = value.contiguous()
                self.wire.from_first(Label("load", (f"{kind}/{name}",)), value)
                self._put(kind, name, value)

    @property
    def _device(self) -> torch.device:
        device: torch.device = next(iter(self.parameters.values())).device
        return device

    def _require_mine(self, keys: Set[TensorKey]) -> None:
        """CallerError unless a state has these parameters and buffers, and nothing for any others."""
        needed = {("weight", name) for name in self.parameters} | {("buffer", name) for name in self._buffers}
        others = needed - keys
        for kind, name in keys - needed:
            if kind not in _OF_PARAMETER or owner(kind, name) not in self.parameters:
                others.add((kind, name))
        if others:
            raise CallerError(
                f"the state belongs to another job: the first tensor that differs is {'/'.join(min(others))!a:.80}"
            )

    def _put(self, kind: str, name: str, value: Tensor) -> None:
        """Take what lies here of one tensor."""
        if kind == "buffer":
            self._buffers[name].copy_(value)
            return
        member = owner(kind, name)
        parameter = self.parameters[member]
        is_alike = value.shape == parameter.shape
        if kind != "optimizer" and not is_alike:
            raise CallerError(
                f"the state belongs to another job: {kind} {name!a:.80} has the shape {tuple(value.shape)}"
            )
        if kind == "weight":
            self._fill(member, parameter, value)
        elif not is_alike:
            self.optimizer.state[parameter][name.rpartition("/")[2]] = value.clone()
        else:
            mine = torch.zeros_like(parameter, requires_grad=False, dtype=value.dtype)
            self._fill(member, mine, value)
            if kind == "gradient":
                parameter.grad = mine
            else:
                self.optimizer.state[parameter][name.rpartition("/")[2]] = mine

    def _fill(self, name: str, tensor: Tensor, value: Tensor) -> None:
        mine, flat = local(tensor), value.reshape(-1)
        if mine.numel() != flat.numel():
            first, last = self.layout.reduction.pieces[name][self.rank]
            flat = flat[first:last]
        mine.copy_(flat.view(mine.shape))

    def tensors(self) -> list[Tensor]:
        """What of the state lies here, as this rank's own device holds it."""
        return [local(each) for each in self._tensors().values()]

    def _tensors(self) -> dict[TensorKey, Tensor]:
        """What of the state's tensors lies here, each whole or a shard."""
        return held(self.parameters, self._buffers, self.optimizer)


def _require_even(micro_batches: int, ranks: int) -> None:
    """CallerError unless each rank has a micro-batch in each pass: nothing could show what an idle one computes."""
    if micro_batches % ranks:
        more, fewer = -(-micro_batches // ranks) * ranks, micro_batches // ranks * ranks
        raise CallerError(
            f"{ranks} ranks do not share {micro_batches} micro-batches evenly; take "
            f"{f'{fewer} or ' if fewer else ''}{more} of them, or a number of ranks that divides {micro_batches}"
        )


def place() -> tuple[int, int]:
    """This process's number, and how many there are; CallerError for a group whose bits are not known to be equal."""
    if not dist.is_initialized():
        return 0, 1
    group = dist.group.WORLD
    if type(group) is not dist.ProcessGroup or dist.get_backend() not in _BACKENDS:
        raise CallerError(
            f"a process group of {type(group).__name__} with backend {dist.get_backend()!a} is refused; use "
            f"{' or '.join(_BACKENDS)}: a group written in Python bypasses everything that records"
        )
    return dist.get_rank(), dist.get_world_size()
