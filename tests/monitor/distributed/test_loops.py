"""Loops of many processes: schedules, evaluations and half precision as in one, and lines where ranks part ways."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from analysis.cli import main
from inspector import Outcome, Settings, Trust, inspect
from monitor import RunFolder
from monitor.distributed.launcher import launch
from tests.monitor.distributed.loop_ranks import CASES, MODULE, STEPS, train

pytestmark = pytest.mark.usefixtures("kept_devices")


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """Where two processes, started once, have recorded all loops."""
    folder = tmp_path_factory.mktemp("together")
    launch(MODULE, 2, {"folder": str(folder)})
    return folder


def trust_of(run):
    return Trust.load([run.with_name(f"{run.name}.trust.json")], [run])


def judge(run):
    """An inspection on two devices that differ."""
    settings = Settings(samples=4, seed=None, devices=("sse41", "mkl-compatible"))
    return inspect([run], trust_of(run), settings, now=datetime.now(UTC))


def leaves(run):
    folder = RunFolder(run, trust_of(run).labs["lab-1"])
    return [folder.leaf(step) for step in range(folder.committed + 1)]


def no_rank_departed(run):
    return main(["ranks", str(run), "--trust", str(run.with_name(f"{run.name}.trust.json"))]) == 0


@pytest.mark.parametrize(("name", "skipped"), [("cosine", 0), ("scaled", 1)])
def test_c26_two_processes_leave_the_run_of_one(tmp_path, together, name, skipped):
    """Rates of two groups by a schedule, evaluations, BF16 or a scaler that skips; one of them after a resume."""
    train(name, "alone", tmp_path / name)
    assert leaves(together / name) == leaves(tmp_path / name)
    assert no_rank_departed(together / name)
    verdict = judge(together / name)
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons
    kinds = [leaf.execution.kind for leaf in leaves(together / name)[1:]]
    assert kinds.count("evaluation") == STEPS // 2
    assert all(
        leaf.execution.hyper == ({}, {}) for leaf in leaves(together / name)[1:] if leaf.execution.kind != "step"
    )
    rates = {str(leaf.execution.hyper) for leaf in leaves(together / name)[1:] if leaf.execution.kind == "step"}
    assert len(rates) == STEPS


def test_c26_a_schedule_that_the_loop_takes_further_between_steps(together):
    assert no_rank_departed(together / "by-hand")
    verdict = judge(together / "by-hand")
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons
    assert "lr of group 1 (declared 0.005) from 0.005 to 0.0025" in verdict.reasons[0].text


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("ends", "rank 1 calls finish(), but rank 0 takes step 2; every rank has to create the same job, get the same"),
        ("less", "rank 1 takes step 2 with batch float32[2, 4]"),
        (
            "rates",
            "rank 1 takes step 2 with lr of group 1 0.5, but rank 0 with 0.005; every rank has to create the same job",
        ),
        ("joins", "Join lets ranks take part without a batch"),
        ("fails", "rank 1 failed: ValueError: the loss of rank 1; rank 0 takes step 2"),
    ],
)
def test_ranks_that_part_ways_end_that_step_with_one_line(together, what, line):
    for rank in (0,) if what == "fails" else (0, 1):
        lines = json.loads((together / f"lines-{rank}.json").read_text())
        assert lines[what].startswith(line), lines[what]
        assert "\n" not in lines[what]
    assert set(CASES) == set(json.loads((together / "lines-0.json").read_text()))
