"""Mixed precision as loops have it: autocast, gradient scalers, FP32 masters of half-precision weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from inspector.inspection.verdict import Outcome
from tests.monitor.recording.whole_loops import plain, record


def pairs(steps=3):
    return [(torch.randn(4, 6), torch.randint(0, 3, (4,))) for _ in range(steps)]


def perceptron():
    return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.GELU(), nn.Linear(5, 3))


def scaled(dtype, overflow=2, **options):
    """Autocast with a gradient scaler; in one step the gradients overflow, and the update is passed over."""

    def loop(make):
        model, scaler = perceptron(), torch.amp.GradScaler("cpu", **options)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        recorder = make(model, optimizer, state=[scaler])
        for number, (x, y) in enumerate(pairs(4)):
            x = x * 1e30 if number == overflow else x
            with recorder.step((x, y)) as step:
                with torch.autocast("cpu", dtype=dtype):
                    loss = functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                step.commit(loss)
        model.scale = nn.Buffer(scaler._scale.detach().clone())
        return model

    return loop


def narrowed(make):
    """Autocast around a step, off in a block of it, and with a weight's cast that is taken twice."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    recorder = make(model, optimizer)
    for x, y in pairs():
        with torch.autocast("cpu", dtype=torch.bfloat16), recorder.step((x, y)) as step:
            with torch.autocast("cpu", enabled=False):
                first = model(x)
            loss = functional.cross_entropy(first + model(x) + model(x * 2), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step.commit(loss)
    return model


def masters(arrangement, dtype=torch.bfloat16):
    """FP32 masters learn from the gradients of working copies, which are cast from them after each update."""

    def loop(make):
        model = perceptron()
        work = copy.deepcopy(model).to(dtype)
        groups = [nn.Parameter(each.detach().clone()) for each in model.parameters()]
        options = {}
        if arrangement == "in the optimizer":
            held = work
        elif arrangement == "in the model":
            held, groups = nn.ModuleDict({"master": model, "work": work}), list(model.parameters())
        else:
            held, groups, options = model, list(model.parameters()), {"state": {"work": work}}
        optimizer = torch.optim.AdamW([{"params": groups[:1]}, {"params": groups[1:], "weight_decay": 0.0}], 1e-2)
        recorder = make(held, optimizer, **options)
        for x, y in pairs():
            with recorder.step((x, y)) as step:
                loss = functional.cross_entropy(work(x.to(dtype)).float(), y)
                loss.backward()
                for master, each in zip(groups, work.parameters(), strict=True):
                    master.grad, each.grad = each.grad.float(), None
                nn.utils.clip_grad_norm_(groups, 1.0)
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    for master, each in zip(groups, work.parameters(), strict=True):
                        each.copy_(master)
                step.commit(loss)
        return held

    return loop


LOOPS = {
    "autocast": narrowed,
    "scaler": scaled(torch.float16, init_scale=1024.0, growth_interval=1),
    **{f"masters {where}": masters(where) for where in ("in the optimizer", "in the model", "beside the work")},
}


@pytest.mark.parametrize("numerics", ["exact", "rounded"])
@pytest.mark.parametrize("name", LOOPS)
def test_loop_is_accepted(tmp_path, devices, name, numerics):
    native = plain(LOOPS[name])
    model, verdict = record(LOOPS[name], tmp_path / "run", devices, numerics=numerics)
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, native[key], rtol=2e-2, atol=2e-3)
