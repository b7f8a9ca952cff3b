"""``honest``: honest runs of many models, recorded with crashes in between; an inspection must accept each."""

from __future__ import annotations

import itertools
import random
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, StepLR

from analysis.bench.origin import write
from firmware_sim.errors import CallerError, ChipwitnessError
from inspector.inspection.guards import Settings
from inspector.inspection.inspection import inspect
from inspector.inspection.sources import Sources
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome
from inspector.replay.pool import DevicePool
from monitor import Recorder
from tests.measurements._honest_models import MODELS

__all__ = ["DEVICES", "World", "run", "table", "verdict", "worlds", "write"]

Row = dict[str, Any]

DEVICES = ("sse41", "mkl-compatible")
"""Replay devices whose native arithmetic differs."""

_LAB = "lab"
_STARTED = datetime(2026, 1, 1, tzinfo=UTC)
_BATCH_SIZES = (1, 7, 50, 100)
_OPTIMIZERS: Mapping[str, Callable[[nn.Module], Optimizer]] = {
    "SGD": lambda model: SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3),
    "AdamW": lambda model: AdamW(model.parameters(), lr=3e-3, weight_decay=0.01),
}
_SCHEDULES: Mapping[str, Callable[[Optimizer], LRScheduler]] = {
    "constant": lambda optimizer: StepLR(optimizer, 1000),
    "steps": lambda optimizer: StepLR(optimizer, 2, 0.5),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 8),
    "warm-up": lambda optimizer: LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One honest run.

    Attributes:
        idle_chips: registered chips that take no part, and answer outside of the run.
        crashes: for each crash, in which step the process ends, and after how much of it: the forward pass, the
            backward pass or the update.
    """

    number: int
    seed: int
    model: str
    numerics: str
    batch_size: int
    optimizer: str
    schedule: str
    steps: int
    chips: int
    idle_chips: int
    checkpoint_every: int
    crashes: tuple[tuple[int, str], ...]


class _Ends(Exception):
    """Stands for the end of the process."""


def worlds(runs: int, seed: int) -> list[World]:
    """So many worlds; every 32 of them have each model, numerics and batch size together once."""
    chance = random.Random(f"chipwitness/honest/{seed}")
    kinds: list[tuple[str, str, int]] = []
    found = []
    for number in range(runs):
        if not kinds:
            kinds = list(itertools.product(MODELS, ("exact", "rounded"), _BATCH_SIZES))
            chance.shuffle(kinds)
        model, numerics, batch_size = kinds.pop()
        steps = chance.randint(2, 5)
        crashing = sorted(chance.sample(range(1, steps + 1), chance.choice((0, 1, 2))))
        found.append(
            World(
                number=number,
                seed=chance.getrandbits(32),
                model=model,
                numerics=numerics,
                batch_size=batch_size,
                optimizer=chance.choice(tuple(_OPTIMIZERS)),
                schedule=chance.choice(tuple(_SCHEDULES)),
                steps=steps,
                chips=chance.randint(1, 4),
                idle_chips=number % 2,
                checkpoint_every=chance.randint(1, 4),
                crashes=tuple((step, chance.choice(("forward", "backward", "update"))) for step in crashing),
            )
        )
    return found


def _objects(world: World) -> tuple[nn.Module, Optimizer, LRScheduler]:
    torch.manual_seed(world.seed)
    model = MODELS[world.model].make()
    optimizer = _OPTIMIZERS[world.optimizer](model)
    return model, optimizer, _SCHEDULES[world.schedule](optimizer)


def _record(world: World, out: Path) -> None:
    """Train the whole run; after each crash a new process would begin as this one goes on."""
    model, optimizer, schedule = _objects(world)
    recorder = Recorder(
        model,
        optimizer,
        out=out,
        numerics=world.numerics,
        seed=world.seed,
        chips=world.chips,
        idle_chips=world.idle_chips,
        checkpoint_every=world.checkpoint_every,
        lab=_LAB,
        snapshot_rate=Fraction(1),
        started=_STARTED,
        hours=1.0,
    )
    crashes = dict(world.crashes)
    while recorder.steps < world.steps:
        step = recorder.steps + 1
        try:
            _take_step(world, recorder, model, optimizer, crashes.pop(step, None))
        except _Ends:
            model, optimizer, schedule = _objects(world)
            recorder = Recorder.resume(model, optimizer, out=out)
            for _ in range(recorder.steps):
                schedule.step()
        else:
            schedule.step()
    recorder.finish()


def _take_step(world: World, recorder: Recorder, model: nn.Module, optimizer: Optimizer, end: str | None) -> None:
    kind = MODELS[world.model]
    batch = kind.batch(world.batch_size, torch.Generator().manual_seed(world.seed + recorder.steps))
    with recorder.step(batch):
        optimizer.zero_grad()
        loss = kind.loss(model, batch)
        _end_if(end == "forward")
        loss.backward()  # type: ignore[no-untyped-call]
        _end_if(end == "backward")
        optimizer.step()
        _end_if(end == "update")


def _end_if(now: bool) -> None:
    if now:
        raise _Ends


def _row(world: World, devices: DevicePool) -> Row:
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")  # put forward after a crash
        out = Path(folder) / "run"
        try:
            _record(world, out)
            trust = Trust.load([out.with_name(f"{out.name}.trust.json")], [out])
            settings = Settings(samples=len(trust.chips_of(_LAB)), seed=str(world.seed), devices=DEVICES)
            now, answers = _STARTED + timedelta(hours=2), out.with_name(f"{out.name}.answers")
            asked = [answers] if world.idle_chips else []
            found = inspect([out], trust, settings, now=now, worker=devices.run, sources=Sources(answers=asked))
            outcome, reasons = found.outcome.value, [reason.text for reason in found.reasons]
        except ChipwitnessError as error:
            outcome, reasons = type(error).__name__, [str(error)]
    return {
        "work": world.model,
        "mode": world.numerics,
        "seconds": time.perf_counter() - started,
        "ratio": None,
        **{name: value for name, value in asdict(world).items() if name not in ("model", "numerics")},
        "devices": list(DEVICES),
        "outcome": outcome,
        "reasons": reasons,
    }


def run(*, runs: int = 12, seed: int = 0, progress: Callable[[int], object] = lambda done: None) -> list[Row]:
    """Record honest runs with a snapshot at every tick and nothing listed as free, and inspect each with all chips.

    Args:
        runs: how many.
        seed: decides every world.
        progress: called with 1 after each row.

    Returns:
        Rows with ``work`` (the model), ``mode`` (numerics), ``seconds`` (of recording and inspection), ``ratio``
        (None), what else the world has, ``devices``, ``outcome`` (of the inspection, or the error that ended it) and
        ``reasons``.

    Raises:
        CallerError: fewer than one run, or a negative seed.
    """
    if runs < 1 or seed < 0:
        raise CallerError("give at least one run, and a seed from 0 on")
    rows = []
    with DevicePool() as devices:
        for world in worlds(runs, seed):
            rows.append(_row(world, devices))
            progress(1)
    return rows


def verdict(rows: Sequence[Row]) -> str | None:
    """Which runs were not accepted, with the first reason, or None."""
    odd = [row for row in rows if row["outcome"] != Outcome.ACCEPT.value]
    if not odd:
        return None
    first = odd[0]
    text = f"run {first['number']} ({first['work']}, {first['mode']}): {first['outcome']}: {first['reasons'][0]}"
    return f"{len(odd)} of {len(rows)} honest runs were not accepted; {text}"


def table(rows: Sequence[Row]) -> list[str]:
    """Lines for a person."""
    lines = [
        f"{'model':13} {'numerics':8} {'batch':>5}  {'optimizer':9} {'schedule':8} {'steps':>5} {'crashes':>7}  outcome"
    ]
    for row in rows:
        lines.append(
            f"{row['work']:13} {row['mode']:8} {row['batch_size']:5}  {row['optimizer']:9} {row['schedule']:8} "
            f"{row['steps']:5} {len(row['crashes']):7}  {row['outcome']}"
        )
        lines += [f"    {text}" for text in row["reasons"] if row["outcome"] != Outcome.ACCEPT.value]
    accepted = sum(row["outcome"] == Outcome.ACCEPT.value for row in rows)
    lines.append(f"{accepted} of {len(rows)} accepted, all chips drawn, replayed on {' and '.join(DEVICES)}")
    return lines
