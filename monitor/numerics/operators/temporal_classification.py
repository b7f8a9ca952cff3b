"""Connectionist temporal classification (Graves et al. 2006), in logarithms.

Each state's logarithm is m + log(e^(a−m) + e^(b−m) + e^(c−m)) over what leads to it, in the order stay, next, skip,
with m their maximum; the sum over the states of one class is exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from monitor.numerics.backend import Backend

__all__ = ["ctc", "ctc_backward"]

Lengths = Tensor | Sequence[int]


class _Lattice:
    """The extended labels of each sample, blanks between and around: 2 S + 1 states.

    Attributes:
        scores: (n, t, states) logarithm of each state's label.
        labels: (n, states).
        jumps: (n, states): whether a state may follow the one before the last.
    """

    def __init__(
        self, log_probs: Tensor, targets: Tensor, input_lengths: Lengths, target_lengths: Lengths, blank: int
    ) -> None:
        place = log_probs.device
        self.inputs = torch.as_tensor(input_lengths).to(place, torch.int64)
        self.targets = torch.as_tensor(target_lengths).to(place, torch.int64)
        n, most = log_probs.shape[1], int(self.targets.max()) if len(self.targets) else 0
        labels = torch.full((n, 2 * most + 1), blank, dtype=torch.int64, device=place)
        if most:
            if targets.dim() == 1:
                begins = self.targets.cumsum(0) - self.targets
                where = (begins[:, None] + torch.arange(most, device=place)).clamp(max=max(len(targets) - 1, 0))
                taken = targets.to(place)[where]
            else:
                taken = targets.to(place)[:, :most]
            inside = torch.arange(most, device=place) < self.targets[:, None]
            labels[:, 1::2] = torch.where(inside, taken.long(), blank)
        self.labels = labels
        self.states = torch.arange(labels.shape[1], device=place)
        self.exists = self.states < 2 * self.targets[:, None] + 1
        self.jumps = torch.zeros_like(self.exists)
        self.jumps[:, 2:] = (labels[:, 2:] != blank) & (labels[:, 2:] != labels[:, :-2])
        moved = log_probs.transpose(0, 1)
        self.scores = moved.gather(2, labels[:, None].expand(-1, moved.shape[1], -1))


def _shifted(x: Tensor, by: int) -> Tensor:
    """Along the states, with −∞ from outside."""
    out = torch.full_like(x, -torch.inf)
    if by > 0:
        out[:, by:] = x[:, :-by]
    else:
        out[:, :by] = x[:, -by:]
    return out


def _log_sum(backend: Backend, *terms: Tensor) -> Tensor:
    top = terms[0]
    for term in terms[1:]:
        top = torch.maximum(top, term)
    base = torch.where(torch.isneginf(top), torch.zeros_like(top), top)
    total = backend.unary("exp", terms[0] - base)
    for term in terms[1:]:
        total = total + backend.unary("exp", term - base)
    return base + backend.unary("log", total)


def _forward(backend: Backend, lattice: _Lattice) -> Tensor:
    """(n, t, states) logarithm of the paths that reach a state."""
    scores = lattice.scores
    none = torch.full_like(scores[:, 0], -torch.inf)
    alpha = [torch.where((lattice.states < 2) & lattice.exists, scores[:, 0], none)]
    for t in range(1, scores.shape[1]):
        last = alpha[-1]
        skipped = torch.where(lattice.jumps, _shifted(last, 2), none)
        reached = _log_sum(backend, last, _shifted(last, 1), skipped) + scores[:, t]
        alpha.append(torch.where(lattice.exists & (t < lattice.inputs)[:, None], reached, none))
    return torch.stack(alpha, 1)


def _backward(backend: Backend, lattice: _Lattice) -> Tensor:
    """(n, t, states) logarithm of the paths that go on from a state, its own label included."""
    scores = lattice.scores
    none = torch.full_like(scores[:, 0], -torch.inf)
    end = 2 * lattice.targets[:, None]
    ends = lattice.exists & (lattice.states >= end - 1)
    beta = [none]
    for t in reversed(range(scores.shape[1])):
        following = beta[-1]
        may = torch.zeros_like(lattice.jumps)
        may[:, :-2] = lattice.jumps[:, 2:]
        skipped = torch.where(may, _shifted(following, -2), none)
        reached = _log_sum(backend, following, _shifted(following, -1), skipped) + scores[:, t]
        is_last = (lattice.inputs == t + 1)[:, None]
        value = torch.where(is_last, torch.where(ends, scores[:, t], none), reached)
        beta.append(torch.where(lattice.exists & (t < lattice.inputs)[:, None], value, none))
    return torch.stack(beta[:0:-1], 1)


def ctc(
    backend: Backend,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Lengths,
    target_lengths: Lengths,
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[Tensor, Tensor]:
    """Negative logarithm of each sample's likelihood (n,), and the forward variables (n, t, states)."""
    lattice = _Lattice(log_probs, targets, input_lengths, target_lengths, blank)
    alpha = _forward(backend, lattice)
    rows = torch.arange(len(alpha), device=alpha.device)
    last = alpha[rows, (lattice.inputs - 1).clamp(min=0)]
    end = 2 * lattice.targets
    blanks = last[rows, end]
    labels = torch.where(end > 0, last[rows, (end - 1).clamp(min=0)], torch.full_like(blanks, -torch.inf))
    return -_log_sum(backend, blanks, labels), alpha


def ctc_backward(
    backend: Backend,
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Lengths,
    target_lengths: Lengths,
    neg_log_likelihood: Tensor,
    log_alpha: Tensor,
    blank: int,
    zero_infinity: bool = False,
) -> Tensor:
    """Equation 16 of the paper: (e^score − e^(log Σ αβ + loss − score)) for each class, times the sample's gradient."""
    lattice = _Lattice(log_probs, targets, input_lengths, target_lengths, blank)
    both = log_alpha + _backward(backend, lattice)
    n, steps = both.shape[:2]
    classes = log_probs.shape[2]
    top = both.amax(2, keepdim=True)
    base = torch.where(torch.isneginf(top), torch.zeros_like(top), top)
    row = torch.arange(n * steps, device=both.device).reshape(n, steps, 1) * classes
    target = (row + lattice.labels[:, None]).reshape(-1)
    share = backend.unary("exp", both - base).reshape(-1, 1)
    mass = backend.scatter_rows(n * steps * classes, target, share).reshape(n, steps, classes)
    scores = log_probs.transpose(0, 1)
    log_mass = backend.unary("log", mass) + base
    loss = neg_log_likelihood[:, None, None]
    seen = backend.unary("exp", torch.where(mass == 0, torch.full_like(mass, -torch.inf), log_mass + loss - scores))
    slope = (backend.unary("exp", scores) - seen) * grad[:, None, None]
    inside = (torch.arange(steps, device=both.device) < lattice.inputs[:, None])[..., None]
    if zero_infinity:
        inside = inside & ~torch.isposinf(loss)
    return torch.where(inside, slope, torch.zeros_like(slope)).transpose(0, 1).contiguous()
