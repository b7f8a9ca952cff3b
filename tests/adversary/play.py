"""Plays sequences of actions, judges them by the oracle, and shortens those that break it."""

from __future__ import annotations

import random
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from inspector.inspection.verdict import Outcome, Verdict
from tests.adversary import file_actions, honest_actions, host_actions  # noqa: F401 - they enter their actions
from tests.adversary.actions import ACTIONS, perform
from tests.adversary.world import Scene, Worker, World, kept_device

__all__ = ["Played", "Step", "honest_sequence", "lying_sequence", "play", "scratch", "shorten"]

Step = tuple[str, int]

PICKS = 1 << 16

INCOMPLETE = ("the run is unfinished", "have no snapshot", "power was cut", "computes like the training device")
"""What an inspection may say is missing."""


@dataclass(slots=True, kw_only=True)
class Played:
    """How a sequence ended.

    Attributes:
        outcome: ACCEPT, REJECT, INCONCLUSIVE, or ``error`` where the inspector refused in one line.
        rows: rows of the lies that made something untrue.
        attempted: rows of all lies that were told.
        escape: highest chance that an inspection misses the world's lies that are not deferred; None if there is none.
        problem: what broke the oracle, or None.
    """

    scene: Scene
    steps: list[Step]
    outcome: str
    reasons: list[str]
    rows: list[str] = field(default_factory=list)
    attempted: list[str] = field(default_factory=list)
    deferred: list[str] = field(default_factory=list)
    escape: float | None = None
    ground: bool = False
    problem: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The sequence, so that it can be played again, and how it ended."""
        return {
            "scene": asdict(self.scene),
            "actions": [list(step) for step in self.steps],
            "outcome": self.outcome,
            "lies": self.rows,
            "problem": self.problem,
            "reasons": self.reasons[:3],
        }


def scratch() -> Path:
    """A new folder, in memory where there is such a file system."""
    shared = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="adversary-", dir=shared if shared.is_dir() else None))


def play(scene: Scene, steps: Sequence[Step], *, worker: Worker = kept_device) -> Played:
    """Play a sequence in a world of its own and judge it."""
    world = World(scene, scratch(), worker)
    try:
        try:
            for name, pick in steps:
                perform(world, name, pick)
            return judge(world, steps)
        except Exception as error:
            trace = traceback.format_exc().strip().splitlines()
            played = Played(scene=scene, steps=list(steps), outcome="traceback", reasons=trace[-8:])
            played.problem = f"traceback: {type(error).__name__}: {error}"
            return played
    finally:
        world.close()


def judge(world: World, steps: Sequence[Step]) -> Played:
    """Inspect what a world's lab hands over, and compare with what it told."""
    scene = world.scene
    verdict = world.judge()
    outcome = "error" if verdict is None else verdict.outcome.value
    if scene.is_honest and verdict is not None and world.strangers:
        outcome = _own_outcome(world, verdict)
    reasons = [world.error] if verdict is None else [reason.text for reason in verdict.reasons]
    told = world.told
    lies = [lie for lie in told if not lie.deferred]
    rate = Fraction(*scene.rate)
    played = Played(
        scene=scene,
        steps=list(steps),
        outcome=outcome,
        reasons=reasons,
        rows=sorted({lie.row for lie in lies}),
        attempted=sorted({lie.row for lie in world.lies}),
        deferred=sorted({lie.row for lie in told if lie.deferred}),
        escape=min((lie.escape(scene.chips + scene.idle, scene.samples, rate) for lie in lies), default=None),
        ground=any(lie.row == "A4" for lie in world.lies),
    )
    accepted = outcome == Outcome.ACCEPT.value
    if scene.is_honest:
        played.problem = _dishonoured(world, outcome, reasons)
    elif accepted and lies and (scene.is_full or played.escape == 0):
        played.problem = f"accepted: {', '.join(played.rows)}"
    return played


def _own_outcome(world: World, verdict: Verdict) -> str:
    """The outcome of the honest lab by itself: what the rival did is the rival's."""
    if "labs" in verdict.evidence:
        return str(verdict.evidence["labs"]["lab"])
    names = {run.name for run in world.strangers}  # a run that cannot be read ends an inspection early
    mine = [reason for reason in verdict.reasons if reason.where.get("run") not in names]
    return verdict.outcome.value if mine else "INCONCLUSIVE"


def _dishonoured(world: World, outcome: str, reasons: list[str]) -> str | None:
    """What an honest lab may not meet."""
    doubts = [] if world.strangers else reasons
    if outcome == "INCONCLUSIVE" and not all(any(text in reason for text in INCOMPLETE) for reason in doubts):
        return f"inconclusive without saying what is missing: {reasons}"
    if outcome == "error":
        return f"refused: {reasons[0]}"
    if world.refused:
        return f"recorder or chip refused: {world.refused[0]}"
    if outcome == "REJECT":
        return f"rejected: {reasons[0]}"
    return None


# Sequences


_LYING = sorted(name for name in ACTIONS if not ACTIONS[name].honest and ACTIONS[name].rows)
_ODD = sorted(name for name in ACTIONS if not ACTIONS[name].honest and not ACTIONS[name].rows)
_HONEST = ["step", "step", "step", "idle", "crash"]


def lying_scene(rng: random.Random, kind: str, *, sampled: bool) -> Scene:
    """A world for a lying lab."""
    chips = rng.randint(2, 4) if sampled else rng.randint(1, 3)
    preset = kind == "preset"
    return Scene(
        seed=rng.randrange(1 << 32),
        kind=kind,
        model="dropout" if rng.random() < 0.2 else "linear",
        optimizer=rng.choice(["sgd", "momentum", "adamw"]),
        numerics="exact" if preset or rng.random() < 0.9 else "rounded",
        chips=chips,
        samples=rng.randint(1, chips - 1) if sampled else chips,
        steps=2 if preset else rng.choice([1, 2, 2, 3, 3, 4]),
        batch=rng.choice([1, 2, 3]),
        checkpoint_every=8 if sampled else rng.choice([1, 1, 2, 3]),
        rate=rng.choice([(1, 2), (1, 4), (3, 4)]) if sampled else (1, 1),
    )


def lying_sequence(seed: int) -> tuple[Scene, list[Step]]:
    """A lying lab's world and what it does in it, drawn from a seed."""
    rng = random.Random(f"lying/{seed}")
    share = rng.random()
    sampled = share < 0.25
    kind = "preset" if share > 0.9 else "loop"
    scene = lying_scene(rng, kind, sampled=sampled)
    count = 1 if rng.random() < 0.6 else rng.randint(2, 4)
    names = [_lying_action(rng, kind) for _ in range(count)]
    if sampled and rng.random() < 0.2:
        if rng.random() < 0.7:
            scene = _replaced(scene, chips=4, samples=3, rate=(1, 2))
            return scene, [*_arranged(rng, ["one_works", "step"], kind), ("grind", rng.randrange(PICKS))]
        names = [rng.choice(["one_works", "work_for_no_run", "other_head"]), "grind"]
    if "swap_folder" in names or "other_seed" in names:
        scene = _replaced(scene, model="dropout")
        names = ["other_seed", *names] + (["swap_folder"] if rng.random() < 0.7 else [])
    for name in sorted({"leave_out", "copy_between_runs"} & set(names)):  # they need two runs
        return scene, [*_arranged(rng, [], kind), ("next_run", 0), ("step", 1), (name, rng.randrange(PICKS))]
    if sampled and rng.random() < 0.05:
        scene, names = _replaced(scene, checkpoint_every=1), ["forge"]
    names += [rng.choice(_ODD) for _ in range(rng.choice([0, 0, 0, 0, 1, 2]))]
    names += [rng.choice(_HONEST) for _ in range(rng.choice([0, 0, 1, 1, 2, 3]))]
    return scene, _arranged(rng, names, kind)


def _lying_action(rng: random.Random, kind: str) -> str:
    """An action of a row, all rows alike but those of edits, which have many forms."""
    by_row: dict[str, list[str]] = {}
    for name in _LYING:
        if kind in ACTIONS[name].kinds and name != "grind":
            for row in ACTIONS[name].rows:
                by_row.setdefault(row, []).append(name)
    rows = [*sorted(by_row), *["tampering"] * 4, *["A1", "A14"] * (4 if kind == "preset" else 0)]
    return rng.choice(by_row[rng.choice([row for row in rows if row in by_row])])


def _arranged(rng: random.Random, names: list[str], kind: str) -> list[Step]:
    """Actions in the order of their phases, training among them mixed; the first step is early."""
    order = {"before": 0, "training": 1, "finished": 2}
    rng.shuffle(names)
    names.sort(key=lambda name: order[ACTIONS[name].phase])
    training = [name for name in names if ACTIONS[name].phase == "training"]
    if training:
        at = names.index(training[0])
        names[at:at] = ["step"] * rng.choice([0, 1, 1])
        after = max(number for number, name in enumerate(names) if ACTIONS[name].phase == "training") + 1
        names[after:after] = ["step"] * rng.choice([0, 1, 1])
    return [(name, rng.randrange(PICKS)) for name in names]


def _replaced(scene: Scene, **changes: Any) -> Scene:
    return Scene(**{**asdict(scene), **changes})


def honest_scene(rng: random.Random, kind: str) -> Scene:
    """A world for an honest lab."""
    chips, idle = rng.randint(1, 4), rng.choice([0, 0, 1, 2])
    return Scene(
        seed=rng.randrange(1 << 32),
        kind=kind,
        model=rng.choice(["linear", "dropout"]),
        optimizer=rng.choice(["sgd", "momentum", "adamw"]),
        numerics=rng.choice(["exact", "exact", "rounded"]),
        chips=chips,
        idle=idle,
        samples=rng.randint(1, chips + idle),
        steps=rng.randint(1, 4),
        batch=rng.randint(1, 7),
        checkpoint_every=rng.randint(1, 4),
        rate=rng.choice([(1, 1), (1, 1), (1, 2), (1, 4), (1, 16)]),
        segments=rng.choice([None, None, 1, 2]),
        is_honest=True,
    )


def honest_sequence(seed: int) -> tuple[Scene, list[Step]]:
    """An honest lab's world and what it does in it, drawn from a seed."""
    rng = random.Random(f"honest/{seed}")
    kind = "preset" if rng.random() < 0.04 else "loop"
    honest = sorted(name for name, each in ACTIONS.items() if each.honest and kind in each.kinds)
    honest = [name for name in honest if name != "next_run" or kind == "preset"]
    often = [name for name in honest if name != "rival"]
    names = [rng.choice(often) for _ in range(rng.randint(0, 6))] + ["step"] * rng.randint(0, 2)
    names += ["rival"] * (rng.random() < 0.2)
    return honest_scene(rng, kind), _arranged(rng, names, kind)


def shorten(played: Played, *, worker: Worker = kept_device) -> Played:
    """Leave out actions while the same problem remains."""
    best = played
    shorter = True
    while shorter:
        shorter = False
        for number in range(len(best.steps)):
            tried = play(best.scene, best.steps[:number] + best.steps[number + 1 :], worker=worker)
            if tried.problem is not None and _same(tried.problem, played.problem):
                best, shorter = tried, True
                break
    return best


def _same(one: str, other: str | None) -> bool:
    return other is not None and one.split(":")[0] == other.split(":")[0]
