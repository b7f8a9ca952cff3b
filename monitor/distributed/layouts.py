"""How a job's state lies on its processes: whole (one process, DDP) or in shards (FSDP2).

A layout gives each rank the model to call, sees that its gradients pass through the exact reduction, and can show the
whole state.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from firmware_sim.errors import CallerError
from monitor import numerics
from monitor.distributed.job import Job, largest_of, norm_of, scales_of, squares_of
from monitor.distributed.reduction import Reduction, even_pieces, row_pieces
from monitor.distributed.statements import Label
from monitor.distributed.wire import Wire
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

    def rest(self) -> None:
        """A pass without a backward one has ended."""

    def norms(self) -> list[Tensor]:
        """Norm of each whole gradient, as FP32 scalars."""


def local(tensor: Tensor) -> Tensor:
    """What of a tensor lies on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gathered(tensor: Tensor, rank: int, ranks: int) -> Tensor | None:
    """All of a tensor, in new memory, on rank 0; None on the others, which take part."""
    if not isinstance(tensor, DTensor):
        return None if rank else tensor.detach().clone()
    pieces = row_pieces(tuple(tensor.shape), ranks)
    widths = [last - first for first, last in pieces]
    mine = local(tensor).detach()
    if mine.numel() != widths[rank] or tensor.placements != (Shard(0),):
        raise CallerError(f"a tensor of shape {tuple(tensor.shape)} cannot be cut into rows among the ranks")
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

    def __init__(self, model: nn.Module, wire: Wire) -> None:
        self.model = model
        self.parameters = dict(model.named_parameters())
        shapes = {name: tuple(parameter.shape) for name, parameter in self.parameters.items()}
        self.reduction = Reduction(shapes, even_pieces, wire)

    def rest(self) -> None:
        """Nothing is left of it."""

    def norms(self) -> list[Tensor]:
        """Norm of each gradient."""
        with self.reduction.session.aside():
            return [norm_of(each.grad) for each in _learning(self.parameters).values() if each.grad is not None]


class Alone(_Whole):
    """One process, whose exact sums do not grow with the number of micro-batches."""

    def __init__(self, job: Job, model: nn.Module, wire: Wire) -> None:
        if wire.ranks != 1:
            raise CallerError(f"the layout 'alone' is for one process, not for {wire.ranks}")
        super().__init__(model, wire)
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

    def __init__(self, job: Job, model: nn.Module, wire: Wire) -> None:
        super().__init__(model, wire)
        self._names = {parameter: name for name, parameter in self.parameters.items()}
        wrapped = DistributedDataParallel(model, broadcast_buffers=False, init_sync=False)  # the seed gives all values
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
                label = Label("sum", tuple(names), self.reduction.turn)
                places = functools.partial(self.reduction.places, names)
                gathered = self.reduction.wire.to_all(label, sums, places)
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

    def __init__(self, job: Job, model: nn.Module, wire: Wire) -> None:
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        if job.scaler().is_enabled():
            raise CallerError(
                "a gradient scaler looks for infinities in whole gradients, which no rank of fsdp2 holds; take layout "
                "'ddp', or BF16 in autocast, which needs no scaler"
            )
        scalars = [name for name, shape in shapes.items() if not shape]
        if scalars:
            raise CallerError(f"{scalars[0]} has no dimension that FSDP2 could cut; give it the shape (1,)")
        for unit in (*job.units(model), model):
            fully_shard(unit)
        self.model = model
        self.parameters = dict(model.named_parameters())
        self.reduction = Reduction(shapes, row_pieces, wire)
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        groups = [(module, module._get_fsdp_state()._fsdp_param_group) for module in units]
        self._groups = [(module, group) for module, group in groups if group is not None]
        for module, group in self._groups:
            held = [names[id(each.sharded_param)] for each in group.fsdp_params]
            learning = [name for name in held if self.parameters[name].requires_grad]
            module.set_custom_all_gather(_AllGather(self.reduction, held))
            module.set_custom_reduce_scatter(_ReduceScatter(self.reduction, learning))
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

    def settle(self) -> None:
        """Forget gradients that are summed elsewhere."""
        for name, parameter in _learning(self.parameters).items():
            if parameter.grad is None:
                raise gradient_missing(name, self.reduction.micro)
            if not self.reduction.last:
                parameter.grad = None

    def rest(self) -> None:
        """Give back what was gathered, and forget its order, which only backward passes do by themselves."""
        for module, group in self._groups:
            group._post_forward_indices.clear()
            group.comm_ctx.post_forward_order.clear()
            module.reshard()

    def norms(self) -> list[Tensor]:
        """The rule for one tensor (``monitor.numerics.operators.reductions.vector_norm``) over shards.

        The largest magnitude is gathered, and the squares are added exactly.
        """
        learning = _learning(self.parameters)
        names = tuple(name for name, parameter in learning.items() if parameter.grad is not None)
        shards = [local(each.grad) for each in learning.values() if each.grad is not None]
        session, wire = self.reduction.session, self.reduction.wire
        with session.aside(), torch.no_grad():
            scales = scales_of(wire.to_all(Label("largest", names), largest_of(shards)).amax(0))
            parts = wire.to_all(Label("squares", names), squares_of(shards, scales)).view(wire.ranks, len(names), -1)
            squares = []
            for each in parts.unbind(1):
                held = ExactSum(1)
                held.digits = each[:, :-1].sum(0).unsqueeze(1)
                held.special = functools.reduce(torch.bitwise_or, each[:, -1:].to(torch.uint8).unbind())
                squares.append(held.rounded().reshape(()))
            with numerics.recording("exact"):
                return [torch.sqrt(square) * scale for square, scale in zip(squares, scales, strict=True)]


class _OfOneGroup:
    """Replaces a collective of FSDP2's on one group of parameters."""

    def __init__(self, reduction: Reduction, names: list[str]) -> None:
        self._reduction, self._names = reduction, names

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what is exchanged."""
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_OfOneGroup, AllGather):
    """Has every rank hold the whole parameters while it needs them."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: object, async_op: bool = False) -> None:
        """Give this rank's pieces, and take all ranks'."""
        reduction = self._reduction
        with reduction.session.aside(), torch.no_grad():
            places = functools.partial(reduction.places, self._names)
            label = Label("weight", tuple(self._names), reduction.turn)
            output_tensor.copy_(reduction.wire.to_all(label, input_tensor, places).view(-1))


class _ReduceScatter(_OfOneGroup, ReduceScatter):
    """Adds gradients exactly, each piece where its owner is."""

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
