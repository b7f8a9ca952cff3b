"""Losses as libraries write them, each in a step of its own: ``autograd.Function``s, masks, penalties, samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["LOSSES", "Loss", "world"]

Loss = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], Tensor]
"""Of the state and the batch; a vector stands for losses by sample."""

_CHUNK = 2


def world(seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The state and the batch that these losses take."""
    generator = torch.Generator().manual_seed(seed)
    state = {
        "weight/h": torch.randn(5, 5, generator=generator),
        "weight/v": torch.randn(7, 5, generator=generator),
        "weight/b": torch.randn(5, generator=generator),
        "optimizer/h/m": torch.randn(5, 5, generator=generator),
        "buffer/codes": torch.zeros(5, 5),
        "buffer/mean": torch.zeros(5),
        "buffer/var": torch.ones(5),
        "buffer/count": torch.zeros((), dtype=torch.int64),
    }
    batch = {
        "x": torch.randn(6, 5, generator=generator),
        "y": torch.randint(7, (6,), generator=generator),
        "mask": torch.tensor([True, True, False, True, False, True]),
        "model": torch.randn(5, 5, generator=generator),
    }
    return state, batch


def _apply(function: Any, *arguments: Tensor) -> Tensor:
    """A function of ``autograd``, which has no types."""
    found: Tensor = function.apply(*arguments)
    return found


class _ChunkedLogProbabilities(torch.autograd.Function):
    """Log-probabilities of labels without all logits at once: chunks of the vocabulary, both ways."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
        top = hidden.new_full((len(hidden),), -1e30)
        total, chosen = hidden.new_zeros(len(hidden)), hidden.new_zeros(len(hidden))
        for start in range(0, len(head), _CHUNK):
            logits = hidden @ head[start : start + _CHUNK].t()
            now = torch.maximum(top, logits.amax(-1))
            total = total * (top - now).exp() + (logits - now[:, None]).exp().sum(-1)
            top = now
            inside = (labels >= start) & (labels < start + logits.shape[1])
            picked = logits.gather(1, (labels - start).clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
            chosen = torch.where(inside, picked, chosen)
        normaliser = top + total.log()
        ctx.save_for_backward(hidden, head, labels, normaliser)
        return chosen - normaliser

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, Tensor, None]:
        (slope,) = slopes
        hidden, head, labels, normaliser = ctx.saved_tensors
        to_hidden, to_head = torch.zeros_like(hidden), torch.empty_like(head)
        for start in range(0, len(head), _CHUNK):
            part = head[start : start + _CHUNK]
            logits = torch.mm(hidden, part.t())
            inside = (labels >= start) & (labels < start + len(part))
            logits.sub_(normaliser[:, None]).exp_().mul_(-slope[:, None])
            logits.scatter_add_(1, (labels - start).clamp(0, len(part) - 1)[:, None], (slope * inside)[:, None])
            to_hidden.addmm_(logits, part)
            torch.mm(logits.t(), hidden, out=to_head[start : start + _CHUNK])
        return to_hidden, to_head, None


class _FusedEntropy(torch.autograd.Function):
    """Cross-entropy that computes its gradients on the way forth and scales them on the way back."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
        loss = hidden.new_zeros(len(hidden))
        to_hidden, to_head = torch.empty_like(hidden), torch.zeros_like(head)
        for start in range(0, len(hidden), _CHUNK):
            rows = slice(start, start + _CHUNK)
            logits = hidden[rows] @ head.t()
            loss[rows] = F.cross_entropy(logits, labels[rows], reduction="none")
            slopes = logits.softmax(-1)
            slopes[torch.arange(len(slopes)), labels[rows]] -= 1
            to_hidden[rows] = slopes @ head
            torch.addmm(to_head, slopes.t(), hidden[rows], out=to_head)
        ctx.save_for_backward(to_hidden, to_head)
        return loss.sum()

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, Tensor, None]:
        to_hidden, to_head = ctx.saved_tensors
        for rows in range(0, len(to_hidden), _CHUNK):
            to_hidden[rows : rows + _CHUNK].mul_(slopes[0])
        return to_hidden, to_head.mul_(slopes[0]), None


class _InPlaceSlopes(torch.autograd.Function):
    """Saves memory: what was saved becomes the gradient, row by row; ``out=`` and in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        saved, out = torch.empty_like(x), torch.empty_like(x)
        torch.tanh(x, out=out)
        torch.mul(out, out, out=saved)
        saved.neg_().add_(1.0)
        ctx.save_for_backward(saved)
        return out

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Tensor:
        saved: Tensor = ctx.saved_tensors[0]
        for row, slope in zip(saved.unbind(0), slopes[0].unbind(0), strict=True):
            row.mul_(slope)
        return saved


class _Through(torch.autograd.Function):
    """Rounds; gradients pass straight, clipped and reversed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.abs() < 1)
        return x.round()

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Tensor:
        (inside,) = ctx.saved_tensors
        return -torch.where(inside, slopes[0].clamp(-0.5, 0.5), torch.zeros_like(slopes[0]))


def _hidden(state: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    return torch.tanh(batch["x"] @ state["weight/h"] + state["weight/b"])


def _logits(state: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    return _hidden(state, batch) @ state["weight/v"].t()


def _index_copies(state: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    rows = _logits(state, batch).sum(1)
    first, second = torch.arange(3), torch.arange(3, 6)
    return -torch.zeros(6).index_copy(0, first, rows[:3]).index_copy(0, second, rows[3:]).mean()


def _index_fills(state: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    hidden = _hidden(state, batch).index_fill(1, torch.tensor([0, 1]), 0.0).index_fill(0, torch.tensor([2]), 0.0)
    return F.cross_entropy(hidden @ state["weight/v"].t(), batch["y"])


def _adaptive(state: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    module = nn.AdaptiveLogSoftmaxWithLoss(5, 7, [2, 4], div_value=2.0)
    for number, parameter in enumerate(module.parameters()):
        parameter.requires_grad_(False).fill_(0.1 * (number + 1))
    loss: Tensor = module(_hidden(state, batch), batch["y"]).loss
    return loss


def _written(state: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    """Slices of one tensor written one after the other, as in loops over time."""
    out = torch.zeros(6, 7)
    for row in range(6):
        out[row] = _hidden(state, {"x": batch["x"][row : row + 1]})[0] @ state["weight/v"].t()
    return F.cross_entropy(out, batch["y"])


def _residual(state: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    """A network that knows physics: derivatives by its inputs, twice, seeded with ones in the shape of outputs."""
    x = batch["x"].clone().requires_grad_()
    out = _logits(state, {"x": x})
    (slope,) = torch.autograd.grad(out, x, torch.ones_like(out), create_graph=True)
    (second,) = torch.autograd.grad(slope[:, :1], x, torch.ones_like(slope[:, :1]), create_graph=True)
    return (slope.square().mean() - second).square().mean()


def _by_sample(state: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(_logits(state, batch), batch["y"], reduction="none")


def _gated(state: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    """Masks of ones in the shape of activations."""
    hidden = _hidden(state, batch)
    mask = torch.ones_like(hidden) * batch["mask"][:, None]
    return F.cross_entropy((hidden * mask) @ state["weight/v"].t(), batch["y"])


def _hooked(state: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    hidden = _hidden(state, batch)
    hook: Any = hidden.register_hook
    hook(lambda g: torch.where(g.isfinite(), g, 0.0) * (1.0 / (g.norm() + 1e-6)).clamp(max=1.0))
    return F.cross_entropy(hidden @ state["weight/v"].t(), batch["y"])


def _normalised(state: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    mean, var = state["buffer/mean"], state["buffer/var"]
    state["buffer/count"].add_(1)
    hidden = F.batch_norm(_hidden(state, batch), mean, var, training=True)
    return F.cross_entropy(hidden @ state["weight/v"].t(), batch["y"])


def _second_order(state: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    """A step within the step, and the loss behind it."""
    loss = F.cross_entropy(_logits(state, batch), batch["y"])
    (slope,) = torch.autograd.grad(loss, state["weight/h"], create_graph=True)
    moved = {**state, "weight/h": state["weight/h"] - 0.1 * slope}
    return F.cross_entropy(_logits(moved, batch), batch["y"].flip(0))


LOSSES: Mapping[str, Loss] = {
    "two index_copy": _index_copies,
    "two index_fill": _index_fills,
    "xlogy": lambda s, b: torch.xlogy(_logits(s, b).softmax(1), _logits(s, b).softmax(1)).sum(1).mean(),
    "AdaptiveLogSoftmaxWithLoss": _adaptive,
    "slices written in a loop": _written,
    "chunked log-probabilities": lambda s, b: (
        -(_apply(_ChunkedLogProbabilities, _hidden(s, b), s["weight/v"], b["y"]) * b["mask"]).sum() / b["mask"].sum()
    ),
    "gradients on the way forth": lambda s, b: _apply(_FusedEntropy, _hidden(s, b), s["weight/v"], b["y"]) / 6,
    "gradients in place of what was saved": lambda s, b: _apply(_InPlaceSlopes, _logits(s, b)).square().mean(),
    "straight through": lambda s, b: F.cross_entropy(_apply(_Through, _logits(s, b) * 3), b["y"]),
    "scattered": lambda s, b: torch.zeros(6, 9).scatter(1, b["y"][:, None], _logits(s, b)[:, :1]).square().mean(),
    "chosen": lambda s, b: torch.where(b["mask"][:, None], _logits(s, b), b["x"].sum()).logsumexp(1).mean(),
    "masked twice": lambda s, b: (
        _logits(s, b).masked_fill(b["mask"][:, None], -1e4).masked_fill(~b["mask"][:, None], 0.0).logsumexp(1).mean()
    ),
    "selected by a mask": lambda s, b: F.cross_entropy(_logits(s, b)[b["mask"]], b["y"][b["mask"]]),
    "written by a mask": lambda s, b: torch.zeros(6, 7).index_put((b["mask"],), _logits(s, b)[b["mask"]]).exp().mean(),
    "derivatives by inputs": _residual,
    "losses by sample": _by_sample,
    "ones as a mask": _gated,
    "hooks on gradients": _hooked,
    "a batch norm": _normalised,
    "gradients of gradients": _second_order,
    "computed again": lambda s, b: F.cross_entropy(
        checkpoint(lambda x: _hidden(s, {"x": x}), b["x"], use_reentrant=False) @ s["weight/v"].t(), b["y"]
    ),
    "gradients by sample": lambda s, b: (
        torch.func.vmap(
            torch.func.grad(lambda h, x, y: F.cross_entropy((torch.tanh(h) @ x)[None], y[None])), (None, 0, 0)
        )(s["weight/h"], b["x"], b["y"] % 5)
        .square()
        .mean()
    ),
}
