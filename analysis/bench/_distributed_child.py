"""One rank of ``bench distributed``: trains the example's GPT, and rank 0 says what state each step reached."""

from __future__ import annotations

import resource
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from analysis.examples.train_on_two_processes import batches, gpt_job
from firmware_sim.evidence import TensorKey
from monitor import initialised
from monitor.distributed.job import Job
from monitor.distributed.launching import answer, arguments, join
from monitor.distributed.layouts import whole
from monitor.distributed.rank import Rank
from monitor.recording.micro_batches import micro_batch
from monitor.sharding import ShardedMemory
from monitor.transcript import encode_state
from monitor.transcript.state import decode_state

SEED = 1


def _root(state: dict[TensorKey, Tensor]) -> str:
    return str(ShardedMemory(state, 1).digest().root).rpartition(":")[2]


def _controlled(given: dict[str, Any], job: Job) -> list[str]:
    """Roots after each of this process's steps; goes on from a file and leaves one where these are given."""
    rank, roots = Rank(job, given["layout"], seed=SEED), []
    first, last = given["steps"]
    if given["start"]:
        start: dict[TensorKey, Tensor] = {}
        if rank.rank == 0:
            found = decode_state(Path(given["start"]).read_bytes(), "the state")
            start = {(name.split("/")[0], name.partition("/")[2]): each for name, each in found.items()}
        rank.load(start, first)
    state: dict[TensorKey, Tensor] = {}
    for number, batch in enumerate(batches(last, job.micro_batches)):
        if number >= first:
            rank.step(batch)
            state = rank.state()
            roots.append(_root(state) if rank.rank == 0 else "")
    if given["end"] and rank.rank == 0:
        Path(given["end"]).write_bytes(encode_state({f"{kind}/{name}": each for (kind, name), each in state.items()}))
    return roots


def _native(given: dict[str, Any], job: Job) -> list[str]:
    """The same with PyTorch's own arithmetic and reductions."""
    ranks, rank = given["processes"], given["rank"]
    model = initialised(job.model, seed=SEED)
    called: nn.Module = model
    if given["layout"] == "fsdp2":
        for unit in (*job.units(model), model):
            fully_shard(unit)
    elif given["layout"] == "ddp":
        called = DistributedDataParallel(model)
    parameters = dict(model.named_parameters())
    optimizer, roots = job.optimizer(iter(parameters.values())), []
    for number, batch in enumerate(batches(given["steps"][1], job.micro_batches)):
        optimizer.zero_grad()
        for micro in range(rank, job.micro_batches, ranks):
            torch.manual_seed(number * job.micro_batches + micro)
            loss = job.loss(called, micro_batch(batch, micro, job.micro_batches)) * ranks  # they average
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), job.clip or 1.0)
        optimizer.step()
        with torch.no_grad():
            state = {("weight", name): whole(each).detach() for name, each in parameters.items()}
        roots.append(_root(state))
    return roots


def main() -> None:
    """Do what the job says."""
    given = arguments()
    job = gpt_job(given["micro_batches"], foreach=given["foreach"], **given["sizes"])
    with nullcontext() if given["layout"] == "alone" else join():
        import torch.distributed as dist

        given["rank"] = dist.get_rank() if dist.is_initialized() else 0
        start = time.perf_counter()
        roots = (_native if given["numerics"] == "native" else _controlled)(given, job)
        seconds = time.perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        answer({"roots": roots, "seconds": seconds, "peak_mib": peak})


if __name__ == "__main__":
    main()
