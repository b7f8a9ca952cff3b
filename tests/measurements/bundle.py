"""``bundle``: bytes of bundles changed in turn, each of which `verify` must notice."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

from analysis.bench.origin import write
from analysis.demo import CHIPS, REPLAY_DEVICES, SAMPLES, SAMPLING, SEED, SNAPSHOT_RATE, STEPS
from firmware_sim.errors import CallerError
from inspector.bundle.checker import check_bundle
from inspector.inspection.guards import Settings
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome
from inspector.replay.pool import DevicePool
from inspector.rounds.turns import play_round, world_of
from monitor.lab.rounds import LabSide
from monitor.lab.simulated_lab import LabConfig
from monitor.presets.task import Task
from monitor.recording.recipes import train

__all__ = ["change_bytes", "run", "verdict", "write"]

Row = dict[str, Any]

_STARTED = datetime(2026, 1, 1, tzinfo=UTC)
_TOLD = 16
"""Places that are named in a row, of those where a change was not noticed."""


def run(*, places: int = 2000, seed: int = 0, progress: Callable[[int], object] | None = None) -> list[Row]:
    """Change every byte of the bundle of one chip and one step, and so many of one as the demo's round makes.

    Rows hold ``work`` (minimal or demo), ``mode``, ``seconds``, ``ratio`` (null), ``seed``, ``bytes``, ``changed``,
    ``noticed``, ``unchanged`` (the verdict of the bundle as it is) and ``missed`` (places of some that were not).

    Args:
        seed: of the places and of what takes their bytes' place.
        progress: called with 1 after each change.

    Raises:
        CallerError: no place.
    """
    if places < 1:
        raise CallerError("at least one place is changed")
    rng = random.Random(seed)
    small = Settings(samples=1, seed=None, devices=REPLAY_DEVICES[:1], sampling=SAMPLING)
    usual = Settings(samples=SAMPLES, seed=None, devices=REPLAY_DEVICES[:1], sampling=SAMPLING)
    tasks = (
        Task.for_preset("digits-cnn", seed=SEED, steps=1, checkpoint_every=1, shards=1, batch_size=2),
        Task.for_preset("tiny-gpt", seed=SEED, steps=STEPS, checkpoint_every=4, shards=CHIPS),
    )
    with tempfile.TemporaryDirectory(prefix="chipwitness-bench-") as folder, DevicePool() as devices:
        minimal = _bundle(Path(folder) / "minimal", tasks[0], Fraction(1), small, devices)
        demo = _bundle(Path(folder) / "demo", tasks[1], SNAPSHOT_RATE, usual, devices)
    every = range(len(minimal[0]))
    some = sorted(rng.sample(range(len(demo[0])), min(places, len(demo[0]))))
    rows = []
    for work, (data, trust), chosen in (("minimal", minimal, every), ("demo", demo, some)):
        mode = "every byte" if len(chosen) == len(data) else f"{len(chosen)} bytes"
        rows.append({"work": work, "mode": mode, **change_bytes(data, trust, chosen, rng, progress), "seed": seed})
    return rows


def change_bytes(
    data: bytes,
    trust: Trust,
    places: Sequence[int],
    rng: random.Random,
    progress: Callable[[int], object] | None = None,
) -> Row:
    """Put another byte in each place in turn, drawn uniformly, and verify what that makes of the bundle."""
    begun, noticed, missed = time.perf_counter(), 0, []
    for place in places:
        changed = bytearray(data)
        changed[place] ^= rng.randrange(1, 256)
        if check_bundle(bytes(changed), trust).evidence["verifies"]:
            missed.append(place)
        else:
            noticed += 1
        if progress is not None:
            progress(1)
    return {
        "seconds": time.perf_counter() - begun,
        "ratio": None,
        "bytes": len(data),
        "changed": len(places),
        "noticed": noticed,
        "unchanged": check_bundle(data, trust).outcome.value,
        "missed": missed[:_TOLD],
    }


def _bundle(out: Path, task: Task, rate: Fraction, settings: Settings, devices: DevicePool) -> tuple[bytes, Trust]:
    """The bundle of a round about an honest run, and the trust file of its world."""
    config = LabConfig(
        lab="lab",
        seed=task.seed,
        chips=task.shards,
        snapshot_rate=rate,
        started=_STARTED,
        duration=timedelta(hours=1),
    )
    train(task, out / "run", config, device="native")
    trust = Trust.load([out / "run.trust.json"], [out / "run"])
    world = world_of(out / "world", [(out / "run", trust)], LabSide)
    decided = play_round(world, settings, now=_STARTED + timedelta(minutes=30), worker=devices.run)
    return decided.bundle.read_bytes(), world.trust()


def verdict(rows: Sequence[Row]) -> str | None:
    """What is not as it has to be, or None."""
    for row in rows:
        if row["unchanged"] != Outcome.ACCEPT.value:
            return f"the bundle {row['work']} does not verify as it is"
        if row["noticed"] < row["changed"]:
            missed = row["changed"] - row["noticed"]
            return f"{missed} of {row['changed']} changes of the bundle {row['work']} go unnoticed"
    return None
