"""A job that PyTorch's own launcher starts records the run of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from analysis.examples import train_on_two_processes
from analysis.examples.train_on_two_processes import batches, gpt_job, judge
from inspector import Outcome, Trust
from monitor import RunFolder
from monitor.distributed.attribution import departures
from monitor.distributed.recorder import DistributedRecorder

ROOT = Path(__file__).resolve().parents[3]
LOOP = """
import sys

import torch.distributed as dist

from analysis.examples.train_on_two_processes import batches, gpt_job
from monitor.distributed.recorder import DistributedRecorder

dist.init_process_group("gloo")
recorder = DistributedRecorder(gpt_job(2, layers=1), layout="fsdp2", out=sys.argv[1], seed=1)
for batch in batches(3, 2):
    recorder.step(batch)
recorder.finish()
dist.destroy_process_group()
"""


def torchrun(script: Path, argument: Path) -> subprocess.CompletedProcess[str]:
    """Start a script in two processes that meet on the loopback interface, at a free port."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    return subprocess.run(
        [*launcher, "--nproc-per-node", "2", str(script), str(argument)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_the_documented_lines_under_torchrun_leave_the_run_of_one_process(tmp_path, kept_devices):
    (tmp_path / "loop.py").write_text(LOOP)
    run = tmp_path / "run"
    ended = torchrun(tmp_path / "loop.py", run)
    assert ended.returncode == 0, ended.stderr
    recorder = DistributedRecorder(gpt_job(2, layers=1), layout="alone", out=tmp_path / "alone", seed=1)
    for batch in batches(3, 2):
        recorder.step(batch)
    recorder.finish()
    lab = Trust.load([tmp_path / "run.trust.json"], [run]).labs["lab-1"]
    one, two = (RunFolder(tmp_path / name, lab) for name in ("alone", "run"))
    assert [two.leaf(step) for step in range(4)] == [one.leaf(step) for step in range(4)]
    assert judge(run).outcome is Outcome.ACCEPT
    assert departures(two, lab) == []
    assert len(list((tmp_path / "run.ranks").glob("00000001-*.json"))) == 2


@pytest.mark.slow
def test_the_example_runs_under_torchrun_as_it_stands(tmp_path):
    ended = torchrun(Path(train_on_two_processes.__file__), tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == "ACCEPT"
