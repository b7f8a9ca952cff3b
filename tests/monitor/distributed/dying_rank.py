"""A rank of the example's job that dies in mid-run, as by kill -9."""

from __future__ import annotations

import os
import signal

from analysis.examples.train_on_two_processes import STEPS, batches, gpt_job
from monitor.distributed.launching import arguments, join
from monitor.distributed.recorder import DistributedRecorder


def main():
    given = arguments()
    with join():
        recorder = DistributedRecorder(gpt_job(), layout="fsdp2", out=given["run"], seed=1)
        for batch in batches(STEPS):
            recorder.step(batch)
            if (recorder.rank.rank, recorder.steps) == tuple(given["dies"]):
                os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
