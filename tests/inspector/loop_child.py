"""Records loops where this process keeps what it trains: loop_child.py RUN NUMERICS OPTIMIZER …"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from inspector.devices.emulation import install_from_environment
from monitor import Recorder, initialised
from monitor.environment import accelerator


class Model(nn.Module):
    """A transformer layer with dropout over 50 tokens, causal by a mask that each step makes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True)
        self.head = nn.Linear(16, 50)
        nn.init.trunc_normal_(self.head.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[1]
        mask = torch.ones(size, size, dtype=torch.bool, device=x.device).triu(1)
        out: Tensor = self.head(self.layer(self.tokens(x), src_mask=mask))
        return out


def main(out: Path, numerics: str, kind: str) -> None:
    place = accelerator()
    with place:
        model = initialised(Model, seed=1)
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(model.parameters(), lr=1e-3)
        if kind == "adamw"
        else torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    )
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    recorder = Recorder(model, optimizer, out=out, numerics=numerics, seed=1, chips=2, checkpoint_every=2)
    for step in range(3):
        tokens = (torch.arange(40).reshape(4, 10) * 13 + step) % 50
        with recorder.step(tokens):
            optimizer.zero_grad()
            x = tokens.to(place)
            loss = functional.cross_entropy(model(x)[:, :-1].reshape(-1, 50), x[:, 1:].reshape(-1))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    print(recorder.finish())


if __name__ == "__main__":
    install_from_environment()
    for run, numerics, kind in zip(sys.argv[1::3], sys.argv[2::3], sys.argv[3::3], strict=True):
        main(Path(run), numerics, kind)
