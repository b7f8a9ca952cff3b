"""Two processes train a small GPT with FSDP2, and one process inspects the run.

Shows: how many processes share the work is no part of what is recorded. Gradients of micro-batches are added exactly
and rounded once, so that two processes with sharded weights reach the bits of one; the inspector repeats the
one-process program on other kernels and knows nothing of shards. `torchrun --nproc-per-node 2 -m
analysis.examples.train_on_two_processes FOLDER` does the same from PyTorch's own launcher.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from chipwitness import DistributedRecorder, Job, Settings, Trust, Verdict, arguments, inspect, join, launch

MICRO_BATCHES, SAMPLES, CONTEXT, VOCABULARY = 4, 2, 12, 64
STEPS = 4
MODULE = "analysis.examples.train_on_two_processes"


class Block(nn.Module):
    """Attention and a hidden layer, each added to its input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention, self.mixed = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.hidden = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, width] to the same."""
        batch, length, width = x.shape
        heads = self.attention(self.norms[0](x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.dropout(self.mixed(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.hidden(self.norms[1](x)))  # type: ignore[no-any-return]


class SmallGPT(nn.Module):
    """A GPT over ``VOCABULARY`` tokens; its sizes divide evenly by no number of processes."""

    def __init__(
        self, width: int = 30, heads: int = 3, layers: int = 2, dropout: float = 0.1, context: int = CONTEXT
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY + 1, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, length] tokens to [batch, length, vocabulary] logits."""
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def gpt_job(micro_batches: int = MICRO_BATCHES, *, foreach: bool = False, **sizes: Any) -> Job:
    """The training: everything that decides its bits, and nothing of processes."""
    count = micro_batches * SAMPLES * CONTEXT

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        logits = model(tokens[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum") / count

    return Job(
        model=lambda: SmallGPT(**sizes),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, foreach=foreach),
        loss=loss,
        micro_batches=micro_batches,
        clip=0.25,
        units=lambda model: list(model.blocks),  # type: ignore[arg-type]
    )


def batches(steps: int, micro_batches: int = MICRO_BATCHES) -> Iterator[Tensor]:
    """Seeded tokens, [samples, context + 1]."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield torch.randint(0, VOCABULARY, (micro_batches * SAMPLES, CONTEXT + 1), generator=generator)


def train(run: Path, layout: str = "fsdp2", lie: tuple[str, int, int] | None = None) -> None:
    """What each process does; where the processes of an earlier start died, these go on, however many they are."""
    goes_on = run.is_dir()
    with join() if layout != "alone" else nullcontext():
        if goes_on:
            recorder = DistributedRecorder.resume(gpt_job(), layout=layout, out=run, lie=lie)
        else:
            recorder = DistributedRecorder(gpt_job(), layout=layout, out=run, seed=1, lie=lie)
        for batch in list(batches(STEPS))[recorder.steps :]:
            recorder.step(batch)
        recorder.finish()


def judge(run: Path) -> Verdict:
    """An inspection of all chips, by one process."""
    trust = Trust.load([run.with_name(f"{run.name}.trust.json")], [run])
    return inspect([run], trust, Settings(samples=4, seed=None, devices=("sse41",)), now=datetime.now(UTC))


def main(folder: Path) -> Verdict:
    """Start both processes, then inspect what they recorded."""
    run = folder / "run"
    launch(MODULE, 2, {"run": str(run)})
    verdict = judge(run)
    print(f"{verdict.outcome.value}; {verdict.reasons[0].text}")
    return verdict


if __name__ == "__main__":
    if "RANK" not in os.environ:
        main(Path(sys.argv[1]))
    elif "CHIPWITNESS_JOB" in os.environ:
        given = arguments()
        train(Path(given["run"]), given.get("layout", "fsdp2"), given.get("lie"))
    else:
        train(Path(sys.argv[1]) / "run")
        if os.environ["RANK"] == "0":
            print(judge(Path(sys.argv[1]) / "run").outcome.value)
