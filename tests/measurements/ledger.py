"""``ledger``: labs that hide work in what nobody can replay, and honest ones that crash, by their chips' ledgers.

A lie's printed slack has to be as much as the work that it hid, and it is accepted only below the limits. An honest
history is never rejected, and leaves the verdict open only where its printed slack is above the limit, or where a power
cut erased a snapshot.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional

from analysis.bench.origin import write
from firmware_sim.errors import CallerError, ChipwitnessError
from inspector.inspection.guards import Settings
from inspector.inspection.inspection import inspect
from inspector.inspection.slack import EXCUSED_BOOTS
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome, Verdict
from inspector.replay.pool import DevicePool
from monitor import Recorder
from monitor.declaration.statement import MOST_SLACK
from monitor.lab.evidence import LiveChips
from monitor.lab.host import Host
from monitor.lab.simulated_lab import SimulatedLab, lab_path
from monitor.transcript import RunFolder
from tests.measurements._ledger_lies import LIES, HiddenWork

__all__ = ["EVENTS", "World", "play", "run", "table", "verdict", "worlds", "write"]

Row = dict[str, Any]
EVENTS = ("kill", "late kill", "second kill", "asked", "shutdown", "asked at rest", "backup", "other run")
"""What happens to an honest lab between or in its steps."""
_DEVICES = ("sse41",)
_STARTED = datetime(2026, 1, 1, tzinfo=UTC)
_ERASED = "in the middle of a snapshot"


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One lab's runs.

    Attributes:
        lengths: training steps of each run, one after the other on the same chips.
        evaluations: after each training step.
        giant: the training step of each run whose batch is 16 times as large; 0 for none.
        plan: by run, what happens after which of its recorded steps: lies, or events of an honest lab.
    """

    number: int
    honest: bool
    seed: int
    chips: int
    rate: int
    lengths: tuple[int, ...]
    every: int
    keep: int | None
    evaluations: int
    giant: int
    sync: bool
    plan: tuple[Mapping[int, str], ...]


class _Killed(BaseException):
    """Stands for the end of the process."""


def worlds(count: int, seed: int, *, honest: bool) -> list[World]:
    """So many worlds; lies and events come in turn, so that each kind is there as often."""
    chance = random.Random(f"chipwitness/ledger/{seed}/{honest}")
    kinds = EVENTS if honest else tuple(LIES)
    found = []
    for number in range(count):
        small = not honest and chance.random() < 0.15
        lengths = tuple(
            chance.randint(1, 2) if small else chance.choice((3, 6, 12, 24))
            for _ in range(4 if small else chance.choice((1, 1, 2)))
        )
        evaluations = chance.choice((0, 0, 1, 2))
        plan = []
        for index, length in enumerate(lengths):
            whole = length * (1 + evaluations)
            places = chance.sample(range(1, whole + 1), min(whole, chance.choice((1, 1, 2, 3))))
            first = kinds[number % len(kinds)] if not index else chance.choice(kinds)
            told = [first, *(chance.choice((first, *kinds)) for _ in places[1:])]
            plan.append(dict(sorted(zip(places, told, strict=True))))
        found.append(
            World(
                number=number,
                honest=honest,
                seed=chance.getrandbits(31),
                chips=10 if not honest and number % 9 == 8 and chance.random() < 0.5 else chance.randint(1, 3),
                rate=chance.choice((2, 8, 64)),
                lengths=lengths,
                every=chance.choice((1, 2, 4, 1000)),
                keep=chance.choice((None, None, 1, 2)),
                evaluations=evaluations,
                giant=chance.choice((0, 0, 1, 2)),
                sync=chance.random() < 0.5,
                plan=tuple(plan),
            )
        )
    return found


class _Loop:
    """A run's training, which can be made again."""

    def __init__(self, world: World, index: int) -> None:
        torch.manual_seed(world.seed + index)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self._world, self._index = world, index

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """What a training step takes."""
        generator = torch.Generator().manual_seed(self._world.seed + 100 * self._index + step)
        size = 128 if step == self._world.giant else 8
        return torch.randn(size, 8, generator=generator), torch.randn(size, 4, generator=generator)

    def train(self, recorder: Recorder, batch: tuple[Tensor, Tensor], *, killed: bool = False) -> None:
        """A training step."""
        with recorder.step(batch):
            self.optimizer.zero_grad()
            functional.mse_loss(self.model(batch[0]), batch[1]).backward()  # type: ignore[no-untyped-call]
            if killed:
                raise _Killed
            self.optimizer.step()

    def evaluate(self, recorder: Recorder, batch: tuple[Tensor, Tensor]) -> None:
        """An evaluation."""
        with recorder.evaluation(batch) as evaluation, torch.no_grad():
            evaluation.commit(functional.mse_loss(self.model(batch[0]), batch[1]))


class _Lab:
    """Records a world's runs in a folder."""

    def __init__(self, world: World, home: Path) -> None:
        self.world, self.home = world, home
        self.runs = [home / f"run{index}" for index in range(len(world.lengths))]
        self.hidden: Counter[tuple[str, str]] = Counter()
        self._waiting: list[int] = []

    def record(self) -> None:
        """All runs, one after the other."""
        before: Path | None = None
        for index, run in enumerate(self.runs):
            if self.world.honest:
                self._honest(index, run, before)
            else:
                self._lying(index, run, before)
            before = run
        for index in self._waiting:
            self._go_on(index, {})

    def _recorder(self, loop: _Loop, run: Path, before: Path | None) -> Recorder:
        world = self.world
        return Recorder(
            loop.model,
            loop.optimizer,
            out=run,
            seed=world.seed,
            chips=world.chips,
            checkpoint_every=world.every,
            keep=world.keep,
            snapshot_rate=Fraction(1, world.rate),
            lab="lab",
            sync=world.sync,
            started=_STARTED,
            hours=1.0,
            after=before,
        )

    def _lying(self, index: int, run: Path, before: Path | None) -> None:
        finished = None if before is None else RunFolder(before, _key(before))
        conduct = HiddenWork(self.world.plan[index], self.world.seed + index, finished)
        with mock.patch("monitor.recording.recorder.conduct", return_value=conduct):
            loop = _Loop(self.world, index)
            recorder = self._recorder(loop, run, before)
        for step in range(1, self.world.lengths[index] + 1):
            batch = loop.batch(step)
            loop.train(recorder, batch)
            for _ in range(self.world.evaluations):
                loop.evaluate(recorder, batch)
        recorder.finish()
        for chip, work in conduct.hidden.items():
            self.hidden[chip, "flop"] += work.flop
            self.hidden[chip, "moved"] += work.moved

    # An honest lab

    def _honest(self, index: int, run: Path, before: Path | None) -> None:
        loop = _Loop(self.world, index)
        recorder = self._recorder(loop, run, before)
        self._train(index, loop, recorder, dict(self.world.plan[index]))

    def _go_on(self, index: int, plan: dict[int, str]) -> None:
        loop = _Loop(self.world, index)
        recorder = Recorder.resume(loop.model, loop.optimizer, out=self.runs[index], sync=self.world.sync)
        self._train(index, loop, recorder, plan)

    def _train(self, index: int, loop: _Loop, recorder: Recorder, plan: dict[int, str]) -> None:
        """Go on to the end, or to the first event that ends the process, and from there in another one."""
        world, run = self.world, self.runs[index]
        whole = 1 + world.evaluations
        done = recorder.steps + len(recorder.evaluations)
        saved: Path | None = None
        for number in range(done + 1, world.lengths[index] * whole + 1):
            step, kind = divmod(number - 1, whole)
            event = plan.pop(number, None)
            batch = loop.batch(step + 1)
            if event in ("kill", "second kill", "asked", "other run") and not kind:
                try:
                    loop.train(recorder, batch, killed=True)
                except _Killed:
                    self._again(index, event, plan)
                    return
            if event == "backup":
                saved = self._copy(run)
            if kind:
                loop.evaluate(recorder, batch)
            else:
                loop.train(recorder, batch)
            if event in ("shutdown", "asked at rest"):
                recorder.shutdown()
            elif event is not None and event != "backup":
                recorder._run.break_off()
            elif saved is not None and number > done + 1 and not plan:
                recorder._run.break_off()
                self._put_back(run, saved)
                event = "backup"
            else:
                continue
            self._again(index, event or "", plan)
            return
        recorder.finish()

    def _again(self, index: int, event: str, plan: dict[int, str]) -> None:
        if event in ("asked", "asked at rest"):
            lab = LiveChips([lab_path(self.runs[index])])
            trust = self.trust([self.runs[index]])
            for chip in trust.chips_of("lab"):
                lab.ask(chip, b"n" * 32, trust.verifier)
        if event == "second kill":
            self._killed_again(index)
        if event == "other run" and index + 1 < len(self.runs):
            self._waiting.append(index)
            return
        self._go_on(index, plan)

    def _killed_again(self, index: int) -> None:
        """The process ends once more, while steps are repeated."""
        announce, told = Host.announce, Counter[str]()

        def ends(host: Host, step: int) -> None:
            announce(host, step)
            told["steps"] += 1
            if told["steps"] == 2:
                host.lab.cut_power()
                raise _Killed

        loop = _Loop(self.world, index)
        with mock.patch.object(Host, "announce", ends):
            try:
                recorder = Recorder.resume(loop.model, loop.optimizer, out=self.runs[index], sync=self.world.sync)
            except _Killed:
                return
        recorder._run.break_off()

    def _copy(self, run: Path) -> Path:
        saved = self.home / f"{run.name}.saved"
        shutil.rmtree(saved, ignore_errors=True)
        shutil.copytree(run, saved / run.name)
        lab = lab_path(run)
        shutil.copytree(lab, saved / lab.name, ignore=lambda folder, _: ["chips"] if Path(folder) == lab else [])
        return saved

    def _put_back(self, run: Path, saved: Path) -> None:
        """All but the chips is as it was before."""
        lab = lab_path(run)
        shutil.rmtree(run)
        shutil.copytree(saved / run.name, run)
        for path in lab.iterdir():
            if path.name != "chips":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for path in (saved / lab.name).iterdir():
            shutil.copytree(path, lab / path.name) if path.is_dir() else shutil.copy(path, lab / path.name)

    def trust(self, runs: Sequence[Path]) -> Trust:
        """What the inspector knows."""
        return Trust.load([run.with_name(f"{run.name}.trust.json") for run in runs], runs)


def _key(run: Path) -> Any:
    return SimulatedLab.lab_key(SimulatedLab.read_config(lab_path(run))).verifying


def play(world: World, worker: Callable[[str, dict[str, Any]], dict[str, Any]]) -> tuple[Verdict, Mapping[Any, int]]:
    """Record a world and inspect it with all chips; also what was hidden, by chip and count."""
    with tempfile.TemporaryDirectory(prefix="chipwitness-ledger-") as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "chips count")  # the recorder's own word to an honest lab
        lab = _Lab(world, Path(folder))
        lab.record()
        trust = lab.trust(lab.runs)
        settings = Settings(samples=world.chips, seed=str(world.seed), devices=_DEVICES)
        now = _STARTED + timedelta(minutes=30)
        return inspect(lab.runs, trust, settings, now=now, worker=worker), lab.hidden


def _problem(world: World, found: Verdict, hidden: Mapping[Any, int]) -> str:
    """Which law is broken; empty where none is."""
    chips = found.evidence.get("chips", [])
    if world.honest:
        if found.outcome is Outcome.REJECT:
            return f"an honest lab is rejected: {found.reasons[0].text}"
        if found.outcome is Outcome.INCONCLUSIVE:
            odd = [reason.text for reason in found.reasons if not _may_be_open(reason.text, chips)]
            return f"left open without need: {odd[0]}" if odd else ""
        return ""
    for chip in chips:
        for count in ("flop", "moved"):
            told, most = chip["ledger"]["slack"][count], hidden.get((chip["chip"], count), 0)
            if told + 64 < most:  # each part of a count is rounded down
                return f"{chip['chip']} prints {told} {count} of slack, and {most} were hidden"
    if found.outcome is Outcome.ACCEPT:
        for chip in chips:
            allowed = _most(world, chip["ledger"])
            for count in ("flop", "moved"):
                if hidden.get((chip["chip"], count), 0) > allowed[count] + 64:
                    return f"accepted with {hidden[chip['chip'], count]} {count} hidden on {chip['chip']}, of {allowed}"
    return ""


def _most(world: World, ledger: Mapping[str, Any]) -> dict[str, int]:
    """What the limits let pass, worked out by the steps alone."""
    limit, every = float(MOST_SLACK), world.every
    found = {}
    for count in ("flop", "moved"):
        spare = limit * ledger["declared"][count]
        boots = [0.0]
        for length, told in zip(world.lengths, ledger["runs"].values(), strict=False):
            steps = length * (1 + world.evaluations)
            boots.append((min(every, steps) + 2) * max(told["declared"][count] / max(length, 1), 1))
        found[count] = int(spare + EXCUSED_BOOTS * max(boots))
    return found


def _may_be_open(text: str, chips: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a doubt about an honest lab has its reason."""
    if _ERASED in text or "have no snapshot" in text or "the power went in that step" in text:
        return True
    for chip in chips:
        ledger = chip["ledger"]
        if ledger is None or not text.startswith(f"chip {chip['chip']}: "):
            continue
        rest = {count: ledger["slack"][count] - ledger["excused"][count] for count in ("flop", "moved")}
        if any(rest[count] > float(MOST_SLACK) * ledger["declared"][count] for count in rest):
            return True
    return False


def run(
    *, lies: int = 400, honest: int = 300, seed: int = 0, progress: Callable[[int], object] = lambda done: None
) -> list[Row]:
    """Play so many worlds of each kind.

    Rows have ``work`` (a lie, an event, or ``all``), ``mode`` (``lies`` or ``honest``), ``seconds``, ``ratio`` (None),
    ``worlds``, ``outcomes``, ``problems`` (texts) and ``kept`` (the worlds that broke a law).

    Raises:
        CallerError: fewer than one world, or a negative number.
    """
    if min(lies, honest, seed) < 0 or not lies + honest:
        raise CallerError("give numbers of at least 0, not both of them 0")
    rows: list[Row] = []
    with DevicePool() as devices:
        for mode, count in (("lies", lies), ("honest", honest)):
            for kind, played in _played(worlds(count, seed, honest=mode == "honest"), devices.run, progress).items():
                rows.append(
                    {
                        "work": kind,
                        "mode": mode,
                        "seconds": sum(each["seconds"] for each in played),
                        "ratio": None,
                        "seed": seed,
                        "worlds": len(played),
                        "outcomes": dict(Counter(each["outcome"] for each in played)),
                        "problems": [each["problem"] for each in played if each["problem"]],
                        "kept": [each["world"] for each in played if each["problem"]],
                    }
                )
    return rows


def _played(
    every: Sequence[World], worker: Callable[..., dict[str, Any]], progress: Callable[[int], object]
) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for world in every:
        begun = time.perf_counter()
        try:
            seen, hidden = play(world, worker)
            outcome, problem = seen.outcome.value, _problem(world, seen, hidden)
        except ChipwitnessError as error:
            outcome, problem = type(error).__name__, str(error)
        row = {"world": asdict(world), "outcome": outcome, "problem": problem, "seconds": time.perf_counter() - begun}
        found.setdefault(next(iter(world.plan[0].values())), []).append(row)
        progress(1)
    return found


def verdict(rows: Sequence[Row]) -> str | None:
    """What broke a law, or None."""
    problems = [f"{row['work']}: {text}" for row in rows for text in row["problems"]]
    return f"{len(problems)} worlds broke a law; {problems[0]}" if problems else None


def table(rows: Sequence[Row]) -> list[str]:
    """Lines for a person."""
    lines = [f"{'':8} {'':14} {'worlds':>6}  outcomes"]
    for row in rows:
        told = ", ".join(f"{count} {name}" for name, count in sorted(row["outcomes"].items()))
        lines.append(f"{row['mode']:8} {row['work']:14} {row['worlds']:6}  {told}")
        lines += [f"    {text}" for text in row["problems"]]
    return lines
