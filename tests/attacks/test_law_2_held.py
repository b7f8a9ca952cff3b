"""Law 2 in memory: beside the declared state a chip holds what a step makes, and no hoard."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from firmware_sim.errors import CallerError
from inspector.inspection.guards import Settings
from inspector.inspection.inspection import inspect
from inspector.inspection.verdict import Outcome
from tests.guards import off

SETTINGS = Settings(samples=3, seed="x", devices=("sse41",))
WIDE = 60_000
"""Elements of a result: nine of them are more than a lab may keep."""


@pytest.fixture
def hoard(record_loop):
    """Records a loop that keeps what its steps make, as long as ``keep`` says."""

    def call(keep, **options):
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        held: list[Any] = []

        def body(model, optimizer, batch):
            optimizer.zero_grad()
            wide = batch.sum() * torch.ones(WIDE)
            (model(batch).sum() + wide[0]).backward()
            optimizer.step()
            keep(held, wide)

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return record_loop(model, optimizer, [torch.ones(3, 4)] * 9, body, **options)

    return call


def lying(recorder):
    recorder._run.loop.is_checked = False


def test_a_hoard_shows_in_every_chips_log(hoard, devices):
    recorded = hoard(list.append, prepare=lying)
    verdict = inspect([recorded.run], recorded.trust, SETTINGS, now=recorded.now, worker=devices.run)
    assert verdict.outcome is Outcome.REJECT
    assert {reason.guard for reason in verdict.reasons} == {"meter"}
    assert "bytes of results were held outside the state, but a step may hold only" in verdict.reasons[0].text
    assert len({reason.where["chip"] for reason in verdict.reasons}) == 3
    with off("held results"):
        verdict = inspect([recorded.run], recorded.trust, SETTINGS, now=recorded.now, worker=devices.run)
    assert verdict.outcome is Outcome.ACCEPT


def test_an_honest_recorder_refuses_a_hoard_and_says_what_to_write(hoard):
    with pytest.raises(CallerError, match=r"bytes of results, but a step makes only .* keep numbers"):
        hoard(list.append)


def test_what_only_cycles_hold_is_no_hoard(hoard, devices):
    def cycle(held, wide):
        loop = [wide]
        loop.append(loop)

    recorded = hoard(cycle)
    verdict = inspect([recorded.run], recorded.trust, SETTINGS, now=recorded.now, worker=devices.run)
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons
    assert "bytes of results outside the state" in verdict.reasons[0].text
    assert max(chip["held_bytes"] for chip in verdict.evidence["chips"]) > 0
