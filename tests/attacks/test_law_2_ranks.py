"""Law 2 in a job of many processes: what a rank runs between steps on its part of the state counts.

Row A45: between steps a rank trains another model in its own parameters, and puts the bits back.
"""

from __future__ import annotations

import gc
from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from analysis.examples.train_on_two_processes import batches, gpt_job, judge
from firmware_sim.errors import CallerError
from inspector import Outcome, Trust
from monitor import RunFolder
from monitor.distributed.launcher import launch
from monitor.distributed.recorder import DistributedRecorder
from tests.guards import off
from tests.monitor.distributed.straying_rank import hide


def train(run, between):
    """A job of one rank, whose loop does something between its steps; returns the verdict."""
    recorder = DistributedRecorder(gpt_job(2, layers=1, width=6), layout="alone", out=run, seed=1)
    for batch in batches(4, 2):
        recorder.step(batch)
        with torch.no_grad():
            between(list(recorder.rank.parameters.values()))
    recorder.finish()
    return judge(run)


def logs(weights):
    """What an honest loop logs."""
    return [float(weight.norm()) for weight in weights]


def test_a45_a_rank_that_trains_between_steps_is_refused(tmp_path):
    with pytest.raises(CallerError, match=r"all ranks together ran .* on the state between two steps"):
        train(tmp_path / "run", hide)


@pytest.mark.parametrize("evaluations", [2, 4])
def test_a35_evaluations_open_no_interval_of_their_own(tmp_path, evaluations):
    """Each would have its allowance, and a job could hide as many steps as it takes trivial evaluations."""
    run = tmp_path / "run"
    recorder = DistributedRecorder(gpt_job(2, layers=1, width=6), layout="alone", out=run, seed=1, beside=1)
    allowed = RunFolder(run, Trust.load([run.with_name("run.trust.json")], [run]).labs["lab-1"]).declared.allowance
    weight = max(recorder.rank.parameters.values(), key=torch.Tensor.numel).detach()
    first, second = batches(2, 2)
    recorder.step(first)
    with pytest.raises(CallerError, match="on the state between two steps") if evaluations > 2 else nullcontext():
        for _ in range(evaluations):
            recorder.evaluation(first)
            for _ in range(allowed.moved // (3 * 2 * weight.nbytes)):
                weight.clone()
        recorder.step(second)


def test_a45_nor_may_one_of_two_ranks(tmp_path):
    with pytest.raises(CallerError, match=r"all ranks together ran .* on the state between two steps"):
        launch("tests.monitor.distributed.straying_rank", 2, {"run": str(tmp_path / "run"), "hides": [1, 2]})


def test_a45_guard_off_it_is_accepted(tmp_path):
    with off("ranks between steps"):
        assert train(tmp_path / "run", hide).outcome is Outcome.ACCEPT


def test_norms_that_a_rank_logs_are_told(tmp_path):
    verdict = train(tmp_path / "run", logs)
    assert verdict.outcome is not Outcome.REJECT, verdict.reasons
    [run] = verdict.evidence["runs"]
    assert run["execution"]["beside_programs"]["calls"] > 0


def test_who_is_let_go_of_leaves_the_modes_to_the_next(tmp_path):
    """Nothing is taken off them while somebody walks over them."""
    before = _get_current_dispatch_mode_stack()
    for name in ("one", "two", "three"):
        recorder = DistributedRecorder(gpt_job(2, layers=1, width=6), layout="alone", out=tmp_path / name, seed=1)
        recorder.step(next(iter(batches(4, 2))))
        assert len(_get_current_dispatch_mode_stack()) == len(before) + 1
        del recorder
        gc.collect()
        assert len(_get_current_dispatch_mode_stack()) == len(before) + 1
