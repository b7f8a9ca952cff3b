"""``evasions``: every lie told in real runs, how often a real inspection catches it, and how often it should.

A trial is a world of its own: new chips, new secrets, another draw. A lie is caught where the inspection ends in
REJECT. The predictions are the closed forms that verdicts print (``inspector.probability.chances``).
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

from analysis.bench import origin
from firmware_sim.dishonest_chips import ChipLie
from firmware_sim.errors import CallerError
from firmware_sim.lies import Chance, Lie, Scenery, find_lie
from inspector.campaign.intervals import clopper_pearson
from inspector.campaign.rates import MeasuredRate, save_rates
from inspector.inspection.guards import Settings
from inspector.inspection.inspection import inspect
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome
from inspector.probability.chances import chip_drawn, snapshots_within
from inspector.replay.pool import DevicePool
from monitor.lab.lies import every_lie
from monitor.lab.simulated_lab import LabConfig
from monitor.presets.task import Task
from monitor.recording.recipes import train
from tests.measurements._own_loop import record_own_loop

__all__ = ["LAWS", "LIES", "Scene", "run", "save_as_rates", "table", "verdict", "write"]

Row = dict[str, Any]

_STARTED = datetime(2026, 1, 1, tzinfo=UTC)
_DURATION = timedelta(hours=1)
_DEVICE = "sse41"
_CERTAIN = 20
"""Worlds where a prediction leaves nothing to chance."""
_DOUBT = 1e-3
"""Chance that a right table of predictions is called wrong."""


CHIPS = 6
"""Chips of the lab."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """The world that lies are told in.

    Attributes:
        rate: snapshots per chip and tick, which a step takes by the chips' clocks.
        lie_step: step at which the lab departs from honesty.
    """

    chips: int = CHIPS
    samples: int = 2
    rate: Fraction = Fraction(1, 8)
    steps: int = 8
    checkpoint_every: int = 2
    lie_step: int = 5

    def drawn(self, liars: int) -> float:
        """Chance that at least one of so many chips is drawn."""
        return chip_drawn(chips=self.chips, liars=liars, drawn=self.samples)

    def snapshots(self, ticks: int, least: int = 1) -> float:
        """Chance that at least so many snapshots fall into some ticks of a chip."""
        return snapshots_within(ticks, self.rate, least)

    def replayed(self, last: int) -> float:
        """Chance that a segment with a step from ``lie_step`` to ``last`` is replayed.

        That is the first segment, and each with a snapshot of a drawn chip.
        """
        first = (self.lie_step - 1) // self.checkpoint_every * self.checkpoint_every
        end = min(-(-last // self.checkpoint_every) * self.checkpoint_every, self.steps)
        return 1.0 if first == 0 else self.snapshots(self.samples * (end - first))


_HIDDEN_TICKS = 6
"""Idle ticks in which all chips hold the other model."""

LAWS: dict[Chance, Callable[[Scene], float]] = {
    Chance.ALWAYS: lambda _: 1.0,
    Chance.NEVER: lambda _: 0.0,
    Chance.STEP: lambda scene: scene.replayed(scene.lie_step),
    Chance.REST: lambda scene: scene.replayed(scene.steps),
    Chance.HELD: lambda scene: scene.snapshots(scene.samples * _HIDDEN_TICKS),
    Chance.SHOWN: lambda scene: scene.snapshots(scene.samples * (2 * scene.steps - 1)),
    Chance.CHIP: lambda scene: scene.drawn(1),
    Chance.SNAPSHOT: lambda scene: scene.drawn(1) * scene.snapshots(scene.steps),
    Chance.SECOND_SNAPSHOT: lambda scene: scene.drawn(1) * scene.snapshots(scene.steps, 2),
    Chance.HALF: lambda scene: scene.drawn(scene.chips // 2),
}
"""How often one inspection should catch a lie. A lie with ``Chance.APART`` has a test of its own."""
LIES = {name: lie for name, lie in every_lie().items() if lie.chance in LAWS}


_CONFIDENCE = 1 - _DOUBT / len(LIES)
"""Of each interval, so that all together miss a right prediction with ``_DOUBT`` at most."""


def _config(lie: Lie, scene: Scene, world: int, first: Path | None) -> LabConfig:
    if first is not None:
        return LabConfig.following(
            first, lie=lie.name, lie_step=scene.lie_step, source=None, started=_STARTED, duration=_DURATION
        )
    return LabConfig(
        lab="lab",
        seed=world,
        chips=scene.chips,
        lie=None if lie.scenery is Scenery.TWO_RUNS else lie.name,
        lie_step=scene.lie_step,
        snapshot_rate=scene.rate,
        started=_STARTED,
        duration=_DURATION,
    )


def _caught(lie: Lie, scene: Scene, world: int, folder: Path, devices: DevicePool) -> bool:
    """One trial."""
    runs: list[Path] = []
    for number in range(2 if lie.scenery is Scenery.TWO_RUNS else 1):
        task = Task.for_preset(
            "digits-cnn",
            seed=2 * world + number,
            steps=scene.steps,
            batch_size=8,
            **{"checkpoint_every": scene.checkpoint_every, "numerics": "rounded", **lie.options},
            shards=scene.chips,
        )
        first = runs[0] if runs else None
        runs.append(folder / f"run-{number}")
        if lie.scenery is Scenery.EVALUATIONS:
            record_own_loop(
                task,
                runs[-1],
                rate=scene.rate,
                started=_STARTED,
                duration=_DURATION,
                evaluates=True,
                lie=lie.name,
                lie_step=scene.lie_step,
            )
        else:
            train(task, runs[-1], _config(lie, scene, world, first), device="native")
    trust = Trust.load([run.with_name(f"{run.name}.trust.json") for run in runs], runs)
    registered = len(trust.chips_of("lab"))
    settings = Settings(samples=min(scene.samples, registered), seed=str(world), devices=(_DEVICE,))
    verdict = inspect(runs, trust, settings, now=_STARTED + 2 * _DURATION, worker=devices.run)
    return verdict.outcome is Outcome.REJECT


def run(
    *,
    lies: Sequence[str] | None = None,
    trials: int = 20,
    samples: int = 2,
    rates: Path | None = None,
    progress: Callable[[int], object] = lambda done: None,
) -> list[Row]:
    """Tell each lie in ``trials`` worlds; in at most 20 where it should always or never be caught.

    Args:
        lies: names; all that ``train`` can tell, if None.
        samples: chips that each inspection draws, of the scene's six.
        rates: file in which these become the rates that ``campaign`` reads; needs all six chips drawn.
        progress: called with 1 before each world.

    Returns:
        Rows with ``work`` (the lie), ``mode`` (lab or chip), ``seconds`` (median of a trial), ``ratio`` (None),
        ``trials``, ``caught``, ``low``, ``high`` (Clopper-Pearson interval), ``confidence`` (of that interval),
        ``predicted``, ``agrees`` and ``scene``.

    Raises:
        CallerError: an unknown lie, or an impossible number.
    """
    told = [find_lie(LIES, name) for name in lies or LIES]
    if trials < 1 or not 1 <= samples <= CHIPS:
        raise CallerError(f"give at least one trial, and 1 to {CHIPS} chips to draw")
    scene = Scene(samples=samples)
    rows: list[Row] = []
    with DevicePool() as devices:
        for lie in told:
            number = trials if 0 < LAWS[lie.chance](scene) < 1 else min(trials, _CERTAIN)
            rows.append(_row(lie, scene, number, devices, progress))
    if rates is not None:
        save_as_rates(rows, rates)
    return rows


def _row(lie: Lie, scene: Scene, trials: int, devices: DevicePool, progress: Callable[[int], object]) -> Row:
    caught, seconds = 0, []
    for world in range(trials):
        progress(1)
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            caught += _caught(lie, scene, world, Path(folder), devices)
        seconds.append(time.perf_counter() - started)
    low, high = clopper_pearson(caught, trials, _CONFIDENCE)
    predicted = LAWS[lie.chance](scene)
    return {
        "work": lie.name,
        "mode": "chip" if isinstance(lie, ChipLie) else "lab",
        "seconds": statistics.median(seconds),
        "ratio": None,
        "trials": trials,
        "caught": caught,
        "low": low,
        "high": high,
        "confidence": _CONFIDENCE,
        "predicted": predicted,
        "agrees": low <= predicted <= high,
        "scene": {**asdict(scene), "rate": str(scene.rate)},
    }


def verdict(rows: Sequence[Row]) -> str | None:
    """Which predictions lie outside the interval of what was measured, or None; all together wrongly in 1 of 1,000."""
    odd = [f"{row['work']} ({row['caught']} of {row['trials']}, {row['predicted']:.2f})" for row in rows]
    odd = [text for text, row in zip(odd, rows, strict=True) if not row["agrees"]]
    return f"caught otherwise than predicted: {', '.join(odd)}" if odd else None


def table(rows: Sequence[Row]) -> list[str]:
    """Lines for a person."""
    lines = [f"{'lie':24} {'by':5} {'caught':>9} {'measured':>9} {'predicted':>10} {'interval':>12}"]
    for row in rows:
        share = row["caught"] / row["trials"]
        told, interval = f"{row['caught']} of {row['trials']}", f"{row['low']:.2f} to {row['high']:.2f}"
        lines.append(f"{row['work']:24} {row['mode']:5} {told:>9} {share:9.2f} {row['predicted']:10.2f} {interval:>12}")
    scene = rows[0]["scene"]
    level = rows[0]["confidence"]
    lines.append(f"each interval holds with {100 * level:.6g} %, so all {len(LIES)} lies' with {1 - _DOUBT:.1%}")
    lines.append(f"{scene['samples']} of {scene['chips']} chips drawn, {scene['rate']} snapshots a chip and step,")
    lines.append(
        f"{scene['steps']} steps in segments of {scene['checkpoint_every']}, the lie at step {scene['lie_step']}"
    )
    return lines


def write(rows: Sequence[Row], path: Path) -> None:
    """Put the rows in a file with machine, device and commit; those of other lies stay, each with its own.

    Raises:
        CallerError: it cannot be written.
    """
    origin.write_among(rows, path, device=_DEVICE)


def save_as_rates(rows: Sequence[Row], path: Path) -> None:
    """Write the rows as the table that ``campaign`` reads: how often a lie is caught once its evidence is held.

    Raises:
        CallerError: the inspections did not draw all chips, or the file cannot be written.
    """
    if any(row["scene"]["samples"] != row["scene"]["chips"] for row in rows):
        raise CallerError(f"a campaign draws chips itself; measure with --samples {CHIPS} for its rates")
    settings = {row["work"]: "{steps} steps, lie at {lie_step}, rate {rate}".format(**row["scene"]) for row in rows}
    rates = [
        MeasuredRate(
            lie=row["work"],
            trials=row["trials"],
            caught=row["caught"],
            settings=settings[row["work"]],
            device=_DEVICE,
        )
        for row in rows
    ]
    save_rates(path, rates)
