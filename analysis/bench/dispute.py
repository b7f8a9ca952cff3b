"""``bench dispute``: what a game between two labs costs, and how that grows with steps and with operators.

Both labs train the same small network. In one game they agree. In the other, one lab returns one wrong element in the
step before the last one: of a chain of small layers, or of a long product, which is decided by its parts. Parties and
referee are in this process, and take turns; a party's work is the processor time while it is asked. No time waits for a
network. What each operator of a large model would take is counted by shapes alone (``worst_tiles``).
"""

from __future__ import annotations

import math
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from analysis.bench.origin import write
from analysis.bench.worst_tiles import needs
from firmware_sim.evidence import SigningKey
from inspector.dispute.game import Party, play
from inspector.dispute.provider import desk_of
from inspector.inspection.transcripts import open_run
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Verdict
from inspector.wire.desk import Desk, Local
from inspector.wire.messages import Question, Reader
from monitor import Recorder
from monitor.lab.prover import LabProver
from monitor.presets.task import Task

__all__ = ["LAYERS", "STEPS", "TERMS", "Counted", "Spent", "run", "table", "verdict", "write"]

STEPS = (16, 64, 256, 1024)
LAYERS = (1, 4, 16, 64)
"""Of the network: the number of operators of a step grows in proportion."""
TERMS = (1 << 15, 1 << 16, 1 << 17, 1 << 18)
"""Of a product, each with 64 elements in each of its chunks' rows."""
_FEW_LAYERS, _FEW_STEPS = 1, 4
_COLUMNS = 64
_MOST_BYTES = 20_000_000
"""Of a game about gpt2-117m, its worst operator and the program of both parties included."""
_SHOWN = 12
_NUMERICS = ("exact", "rounded")
_BRANCHING = (2, 4, 16)
_WIDTH, _BATCH, _EVERY = 8, 4, 16
_SPARE = 4
"""Rounds that a game has on top of its two searches, at most."""
_LEAVES = ("step", "leaves")

Row = dict[str, Any]


def run(
    *,
    steps: Sequence[int] = STEPS,
    layers: Sequence[int] = LAYERS,
    terms: Sequence[int] = TERMS,
    preset: str = "gpt2-117m",
    seed: int = 1,
) -> list[Row]:
    """Record, play, and count.

    Rows: by numbers of steps, games of labs that agree and of labs that differ, these also with a search in more parts;
    by layers and by terms, games of labs that differ; and the operators of a preset's step that take the most, or are
    not decided. ``seconds`` is the referee's processor time, ``ratio`` that to the first row
    of the same kind. ``providers_seconds`` is that of both labs for their answers, ``step_seconds`` that of recording
    one step; ``leaf_bytes`` and ``program_bytes`` are parts of ``bytes``; ``nodes`` are operators of a step.
    """
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as place:
        for count in steps:
            labs = _Labs(Path(place, f"steps-{count}"), count, _FEW_LAYERS, seed, "right", "same", "wrong")
            rows.append(labs.play("steps", "agree", branching=2))
            parts = _BRANCHING if count == max(steps) else _BRANCHING[:1]
            rows += [labs.play("steps", "differ", branching=each) for each in parts]
        for count in layers:
            labs = _Labs(Path(place, f"layers-{count}"), _FEW_STEPS, count, seed, "right", "wrong")
            rows.append(labs.play("nodes", "differ", branching=2))
        for count in terms:
            labs = _Labs(Path(place, f"terms-{count}"), _FEW_STEPS, 0, seed, "right", "wrong", terms=count)
            rows.append({**labs.play("terms", "differ", branching=2), "terms": count})
    first: dict[tuple[str, str, int], float] = {}
    for row in rows:
        kind = row["work"], row["mode"], row["branching"]
        row["ratio"] = row["seconds"] / first.setdefault(kind, row["seconds"])
    return rows + _worst(preset)


def _worst(preset: str) -> list[Row]:
    """Operators of a preset's step that take the most bytes, and all that are not decided."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # others only wait, and waiting counts as processor time
    try:
        counted = {kind: needs(Task.for_preset(preset, seed=1, steps=1, numerics=kind)) for kind in _NUMERICS}
    finally:
        torch.set_num_threads(threads)
    return [
        {"work": preset, "ratio": 1.0, "numerics": numerics, "program_bytes": program, **asdict(each)}
        for numerics, (found, program) in counted.items()
        for number, each in enumerate(found)
        if number < _SHOWN or each.case != "output"
    ]


def table(rows: list[Row]) -> list[str]:
    """Return the rows as lines for people."""
    lines = [f"{'':14} {'steps':>6} {'nodes':>6} {'parts':>5} {'rounds':>6} {'bytes':>10} {'referee':>9} {'labs':>9}"]
    for row in (row for row in rows if "rounds" in row):
        counts = f"{row['steps']:6} {row['nodes']:6} {row['branching']:5} {row['rounds']:6} {row['bytes']:10,}"
        spent = f"{row['seconds']:7.3f} s {row['providers_seconds']:7.3f} s"
        lines.append(f"{row['work'] + ', ' + row['mode']:14} {counts} {spent}")
    for row in (row for row in rows if "case" in row):
        operator = f"{row['numerics']:8} {row['mode']:40} {row['shapes']:30}"
        lines.append(f"{row['work']} {operator} {row['bytes']:11,} bytes  {row['case']}")
    return lines


def verdict(rows: list[Row]) -> str | None:
    """Why the games are not as the law promises: another party guilty, or more rounds than the searches need."""
    for row in rows:
        if "case" in row:
            if row["case"] != "output" or row["bytes"] + row["program_bytes"] > _MOST_BYTES:
                return f"{row['mode']} of {row['work']} takes {row['bytes']} bytes: {row['case']}"
            continue
        if row["guilty"] != (None if row["mode"] == "agree" else "wrong"):
            return f"{row['guilty']} is guilty in a game of {row['steps']} steps where the labs {row['mode']}"
        if row["rounds"] > row["most_rounds"]:
            where = f"{row['steps']} steps and {row['nodes']} operators"
            return f"{row['rounds']} rounds for {where}, more than {row['most_rounds']}"
    return None


@dataclass(slots=True)
class Spent:
    """What parties have spent on answers: processor seconds, questions, and bytes by their first words."""

    seconds: float = 0.0
    questions: int = 0
    bytes: Counter[str] = field(default_factory=Counter)


class Counted:
    """A party in this process, whose work is counted."""

    def __init__(self, desk: Desk, referee: SigningKey, spent: Spent) -> None:
        self._party, self._referee, self._spent = Local(desk), referee, spent

    def ask(self, envelope: bytes, reader: Reader, seconds: float) -> None:
        """Let the party answer."""
        start = time.process_time()
        self._party.ask(envelope, reader, seconds)
        self._spent.seconds += time.process_time() - start
        kind = Question.open(envelope, self._referee.verifying).text.partition(" ")[0]
        self._spent.questions += 1
        self._spent.bytes[kind] += reader.received


class _Labs:
    """Runs of one loop, each of a lab: "right" and "same" compute what they should, "wrong" does not in one step."""

    def __init__(self, folder: Path, steps: int, layers: int, seed: int, *names: str, terms: int = 0) -> None:
        folder.mkdir()
        self._folder, self._steps = folder, steps
        start = time.process_time()
        lie = {"lie": "wrong-operator", "lie_step": steps - 1}
        runs = [
            _recorded(folder / name, steps, layers, terms, seed, **(lie if name == "wrong" else {})) for name in names
        ]
        self._step_seconds = (time.process_time() - start) / (steps * len(names))
        self._trust = Trust.load([run.with_name(f"{run.name}.trust.json") for run in runs])
        self._provers = {run.name: LabProver(run) for run in runs}

    def play(self, work: str, mode: str, *, branching: int) -> Row:
        referee, spent, parties = SigningKey.generate(bytes(32)), Spent(), []
        for name in ("right", "same" if mode == "agree" else "wrong"):
            prover = LabProver(self._folder / name)
            run, store = open_run(self._folder / name, self._trust), self._folder / f"{name}-{mode}-{branching}"
            desk = desk_of(run, prover, store, [referee.verifying])
            parties.append(Party(name=name, key=prover.key.verifying, transport=Counted(desk, referee, spent)))
        start = time.process_time()
        found, game = play(parties, self._trust, referee, seconds=0, now=datetime.now(UTC), branching=branching)
        seconds = time.process_time() - start - spent.seconds
        return self._row(work, mode, branching, found, spent, seconds=seconds, evidence_bytes=len(game))

    def _row(
        self,
        work: str,
        mode: str,
        branching: int,
        found: Verdict,
        spent: Spent,
        *,
        seconds: float,
        evidence_bytes: int,
    ) -> Row:
        nodes = self._provers["right"].trace(self._steps).size
        most = math.ceil(math.log(self._steps + 1, branching)) + math.ceil(math.log2(nodes)) + _SPARE
        return {
            "work": work,
            "mode": mode,
            "seconds": seconds,
            "ratio": 1.0,
            "steps": self._steps,
            "nodes": nodes,
            "branching": branching,
            "guilty": found.evidence["guilty"],
            "rounds": found.evidence["rounds"],
            "most_rounds": most,
            "questions": spent.questions,
            "bytes": found.evidence["bytes"],
            "leaf_bytes": sum(spent.bytes[kind] for kind in _LEAVES),
            "program_bytes": spent.bytes["program"],
            "bytes_by_question": dict(sorted(spent.bytes.items())),
            "evidence_bytes": evidence_bytes,
            "providers_seconds": spent.seconds,
            "step_seconds": self._step_seconds,
        }


class _Product(nn.Module):
    """A product of two parameters, over many terms."""

    def __init__(self, terms: int) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(1, terms) / terms)
        self.columns = nn.Parameter(torch.randn(terms, _COLUMNS))

    def forward(self, x: Tensor) -> Tensor:
        """(1, columns), by the mean of x."""
        return self.rows @ self.columns * x.mean()


def _recorded(out: Path, steps: int, layers: int, terms: int, seed: int, **lie: Any) -> Path:
    """A lab's run of the loop."""
    torch.manual_seed(seed)
    model = _Product(terms) if terms else nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    settings: dict[str, Any] = {
        "seed": seed,
        "chips": 1,
        "checkpoint_every": _EVERY,
        "snapshot_rate": Fraction(1, 1024),
    }
    recorder = Recorder(model, optimizer, out=out, numerics="exact", lab=out.name, **settings, **lie)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        batch = torch.randn(_BATCH, _WIDTH, generator=generator)
        with recorder.step(batch) as step:
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            step.commit(loss=loss)
    recorder.finish()
    return out
