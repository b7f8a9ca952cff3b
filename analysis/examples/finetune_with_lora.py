"""Supervised fine-tuning of a small GPT by LoRA under BF16 autocast, recorded and inspected.

Shows: a frozen model whose adapters alone train (Hu et al. 2021), in the mixed precision that fine-tuning uses. Prompts
are masked out of the loss, and rows are padded. The inspector repeats the casts that autocast made, bit for bit, on
other kernels. A second lab trains one step on another sample than it declares: it is rejected, and only it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from analysis.examples.train_on_two_processes import SmallGPT
from chipwitness import Recorder, Settings, Trust, Verdict, initialised, inspect

STEPS, BATCH, RANK, LENGTH = 6, 8, 4, 9
LETTERS = "\0+=0123456789"
"""Characters by number; the first one pads."""
IGNORED = -100


class Adapted(nn.Module):
    """A frozen layer, and a product of two thin matrices that is added to it and trains."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, in] to [batch, length, out]."""
        adapted: Tensor = self.layer(x) + self.up(self.down(x))
        return adapted


def adapted_gpt() -> nn.Module:
    """The model: all of it frozen but for adapters of each block's attention."""
    model = SmallGPT(dropout=0.0).requires_grad_(False)
    blocks: Any = model.blocks
    for block in blocks:
        block.attention, block.mixed = Adapted(block.attention), Adapted(block.mixed)
    return model


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Additions as padded tokens, and the labels: of the answer alone; both [batch, length]."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long)
        labels = torch.full((BATCH, LENGTH), IGNORED)
        for row, (one, other) in enumerate(torch.randint(0, 100, (BATCH, 2), generator=generator).tolist()):
            prompt, answer = f"{one}+{other}=", f"{one + other}"
            text = torch.tensor([LETTERS.index(letter) for letter in prompt + answer])
            tokens[row, : len(text)] = text
            labels[row, len(prompt) : len(text)] = text[len(prompt) :]
        yield tokens, labels


def train(run: Path, *, lie: str | None = None) -> None:
    """The loop; the optimizer has the adapters alone."""
    model = initialised(adapted_gpt, seed=1)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    recorder = Recorder(model, optimizer, out=run, numerics="exact", seed=1, lie=lie, lie_step=3)
    for batch in batches():
        with recorder.step(batch) as step:
            tokens, labels = batch
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(tokens[:, :-1])
                loss = functional.cross_entropy(
                    logits.flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=IGNORED
                )
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            step.commit(loss=loss)
    recorder.finish()


def judge(run: Path) -> Verdict:
    """An inspection of all chips."""
    trust = Trust.load([run.with_name(f"{run.name}.trust.json")], [run])
    return inspect([run], trust, Settings(samples=4, seed=None, devices=("sse41",)), now=datetime.now(UTC))


def main(folder: Path) -> dict[str, Verdict]:
    """Record an honest lab and one that lies; returns the verdicts."""
    verdicts = {}
    for name, lie in (("honest", None), ("lying", "change-sample")):
        train(folder / name, lie=lie)
        verdicts[name] = judge(folder / name)
        print(f"{name}: {verdicts[name].outcome.value}; {verdicts[name].reasons[0].text}")
    return verdicts


if __name__ == "__main__":
    main(Path(sys.argv[1]))
