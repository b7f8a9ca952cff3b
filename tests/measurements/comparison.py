"""``comparison``: what it costs to be convinced of a training, by scheme; measured on the same work, and as published.

Two labs train the same preset; one computes a wrong element in one operator. Schemes that are measured here: the game
of refereed delegation, a replay of every step, a replay of a few segments, rounding logs, and an audit that trains
natively between checkpoints and accepts distances up to a threshold. Costs are ratios to native training of the same
steps in the same process. Published figures are those of other works on other machines, as their sources state them.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from analysis.bench.origin import write
from analysis.report.comparison import shown
from firmware_sim.errors import DeviceError
from firmware_sim.evidence import SigningKey, canonical
from inspector.devices import device
from inspector.dispute.game import Party, play
from inspector.dispute.provider import desk_of
from inspector.inspection.guards import Settings
from inspector.inspection.inspection import inspect
from inspector.inspection.transcripts import open_run
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome
from inspector.replay.pool import DevicePool
from inspector.wire.desk import Desk, Local
from inspector.wire.messages import Reader
from monitor import processes
from monitor.lab.prover import LabProver
from monitor.lab.simulated_lab import LabConfig
from monitor.presets.task import Task
from monitor.presets.training import build, take_step
from monitor.recording.recipes import train
from monitor.transcript.data import declared_data

__all__ = ["PUBLISHED", "Scheme", "run", "table", "verdict", "write"]

Row = dict[str, Any]
PRESET, STEPS, EVERY = "tiny-gpt", 32, 4
_OTHER = "sse41"
"""The family of kernels of whoever checks."""
_NOW = datetime(2026, 1, 1, tzinfo=UTC)
_MARGIN = 2.0
"""Threshold of the audit, over the largest distance between two honest devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """What a row of the table says.

    Attributes:
        scheme: its name.
        work: what was trained.
        source: of the figures.
        prover: processor time of training with evidence, and ``verifier``: of checking, as ratios to native training;
            texts are figures of other kinds, None is one that was not published.
        bytes: that the verifier receives.
        trust: whom the verifier relies on.
        covers: what is shown.
        misses: what is not.
    """

    scheme: str
    work: str
    source: str
    prover: float | str | None
    verifier: float | str | None
    bytes: int | str | None
    trust: str
    covers: str
    misses: str


_REPLAYER = "the verifier has the data and as much compute as it replays"
PUBLISHED = (
    Scheme(
        scheme="rounding logs",
        work="ResNet-50, GPT-2 (117M), GPUs",
        source="Srivastava et al. 2024, section 5",
        prover="1.2 to 1.4 times training without rounding",
        verifier="1.3 to 1.7 times training without rounding",
        bytes="18 MB a step of GPT-2",
        trust="one of several auditors is honest",
        covers="every checkpoint, bit for bit",
        misses="in the released code functional operators, gradients of weights, the optimizer",
    ),
    Scheme(
        scheme="proof of learning",
        work="GPT-2 (117M)",
        source="Jia et al. 2021; size as in Srivastava et al. 2024",
        prover=None,
        verifier="trains the sampled steps again",
        bytes="2.78 GB a stored step",
        trust=_REPLAYER,
        covers="distances between checkpoints, up to a threshold",
        misses="whatever stays below the threshold",
    ),
    Scheme(
        scheme="Kaizen, a proof of training",
        work="VGG-11 (10M), batch 16",
        source="Abbaszadeh et al., ePrint 2024/162",
        prover="15 to 22 minutes an iteration",
        verifier="130 ms",
        bytes=1_630_000,
        trust="cryptographic assumptions alone",
        covers="every step, without showing weights or data",
        misses="models of today's size",
    ),
    Scheme(
        scheme="zkDL, a proof of training",
        work="8 layers (10M), batch 64, one GPU",
        source="Sun et al., arXiv 2307.16273",
        prover="below 1 s a batch",
        verifier=None,
        bytes=None,
        trust="cryptographic assumptions alone",
        covers="every step of layers with ReLU",
        misses="attention, normalisation, models of today's size",
    ),
    Scheme(
        scheme="opML, an optimistic game",
        work="inference of a small network",
        source="Conway et al., arXiv 2401.17555; times as in the authors' announcement of 2023",
        prover="below 2 s",
        verifier="a challenge takes 2 minutes",
        bytes=None,
        trust="one honest challenger, and a chain that decides an instruction",
        covers="inference in a virtual machine's fixed arithmetic",
        misses="training, in what was measured",
    ),
    Scheme(
        scheme="Verde with RepOps",
        work="Llama 1B, GPU",
        source="Arun et al. 2025",
        prover="about 1.6 times native inference; 2.5 s to hash a state",
        verifier="one operator",
        bytes=None,
        trust="one of the providers is honest",
        covers="every operator, bit for bit",
        misses="several GPUs for one provider",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is trained."""

    preset: str
    steps: int

    def task(self, numerics: str) -> Task:
        """It under these numerics."""
        shape = {"steps": self.steps, "checkpoint_every": EVERY, "shards": 1}
        return Task.for_preset(self.preset, seed=1, numerics=numerics, **shape)


def _lab(name: str, **told: Any) -> LabConfig:
    hour, rate = timedelta(hours=1), Fraction(1)
    return LabConfig(lab=name, seed=1, chips=1, snapshot_rate=rate, started=_NOW, duration=hour, **told)


def _recorded(out: Path, numerics: str, work: Work, **told: Any) -> float:
    """Processor seconds of a recorded training."""
    started = time.process_time()
    train(work.task(numerics), out, _lab(out.name, **told), device="native")
    return time.process_time() - started


class Native:
    """Native training in this process's kernels, from any checkpoint on."""

    def __init__(self, work: Work) -> None:
        self._task, steps = work.task("exact"), work.steps
        self._model, self._optimizer = build(self._task, torch.device("cpu"))
        samples = declared_data(self._task, None).with_salt(bytes(32))
        self._batches = [samples.batch(number) for number in range(1, steps + 1)]

    def train(self, first: int, last: int) -> float:
        """Take steps ``first`` to ``last``; return their processor seconds."""
        started = time.process_time()
        for number in range(first, last + 1):
            rate = self._task.learning_rate_at(number)
            take_step(self._task, self._model, self._optimizer, self._batches[number - 1], rate)
        return time.process_time() - started

    def weights(self) -> torch.Tensor:
        """All, one after another."""
        return torch.nn.utils.parameters_to_vector(self._model.parameters()).detach().clone()

    def save(self, path: Path) -> None:
        """Write a checkpoint: weights and the optimizer's state."""
        torch.save([self._model.state_dict(), self._optimizer.state_dict()], path)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint."""
        weights, state = torch.load(path, weights_only=True)
        self._model.load_state_dict(weights)
        self._optimizer.load_state_dict(state)


def audit(folder: Path, work: Work) -> Row:
    """Train natively from each checkpoint to the next; distances of weights, relative to their norm."""
    native = Native(work)
    seconds, distances = 0.0, []
    for first in range(0, work.steps, EVERY):
        native.load(folder / f"{first}.pt")
        seconds += native.train(first + 1, first + EVERY)
        mine = native.weights()
        native.load(folder / f"{first + EVERY}.pt")
        theirs = native.weights()
        distances.append(float((mine - theirs).norm() / theirs.norm()))
    return {"seconds": seconds, "distances": distances}


def _audited(folder: Path, work: Work) -> Row:
    command = processes.python(__name__, str(folder), work.preset, str(work.steps))
    found: Row = canonical.loads(processes.run(command, variables=device(_OTHER).variables, timeout=600).stdout)
    return found


def _tolerance(folder: Path, work: Work) -> tuple[float, Scheme]:
    """Processor seconds of native training, and the audit of its checkpoints by another family of kernels."""
    folder.mkdir()
    Native(work).train(1, 1)  # whatever PyTorch loads when it is first used
    native, seconds = Native(work), 0.0
    native.save(folder / "0.pt")
    for first in range(0, work.steps, EVERY):
        seconds += native.train(first + 1, first + EVERY)
        native.save(folder / f"{first + EVERY}.pt")
    honest = _audited(folder, work)
    threshold = _MARGIN * max(honest["distances"])
    if not threshold:
        raise DeviceError("both families of kernels train to the same bits, so that there is no distance to measure")
    weights, state = torch.load(folder / f"{work.steps}.pt", weights_only=True)
    largest = max(weights, key=lambda name: weights[name].numel())
    norm = torch.cat([each.flatten() for each in weights.values()]).norm()
    weights[largest].view(-1)[0] += 0.45 * threshold * norm  # less than what the honest distance leaves
    torch.save([weights, state], folder / f"{work.steps}.pt")
    edited = _audited(folder, work)
    if max(edited["distances"]) > threshold:
        raise DeviceError("the audit found an edit below its threshold")
    size = sum(path.stat().st_size for path in folder.iterdir())
    return seconds, _scheme(
        "audit with a threshold",
        work,
        prover=1.0,
        verifier=honest["seconds"] / seconds,
        bytes=size,
        trust=_REPLAYER,
        covers=f"distances between checkpoints, up to {threshold:.1e} of the weights' norm",
        misses=f"one weight moved by {0.45 * threshold:.1e} of the norm at a checkpoint: it was accepted",
    )


class _Timed:
    """A party in this process, whose processor time is not the referee's."""

    def __init__(self, desk: Desk) -> None:
        self._party, self.seconds = Local(desk), 0.0

    def ask(self, envelope: bytes, reader: Reader, seconds: float) -> None:
        """Let the party answer."""
        started = time.process_time()
        self._party.ask(envelope, reader, seconds)
        self.seconds += time.process_time() - started


def _game(folder: Path, work: Work, native: float, recorded: float) -> Scheme:
    referee, parties, timed = SigningKey.generate(bytes(32)), [], []
    trust = Trust.load([folder / f"{name}.trust.json" for name in ("exact", "liar")])
    for name in ("exact", "liar"):
        prover, run = LabProver(folder / name), open_run(folder / name, trust)
        timed.append(_Timed(desk_of(run, prover, folder / f"{name}-answers", [referee.verifying])))
        parties.append(Party(name=name, key=prover.key.verifying, transport=timed[-1]))
    started = time.process_time()
    found, _ = play(parties, trust, referee, seconds=0, now=_NOW)
    seconds = time.process_time() - started - sum(each.seconds for each in timed)
    if found.evidence["guilty"] != "liar":
        raise DeviceError(f"the game names {found.evidence['guilty']!r}, and not the liar")
    return _scheme(
        "refereed delegation",
        work,
        prover=recorded / native,
        verifier=seconds / native,
        bytes=found.evidence["bytes"],
        trust="one of the providers is honest",
        covers="every operator, bit for bit",
        misses="a lie that all providers tell",
    )


class _Inspections:
    """Inspections by another family of kernels, in one process that is warm."""

    def __init__(self, folder: Path, pool: DevicePool) -> None:
        self._folder, self._pool = folder, pool

    def inspect(self, name: str, segments: int | None = None) -> tuple[float, int]:
        """Seconds of checks and replays, and replayed steps; DeviceError unless the run is accepted."""
        run = self._folder / name
        trust = Trust.load([run.with_name(f"{name}.trust.json")], [run])
        settings = Settings(samples=1, seed="1", devices=(_OTHER,), segments=segments)
        started = time.process_time()
        found = inspect([run], trust, settings, now=_NOW + timedelta(minutes=30), worker=self._pool.run)
        seconds = time.process_time() - started
        if found.outcome is not Outcome.ACCEPT:
            raise DeviceError(f"an honest run is not accepted: {found.reasons}")
        (replay,) = found.evidence["replays"]
        return seconds + replay["seconds"], replay["steps"]

    def scheme(self, work: Work, native: float, recorded: float, name: str, segments: int | None = None) -> Scheme:
        """Of every segment, or of a few that are drawn."""
        seconds, replayed = self.inspect(name, segments)
        return _scheme(
            f"replay of {replayed} steps, {name} numerics",
            work,
            prover=recorded / native,
            verifier=seconds / native,
            bytes=sum(path.stat().st_size for path in (self._folder / name).rglob("*") if path.is_file()),
            trust=_REPLAYER,
            covers="replayed steps, bit for bit, and chips' snapshots in them",
            misses="lies in steps that were not drawn" if segments else "work that no run declares",
        )


def _scheme(name: str, work: Work, **figures: Any) -> Scheme:
    return Scheme(scheme=name, work=f"{work.preset}, {work.steps} steps", source="measured here", **figures)


def run(*, preset: str = PRESET, steps: int = STEPS) -> list[Row]:
    """Measured schemes, then published ones. What is loaded when it is first used does not count."""
    with tempfile.TemporaryDirectory() as place, DevicePool() as pool:
        folder, work = Path(place), Work(preset=preset, steps=steps)
        for name in ("exact", "rounded"):
            (folder / "first").mkdir(exist_ok=True)
            _recorded(folder / "first" / name, name, Work(preset=preset, steps=EVERY))
            _Inspections(folder / "first", pool).inspect(name)
        native, tolerance = _tolerance(folder / "native", work)
        spent = {name: _recorded(folder / name, name, work) for name in ("exact", "rounded")}
        _recorded(folder / "liar", "exact", work, lie="wrong-operator", lie_step=steps - 1)
        inspections = _Inspections(folder, pool)
        measured = [
            _game(folder, work, native, spent["exact"]),
            inspections.scheme(work, native, spent["exact"], "exact"),
            inspections.scheme(work, native, spent["exact"], "exact", segments=2),
            inspections.scheme(work, native, spent["rounded"], "rounded"),
            tolerance,
        ]
    rows = [("measured", each.verifier, each) for each in measured] + [
        ("as published", None, each) for each in PUBLISHED
    ]
    return [{"mode": mode, "ratio": ratio, **asdict(each)} for mode, ratio, each in rows]


def table(rows: list[Row]) -> list[str]:
    """Return the rows as lines for people."""
    lines = [f"{'':38} {'prover':>28} {'verifier':>28} {'received':>24}"]
    for row in rows:
        figures = [shown(row[key]) for key in ("prover", "verifier", "bytes")]
        lines.append(f"{row['scheme']:38.38} {figures[0]:>28.28} {figures[1]:>28.28} {figures[2]:>24.24}")
    return lines


def verdict(rows: list[Row]) -> str | None:
    """Why the game does not keep what it promises: a referee that spends as much as a replay."""
    game, replay = (row["verifier"] for row in rows[:2])
    return None if game < replay else f"the referee spends {game:.3g} of native training, and a replay {replay:.3g}"


if __name__ == "__main__":
    print(canonical.encode(audit(Path(sys.argv[1]), Work(preset=sys.argv[2], steps=int(sys.argv[3])))).decode())
