"""Two processes of one thread each, in turns: a step of one process at half the batch, then a step of FSDP2 on both.

Both processes take the first kind at once, so that the machine is as busy in either turn.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from analysis.examples.train_on_two_processes import VOCABULARY, SmallGPT
from monitor.distributed.job import Job
from monitor.distributed.launcher import answer, arguments, join
from monitor.distributed.rank import Rank
from monitor.distributed.recorder import DistributedRecorder
from monitor.distributed.statements import Statements, rank_key

SEED = 1
SAMPLES = 4
"""Sequences in a micro-batch, of ``LENGTH`` tokens; the model has 4.8 million parameters."""
LENGTH = 64
_WARM = 2
_TURNS = ("alone", "fsdp2")


class _Taker(Protocol):
    def step(self, batch: object) -> Tensor:
        """The next step's loss."""


def _job(micro_batches: int) -> Job:
    tokens = micro_batches * SAMPLES * LENGTH

    def loss(model: nn.Module, part: Tensor) -> Tensor:
        logits = model(part[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum") / tokens

    return Job(
        model=lambda: SmallGPT(width=256, heads=4, layers=6, dropout=0.0, context=LENGTH),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        loss=loss,
        micro_batches=micro_batches,
        clip=1.0,
        units=lambda model: list(model.blocks),  # type: ignore[arg-type]
    )


def _taker(layout: str, micro_batches: int, out: Path, *, is_recorded: bool) -> _Taker:
    """A rank that signs what it does, or all of a recorded job's."""
    job = _job(micro_batches)
    if is_recorded:
        return DistributedRecorder(job, layout=layout, out=out, seed=SEED)
    rank = Rank(job, layout, seed=SEED)
    keys = [rank_key("bench", number) for number in range(rank.ranks)]
    rank.wire.statements = Statements(out, "00", rank.rank, keys[rank.rank], [key.verifying for key in keys])
    return rank


def _batches(steps: int, micro_batches: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    for _ in range(steps):
        yield torch.randint(0, VOCABULARY, (micro_batches * SAMPLES, LENGTH + 1), generator=generator)


def _slowest(seconds: float) -> float:
    found = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def main() -> None:
    """Take both in turns; wall and processor seconds of each turn, of the slower process."""
    given = arguments()
    half, out = given["micro_batches"], Path(given["out"])
    takers = {"alone": _taker("alone", half, out / f"alone-{os.environ['RANK']}", is_recorded=given["recorded"])}
    times: dict[str, list[tuple[float, float]]] = {layout: [] for layout in _TURNS}
    with join():
        takers["fsdp2"] = _taker("fsdp2", 2 * half, out / "fsdp2", is_recorded=given["recorded"])
        for batch in _batches(_WARM + given["steps"], 2 * half):
            for layout in _TURNS:
                mine = batch if layout == "fsdp2" else batch[: len(batch) // 2]
                dist.barrier()
                wall, cpu = time.perf_counter(), time.process_time()
                takers[layout].step(mine)
                taken = (time.perf_counter() - wall, time.process_time() - cpu)
                times[layout].append((_slowest(taken[0]), _slowest(taken[1])))
        answer({layout: taken[_WARM:] for layout, taken in times.items()})


if __name__ == "__main__":
    main()
