"""``hiding``: labs that keep another model in their chips' memory as best they can, beside the chance printed.

The chance is a verdict's own (``inspector.probability.chances``: "all chips hold another state for … ticks at a
stretch"), which holds at least. Each lab sees every snapshot as it is taken, and plays one way (``WAYS``). Runs, chips
and inspections are real; a lab is caught where the inspection ends in REJECT.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional

from analysis.bench.origin import write
from firmware_sim import RecordKind, parse_log
from inspector.campaign.intervals import clopper_pearson
from inspector.inspection.guards import Settings
from inspector.inspection.inspection import inspect
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome
from inspector.replay.pool import DevicePool
from monitor import Recorder
from monitor.lab.conduct import Conduct
from monitor.lab.host import Host
from monitor.lab.simulated_lab import SimulatedLab

__all__ = ["BEST", "SETTINGS", "WAYS", "run", "table", "verdict", "write"]

Row = dict[str, Any]
SETTINGS = ((1, 2), (1, 5), (1, 10), (2, 2), (2, 5), (4, 5))
"""Chips, of which half are drawn but at least one, and ticks with another model."""
WAYS = ("at once", "after a snapshot", "end epochs", "shut down", "cut power", "attach anew")
BEST = "end epochs"
"""Begins just after a snapshot, and ends the epoch after each tick that held none."""
_RATE = Fraction(1, 8)
_STARTED = datetime(2026, 1, 1, tzinfo=UTC)
_STEP, _STEPS = 2, 4
_MOST_WAITING = 64
_DOUBT = 1e-3
"""Chance that a right table is called wrong."""


class _Hiding(Conduct):
    """After one step and an evaluation, keeps other weights in memory for some ticks that are declared idle."""

    def __init__(self, way: str, ticks: int) -> None:
        self.way, self.ticks = way, ticks

    def after_step(self, step: int, host: Host) -> None:
        if step != _STEP + 1:  # the evaluation has taken the chips' clocks into a tick
            return
        declared = {name: tensor.clone() for name, tensor in host.memory.export().items()}
        other = {name: tensor + 1 if tensor.is_floating_point() else tensor for name, tensor in declared.items()}
        if self.way in (BEST, "after a snapshot"):
            for _ in range(_MOST_WAITING):
                host.idle_chips()
                if any(map(_has_just_taken, host.lab.chips)):
                    break
        if self.way == "attach anew":
            host.attach_memory(step)
        for _ in range(self.ticks):
            host.memory.load(other)
            host.idle_chips()
            host.memory.load(declared)
            self._between(step, host)

    def _between(self, step: int, host: Host) -> None:
        if self.way == "end epochs":
            for chip in host.lab.chips:
                if not _has_just_taken(chip):
                    chip.close_epoch()
        elif self.way == "shut down":
            host.lab.restart()
        elif self.way == "cut power":
            host.lab.cut_power()
            host.lab.chips[:] = SimulatedLab.reopen(host.lab.folder).chips
        if self.way in ("shut down", "cut power"):
            host.attach_memory(step)
            host.announce(step)


def _has_just_taken(chip: Any) -> bool:
    """Whether a chip has taken the snapshot of the present tick, so that what is left of it holds none."""
    last = parse_log(chip.log_bytes())[-1]
    return last.kind is RecordKind.SNAPSHOT and last.tick == chip.time


def _train(out: Path, world: int, chips: int, conduct: Conduct) -> None:
    torch.manual_seed(world)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mock.patch("monitor.recording.recorder.conduct", return_value=conduct):
        recorder = Recorder(
            model,
            optimizer,
            out=out,
            seed=world,
            chips=chips,
            checkpoint_every=1,
            snapshot_rate=_RATE,
            lab="lab",
            started=_STARTED,
            hours=1.0,
        )
    for step in range(1, _STEPS + 1):
        batch: tuple[Tensor, Tensor] = torch.randn(4, 8), torch.randn(4, 4)
        with recorder.step(batch):
            optimizer.zero_grad()
            functional.mse_loss(model(batch[0]), batch[1]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        if step == _STEP:
            with recorder.evaluation(batch) as evaluation, torch.no_grad():
                evaluation.commit(functional.mse_loss(model(batch[0]), batch[1]))
    recorder.finish()


def _tried(folder: Path, world: int, chips: int, ticks: int, way: str, devices: DevicePool) -> tuple[str, float]:
    """Outcome of one inspection, and the chance that its verdict prints."""
    out = folder / "run"
    _train(out, world, chips, _Hiding(way, ticks))
    trust = Trust.load([out.with_name("run.trust.json")], [out])
    settings = Settings(samples=max(chips // 2, 1), seed=str(world), devices=("sse41",))
    found = inspect([out], trust, settings, now=_STARTED + timedelta(minutes=30), worker=devices.run)
    rows = found.evidence["chances"]
    [printed] = [row["probability"] for row in rows if f"another state for {ticks} ticks at a stretch" in row["lie"]]
    return found.outcome.value, printed


def run(*, tries: int = 480, seed: int = 0, progress: Callable[[int], object] | None = None) -> list[Row]:
    """Play each setting so often: half of the tries the best way that is known, the others in turn.

    Rows hold ``work`` (the way), ``mode`` (chips and ticks), ``seconds`` (of all tries), ``ratio`` (None), ``seed``,
    ``tries``, ``caught``, ``doubted`` (INCONCLUSIVE), ``low``, ``high`` (Clopper-Pearson interval of the caught),
    ``confidence`` (of it, so that all together hold with 1 - ``_DOUBT``) and ``printed``.
    """
    confidence = 1 - _DOUBT / (len(SETTINGS) * len(WAYS))
    rows: list[Row] = []
    with DevicePool() as devices:
        for place, (chips, ticks) in enumerate(SETTINGS):
            for number, way in enumerate(WAYS):
                begun, outcomes, printed = time.perf_counter(), [], {1.0}
                worlds = range(tries // 2 if way == BEST else tries // 2 // (len(WAYS) - 1))
                for world in worlds:
                    with tempfile.TemporaryDirectory() as folder:
                        at = seed + place * 1_000_000 + number * 100_000 + world
                        outcome, chance = _tried(Path(folder), at, chips, ticks, way, devices)
                    outcomes.append(outcome)
                    printed.add(chance)
                    if progress is not None:
                        progress(1)
                caught = outcomes.count(Outcome.REJECT.value)
                low, high = clopper_pearson(caught, len(worlds), confidence)
                rows.append(
                    {
                        "work": way,
                        "mode": f"{chips} chips, {ticks} ticks",
                        "seconds": time.perf_counter() - begun,
                        "ratio": None,
                        "seed": seed,
                        "tries": len(worlds),
                        "caught": caught,
                        "doubted": outcomes.count(Outcome.INCONCLUSIVE.value),
                        "low": low,
                        "high": high,
                        "confidence": confidence,
                        "printed": min(printed),
                    }
                )
    return rows


def verdict(rows: Sequence[Row]) -> str | None:
    """Which way is caught less often than is printed, or None; all together wrongly in 1 of 1,000."""
    odd = [row for row in rows if row["high"] < row["printed"]]
    text = ", ".join(f"{each['work']} ({each['mode']}: {each['caught']} of {each['tries']})" for each in odd)
    return f"caught less often than verdicts print: {text}" if odd else None


def table(rows: Sequence[Row]) -> list[str]:
    """Lines for a person."""
    lines = [f"{'lab':17} {'setting':19} {'caught':>11} {'measured':>9} {'printed':>8}  {'interval':>12}"]
    for row in rows:
        told, interval = f"{row['caught']} of {row['tries']}", f"{row['low']:.2f} to {row['high']:.2f}"
        share = row["caught"] / row["tries"]
        lines.append(f"{row['work']:17} {row['mode']:19} {told:>11} {share:9.2f} {row['printed']:8.2f}  {interval:>12}")
    return lines
