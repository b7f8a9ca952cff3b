"""A rank of the example's job that dies in mid-run, as by kill -9, or trains another model between two steps."""

from __future__ import annotations

import os
import signal

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


def main():
    given = arguments()
    with join():
        recorder = DistributedRecorder(gpt_job(), layout="fsdp2", out=given["run"], seed=1)
        for batch in batches(STEPS):
            recorder.step(batch)
            at = [recorder.rank.rank, recorder.steps]
            if at == given.get("dies"):
                os.kill(os.getpid(), signal.SIGKILL)
            if at == given.get("hides"):
                hide(recorder.rank.parameters.values())


if __name__ == "__main__":
    main()
