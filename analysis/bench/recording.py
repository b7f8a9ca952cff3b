"""``bench recording``: a step of a GPT with 5M parameters, recorded by default, against the same numerics alone.

Trainers take turns, step by step, each with its own thread, model and optimizer, since a recorder sees all
operators of its thread: plain PyTorch, the numerics of a recorder without one, and recorders that look for hidden
writes in no step but the first ones, in one of sixteen (the default) and in every one. What looking costs is the
difference.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from analysis.bench.origin import Row, write
from firmware_sim.errors import CallerError
from monitor import Recorder
from monitor.numerics import recording
from monitor.presets import preset
from monitor.transcript import to_batch

__all__ = ["MOST", "run", "table", "verdict", "write"]

Look: TypeAlias = Literal["sampled", "every"] | int

MOST = 1.3
"""Of the same numerics without recording, what a recorded step may take."""
NUMERICS = "exact"
_WIDTH, _LAYERS, _HEADS, _VOCABULARY, _CONTEXT = 256, 6, 4, 256, 64
SIZES = (4, 32)
"""Sequences of 64 bytes in a batch. What recording adds is almost the same for each, so that larger ones hide it."""
_WARM = 3
_CHECKS: dict[str, Look] = {
    "recorded, no look at writes": 10**9,
    "recorded": "sampled",
    "recorded, a look in every step": "every",
}


class _GPT(nn.Module):
    """A byte-level GPT of 4.9 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(_VOCABULARY, _WIDTH)
        self.positions = nn.Embedding(_CONTEXT, _WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(_WIDTH, _HEADS, 4 * _WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(_LAYERS)
        )
        self.head = nn.Linear(_WIDTH, _VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight
        mask = torch.ones(_CONTEXT, _CONTEXT, dtype=torch.bool).triu(1)
        for block in self.blocks:
            x = block(x, src_mask=mask)
        return self.head(x)  # type: ignore[no-any-return]


class _Trainer:
    """A model and its optimizer, which start alike in every mode."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = _GPT().train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def recorder(self, out: Path, look: Look) -> Recorder:
        return Recorder(self.model, self.optimizer, out=out, check_writes=look)

    def take(self, batch: Tensor) -> None:
        self.optimizer.zero_grad()
        logits = self.model(batch[:, :-1])
        functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()


def run(*, steps: int = 32, sizes: Sequence[int] = SIZES, progress: Callable[[int], object] | None = None) -> list[Row]:
    """Measure each mode over the same steps, for each size of batch.

    Rows hold ``work``, ``mode``, ``seconds`` (mean wall time of a step), ``ratio`` (to the numerics alone),
    ``cpu_seconds`` and ``cpu_ratio`` (processor time, all threads), ``median_ratio`` (of the steps' wall times),
    ``parameters``, ``batch_size`` and ``steps``.

    Args:
        steps: how many are measured, after the first ones; a multiple of 16 has each look of the default in it.
        sizes: sequences in a batch.
        progress: called with 1 after each.

    Raises:
        CallerError: no step, or a batch without a sequence.
    """
    if steps < 1 or not sizes or min(sizes) < 1:
        raise CallerError("give at least one step, and at least one sequence in each batch")
    return [row for size in sizes for row in _rows(steps, size, progress or (lambda _: None))]


def _rows(steps: int, size: int, tell: Callable[[int], object]) -> list[Row]:
    samples = preset("tiny-gpt").samples(None)
    with tempfile.TemporaryDirectory(prefix="chipwitness-bench-") as folder, ExitStack() as stack:
        trainers = {mode: _Trainer() for mode in ("plain PyTorch", f"{NUMERICS} alone", *_CHECKS)}
        threads = {mode: stack.enter_context(ThreadPoolExecutor(1)) for mode in trainers}
        recorders = {
            mode: threads[mode].submit(trainers[mode].recorder, Path(folder) / str(number), look).result()
            for number, (mode, look) in enumerate(_CHECKS.items())
        }
        times: dict[str, list[tuple[float, float]]] = {mode: [] for mode in trainers}
        for number in range(_WARM + steps):
            rows = np.arange(number * size, (number + 1) * size) % len(samples["tokens"])
            batch = to_batch(samples, rows)["tokens"].long()
            for mode, trainer in trainers.items():
                session: AbstractContextManager[object]
                if mode in recorders:
                    session = recorders[mode].step(batch)
                else:
                    session = recording(NUMERICS) if mode.startswith(NUMERICS) else nullcontext()
                times[mode].append(threads[mode].submit(_timed, trainer, batch, session).result())
            tell(1)
        for mode, each in recorders.items():
            threads[mode].submit(each.finish).result()
    first = times[f"{NUMERICS} alone"][_WARM:]
    count = sum(each.numel() for each in trainers["plain PyTorch"].model.parameters())
    rows_out = []
    for mode, taken in times.items():
        measured = taken[_WARM:]
        wall, cpu = (statistics.mean(each[part] for each in measured) for part in (0, 1))
        alone, alone_cpu = (statistics.mean(each[part] for each in first) for part in (0, 1))
        rows_out.append(
            {
                "work": "gpt",
                "mode": mode,
                "seconds": wall,
                "ratio": wall / alone,
                "median_ratio": statistics.median(a[0] / b[0] for a, b in zip(measured, first, strict=True)),
                "cpu_seconds": cpu,
                "cpu_ratio": cpu / alone_cpu,
                "parameters": count,
                "batch_size": size,
                "steps": steps,
            }
        )
    return rows_out


def _timed(trainer: _Trainer, batch: Tensor, session: AbstractContextManager[object]) -> tuple[float, float]:
    """Seconds that a step takes, and of a processor."""
    wall, cpu = time.perf_counter(), time.process_time()
    with session:
        trainer.take(batch)
    return time.perf_counter() - wall, time.process_time() - cpu


def verdict(rows: Sequence[Row]) -> str | None:
    """Why recording costs more than it may, or None."""
    for row in rows:
        if row["mode"] == "recorded" and row["ratio"] > MOST:
            what = f"a recorded step of {row['batch_size']} sequences"
            return f"{what} takes {row['ratio']:.2f} times the same numerics alone, more than {MOST}"
    return None


def table(rows: Sequence[Row]) -> list[str]:
    """Lines for a person."""
    lines = [f"{'batch':>5} {'step':32} {'ms':>9} {'ratio':>7} {'median':>7} {'processor ms':>13} {'ratio':>7}"]
    for row in rows:
        lines.append(
            f"{row['batch_size']:5} {row['mode']:32} {1000 * row['seconds']:9.1f} {row['ratio']:6.2f}× "
            f"{row['median_ratio']:6.2f}× {1000 * row['cpu_seconds']:13.1f} {row['cpu_ratio']:6.2f}×"
        )
    for size in dict.fromkeys(row["batch_size"] for row in rows):
        by = {row["mode"]: row["cpu_seconds"] for row in rows if row["batch_size"] == size}
        looks = [1000 * (by[mode] - by["recorded, no look at writes"]) for mode in list(_CHECKS)[1:]]
        lines.append(
            f"Batch {size}: looking for hidden writes costs {looks[0]:.0f} ms of a processor a step by default, "
            f"{looks[1]:.0f} ms where every step is looked at."
        )
    return lines
