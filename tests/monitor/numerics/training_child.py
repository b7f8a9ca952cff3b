"""Trains small models for a few steps in a process of its own; prints digests. Run by test_bit_equality."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from monitor.numerics import Bound, Formats, recording, replaying


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_a, self.norm_b = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm_a(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.norm_b(x))))


class Gpt(nn.Module):
    def __init__(self, width: int = 64, context: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1, stride=2, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 10),
    )


def exact_initialisation(model: nn.Module) -> None:
    """Weights from integers, so that no device can differ before the first step."""
    counter = 0
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            nn.init.constant_(parameter, 1.0 if name.endswith("weight") else 0.0)
            continue
        n = parameter.numel()
        mixed = (torch.arange(counter, counter + n, dtype=torch.int64) * 2654435761) % (1 << 32)
        mixed = (mixed ^ (mixed >> 15)) * 2246822519 % (1 << 32)
        with torch.no_grad():
            parameter.copy_(((mixed >> 8).to(torch.float32) * 2.0**-24 - 0.5).reshape(parameter.shape) * 0.125)
        counter += n


def batches(kind: str, step: int) -> tuple[Tensor, Tensor]:
    g = torch.arange(4 * 33, dtype=torch.int64) + 977 * step
    if kind == "gpt":
        tokens = ((g * g * 31 + g * 7) % 251).reshape(4, 33)
        return tokens[:, :-1], tokens[:, 1:]
    x = torch.arange(16 * 64, dtype=torch.int64) + 313 * step
    return ((x * x * 29 + 11 * x) % 17).to(torch.float32).reshape(16, 1, 8, 8) / 16, (x[:16] * 7) % 10


def digest(tensors: list[Tensor]) -> str:
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    out = [*model.parameters(), *model.buffers()]
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            out += [v for _, v in sorted(optimizer.state.get(parameter, {}).items()) if isinstance(v, Tensor)]
    return out


def train(kind: str, numerics: str, steps: int, logs: list[bytes] | None, options: dict[str, Any]) -> dict[str, Any]:
    model = Gpt() if kind == "gpt" else cnn()
    exact_initialisation(model)
    dtype = getattr(torch, options.get("dtype", "float32"))
    model.to(dtype)
    if kind == "gpt":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            model.parameters(), lr=1e-3, eps=1e-4 if dtype == torch.float16 else 1e-8, foreach=False
        )
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    formats = Formats(**options.get("formats", {}))
    bound = Bound(**options.get("bound", {}))
    out: dict[str, Any] = {"digests": [], "losses": [], "forced": 0, "entries": 0, "elements": 0, "logs": []}
    started = time.perf_counter()
    for step in range(steps):
        x, y = batches(kind, step)
        x = x.to(dtype) if x.is_floating_point() else x
        if logs is None:
            session = recording(numerics, formats=formats, bound=bound)
        else:
            session = replaying(numerics, logs[step], formats=formats, bound=bound)
        with session:
            logits = model(x)
            loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), y.reshape(-1))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        out["losses"].append(float(loss.detach()))
        out["digests"].append(digest([loss, *state_of(model, optimizer)]))
        out["forced"] += session.statistics.forced
        out["entries"] += session.statistics.entries
        out["elements"] += session.statistics.elements
        out["contradictions"] = out.get("contradictions", 0) + session.statistics.contradictions
        out["logs"].append(session.log)
    out["seconds"] = time.perf_counter() - started
    return out


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    folder = Path(job["folder"])
    results = {}
    for kind in job["kinds"]:
        logs = None
        if job.get("replay"):
            logs = [(folder / f"{job['replay']}-{kind}-{s}.log").read_bytes() for s in range(job["steps"])]
        result = train(kind, job["numerics"], job["steps"], logs, job.get("options", {}))
        for step, log in enumerate(result.pop("logs")):
            if logs is None:
                (folder / f"{job['name']}-{kind}-{step}.log").write_bytes(log)
        results[kind] = result
    return results


if __name__ == "__main__":
    print(json.dumps([run_job(job) for job in json.loads(sys.argv[1])]))
