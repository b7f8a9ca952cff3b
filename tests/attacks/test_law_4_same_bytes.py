"""What is replayed, what was verified and what the verdict names are the same bytes."""

from __future__ import annotations

import pytest

from inspector.guards import Settings
from inspector.session import inspect
from inspector.verdict import Outcome
from tests.guards import off

SETTINGS = Settings(samples=3, seed="x", devices=("sse41",))


@pytest.fixture
def swapping(make_run, devices, tmp_path):
    """A run that trains with twice its declared rate, and a worker before whose start the lab swaps folders.

    The other folder, signed by the same lab, declares the rate that was really used, and so replays as committed.
    """
    cheat = make_run("cheat", lie="other-learning-rate", lie_step=1, learning_rate=0.01)
    clean = make_run("clean", learning_rate=0.02)

    def swap_and_work(name, job):
        if clean.run.exists():
            cheat.run.rename(tmp_path / "hidden")
            clean.run.rename(cheat.run)
        return devices.run(name, job)

    return cheat, swap_and_work


def test_a3_a_folder_that_is_swapped_during_the_inspection_is_rejected(swapping):
    recorded, worker = swapping
    verdict = inspect([recorded.run], recorded.trust, SETTINGS, now=recorded.now, worker=worker)
    assert verdict.outcome is Outcome.REJECT
    assert "cheat holds another run than the one that was verified" in verdict.reasons[0].text


def test_a3_guard_off_the_clean_folder_is_replayed_for_the_cheat(swapping):
    recorded, worker = swapping
    with off("verified manifest"):
        verdict = inspect([recorded.run], recorded.trust, SETTINGS, now=recorded.now, worker=worker)
    assert verdict.outcome is Outcome.ACCEPT


def test_the_cheat_is_rejected_without_a_swap(make_run, devices):
    recorded = make_run(lie="other-learning-rate", lie_step=1, learning_rate=0.01)
    verdict = inspect([recorded.run], recorded.trust, SETTINGS, now=recorded.now, worker=devices.run)
    assert verdict.outcome is Outcome.REJECT
