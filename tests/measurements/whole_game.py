"""``whole-game``: a dispute about a large model, played to its end, with a lie in the largest product of a step.

Two labs record the same preset; one alters one element of the first product whose result is the largest (of GPT-2: the
gradient of its head). Parties and referee are in this process. What parties spend on answers is counted apart.
Recordings take an hour for a large model, so they are kept, with what they took.
"""

from __future__ import annotations

import json
import math
import resource
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from analysis.bench.dispute import Counted, Spent
from analysis.bench.origin import write_among
from firmware_sim.evidence import SigningKey
from inspector.dispute.game import Party, check_game, play
from inspector.dispute.provider import desk_of
from inspector.inspection.transcripts import open_run
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Verdict
from monitor.lab.conduct import Conduct
from monitor.lab.lies import LAB_LIES
from monitor.lab.prover import LabProver
from monitor.lab.simulated_lab import LabConfig
from monitor.presets.task import Task
from monitor.recording.recipes import train
from monitor.replay.derivation import derive

__all__ = ["PRODUCTS", "run", "table", "verdict", "write"]

Row = dict[str, Any]
_LIE = "wrong-operator"
PRODUCTS = ("aten.mm.default", "aten.addmm.default")
_ELEMENT = 12_345_678
_MOST_BYTES, _MOST_SHARE = 20_000_000, 0.05


class _WrongProduct(Conduct):
    """Alters one element of the first product with a result of a shape."""

    def __init__(self, step: int, shape: tuple[int, ...]) -> None:
        super().__init__(step)
        self._shape, self._is_told = shape, False

    def observer(self, step: int) -> Any:
        return _WrongProduct(step, self._shape) if step == self._step else None  # a prover takes the step repeatedly

    def before(self, index: int, func: object, args: object, kwargs: object) -> None:
        """Nothing to do."""

    def after(self, index: int, func: object, args: object, kwargs: object, out: object) -> None:
        """Alter the result once."""
        if self._is_told or str(func) not in PRODUCTS or not isinstance(out, Tensor) or out.shape != self._shape:
            return
        with torch.no_grad():
            out.view(-1)[_ELEMENT % out.numel()] += 1e-3
        self._is_told = True


def _largest_product(task: Task) -> tuple[int, ...]:
    """Shape of the largest result of a product of a step."""
    results = [
        tuple(call["results"][0]["shape"])
        for call in derive(task).program.calls
        if call["operator"] in PRODUCTS and call["results"]
    ]
    return max(results, key=math.prod)


def run(*, preset: str, folder: Path, steps: int = 2, batch_size: int = 2) -> list[Row]:
    """Record what is not in ``folder``, and play."""
    task = Task.for_preset(
        preset, seed=1, steps=steps, numerics="exact", batch_size=batch_size, checkpoint_every=steps, shards=1
    )
    shape = _largest_product(task)
    told = replace(LAB_LIES[_LIE], conduct=lambda step: _WrongProduct(step, shape))
    with mock.patch.dict(LAB_LIES, {_LIE: told}):  # also while the liar's prover takes the step again
        runs = [_recorded(task, folder, name) for name in ("honest", "liar")]
        found, game, trust, spent, seconds = _played(runs, folder)
    took = json.loads((folder / "recorded.json").read_text())["honest"] / steps
    seen = found.evidence
    again = check_game(game, trust)
    return [
        {
            "work": preset,
            "mode": f"batches of {batch_size}",
            "seconds": seconds,
            "ratio": seconds / took,
            "step_seconds": took,
            "providers_seconds": spent.seconds,
            "steps": steps,
            "guilty": seen["guilty"],
            **{key: seen[key] for key in ("step", "operator", "tile", "case", "rounds", "bytes")},
            "bytes_by_question": dict(sorted(spent.bytes.items())),
            "evidence_bytes": len(game),
            "verifies": again.evidence["verifies"] and again.evidence["guilty"] == seen["guilty"],
            "memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        }
    ]


def _played(runs: list[Path], folder: Path) -> tuple[Verdict, bytes, Trust, Spent, float]:
    """Verdict, evidence, trust, what the parties spent, and the referee's processor seconds."""
    trust = Trust.load([each.with_name(f"{each.name}.trust.json") for each in runs])
    referee, spent, parties = SigningKey.generate(bytes(32)), Spent(), []
    for each in runs:
        prover = LabProver(each)
        store = folder / f"answers-{each.name}-{time.time_ns()}"
        desk = desk_of(open_run(each, trust), prover, store, [referee.verifying])
        parties.append(Party(name=each.name, key=prover.key.verifying, transport=Counted(desk, referee, spent)))
    start = time.process_time()
    found, game = play(parties, trust, referee, seconds=0, now=datetime.now(UTC), branching=2)
    return found, game, trust, spent, time.process_time() - start - spent.seconds


def _recorded(task: Task, folder: Path, name: str) -> Path:
    out, notes = folder / name, folder / "recorded.json"
    if out.exists():
        return out
    folder.mkdir(parents=True, exist_ok=True)
    config = LabConfig(lab=name, seed=1, chips=1, duration=timedelta(hours=48))
    start = time.process_time()
    if name == "liar":
        config = replace(config, lie=_LIE, lie_step=task.steps)
    train(task, out, config, device="native")
    known = json.loads(notes.read_text()) if notes.exists() else {}
    notes.write_text(json.dumps({**known, name: time.process_time() - start}))
    return out


def table(rows: list[Row]) -> list[str]:
    """Return the rows as lines for people."""
    return [
        f"{row['work']}, {row['mode']}: {row['guilty']} is guilty of {row['operator']} of step {row['step']}; "
        f"{row['rounds']} rounds, {row['bytes']:,} bytes; referee {row['seconds']:.1f} s of processor time, "
        f"{row['ratio']:.1%} of a recorded step ({row['step_seconds']:.0f} s)"
        for row in rows
    ]


def verdict(rows: list[Row]) -> str | None:
    """Why the game is not as it should be."""
    for row in rows:
        if row["guilty"] != "liar" or row["step"] != row["steps"] or not row["verifies"]:
            return f"{row['guilty']} is guilty in step {row['step']}; verifies: {row['verifies']}"
        if row["bytes"] > _MOST_BYTES or row["ratio"] > _MOST_SHARE:
            return f"{row['bytes']} bytes, {row['ratio']:.1%} of a step"
    return None


def write(rows: list[Row], path: Path) -> None:
    """Put the rows into a file, among those of other presets."""
    write_among(rows, path, by=("work", "mode"))
