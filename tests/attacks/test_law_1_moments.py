"""A snapshot is evidence about the moment at which it was taken."""

from __future__ import annotations

from fractions import Fraction
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn

from firmware_sim import FirmwareChip
from inspector.inspection.guards import Settings
from inspector.inspection.judging import inspect
from inspector.inspection.verdict import Outcome
from tests.guards import off

SETTINGS = Settings(samples=3, seed="x", devices=("sse41",))


@pytest.fixture
def stale_preset(make_run):
    return make_run(lie="stale-snapshots", checkpoint_every=1, rate=Fraction(1, 2))


@pytest.fixture
def stale_loop(record_loop):
    """A loop with one wrong operator in step 3, whose chips see the initial memory at every tick and are told so."""
    memories, shown = {}, {}
    attach, tick = FirmwareChip.attach, FirmwareChip.tick

    def watch(chip, memory, run_id, step):
        memories[chip.chip_id] = memory
        return attach(chip, memory, run_id, step)

    def show_the_start(chip, run_id, step, op=0):
        regions = memories[chip.chip_id].regions
        held = [region.tensor.detach().clone() for region in regions]
        start = shown.setdefault(chip.chip_id, held)
        with torch.no_grad():
            for region, value in zip(regions, start, strict=True):
                region.tensor.detach().copy_(value)
            event = tick(chip, run_id, 0, op)
            for region, value in zip(regions, held, strict=True):
                region.tensor.detach().copy_(value)
        return event

    torch.manual_seed(1)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def body(model, optimizer, batch):
        optimizer.zero_grad()
        model(batch).square().sum().backward()
        optimizer.step()

    with mock.patch.object(FirmwareChip, "attach", watch), mock.patch.object(FirmwareChip, "tick", show_the_start):
        batches = [torch.randn(2, 4) for _ in range(5)]
        return record_loop(
            model, optimizer, batches, body, lie="wrong-operator", lie_step=3, checkpoint_every=1, numerics="exact"
        )


@pytest.fixture
def judge(devices):
    return lambda recorded: partial(inspect, [recorded.run], recorded.trust, now=recorded.now, worker=devices.run)


@pytest.mark.parametrize("kind", ["preset", "loop"])
def test_a1_a2_snapshots_that_claim_an_earlier_step_are_rejected(kind, request, judge):
    verdict = judge(request.getfixturevalue(f"stale_{kind}"))(settings=SETTINGS)
    assert verdict.outcome is Outcome.REJECT
    assert any("the snapshot claims step 0, but step" in reason.text for reason in verdict.reasons)


@pytest.mark.parametrize("kind", ["preset", "loop"])
def test_a1_a2_guard_off_they_are_accepted(kind, request, judge):
    recorded = request.getfixturevalue(f"stale_{kind}")
    with off("snapshot moment"):
        assert judge(recorded)(settings=SETTINGS).outcome is Outcome.ACCEPT


def test_honest_snapshots_name_their_moment(make_run, judge):
    assert judge(make_run(rate=Fraction(1)))(settings=SETTINGS).outcome is Outcome.ACCEPT
