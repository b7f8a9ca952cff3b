"""Somebody's own loop over a half-precision model is recorded, replayed and accepted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from inspector.inspection.inspection import verify
from inspector.inspection.verdict import Outcome


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_half_precision_loops_are_recorded_and_replay(
    record_loop: Callable[..., Any], dtype: torch.dtype, optimizer: str
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4)).to(dtype)
    steps: torch.optim.Optimizer = (
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if optimizer == "sgd"
        else torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    )
    batches = [(torch.randn(12, 8).to(dtype), torch.randint(0, 4, (12,))) for _ in range(3)]

    def body(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        optimizer.zero_grad()
        torch.autograd.backward(functional.cross_entropy(model(batch[0]), batch[1]))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    recorded = record_loop(model, steps, batches, body, checkpoint_every=1)
    verdict = verify(recorded.run, recorded.trust, now=recorded.now)
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons
    assert all(parameter.dtype == dtype for parameter in model.parameters())
