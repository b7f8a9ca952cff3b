"""How a job's state lies on its processes: whole (one process, DDP) or in shards (FSDP2).

A layout gives each rank the model to call, sees that its gradients pass through the exact reduction, and can show the
whole state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from firmware_sim.errors import CallerError
from monitor import numerics
from monitor.distributed.job import Job, norm_of
from monitor.distributed.reduction import Reduction, even_pieces, row_pieces
from monitor.numerics.exact.accumulator import ExactSum
from monitor.recording.micro_batches import gradient_missing

__all__ = ["LAYOUTS", "RankLayout", "gathered", "local", "whole"]


class RankLayout(Protocol):
    """One rank's part of a job.

    Attributes:
        model: what a micro-batch's loss is computed with.
        parameters: those that the optimizer updates here, by the names that one process gives them.
    """

    model: nn.Module
    parameters: dict[str, nn.Parameter]
    reduction: Reduction

    def settle(self) -> None:
        """A backward pass has ended: gradients are on their way, or after the last one in ``parameters``."""

    def norms(self) -> list[Tensor]:
        """Norm of each whole gradient, as FP32 scalars."""


def local(tensor: Tensor) -> Tensor:
    """What of a tensor lies on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gathered(tensor: Tensor, rank: int, ranks: int) -> Tensor | None:
    """All of a tensor, in memory of its own, on rank 0; None on the others, which take part."""
    if not isinstance(tensor, DTensor):
        return None if rank else tensor.detach().clone()
    pieces = row_pieces(tuple(tensor.shape), ranks)
    widths = [last - first for first, last in pieces]
    mine = local(tensor).detach()
    if mine.numel() != widths[rank] or tensor.placements != (Shard(0),):
        raise CallerError(f"a tensor of shape {tuple(tensor.shape)} lies on ranks otherwise than in rows of it")
    if not tensor.numel():
        return None if rank else mine.new_zeros(tensor.shape)
    row = mine.new_zeros(widths[0])
    row[: mine.numel()] = mine.reshape(-1)
    rows = None if rank else [torch.empty_like(row) for _ in range(ranks)]
    dist.gather(row, rows)
    if rows is None:
        return None
    return torch.cat([each[:width] for each, width in zip(rows, widths, strict=True)]).view(tensor.shape)


class _Whole:
    """Every rank holds the whole state."""

    def __init__(self, model: nn.Module, rank: int, ranks: int) -> None:
        self.model = model
        self.parameters = dict(model.named_parameters())
        shapes = {name: tuple(parameter.shape) for name, parameter in self.parameters.items()}
        self.reduction = Reduction(shapes, even_pieces, rank, ranks)

    def norms(self) -> list[Tensor]:
        """Norm of each gradient."""
        with self.reduction.session.aside():
            return [norm_of(each.grad) for each in _learning(self.parameters).values() if each.grad is not None]


class Alone(_Whole):
    """One process, whose exact sums do not grow with the number of micro-batches."""

    def __init__(self, job: Job, model: nn.Module, rank: int, ranks: int) -> None:
        if ranks != 1:
            raise CallerError(f"the layout alone is that of one process, not of {ranks}")
        super().__init__(model, rank, ranks)
        self._sums: dict[str, ExactSum] = {}

    def settle(self) -> None:
        """Take the gradients into the sums."""
        session = self.reduction.session
        for name, parameter in _learning(self.parameters).items():
            if parameter.grad is None:
                raise gradient_missing(name, self.reduction.micro)
            with session.aside(), torch.no_grad():
                held = self._sums.setdefault(name, ExactSum(parameter.numel(), parameter.device))
                held.add(parameter.grad)
                parameter.grad = None
                if self.reduction.last:
                    parameter.grad = self._sums.pop(name).rounded().view_as(parameter)


class Replicated(_Whole):
    """DDP: buckets of gradients pass through the exact reduction, and every rank gets all sums."""

    def __init__(self, job: Job, model: nn.Module, rank: int, ranks: int) -> None:
        super().__init__(model, rank, ranks)
        self._names = {parameter: name for name, parameter in self.parameters.items()}
        wrapped = DistributedDataParallel(model, broadcast_buffers=False)
        wrapped.register_comm_hook(None, lambda _, bucket: self._reduce(bucket))
        self.model = wrapped

    def _reduce(self, bucket: Any) -> torch.futures.Future[Tensor]:
        names = [self._names[parameter] for parameter in bucket.parameters()]
        with self.reduction.session.aside(), torch.no_grad():
            flat = bucket.buffer()
            parts = torch.split(flat, [self.parameters[name].numel() for name in names])
            rows = torch.cat([self._rows(name, part) for name, part in zip(names, parts, strict=True)], dim=1)
            sums = self.reduction.exchange(names, rows)
            if sums is not None:
                gathered = torch.empty_like(rows)
                dist.all_gather_into_tensor(gathered.view(-1), sums)
                widths = [self.reduction.width(name) for name in names]
                for part, columns in zip(parts, torch.split(gathered, widths, dim=1), strict=True):
                    part.copy_(columns.reshape(-1)[: part.numel()])
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(flat)
        return done

    def _rows(self, name: str, flat: Tensor) -> Tensor:
        rows = flat.new_zeros((self.reduction.ranks, self.reduction.width(name)))
        rows.view(-1)[: flat.numel()] = flat
        return rows

    def settle(self) -> None:
        """Forget gradients that are summed elsewhere."""
        for name, parameter in _learning(self.parameters).items():
            if parameter.grad is None:
                raise gradient_missing(name, self.reduction.micro)
            if not self.reduction.last:
                parameter.grad = None


class Sharded:
    """FSDP2: parameters, gradients and optimizer state in shards of the first dimension."""

    def __init__(self, job: Job, model: nn.Module, rank: int, ranks: int) -> None:
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        scalars = [name for name, shape in shapes.items() if not shape]
        if scalars:
            raise CallerError(f"{scalars[0]} has no dimension that FSDP2 could cut; give it the shape (1,)")
        for unit in (*job.units(model), model):
            fully_shard(unit)
        self.model = model
        self.parameters = dict(model.named_parameters())
        self.reduction = Reduction(shapes, row_pieces, rank, ranks)
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        for module in model.modules():
            if isinstance(module, FSDPModule):
                group = module._get_fsdp_state()._fsdp_param_group
                if group is None:
                    continue
                held = [names[id(each.sharded_param)] for each in group.fsdp_params if each.sharded_param.requires_grad]
                module.set_custom_reduce_scatter(_ReduceScatter(self.reduction, held))
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def settle(self) -> None:
        """Forget gradients that are summed elsewhere."""
        for name, parameter in _learning(self.parameters).items():
            if parameter.grad is None:
                raise gradient_missing(name, self.reduction.micro)
            if not self.reduction.last:
                parameter.grad = None

    def norms(self) -> list[Tensor]:
        """The rule for one tensor (``monitor.numerics.operators.reductions.vector_norm``) over shards.

        The largest magnitude is gathered, and the squares are added exactly.
        """
        shards = [
            local(parameter.grad) for parameter in _learning(self.parameters).values() if parameter.grad is not None
        ]
        session = self.reduction.session
        with session.aside(), torch.no_grad():
            bits = [
                shard.abs().view(torch.int32).max() if shard.numel() else torch.zeros((), dtype=torch.int32)
                for shard in shards
            ]
            largest = torch.stack(bits)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)  # of magnitudes' bits, which lie in their order
            scales = ((((largest >> 23) & 0xFF).clamp(min=1, max=253)) << 23).view(torch.float32)
            sums = [ExactSum(1) for _ in shards]
            for shard, scale, held in zip(shards, scales, sums, strict=True):
                small = torch.div(shard, scale)
                held.add_all(small * small)
            digits, special = (torch.stack([getattr(held, name) for held in sums]) for name in ("digits", "special"))
            dist.all_reduce(digits)
            dist.all_reduce(special, op=dist.ReduceOp.BOR)
            squares = []
            for number, held in enumerate(sums):
                held.digits, held.special = digits[number], special[number]
                squares.append(held.rounded().reshape(()))
            with numerics.recording("exact"):
                return [torch.sqrt(square) * scale for square, scale in zip(squares, scales, strict=True)]


class _ReduceScatter(ReduceScatter):
    """Stands for FSDP2's reduce-scatter of one group of parameters."""

    def __init__(self, reduction: Reduction, names: list[str]) -> None:
        self._reduction, self._names = reduction, names

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what is exchanged."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: object, op: object, async_op: bool = False
    ) -> None:
        """Exchange the rows; the output means something after the last backward pass alone."""
        with self._reduction.session.aside(), torch.no_grad():
            sums = self._reduction.exchange(self._names, input_tensor.view(self._reduction.ranks, -1))
            output_tensor.zero_() if sums is None else output_tensor.copy_(sums)


def _learning(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}


LAYOUTS: dict[str, Any] = {"alone": Alone, "ddp": Replicated, "fsdp2": Sharded}
"""By the name that a user gives."""
