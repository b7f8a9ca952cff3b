"""A rank of the example's job that may die in mid-run, or go on with what died."""

from __future__ import annotations

import os
import signal

from analysis.examples.train_on_two_processes import STEPS, batches, gpt_job
from monitor.distributed.launching import arguments, join
from monitor.distributed.recorder import DistributedRecorder


def main():
    given = arguments()
    make, seed = (DistributedRecorder.resume, {}) if given["resume"] else (DistributedRecorder, {"seed": 1})
    with join():
        recorder = make(gpt_job(), layout="fsdp2", out=given["run"], **seed)
        for batch in list(batches(STEPS))[recorder.steps :]:
            recorder.step(batch)
            if (recorder.rank.rank, recorder.steps) == tuple(given["dies"]):
                os.kill(os.getpid(), signal.SIGKILL)
        recorder.finish()


if __name__ == "__main__":
    main()
