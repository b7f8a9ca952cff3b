"""``precision``: mixed precision over several seeds, native and under control, on real digits.

Each arrangement trains a small network on scikit-learn's handwritten digits: natively, and recorded in controlled
numerics. The mean final loss over the seeds is to differ from native's by less than native's standard deviation over
the seeds. The first seed's run is inspected on two devices.
"""

from __future__ import annotations

import contextlib
import copy
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from analysis.bench.origin import write as write_rows
from firmware_sim.errors import CallerError
from inspector.inspection.guards import Settings
from inspector.inspection.judgement import inspect
from inspector.inspection.trust import Trust
from inspector.replay.pool import DevicePool
from monitor import Recorder
from monitor.presets._digits import digits

__all__ = ["ARRANGEMENTS", "run", "table", "verdict", "write"]

Row = dict[str, Any]
Make = Callable[..., Any]

_BATCH, _LAST = 32, 10
_DEVICES = ("sse41", "mkl-compatible")


def _batches(seed: int, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    samples = digits()
    pixels = torch.from_numpy(samples["pixels"].reshape(-1, 64).astype(np.float32)) / 16
    labels = torch.from_numpy(samples["label"].astype(np.int64))
    order = np.random.default_rng(seed)
    for _ in range(steps):
        chosen = torch.from_numpy(order.choice(len(labels), _BATCH, replace=False))
        yield pixels[chosen], labels[chosen]


def _network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 48), nn.LayerNorm(48), nn.GELU(), nn.Linear(48, 10))


def _autocast(dtype: torch.dtype) -> Callable[[Make, int, int], list[float]]:
    def train(make: Make, seed: int, steps: int) -> list[float]:
        model, scaler = _network(), torch.amp.GradScaler("cpu", enabled=dtype is torch.float16, init_scale=1024.0)
        optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
        recorder, losses = make(model, optimizer, state=[scaler]), []
        for pixels, labels in _batches(seed, steps):
            with recorder.step((pixels, labels)) as step:
                with torch.autocast("cpu", dtype=dtype):
                    loss = functional.cross_entropy(model(pixels), labels)
                optimizer.zero_grad()
                scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
                scaler.step(optimizer)
                scaler.update()
                step.commit(loss)
            losses.append(float(loss.detach()))
        recorder.finish()
        return losses

    return train


def _masters(where: str) -> Callable[[Make, int, int], list[float]]:
    """FP32 masters in the optimizer alone, in the model, or with BF16 working copies that are listed as state."""

    def train(make: Make, seed: int, steps: int) -> list[float]:
        model = _network()
        work = copy.deepcopy(model).to(torch.bfloat16)
        weights: list[nn.Parameter] = list(model.parameters())
        held, state = (model, {"work": work}) if where == "listed" else (work, {})
        if where == "model":
            held = nn.ModuleDict({"master": model, "work": work})
        elif where == "optimizer":
            weights = [nn.Parameter(each.detach().clone()) for each in weights]
        optimizer = torch.optim.AdamW(weights, 3e-3)
        recorder, losses = make(held, optimizer, state=state), []
        for pixels, labels in _batches(seed, steps):
            with recorder.step((pixels, labels)) as step:
                loss = functional.cross_entropy(work(pixels.bfloat16()).float(), labels)
                loss.backward()  # type: ignore[no-untyped-call]
                for master, each in zip(weights, work.parameters(), strict=True):
                    assert each.grad is not None
                    master.grad, each.grad = each.grad.float(), None
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    for master, each in zip(weights, work.parameters(), strict=True):
                        each.copy_(master)
                step.commit(loss)
            losses.append(float(loss.detach()))
        recorder.finish()
        return losses

    return train


ARRANGEMENTS: dict[str, Callable[[Make, int, int], list[float]]] = {
    "autocast BF16": _autocast(torch.bfloat16),
    "autocast FP16 with a scaler": _autocast(torch.float16),
    **{f"BF16 work, masters in the {where}": _masters(where) for where in ("optimizer", "model")},
    "BF16 work listed as state, masters in the model": _masters("listed"),
}


class _Plain:
    """A recorder that records nothing."""

    @contextlib.contextmanager
    def step(self, batch: object) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(commit=lambda loss: None)

    def finish(self) -> None:
        """Nothing is to be finished."""


def _final(train: Callable[[Make, int, int], list[float]], make: Make, seed: int, steps: int) -> float:
    torch.manual_seed(seed)
    return statistics.fmean(train(make, seed, steps)[-_LAST:])


def run(*, seeds: int = 5, steps: int = 60, progress: Callable[[int], object] = print) -> list[Row]:
    """Train each arrangement with each seed, natively and in both numerics.

    Args:
        seeds: how many; at least 2.
        steps: of each training, at least 10; the mean loss of the last 10 counts.
        progress: called with 1 after each arrangement in each numerics.

    Raises:
        CallerError: too few seeds or steps.
    """
    if seeds < 2 or steps < _LAST:
        raise CallerError(f"a comparison takes at least 2 seeds and {_LAST} steps")
    rows = []
    with DevicePool() as pool, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for work, train in ARRANGEMENTS.items():
            native = [_final(train, lambda *_, **__: _Plain(), seed, steps) for seed in range(seeds)]
            for numerics in ("exact", "rounded"):
                found, outcome = [], ""
                for seed in range(seeds):
                    with tempfile.TemporaryDirectory() as place:
                        folder = Path(place) / "run"

                        def make(model: Any, optimizer: Any, *, state: Any, out: Path = folder) -> Recorder:
                            return Recorder(model, optimizer, out=out, numerics=numerics, chips=1, state=state)  # noqa: B023

                        found.append(_final(train, make, seed, steps))
                        if not outcome:
                            settings = Settings(samples=1, seed="precision", devices=_DEVICES)
                            trust = Trust.load([Path(place) / "run.trust.json"], [folder])
                            judged = inspect([folder], trust, settings, now=datetime.now(UTC), worker=pool.run)
                            outcome = judged.outcome.value
                row: Row = {"work": work, "mode": numerics, "seeds": seeds, "steps": steps, "outcome": outcome}
                row |= {"loss": statistics.fmean(found), "native_loss": statistics.fmean(native)}
                rows.append(row | {"native_deviation": statistics.stdev(native)})
                progress(1)
    return rows


def table(rows: Sequence[Row]) -> Iterator[str]:
    """One line an arrangement and numerics."""
    for row in rows:
        yield (
            f"{row['work']:48} {row['mode']:8} {row['outcome']:12} loss {row['loss']:.4f} native "
            f"{row['native_loss']:.4f} ± {row['native_deviation']:.4f}"
        )


def verdict(rows: Sequence[Row]) -> str | None:
    """What is not as it should be; None if nothing."""
    for row in rows:
        if row["outcome"] != "ACCEPT":
            return f"{row['work']} in {row['mode']} ends {row['outcome']}"
        if abs(row["loss"] - row["native_loss"]) >= row["native_deviation"]:
            return f"{row['work']} in {row['mode']} ends with another loss than native training"
    return None


def write(rows: Sequence[Row], path: Path) -> None:
    """Put the rows in a file; CallerError if that fails."""
    write_rows(rows, path)
