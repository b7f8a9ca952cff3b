"""Models whose programs shapes alone do not give, and a rank that trains some of them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from monitor.distributed.job import Job
from monitor.distributed.launcher import arguments, join
from monitor.distributed.recorder import DistributedRecorder

MODULE = __spec__.name
WORDS, WIDTH = 9, 6


class Language(nn.Module):
    """Tokens through some layers."""

    def __init__(self, *layers):
        super().__init__()
        self.tokens, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(layers)

    def forward(self, tokens):
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
            x = x[0] if isinstance(x, tuple) else x
        return self.head(x)


def pre_norm():
    """Attention takes its inputs transposed, and so does the normalisation before it in the backward pass."""
    return Language(*(nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True, norm_first=True) for _ in range(2)))


def recurrent():
    """Of each kind: layers of two directions, with dropout between them, and biases or none."""
    return Language(
        nn.LSTM(WIDTH, WIDTH // 2, num_layers=2, dropout=0.25, bidirectional=True, batch_first=True),
        nn.GRU(WIDTH, WIDTH, batch_first=True, bias=False),
        nn.RNN(WIDTH, WIDTH, nonlinearity="relu"),
    )


class Masked(nn.Module):
    """Makes tensors of its own in each pass, names no device for them, and holds some that are no part of its state."""

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True)
        self.scale, self.shift = nn.Parameter(torch.tensor([0.5])), torch.tensor([0.25] * WIDTH)

    def forward(self, tokens):
        length = tokens.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        places = torch.arange(length).unsqueeze_(1) * 0.01
        noise = torch.zeros(tokens.shape[0], length, WIDTH)
        noise[:, 0] = self.tokens(tokens)[:, 0] * self.scale
        x = self.tokens(tokens) + places + self.shift + noise + torch.rand(length, WIDTH)
        return self.head(self.block(x, src_mask=mask))


MODELS = {"pre-norm": pre_norm, "recurrent": recurrent, "masked": Masked}


def language(model, *, foreach=False):
    """Training of a language model."""
    return Job(
        model=model,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=foreach),
        loss=lambda model, part: cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten()) / 2,
        micro_batches=2,
        clip=0.5,
        units=lambda model: list(getattr(model, "layers", ())),
    )


def batches(steps):
    """Seeded tokens, [samples, length + 1]."""
    return torch.randint(0, WORDS, (steps, 4, 4), generator=torch.Generator().manual_seed(1))


def train(job, layout, run, steps=2):
    """Record some steps on whatever processes have joined; goes on with a run that is there."""
    if Path(run).exists():
        recorder = DistributedRecorder.resume(job, layout=layout, out=run)
    else:
        recorder = DistributedRecorder(job, layout=layout, out=run, seed=1)
    for batch in batches(steps)[recorder.steps :]:
        recorder.step(batch)
    recorder.finish()


if __name__ == "__main__":
    given = arguments()
    with join():
        for model, layout, run in given["runs"]:
            train(language(MODELS[model]), layout, run)
