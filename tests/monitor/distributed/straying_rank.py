"""A rank of the example's job that dies in mid-run, as by kill -9, or trains another model between two steps."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch

from analysis.examples.train_on_two_processes import STEPS, batches, gpt_job
from monitor.distributed.launcher import arguments, join
from monitor.distributed.recorder import DistributedRecorder


def hide(weights):
    """Steps of another training, in the memory of the declared one, which has its bits back afterwards."""
    own = (each.to_local() if hasattr(each, "to_local") else each for each in weights)
    weight = max((each for each in own if each.ndim == 2), key=torch.Tensor.numel)
    with torch.no_grad():
        kept = weight.clone()
        for _ in range(60):
            weight.sub_(weight @ (weight.T @ weight), alpha=1e-3)
        weight.copy_(kept)


def small_job():
    """The example's, at its smallest."""
    return gpt_job(layers=1, width=6)


def main():
    given = arguments()
    run = Path(given["run"])
    with join():
        if run.is_dir():
            recorder = DistributedRecorder.resume(small_job(), layout="fsdp2", out=run)
        else:
            job = gpt_job() if "hides" in given else small_job()
            recorder = DistributedRecorder(job, layout="fsdp2", out=run, seed=1)
        for batch in list(batches(STEPS))[recorder.steps :]:
            recorder.step(batch)
            at = [recorder.rank.rank, recorder.steps]
            if at == given.get("dies"):
                os.kill(os.getpid(), signal.SIGKILL)
            if at == given.get("hides"):
                hide(recorder.rank.parameters.values())
        recorder.finish()


if __name__ == "__main__":
    main()
