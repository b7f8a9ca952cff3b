"""Declared micro-batches: one exact sum, one rounding, keys by part; undeclared, nothing changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from firmware_sim.errors import CallerError
from monitor import Recorder, numerics
from monitor.programs.keys import RecordedKeys, RepeatedKeys, step_seed
from monitor.recording.micro_batches import micro_batch, micro_batches


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(3, 2), nn.Linear(2, 2)

    def forward(self, x):
        return self.used(x)


def test_a_loop_over_parts_is_recorded_and_repeated(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.3), nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    recorder = Recorder(model, optimizer, out=tmp_path / "run", chips=1, check_writes="every")
    for _ in range(3):
        batch = {"x": torch.randn(8, 5), "y": torch.randint(0, 3, (8,))}
        with recorder.step(batch) as step:
            losses = []
            for part in step.micro_batches(4):
                losses.append(functional.cross_entropy(model(part["x"]), part["y"], reduction="sum") / 8)
                losses[-1].backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            step.commit(torch.stack(losses).detach().sum())
    recorder.finish()  # repeats every step from its program, dropout included


def test_the_sum_is_exact_and_does_not_know_the_order():
    weight = nn.Parameter(torch.zeros(1))
    scales = torch.tensor([1.0, 2.0**-24, 2.0**-24, 2.0**-30])
    results = []
    for order in ([0, 1, 2, 3], [3, 2, 1, 0]):
        keys = RecordedKeys(1, 1)
        with numerics.recording("exact", keys=keys):
            for part in micro_batches(scales[order], 4, {"weight": weight}, keys):
                (weight * part).sum().backward()
        assert weight.grad is not None
        results.append(weight.grad.clone())
    assert torch.equal(*results)
    assert float(results[0]) == 1.0 + 2.0**-23  # one after another, each half of the last place would be lost


def test_keys_come_from_step_and_part_and_replays_find_them():
    seed, step = 3, 5
    keys, taken = RecordedKeys(seed, step), {}
    random = torch.get_rng_state()
    torch.default_generator.manual_seed(step_seed(seed, step))
    for part in (2, 0, 1):
        with keys.stream(part + 1):
            taken[part] = [keys(), keys()]
    own, draws = keys(), keys.take()
    torch.set_rng_state(random)
    repeated = RepeatedKeys(seed, step)
    repeated.expect(draws)
    assert [repeated() for _ in draws] == [*taken[2], *taken[0], *taken[1], own]
    alone = RecordedKeys(seed, step)
    with alone.stream(1):
        assert [alone(), alone()] == taken[0]


def test_what_cannot_be_cut_or_summed_is_refused(tmp_path):
    with pytest.raises(CallerError, match="7 samples cannot be cut into 2 equal"):
        micro_batch((torch.zeros(7),), 0, 2)
    assert torch.equal(micro_batch([torch.arange(4), torch.tensor(1)], 1, 2)[0], torch.tensor([2, 3]))
    model = Frozen()
    recorder = Recorder(model, torch.optim.SGD(model.parameters()), out=tmp_path / "run", chips=1)

    def body(step):
        with step:
            for part in step.micro_batches(2):
                model(part).sum().backward()

    step = recorder.step(torch.ones(4, 3))
    with pytest.raises(CallerError, match=r"micro-batch 0 gives unused\.weight no gradient"):
        body(step)
    with pytest.raises(CallerError, match="inside the with statement"):
        next(step.micro_batches(2))
