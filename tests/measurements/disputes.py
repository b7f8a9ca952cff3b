"""``disputes``: every lie of a lab about its numbers, told at random places, and what a referee rules on it.

An honest lab and one that lies record the same loop. The referee has to name the liar, and the first step at which the
two runs differ; a lie that changes no committed result is to be accepted. Labs, runs and games are real.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch

from analysis.bench.origin import write_among
from firmware_sim.errors import CallerError
from firmware_sim.lies import Chance, Scenery
from inspector.dispute.dispute import Disputant, play_here
from inspector.dispute.game import check_game
from inspector.dispute.results import result_of
from inspector.inspection.transcripts import open_run
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome
from monitor import Recorder
from monitor.lab.conduct import Conduct, LabLie
from monitor.lab.lies import LAB_LIES
from monitor.lab.prover import LabProver
from tests.inspector.inspection.test_every_lie import LOOPS

__all__ = ["LIES", "OPERATOR", "run", "table", "verdict", "write"]

Row = dict[str, Any]
STEPS = 5
LIES = [
    name
    for name, lie in LAB_LIES.items()
    if lie.scenery in (Scenery.RUN, Scenery.EVALUATIONS) and lie.chance in (Chance.STEP, Chance.REST, Chance.ALWAYS)
]
"""Lies of one recording of any loop that alter what a replay reaches, or what is declared."""
OPERATOR = "wrong-operator"
_STARTED = datetime(2026, 1, 1, tzinfo=UTC)


def _record(out: Path, model: str, options: Mapping[str, Any], **told: Any) -> None:
    kind, batches, body, optimizer_of = cast(tuple[Any, Any, Any, Any], LOOPS[model])
    torch.manual_seed(3)
    net = kind()
    optimizer = optimizer_of(net.parameters())
    chosen = {"seed": 5, "chips": 1, "checkpoint_every": 2, "started": _STARTED, "hours": 1.0, **options, **told}
    recorder = Recorder(net, optimizer, out=out, lab=out.name, **chosen)
    for number in range(1, STEPS + 1):
        batch = batches(number)
        with recorder.step(batch):
            body(net, optimizer, batch)
    recorder.finish()


def _places(name: str, operators: int, places: int, chance: random.Random) -> list[tuple[int, LabLie]]:
    """Steps at which the lie is told; an operator's lie is told at random operators, too."""
    lie = LAB_LIES[name]
    steps = [chance.randint(1, STEPS) for _ in range(places)]
    if name != OPERATOR:
        return [(step, lie) for step in dict.fromkeys(steps)]
    conduct: Any = lie.conduct

    def at(place: int) -> Callable[[int], Conduct]:
        return lambda step: conduct(step, place)

    return [(step, replace(lie, conduct=at(chance.randrange(operators)))) for step in steps]


def _difference(first: Disputant, second: Disputant) -> int | None:
    """The first step about whose result two runs differ."""
    leaves = [[result_of(leaf) for leaf in each.run.load_steps()[0]] for each in (first, second)]
    return next((step for step, pair in enumerate(zip(*leaves, strict=False)) if pair[0] != pair[1]), None)


def _disputed(folder: Path, honest: Path, lying: Path) -> tuple[str, str]:
    """What came of the game: convicted, no effect, or what is wrong; and the referee's words."""
    trust = Trust.load([run.with_name(f"{run.name}.trust.json") for run in (honest, lying)], [honest, lying])
    first, second = (Disputant(run=open_run(run, trust), prover=LabProver(run)) for run in (honest, lying))
    step = _difference(first, second)
    found, game = play_here(first, second, trust)
    words = found.reasons[0].text
    if check_game(game, trust).outcome is not found.outcome:
        return "does not verify", words
    guilty = found.evidence["guilty"]
    if guilty is not None and guilty != lying.name:
        return "honest lab found guilty", words
    if guilty is None:
        return ("no effect" if found.outcome is Outcome.ACCEPT and step is None else "undecided"), words
    if step is not None and found.evidence["step"] != step:
        return "another step", words
    return "convicted", words


def run(
    *,
    places: int = 3,
    models: Sequence[str] = tuple(LOOPS),
    numerics: Sequence[str] = ("exact", "rounded"),
    lies: Sequence[str] = tuple(LIES),
    seed: int = 0,
    progress: Callable[[int], object] | None = None,
) -> list[Row]:
    """A row for each model, numerics and lie; ``wrong`` lists each game that did not end as it has to."""
    rows = []
    with tempfile.TemporaryDirectory() as place:
        for model in models:
            for mode, name in product(numerics, lies):
                options = {"numerics": mode, **LAB_LIES[name].options}
                if options["numerics"] != mode:
                    continue
                honest = Path(place, f"{model} {sorted(options.items())}", "honest")
                if not honest.exists():
                    honest.parent.mkdir()
                    _record(honest, model, options)
                rows.append({**_told(honest, model, options, name, places, seed), "seed": seed})
                if progress is not None:
                    progress(len(rows))
    return rows


def _told(honest: Path, model: str, options: Mapping[str, Any], name: str, places: int, seed: int) -> Row:
    mode = options["numerics"]
    chance = random.Random(f"{seed} {model} {mode} {name}")
    operators = len(LabProver(honest)._trace(1)[0])
    count: Counter[str] = Counter()
    wrong: list[str] = []
    for number, (step, lie) in enumerate(_places(name, operators, places, chance)):
        lying = honest.with_name(f"{name}-{number}")
        with ExitStack() as stack:
            stack.enter_context(mock.patch.dict(LAB_LIES, {name: lie}))
            try:
                _record(lying, model, options, lie=name, lie_step=step)
            except CallerError as error:
                count[f"not told: {error}"] += 1
                continue
            came, words = _disputed(honest.parent, honest, lying)
        count[came] += 1
        if came not in ("convicted", "no effect"):
            wrong.append(f"step {step}: {came}: {words}")
    return {"work": model, "mode": mode, "lie": name, "games": sum(count.values()), **dict(count), "wrong": wrong}


def table(rows: Sequence[Row]) -> list[str]:
    """Return the rows as lines for people."""
    ends = ("convicted", "no effect")
    return [
        f"{row['work']:13} {row['mode']:8} {row['lie']:24} {row['games']:4} games: "
        + ", ".join(f"{row[end]} {end}" for end in ends if end in row)
        + "".join(f"\n  {text}" for text in row["wrong"])
        for row in rows
    ]


def verdict(rows: Sequence[Row]) -> str | None:
    """What did not end as it has to; None where each liar was named or its lie had no effect."""
    wrong = [f"{row['work']}, {row['mode']}, {row['lie']}: {text}" for row in rows for text in row["wrong"]]
    return f"{len(wrong)} games ended otherwise; {wrong[0]}" if wrong else None


def write(rows: Sequence[Row], path: Path) -> None:
    """Add the rows to a file of earlier ones."""
    write_among(rows, path, by=("work", "mode", "lie"))
