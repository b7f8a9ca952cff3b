"""``rounds``: what labs try in the rounds of an inspection: how often it is caught, and how often it should be.

A trial is a world of its own: new chips, new keys, new secrets. A lie is caught where the verdict on its lab is REJECT.
"""

from __future__ import annotations

import hashlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

from analysis.bench.origin import write
from firmware_sim.errors import CallerError
from inspector.campaign.intervals import clopper_pearson
from inspector.inspection.guards import Sampling, Settings
from inspector.inspection.sampling import challenge_seed, draw
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome
from inspector.probability.chances import chip_drawn
from inspector.probability.odds import Violation, chain
from inspector.replay.pool import DevicePool
from inspector.rounds import steps
from inspector.rounds.world import World
from monitor import processes
from monitor.lab.evidence import LiveChips
from monitor.lab.rounds import LabSide
from monitor.lab.simulated_lab import LabConfig, SimulatedLab, lab_path
from monitor.presets.task import Task
from monitor.recording.recipes import train
from monitor.transcript.draft import Draft
from monitor.transcript.layout import MANIFEST, chip_path
from tests.measurements import _forked_loop

__all__ = ["LIES", "run", "table", "verdict", "write"]

Row = dict[str, Any]

_STARTED = datetime(2026, 1, 1, tzinfo=UTC)
_DURATION, _MINUTE = timedelta(hours=1), timedelta(minutes=1)
_CERTAIN = 20
"""Worlds where a prediction leaves nothing to chance."""
_DOUBT = 1e-3
"""Chance that a right table of predictions is called wrong."""
_CHIPS, _STEPS, _SWAP_STEPS = 2, 2, 6
_SETTINGS = Settings(samples=1, seed=None, devices=("sse41",))
_SWAP = Sampling(confidence=0.5, against=Violation("swap"))
_HEADS = 16
"""So many heads a lab that grinds could sign."""
_GUESS = "0" * 64
"""What such a lab takes the inspectorate's secret for."""


@dataclass(slots=True)
class _Scene:
    """A world in which labs train and rounds are played."""

    folder: Path
    number: int
    devices: DevicePool
    now: datetime = _STARTED + timedelta(minutes=1)

    def train(self, name: str, *, lab: str = "lab", after: Path | None = None, number: int = 0, **more: Any) -> Path:
        """A finished run of a lab."""
        given = {"lie": None, "lie_step": 1, "snapshot_rate": Fraction(1, 2), "steps": _STEPS, "every": 1, **more}
        run, shards = self.folder / name, _CHIPS
        if after is None:
            config = LabConfig(
                lab=lab, seed=self.number, chips=shards, lie=given["lie"], lie_step=given["lie_step"],
                snapshot_rate=given["snapshot_rate"], started=_STARTED, duration=_DURATION,
            )  # fmt: skip
        else:
            config = LabConfig.following(after, started=_STARTED, duration=_DURATION)
        task = Task.for_preset(
            "digits-cnn", seed=self.number + number, steps=given["steps"], checkpoint_every=given["every"],
            shards=shards, batch_size=2, numerics="exact",
        )  # fmt: skip
        train(task, run, config, device="native")
        return run

    def trust(self, *runs: Path) -> Trust:
        """What the registry knows of the labs of these runs."""
        return Trust.load([run.with_name(f"{run.name}.trust.json") for run in runs], list(runs))

    def world(self, *runs: Path) -> World:
        """A world that these runs have joined, each with its own lab's chips."""
        world = World.create(self.folder / "world", LabSide)
        for run in runs:
            world.join(self.trust(run), {run.name: run})
        return world

    def round(
        self,
        world: World,
        *,
        hand: dict[str, list[str]] | None = None,
        silent: Sequence[str] = (),
        late: Sequence[str] = (),
        rules: Path | None = None,
        settings: Settings = _SETTINGS,
    ) -> dict[str, str]:
        """Play a round and return the outcome of each lab.

        Args:
            hand: by lab, the only runs that it hands over.
            silent: labs that say nothing.
            late: labs whose chips answer when the deadline has passed.
        """
        labs = [lab for lab in sorted(world.trust().labs) if lab not in silent]
        begun = self.now
        steps.announce(world, settings, minutes=1, refusals=0, now=begun, rules=rules)
        for lab in labs:
            steps.hand(world, lab, runs=(hand or {}).get(lab), now=begun)
        now = steps.past(world, "heads", begun) if silent else begun
        steps.reveal(world, now=now)
        for lab in labs:
            steps.answer(world, lab, now=steps.past(world, "answers", now) if lab in late else now)
        now = steps.past(world, "answers", now) if silent or late else now
        steps.order(world, now=now)
        for lab in labs:
            steps.disclose(world, lab, now=now)
        now = steps.past(world, "openings", now) if silent else now
        steps.replay(world, now=now, worker=self.devices.run)
        verdict = steps.decide(world, now=now).verdict
        self.now = now + 5 * _MINUTE
        return {lab: verdict.evidence["labs"].get(lab, verdict.outcome.value) for lab in world.trust().labs}

    def rejects(self, world: World, **options: Any) -> bool:
        """Whether the round rejects the lab called ``lab``."""
        return self.round(world, **options)["lab"] == Outcome.REJECT.value


def _selective(scene: _Scene) -> bool:
    one = scene.train("one")
    two = scene.train("two", after=one, number=1)
    return scene.rejects(scene.world(one, two), hand={"lab": ["one"]})


def _nothing(scene: _Scene) -> bool:
    honest, secret = scene.train("honest", lab="other"), scene.train("secret")
    return scene.rejects(scene.world(honest, secret), hand={"lab": []})


def _silent(scene: _Scene) -> bool:
    honest, secret = scene.train("honest", lab="other"), scene.train("secret")
    return scene.rejects(scene.world(honest, secret), silent=["lab"])


def _late(scene: _Scene) -> bool:
    return scene.rejects(scene.world(scene.train("run")), late=["lab"])


def _second_world(scene: _Scene) -> bool:
    """Chips and folders are put back to before a run that an earlier round has seen."""
    one = scene.train("one")
    chips = lab_path(one) / "chips"
    shutil.copytree(chips, scene.folder / "copy")
    two = scene.train("two", after=one, number=1)
    world = scene.world(one, two)
    scene.round(world)
    shutil.rmtree(chips)
    shutil.copytree(scene.folder / "copy", chips)
    return scene.rejects(world, hand={"lab": ["one"]})


def _swapped_folder(scene: _Scene) -> bool:
    """A clean folder with the id of a run that was rejected lies in its place."""
    liar = scene.train("run", lie="wrong-operator", lie_step=1)
    world = scene.world(liar)
    if not scene.rejects(world):
        return False
    shutil.rmtree(liar)
    shutil.rmtree(lab_path(liar))
    scene.train("run")
    return scene.rejects(world)


def _sold_twice(scene: _Scene) -> bool:
    """The registry does not give a chip of one lab to another too; nobody is inspected."""
    one, two = scene.train("one", lab="other"), scene.train("two")
    world, trust = scene.world(one), scene.trust(two)
    try:
        world.join(replace(trust, chips={**trust.chips, "other-chip-0000": "lab"}), {"two": two})
    except CallerError:
        return True
    return False


def _grinding(scene: _Scene) -> bool:
    """A lab lets its chip answer anew, and signs that, until the draw by its guess of the secret misses its partner."""
    honest, secret = scene.train("honest", lab="other"), scene.train("secret")
    world = scene.world(honest, secret)
    trust, key = world.trust(), SimulatedLab.lab_key(SimulatedLab.read_config(lab_path(honest)))
    pool, (chip, *_) = sorted(trust.chips), sorted(trust.chips_of("other"))
    chips = LiveChips([lab_path(honest)])
    for _ in range(_HEADS):
        head = hashlib.sha256((honest / MANIFEST).read_bytes()).hexdigest()
        if draw(pool, 1, challenge_seed(_GUESS, [head]))[0] in trust.chips_of("other"):
            break
        draft = Draft.read(honest, key)
        for name, content in chips.ask(chip, trust.nonce, trust.verifier).items():
            draft.put(honest, chip_path(chip, name), content)
        draft.sign(honest, key)
    return scene.rejects(world, hand={"lab": []})


def _fork(scene: _Scene) -> bool:
    """Steps that an inspection has seen are trained again on other data, from a backup of the step before them."""
    run, backup = scene.folder / "run", scene.folder / "backup"
    words = (str(run.resolve()), str(backup.resolve()), str(scene.number))
    processes.run(processes.python(_forked_loop.__name__, *words)).check_returncode()
    world = scene.world(run)
    if scene.rejects(world):
        return False
    for place, kept in ((run, backup / "run"), (lab_path(run), backup / "lab")):
        shutil.rmtree(place)
        shutil.copytree(kept, place)
    _forked_loop.train_anew(run, scene.number)
    return scene.rejects(world)


def _swap(scene: _Scene) -> bool:
    """Made-up weights for the last steps, in segments in which no chip took a snapshot."""
    rate = Fraction(1, 10_000)
    run = scene.train("run", lie="fake-layers", lie_step=_SWAP_STEPS, steps=_SWAP_STEPS, every=1, snapshot_rate=rate)
    return scene.rejects(scene.world(run), settings=replace(_SETTINGS, samples=_CHIPS, sampling=_SWAP))


def _below_threshold(scene: _Scene) -> bool:
    """Three labs on one job, each of which does less than the rule allows."""
    runs = [scene.train(f"run-{lab}", lab=lab) for lab in ("lab", "second", "third")]
    world = scene.world(*runs)
    rules = scene.folder / "rules.toml"
    text = '[[rule]]\nname = "cap"\nkind = "flop"\nper = "{}"\nat_most = {}\n'
    task = Task.for_preset("digits-cnn", seed=scene.number, steps=_STEPS, batch_size=2, shards=_CHIPS)
    rules.write_text(text.format("job", 2 * _flop(task)))
    return scene.rejects(world, rules=rules)


def _flop(task: Task) -> int:
    """FLOP of a whole run."""
    from monitor.replay.derivation import derive

    return task.steps * derive(task).program.flop


LIES: dict[str, tuple[Callable[[_Scene], bool], Callable[[], float]]] = {
    "reveals-some-of-its-runs": (_selective, lambda: 1.0),
    "declares-nothing": (_nothing, lambda: chip_drawn(chips=2 * _CHIPS, liars=_CHIPS, drawn=1)),
    "says-nothing": (_silent, lambda: 1.0),
    "answers-late": (_late, lambda: 1.0),
    "second-world-of-folders": (_second_world, lambda: 1.0),
    "swaps-a-rejected-folder": (_swapped_folder, lambda: 1.0),
    "sells-one-chip-twice": (_sold_twice, lambda: 1.0),
    "grinds-its-root": (_grinding, lambda: chip_drawn(chips=2 * _CHIPS, liars=_CHIPS, drawn=1)),
    "forks-at-a-resume": (_fork, lambda: 1.0),
    "swaps-weights-where-no-snapshot-is": (_swap, lambda: 1 - _swap_escapes()),
    "several-labs-below-a-threshold": (_below_threshold, lambda: 1.0),
}
"""By name, how a lie is told in a world, and how often it should be caught."""


def _swap_escapes() -> float:
    audit = chain(_SWAP_STEPS, 1, first=True)
    needed = audit.needed(_SWAP.against, _SWAP.confidence)
    return replace(audit, drawn=needed).escape(_SWAP.against)


def run(
    *, trials: int = 20, lies: Sequence[str] | None = None, progress: Callable[[int], object] | None = None
) -> list[Row]:
    """Tell each lie in ``trials`` worlds; in at most 20 where it should always be caught.

    Rows hold ``work`` (the lie), ``mode`` (rounds), ``seconds`` (median of a world), ``ratio`` (None), ``trials``,
    ``caught``, ``low``, ``high`` (Clopper-Pearson interval), ``confidence`` (of that interval), ``predicted`` and
    ``agrees``.

    Args:
        progress: called with 1 after each world.

    Raises:
        CallerError: an unknown lie, or no trial.
    """
    for name in lies or ():
        if name not in LIES:
            raise CallerError(f"no measurement of a lie {name!r}; there are {', '.join(LIES)}")
    if trials < 1:
        raise CallerError("give at least one trial")
    rows = []
    with DevicePool() as devices:
        for name in lies or LIES:
            told, prediction = LIES[name]
            predicted = prediction()
            number = trials if 0 < predicted < 1 else min(trials, _CERTAIN)
            caught, seconds = 0, []
            for world in range(number):
                begun = time.perf_counter()
                with tempfile.TemporaryDirectory(prefix="chipwitness-bench-") as folder:
                    caught += told(_Scene(Path(folder), world, devices))
                seconds.append(time.perf_counter() - begun)
                if progress is not None:
                    progress(1)
            rows.append(_row(name, number, caught, predicted, statistics.median(seconds)))
    return rows


def _row(name: str, trials: int, caught: int, predicted: float, seconds: float) -> Row:
    confidence = 1 - _DOUBT / len(LIES)
    low, high = clopper_pearson(caught, trials, confidence)
    return {
        "work": name,
        "mode": "rounds",
        "seconds": seconds,
        "ratio": None,
        "trials": trials,
        "caught": caught,
        "low": low,
        "high": high,
        "confidence": confidence,
        "predicted": predicted,
        "agrees": low <= predicted <= high,
    }


def verdict(rows: Sequence[Row]) -> str | None:
    """Which predictions lie outside the interval of what was measured, or None; all together wrongly in 1 of 1,000."""
    odd = [f"{row['work']} ({row['caught']} of {row['trials']})" for row in rows if not row["agrees"]]
    return f"caught otherwise than predicted: {', '.join(odd)}" if odd else None


def table(rows: Sequence[Row]) -> list[str]:
    """Lines for a person."""
    lines = [f"{'lie':36} {'caught':>10} {'predicted':>10} {'interval':>14}"]
    for row in rows:
        told, interval = f"{row['caught']} of {row['trials']}", f"{row['low']:.3f} to {row['high']:.3f}"
        lines.append(f"{row['work']:36} {told:>10} {row['predicted']:10.3f} {interval:>14}")
    return [*lines, f"each interval holds with {100 * rows[0]['confidence']:.6g} %, so all with {1 - _DOUBT:.1%}"]
