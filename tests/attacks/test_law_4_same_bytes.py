"""What is replayed, what was verified and what the verdict names are the same bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from inspector.inspection.guards import Settings
from inspector.inspection.inspection import inspect
from inspector.inspection.verdict import Outcome
from monitor.lab.simulated_lab import simulated_secret
from tests.guards import off

SETTINGS = Settings(samples=3, seed="x", devices=("sse41",))
DECLARED, USED = 5, 6


def body(model, optimizer, batch):
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()


@pytest.fixture
def dropout(record_loop, monkeypatch):
    """A function that records a loop with dropout, by a lab whose keys and chips are always the same."""

    def record(name, seed, used):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.5), nn.Linear(12, 2))
        batches = [torch.randn(4, 6, generator=torch.Generator().manual_seed(step)) for step in range(6)]
        monkeypatch.setattr("monitor.recording.recorder.lab_salt", lambda *_: bytes(32))  # a lab chooses its own

        def other_masks(recorder):
            told, sign = recorder._run.declared, recorder._run.inspectorate.sign
            recorder._run.declared = replace(told, seed=used)
            recorder._run.inspectorate.sign = lambda _, *programs, **options: sign(told, *programs, **options)

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        secret = simulated_secret(DECLARED)
        return record_loop(model, optimizer, batches, body, name=name, seed=seed, secret=secret, prepare=other_masks)

    return record


@pytest.fixture
def swapping(dropout, devices, tmp_path):
    """A run with other masks than its declared seed gives, and a worker before whose start the lab swaps folders.

    The other folder, signed by the same lab, declares the seed that was really used, and so replays as committed.
    """
    cheat, clean = dropout("cheat", DECLARED, USED), dropout("clean", USED, USED)

    def swap_and_work(name, job):
        if clean.run.exists():
            cheat.run.rename(tmp_path / "hidden")
            clean.run.rename(cheat.run)
        return devices.run(name, job)

    return cheat, swap_and_work


def test_a3_a_folder_that_is_swapped_during_the_inspection_is_noticed(swapping):
    recorded, worker = swapping
    verdict = inspect([recorded.run], recorded.trust, SETTINGS, now=recorded.now, worker=worker)
    assert verdict.outcome is Outcome.INCONCLUSIVE  # who renames folders on the inspector's disk, nobody can tell
    assert "cheat has changed since it was verified" in verdict.reasons[0].text


def test_a3_guard_off_the_clean_folder_is_replayed_for_the_cheat(swapping):
    recorded, worker = swapping
    with off("verified manifest"):
        verdict = inspect([recorded.run], recorded.trust, SETTINGS, now=recorded.now, worker=worker)
    assert verdict.outcome is Outcome.ACCEPT


def test_the_cheat_is_rejected_without_a_swap(dropout, devices):
    recorded = dropout("cheat", DECLARED, USED)
    verdict = inspect([recorded.run], recorded.trust, SETTINGS, now=recorded.now, worker=devices.run)
    assert verdict.outcome is Outcome.REJECT
