"""One rank of ``bench distributed``: trains the example's GPT, and rank 0 says what state each step reached."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.nn.parallel import DistributedDataParallel

from analysis.examples.train_on_two_processes import batches, gpt_job
from firmware_sim.evidence import TensorKey
from firmware_sim.evidence.canonical import JsonObject
from monitor import initialised
from monitor.distributed.job import Job
from monitor.distributed.launcher import answer, arguments, join
from monitor.distributed.layouts import whole
from monitor.distributed.rank import Rank
from monitor.recording.micro_batches import micro_batch
from monitor.sharding import ShardedMemory
from monitor.transcript import encode_state
from monitor.transcript.state import decode_state

SEED = 1


def _root(state: dict[TensorKey, Tensor]) -> str:
    return str(ShardedMemory(state, 1).digest().root).rpartition(":")[2]


def _resident(name: str) -> float:
    """A figure of this process's memory in MiB: VmRSS is what it has, VmHWM the most since ``_at_rest``."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) / 1024


def _at_rest() -> float:
    """Give back what is free, and measure anew from here on; returns what is held, in MiB."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _resident("VmRSS")


@contextmanager
def _counted() -> Iterator[list[int]]:
    """Counts the storages of whole parameters that FSDP2 lets go."""
    found, free = [0], _fsdp_param.free_storage

    def freed(tensor: Tensor) -> None:
        before = tensor.untyped_storage().size()
        free(tensor)
        found[0] += before > tensor.untyped_storage().size() == 0

    _fsdp_param.free_storage = freed
    try:
        yield found
    finally:
        _fsdp_param.free_storage = free


def _controlled(given: JsonObject, job: Job) -> dict[str, Any]:
    """What each of this process's steps came to; goes on from a file and leaves one where these are given."""
    rank, roots, norms = Rank(job, given["layout"], seed=SEED), [], []
    first, last = given["steps"]
    if given["start"]:
        start: dict[TensorKey, Tensor] = {}
        if rank.rank == 0:
            found = decode_state(Path(given["start"]).read_bytes(), "the state")
            start = {(name.split("/")[0], name.partition("/")[2]): each for name, each in found.items()}
        rank.load(start, first)
    state: dict[TensorKey, Tensor] = {}
    rest = 0.0
    for number, batch in enumerate(batches(last, job.micro_batches)):
        if number >= first:
            rank.step(batch)
            norms.append(0.0 if rank.norm is None else float(rank.norm))
            state = rank.state()
            if number == first:
                rest = _at_rest()
            roots.append(_root(state) if rank.rank == 0 else "")
    if given["end"] and rank.rank == 0:
        Path(given["end"]).write_bytes(encode_state({f"{kind}/{name}": each for (kind, name), each in state.items()}))
    cuts = rank.layout.reduction.pieces.values()
    uneven = sum(len({last - first for first, last in pieces}) > 1 for pieces in cuts)
    step = _resident("VmHWM") - rest if last - first > 1 else None
    return {"roots": roots, "norms": norms, "uneven": uneven, "step_mib": step}


def _native(given: JsonObject, job: Job) -> dict[str, Any]:
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
    optimizer = job.optimizer(iter(parameters.values()))
    roots, norms = [], []
    for number, batch in enumerate(batches(given["steps"][1], job.micro_batches)):
        optimizer.zero_grad()
        for micro in range(rank, job.micro_batches, ranks):
            torch.manual_seed(number * job.micro_batches + micro)
            loss = job.loss(called, micro_batch(batch, micro, job.micro_batches)) * ranks  # they average
            loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), job.clip or 1.0)
        norms.append(float(whole(norm)))
        optimizer.step()
        with torch.no_grad():
            state = {("weight", name): whole(each).detach() for name, each in parameters.items()}
        roots.append(_root(state))
    return {"roots": roots, "norms": norms, "uneven": None, "step_mib": None}


def _most(value: float) -> float:
    """The largest of all ranks' figures."""
    if not dist.is_initialized():
        return value
    found = torch.tensor([value])
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def main() -> None:
    """Do what the job says."""
    given = arguments()
    job = gpt_job(given["micro_batches"], foreach=given["foreach"], **given["sizes"])
    with nullcontext() if given["layout"] == "alone" else join(), _counted() as freed:
        given["rank"] = dist.get_rank() if dist.is_initialized() else 0
        start = time.perf_counter()
        found = (_native if given["numerics"] == "native" else _controlled)(given, job)
        if found["step_mib"] is not None:
            found["step_mib"] = _most(found["step_mib"])
        answer({**found, "seconds": time.perf_counter() - start, "freed": freed[0], "clip": job.clip})


if __name__ == "__main__":
    main()
