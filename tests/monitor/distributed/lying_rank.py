"""Ranks of small jobs, one after another, in each of which a rank may lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from analysis.examples.train_on_two_processes import STEPS, batches, gpt_job
from monitor.distributed.launcher import arguments, join
from monitor.distributed.recorder import DistributedRecorder


def main(given: dict[str, Any]) -> None:
    """Train each run to its end; one that is there goes on."""
    job = gpt_job(2, layers=1, width=6)
    with join():
        for name, layout, lie in given["runs"]:
            run = Path(name)
            if run.is_dir():
                recorder = DistributedRecorder.resume(job, layout=layout, out=run, lie=lie)
            else:
                recorder = DistributedRecorder(job, layout=layout, out=run, seed=1, lie=lie)
            for batch in list(batches(STEPS, 2))[recorder.steps :]:
                recorder.step(batch)
            recorder.finish()


if __name__ == "__main__":
    main(arguments())
