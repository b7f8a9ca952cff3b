"""Optimizers that hold others, or that need a closure: recorded and replayed, and said to be unknown arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from firmware_sim.errors import CallerError
from inspector.inspection.inspection import verify
from inspector.inspection.verdict import Outcome
from monitor import Recorder
from monitor.loops.optimizers import one_optimizer, trial_copy


class Sharp(torch.optim.Optimizer):
    """Sharpness-aware: climbs, has another backward pass, and lets the optimizer that it holds step."""

    def __init__(self, params, base, **defaults):
        super().__init__(params, {"rho": 0.05, **defaults})
        self.base = base(self.param_groups, **defaults)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def climb(self):
        for group in self.param_groups:
            for each in group["params"]:
                self.state[each]["old"] = each.clone()
                each.add_(each.grad, alpha=group["rho"])
                each.grad = None

    @torch.no_grad()
    def step(self, closure):  # type: ignore[override]  # it needs its closure
        with torch.enable_grad():
            closure()
        self.climb()
        with torch.enable_grad():
            closure()
        for group in self.param_groups:
            for each in group["params"]:
                each.copy_(self.state[each]["old"])
        self.base.step()


class Ahead(torch.optim.Optimizer):
    """Lookahead: each second step weights go half the way from where they were."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner, self.param_groups, self.count = inner, inner.param_groups, 0

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step()
        self.count += 1
        for group in self.param_groups:
            for each in group["params"]:
                kept = self.state[each]
                if "slow" not in kept:
                    kept["slow"] = each.clone()
                elif not self.count % 2:
                    each.copy_(kept["slow"].lerp_(each, 0.5))


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))


def pairs(steps):
    torch.manual_seed(1)
    return [(torch.randn(6, 8), torch.randint(0, 4, (6,))) for _ in range(steps)]


def stepped(model, optimizer, batch):
    def closure():
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        return loss

    if not isinstance(optimizer, Sharp | torch.optim.LBFGS):
        closure()
        return optimizer.step()
    return optimizer.step(closure)


MADE = {
    "Sharp": lambda params: Sharp(params, torch.optim.SGD, lr=0.1, momentum=0.9),
    "Ahead": lambda params: Ahead(torch.optim.AdamW(params, lr=0.01)),
    "LBFGS": lambda params: torch.optim.LBFGS(params, lr=0.5, max_iter=3),
}


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.filterwarnings("ignore:a loop .* leaves")
def test_it_trains_as_without_a_recorder_and_its_arithmetic_alone_is_in_doubt(record_loop, kind):
    plain = model_of()
    optimizer = MADE[kind](plain.parameters())
    for batch in pairs(4):
        stepped(plain, optimizer, batch)
    model = model_of()
    recorded = record_loop(model, MADE[kind](model.parameters()), pairs(4), stepped, checkpoint_every=2)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    verdict = verify(recorded.run, recorded.trust, now=recorded.now)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert any(f"the arithmetic of optimizer '{__name__}.{kind}'" in each.text for each in verdict.reasons) or (
        kind == "LBFGS"
    )
    assert not [each for each in verdict.reasons if each.guard == "replay"]


def test_state_of_the_inner_optimizer_is_the_runs_and_resumes(tmp_path):
    def made():
        model = model_of()
        return model, MADE["Sharp"](model.parameters())

    def run(recorder, model, optimizer, batches):
        for batch in batches:
            with recorder.step(batch):
                stepped(model, optimizer, batch)

    model, optimizer = made()
    whole = Recorder(model, optimizer, out=tmp_path / "whole", seed=5)
    run(whole, model, optimizer, pairs(4))
    model, optimizer = made()
    recorder = Recorder(model, optimizer, out=tmp_path / "run", seed=5)
    run(recorder, model, optimizer, pairs(4)[:2])
    with pytest.raises(ZeroDivisionError), recorder.step(pairs(4)[2]):
        raise ZeroDivisionError
    model, optimizer = made()
    recorder = Recorder.resume(model, optimizer, out=tmp_path / "run")
    assert all("momentum_buffer" in optimizer.base.state[each] for each in model.parameters())
    run(recorder, model, optimizer, pairs(4)[2:])
    assert recorder.finish() == whole.finish()


def test_what_an_optimizer_keeps_in_lists_is_not_in_a_checkpoint(tmp_path):
    model = model_of()
    optimizer = MADE["LBFGS"](model.parameters())
    recorder = Recorder(model, optimizer, out=tmp_path / "run", seed=5)
    for batch in pairs(2):
        with recorder.step(batch):
            stepped(model, optimizer, batch)
    with pytest.raises(ZeroDivisionError), recorder.step(pairs(1)[0]):
        raise ZeroDivisionError
    model = model_of()
    with pytest.raises(CallerError, match=r"the optimizer keeps .* outside tensors, so no checkpoint holds it"):
        Recorder.resume(model, MADE["LBFGS"](model.parameters()), out=tmp_path / "run")


def test_a_trial_copy_holds_copies_of_what_its_original_holds():
    model = model_of()
    optimizer = one_optimizer(MADE["Sharp"](model.parameters()))
    twin: Any = trial_copy(optimizer)
    (_, outer), (place, inner) = twin.members
    assert (place, outer.base) == ("base.", inner)
    assert outer.param_groups is inner.param_groups
    assert not {id(each) for each in model.parameters()} & {
        id(each) for group in inner.param_groups for each in group["params"]
    }
