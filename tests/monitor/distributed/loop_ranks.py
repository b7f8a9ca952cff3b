"""Two ranks whose loops have schedules, evaluations and half precision, or do otherwise than each other."""

from __future__ import annotations

import gc
import json
import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn import functional
from torch.optim import lr_scheduler

from firmware_sim.errors import CallerError
from monitor.distributed.job import Job
from monitor.distributed.launcher import arguments, join
from monitor.distributed.recorder import DistributedRecorder
from monitor.recording.recorder import Recorder

MODULE = __spec__.name
STEPS = 4


def network():
    return nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4))


def two_groups(parameters):
    first, *rest = parameters
    groups = [{"params": [first], "lr": 1e-3}, {"params": rest, "lr": 5e-3, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, fused=True)


def halved(dtype):
    """A loss in autocast."""

    def loss(model, batch):
        with torch.autocast("cpu", dtype):
            return functional.mse_loss(model(batch).float(), batch, reduction="sum") / 16

    return loss


def cosine(optimizer):
    """With warm-up."""
    parts = [lr_scheduler.LinearLR(optimizer, 0.25, total_iters=2), lr_scheduler.CosineAnnealingLR(optimizer, 4)]
    return lr_scheduler.SequentialLR(optimizer, parts, [2])


def job(**others):
    given = {"model": network, "optimizer": two_groups, "loss": halved(torch.bfloat16), "micro_batches": 2, "clip": 1.0}
    return Job(**{**given, "units": lambda model: [model[0]], **others})


JOBS = {
    "cosine": job(scheduler=cosine),
    "scaled": job(
        loss=halved(torch.float16),
        scheduler=lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=[1e-2, 2e-2], total_steps=STEPS),
        scaler=lambda: torch.amp.GradScaler("cpu", init_scale=2.0**40, backoff_factor=2.0**-30, growth_interval=1),
        score=lambda model, batch: (model(batch) - batch).abs().sum(),
    ),
}


def batches(count=STEPS):
    return torch.rand(count, 4, 4, generator=torch.Generator().manual_seed(2))


class Loader:
    """Counts batches."""

    def __init__(self):
        self.given = 0

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.given = state["given"]


def train(name, layout, run, *, until=STEPS):
    """Goes on with a run that is there; the number of batches that its loader has given."""
    loader, make = Loader(), DistributedRecorder.resume if Path(run).exists() else DistributedRecorder
    seed: dict[str, Any] = {} if Path(run).exists() else {"seed": 1}
    recorder = make(JOBS[name], layout=layout, out=run, stateful={"loader": loader}, **seed)
    for batch in batches()[loader.given : until]:
        loader.given += 1
        recorder.step(batch)
        if recorder.steps % 2:
            recorder.evaluation(batch)
    if until == STEPS:
        recorder.finish()
    else:
        del recorder  # as a process that ends
        gc.collect()
    return loader.given


def by_hand(run, rank):
    """A schedule that the loop itself takes further, between steps; and an end for which rank 0 needs longer."""
    closed = run.with_name("closed")
    recorder = DistributedRecorder(job(), layout="ddp", out=run, seed=1)
    schedule = lr_scheduler.LambdaLR(recorder.optimizer, lambda step: 1 / (step + 1))
    for batch in batches(2):
        recorder.step(batch)
        schedule.step()
    finish = Recorder.finish

    def late(each):
        finish(each)
        time.sleep(0.5)
        closed.touch()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Recorder, "finish", late)
        recorder.finish()
    assert closed.exists(), f"rank {rank} has ended before rank 0"


CASES = ("ends", "less", "rates", "joins", "fails")


def stray(what, run, rank):
    """The line with which a rank's second step ends, in which rank 1 does something else."""
    fails: list[Any] = []

    def loss(model, batch):
        if fails:
            raise ValueError("the loss of rank 1")
        return model(batch).pow(2).sum()

    recorder = DistributedRecorder(job(loss=loss), layout="ddp", out=run, seed=1, deadline=100)
    first, second = batches(2)
    recorder.step(first)
    if rank and what == "fails":
        fails.append(True)
    if rank and what == "less":
        second = second[:2]
    if rank and what == "rates":
        recorder.optimizer.param_groups[1]["lr"] = 0.5
    try:
        with Join([cast(Any, recorder.rank.layout.model)]) if what == "joins" else nullcontext():
            recorder.finish() if rank and what == "ends" else recorder.step(second)
    except CallerError as error:
        return str(error)
    return "nothing"


def main():
    given = arguments()
    rank, folder = int(os.environ["RANK"]), Path(given["folder"])
    with join():
        assert train("cosine", "fsdp2", folder / "cosine", until=2) == 2
        assert train("cosine", "ddp", folder / "cosine") == STEPS
        assert train("scaled", "ddp", folder / "scaled", until=2) == 2
        assert train("scaled", "ddp", folder / "scaled") == STEPS
        by_hand(folder / "by-hand", rank)
        lines = {}
        for what in CASES:
            try:
                lines[what] = stray(what, folder / what, rank)
            except ValueError:
                os._exit(0)  # and rank 0 waits for its gradients
            (folder / f"lines-{rank}.json").write_text(json.dumps(lines))
        os._exit(0)


if __name__ == "__main__":
    main()
