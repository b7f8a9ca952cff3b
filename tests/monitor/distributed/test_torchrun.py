"""A job that PyTorch's own launcher starts records the run of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from analysis.examples import train_on_two_processes

ROOT = Path(__file__).resolve().parents[3]


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


def test_the_example_runs_under_torchrun_as_it_stands(tmp_path):
    ended = torchrun(Path(train_on_two_processes.__file__), tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == "ACCEPT"
