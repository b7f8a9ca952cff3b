"""One simulated lab, what it records, and an inspection of what it hands over."""

from __future__ import annotations

import random
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from firmware_sim import FirmwareChip, Meter, Work
from firmware_sim.errors import ChipwitnessError, DeviceError, EvidenceError
from inspector.inspection.guards import Settings
from inspector.inspection.inspection import inspect
from inspector.inspection.sources import Sources
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Verdict
from inspector.replay._worker import _ACTIONS
from monitor import Recorder
from monitor.declaration.slots import StepNumbers
from monitor.declaration.statement import hyper_of
from monitor.lab.conduct import Conduct
from monitor.lab.lies import conduct
from monitor.lab.simulated_lab import LabConfig, SimulatedLab, lab_path
from monitor.presets.task import Task
from monitor.recording.recipes import train
from monitor.transcript.data import DeclaredData
from tests.adversary.evidence import Evidence, contents
from tests.adversary.host import Puppet, Stretch, lab_of
from tests.adversary.lies import Lie
from tests.handing import hand_over

__all__ = ["NOW", "Scene", "World", "kept_device"]

STARTED = datetime(2026, 1, 1, tzinfo=UTC)
NOW = STARTED + timedelta(minutes=30)

Worker = Callable[[str, dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """The world that a sequence plays in.

    Attributes:
        kind: ``loop`` or ``preset``.
        rate: snapshots per chip and tick.
        idle: registered chips that take no part in the run.
        samples: chips that the inspection draws; all of them, if it is as many as there are.
        device: ``kept`` for one in this process, else a device's name.
    """

    seed: int
    kind: str = "loop"
    model: str = "linear"
    optimizer: str = "momentum"
    numerics: str = "exact"
    chips: int = 2
    idle: int = 0
    samples: int = 2
    steps: int = 2
    batch: int = 2
    checkpoint_every: int = 2
    rate: tuple[int, int] = (1, 1)
    segments: int | None = None
    device: str = "kept"
    is_honest: bool = False

    @property
    def is_full(self) -> bool:
        """Whether every chip is drawn and every tick holds a snapshot."""
        return self.samples == self.chips + self.idle and self.rate == (1, 1)


def kept_device(name: str, job: dict[str, Any]) -> dict[str, Any]:
    """A replay device in this process, which says that it computes otherwise than the training device."""
    identity = {"device": name, "fingerprint": "sha256:" + "0" * 64, "seconds": 0.0}
    try:
        return {**identity, **_ACTIONS[job["action"]](job)}
    except EvidenceError as error:
        return {**identity, "evidence_error": str(error)}


class World:
    """A lab in a folder of its own.

    Attributes:
        lies: what it has told so far.
        refused: texts of the errors that recorder and chips answered with.
        runs: the run folders that it hands over.
        renamed: pairs of folders that change places between verification and replay.
        copies: digests of what a dishonest chip's memory really held at its snapshots.
        elsewhere: a lie about where the next step is taken, and for how many ticks chips idle in its place.
        interrupting: what decides within a command of which chip the next step is taken; None if it is not.
    """

    def __init__(self, scene: Scene, folder: Path, worker: Worker = kept_device) -> None:
        self.scene = scene
        self.folder = folder
        self.worker = worker
        self.phase = "before"
        self.lies: list[Lie] = []
        self.refused: list[str] = []
        self.said: Counter[str] = Counter()
        self.runs: list[Path] = []
        self.withheld: set[Path] = set()
        self.trust: Trust | None = None
        self.strangers: list[Path] = []
        self.stranger_trust: list[Trust] = []
        self.chips: list[Puppet] = []
        self.idle_chips: list[Any] = []
        self.recorder: Recorder | None = None
        self.baseline: dict[Path, dict[str, bytes]] = {}
        self.swap: tuple[Path, Path] | None = None
        self.fresh_draw = False
        self.now = NOW
        self.optimizer = scene.optimizer
        self.declared: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
        self.declare_data: Callable[[DeclaredData], DeclaredData] | None = None
        self.task_seed: Callable[[int], int] | None = None
        self.seed_lie: Lie | None = None
        self.maximum_flop: int | None = None
        self.draws = True
        self.lie: str | None = None
        self.chip_lie: str | None = None
        self.copies: set[bytes] = set()
        self.elsewhere: tuple[Lie, int] | None = None
        self.is_elsewhere = False
        self.interrupting: int | None = None
        self.prelude: list[Callable[[], None]] = []
        self.script: list[Callable[[], None]] = []
        self.played = 0
        self.forging: tuple[Lie, str, int] | None = None
        self.body: Callable[[Any, Any, Any], None] = _train
        self.abandoned = False

    # The lab at work

    @property
    def run(self) -> Path:
        """The run folder that the lab works on."""
        return self.runs[-1]

    @property
    def step(self) -> int:
        """Steps that are recorded (of a preset: scheduled)."""
        return self.played if self.recorder is None else self.recorder.steps

    def tell(self, row: str, **options: Any) -> Lie:
        """Note a lie."""
        lie = Lie(row=row, **options)
        self.lies.append(lie)
        return lie

    def adopt(self, chips: list[Any], idle: list[Any]) -> list[Any]:
        """Put the host before the chips that train."""
        old = self.chips
        self.idle_chips = idle
        self.chips = [Puppet(self, chip, number) for number, chip in enumerate(chips)]
        for mine, before in zip(self.chips, old, strict=False):
            mine.watched = [Stretch(stretch.lie) for stretch in before.watched]
            mine.history, mine.open = before.history, before.open
        return list(self.chips)

    def crooked(self, config: LabConfig) -> LabConfig:
        """The configuration with which chips are made."""
        if self.chip_lie is None:
            return config
        return replace(config, lie=self.chip_lie)

    def honest_looking(self, config: LabConfig) -> LabConfig:
        """The configuration as the recorder is told it."""
        return replace(config, lie=None) if self.chip_lie is not None and self.scene.kind == "loop" else config

    def before_run(self) -> None:
        """Called when there are chips, before the run's memory is attached."""
        for act in self.prelude:
            self.attempt(act)
        self.prelude.clear()

    def attempt(self, act: Callable[[], object]) -> bool:
        """Do something that recorder or chips may refuse."""
        try:
            act()
        except ChipwitnessError as error:
            self.refused.append(str(error))
            return False
        return True

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """The lab's own process, altered as far as the lab has altered it."""
        lab = lab_of(self)
        with ExitStack() as stack:
            modules = ("monitor.recording.recorder", "monitor.recording.recipes")
            for module in (*modules, "monitor.recording.recording"):
                stack.enter_context(mock.patch(f"{module}.SimulatedLab", lab))
            for module in modules if self.scene.kind == "preset" else ():
                stack.enter_context(mock.patch(f"{module}.conduct", self._conduct))
            if not self.scene.is_honest:
                stack.enter_context(mock.patch("monitor.recording.step_programs._require_constant"))
                for check in ("RunFolder.check_listing", "RunFolder.check_contents"):  # what holds up no liar
                    stack.enter_context(mock.patch(f"monitor.recording.recorder.{check}"))
                stack.enter_context(mock.patch("monitor.recording.recording.heard_beyond", return_value={}))
                stack.enter_context(mock.patch.object(Meter, "charge", self._charging()))
                stack.enter_context(mock.patch.object(FirmwareChip, "_freeze", self._freezing()))
            if self.declared is not None:
                liar = self.declared
                stack.enter_context(
                    mock.patch("monitor.recording.updates.hyper_of", lambda group: liar(hyper_of(group)))
                )
                stack.enter_context(mock.patch("monitor.recording.step_programs.StepNumbers", _Lenient))
            yield

    def _charging(self) -> Callable[[Meter, Work], None]:
        """The meter of a device whose host exchanges memory between operators, or has them run elsewhere."""
        charge = Meter.charge

        def charged(meter: Meter, work: Work) -> None:
            if self.is_elsewhere:
                return
            with ExitStack() as stack:
                for chip in self.chips:
                    if chip.memory is not None and chip.memory.meter is meter:
                        stack.enter_context(chip.viewed())
                charge(meter, work)

        return charged

    def _freezing(self) -> Callable[[Any], Any]:
        """A chip whose copies we remember if it tells a lie itself."""
        freeze = FirmwareChip._freeze

        def frozen(chip: FirmwareChip) -> Any:
            copy = freeze(chip)
            if copy is not None and type(chip) is not FirmwareChip:
                self.copies.add(copy.digest(chip.algorithm).value)
            return copy

        return frozen

    def advance(self, phase: str) -> None:
        """Bring the lab to a phase by honest work."""
        if self.phase == "before" and phase != "before":
            self.begin()
        if self.phase == "training" and phase == "finished":
            if self.step < 1:
                for _ in range(self.scene.steps):
                    self.train()
            self.finish()

    def begin(self) -> None:
        """Start a run."""
        scene = self.scene
        self.runs.append(self.folder / f"run{len(self.runs)}")
        self.recorder = None
        self.phase = "training"
        self.played = 0
        if scene.kind == "preset":
            return
        model, optimizer = self._objects()
        with self.at_work():
            self.attempt(lambda: self._begin(model, optimizer))

    def _begin(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        scene = self.scene
        self.recorder = Recorder(
            model,
            optimizer,
            out=self.run,
            numerics=scene.numerics,
            seed=scene.seed,
            chips=scene.chips,
            idle_chips=scene.idle,
            checkpoint_every=scene.checkpoint_every,
            snapshot_rate=Fraction(*scene.rate),
            lab="lab",
            started=STARTED,
            hours=1.0 + len(self.runs) / 60,
        )
        self.model, self.optim = model, optimizer
        if self.task_seed is not None:
            told, sign = self.recorder._run.declared.seed, self.recorder._run.inspectorate.sign
            self.recorder._run.declared = replace(self.recorder._run.declared, seed=self.task_seed(scene.seed))
            # What the inspectorate is shown is the declaration that the run holds.
            self.recorder._run.inspectorate.sign = lambda declared, *programs, **options: sign(  # type: ignore[method-assign]
                replace(declared, seed=told), *programs, **options
            )

    def _objects(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(self.scene.seed)
        model: nn.Module = nn.Linear(3, 2)
        if self.scene.model == "dropout":
            model = nn.Sequential(nn.Linear(3, 32), nn.Dropout(0.5), nn.Linear(32, 2))
        if self.optimizer == "adamw":
            return model, torch.optim.AdamW(model.parameters(), lr=0.001, weight_decay=0.01)
        momentum = 0.9 if self.optimizer == "momentum" else 0.0
        rate = 5.0 if self.optimizer == "steep" else 0.125
        return model, torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)

    def train(self) -> bool:
        """Record one step."""
        if self.scene.kind == "preset":
            self.script.append(_step_mark)
            self.played += 1
            return True
        if self.recorder is None:
            return False
        with self.at_work():
            if self.attempt(self._step):
                return True
            if self.recorder is not None and self.recorder._state == "failed":
                self.recorder = None
                self.resume()
        return False

    def _step(self) -> None:
        assert self.recorder is not None
        generator = torch.Generator().manual_seed(self.scene.seed * 1000 + self.step)
        batch = torch.randn(self.scene.batch, 3, generator=generator)
        if self.forging is not None:
            self._forge(self.recorder)
        elsewhere, pick = self.elsewhere, self.interrupting
        self.elsewhere, self.interrupting = None, None
        self.is_elsewhere = elsewhere is not None
        try:
            with self.recorder.step(batch):
                if pick is None:
                    self.body(self.model, self.optim, batch)
                else:
                    self._within_command(pick, lambda: self.body(self.model, self.optim, batch))
        finally:
            self.is_elsewhere = False
        if elsewhere is not None:
            lie, ticks = elsewhere
            for chip in self.chips:
                lie.hit(chip.number)
                chip.idle(ticks)
        if self.seed_lie is not None and self.draws and self.recorder._run.declared.seed != self.scene.seed:
            self.seed_lie.hit(0)

    def _within_command(self, pick: int, body: Callable[[], None]) -> None:
        """Run a body in the middle of a command of one chip, as a signal's handler or a profiler would run."""
        done: list[Any]
        chip, done = self.random(pick).choice(self.chips).chip, []

        def hook(frame: Any, event: str, argument: object) -> None:
            if not done and frame.f_code.co_name == "_nvram_status":
                done.append(frame)
                sys.setprofile(None)
                body()

        sys.setprofile(hook)
        try:
            chip.nvram  # noqa: B018 - a command that is told nothing
        finally:
            sys.setprofile(None)

    def _forge(self, recorder: Recorder) -> None:
        """From now on what is committed is not what was trained."""
        settle = recorder._run.loop.state.__class__.settle

        def settle_and_forge() -> None:
            settle(recorder._run.loop.state)
            self.forge(recorder._run.loop.state.memory.tensors, recorder.steps)

        recorder._run.loop.state.settle = settle_and_forge  # type: ignore[method-assign]
        for name in ("repeat", "repeat_segment"):
            setattr(recorder._run.loop.held, name, lambda *_: None)

    def forge(self, tensors: Mapping[tuple[str, str], torch.Tensor], step: int) -> None:
        """Overwrite what was trained."""
        if self.forging is None:
            return
        lie, what, seed = self.forging
        generator = torch.Generator().manual_seed(seed + step)
        with torch.no_grad():
            for (kind, _), tensor in tensors.items():
                if kind != ("weight" if what != "optimizer" else "optimizer") or not tensor.is_floating_point():
                    continue
                if what == "all":
                    tensor.copy_(torch.randn(tensor.shape, generator=generator))
                else:
                    tensor.view(-1)[:1].add_(0.25)
                    break
            else:
                if what == "optimizer":
                    return
        lie.hit(0)

    def resume(self) -> None:
        """Boot after a crash and go on."""
        model, optimizer = self._objects()

        def again() -> None:
            self.recorder = Recorder.resume(model, optimizer, out=self.run)
            self.model, self.optim = model, optimizer

        with self.at_work():
            self.attempt(again)

    def crash(self) -> None:
        """Lose power and process, then resume."""
        if self.scene.kind == "preset" or self.recorder is None:
            return
        for chip in (*self.chips, *self.idle_chips):
            self.attempt(chip.cut_power)
        self.recorder = None
        self.resume()

    def finish(self) -> None:
        """Hand the chips' evidence over and close the run."""
        self.phase = "finished"
        with self.at_work():
            if self.scene.kind == "preset":
                self.attempt(self._train_preset)
            elif self.recorder is not None:
                self.attempt(self.recorder.finish)
        self.keep()

    def keep(self) -> None:
        """Remember what the lab would hand over without further edits."""
        if self.run.is_dir():
            self.baseline[self.run] = contents(self.run)
        self.trust = self._trust()

    def _trust(self) -> Trust | None:
        files = [run.with_name(run.name + ".trust.json") for run in self.runs]
        files = [file for file in files if file.exists()]
        if files:
            return Trust.load(files, self.runs)
        if self.scene.kind == "preset" and lab_path(self.runs[0]).is_dir():
            return Trust.from_json(
                SimulatedLab.reference_values(SimulatedLab.read_config(lab_path(self.runs[0]))), "this world"
            )
        return None

    def _train_preset(self) -> None:
        scene = self.scene
        task = Task.for_preset(
            "digits-cnn",
            seed=scene.seed,
            steps=max(self.played, 1),
            batch_size=max(scene.batch, 2),
            numerics=scene.numerics,
            checkpoint_every=scene.checkpoint_every,
            shards=scene.chips,
        )
        lie = self.lie if self.chip_lie is None else self.chip_lie
        lie_step, duration = min(2, task.steps), timedelta(hours=1, minutes=len(self.runs))
        if len(self.runs) > 1:
            config = LabConfig.following(
                self.runs[0], lie=lie, lie_step=lie_step, source=None, started=STARTED, duration=duration
            )
        else:
            config = LabConfig(
                lab="lab",
                seed=scene.seed,
                chips=scene.chips,
                idle_chips=scene.idle,
                lie=lie,
                lie_step=lie_step,
                snapshot_rate=Fraction(*scene.rate),
                started=STARTED,
                duration=duration,
            )
        self.played = 0
        train(task, self.run, config, device="native")

    def _conduct(self, lie: str | None, step: int) -> Conduct:
        """A preset's conduct, in which the host acts between steps and forges before they are committed."""
        real: Any = conduct(lie, step)
        after, before = real.after_step, real.before_commit

        def after_step(at: int, host: Any) -> None:
            after(at, host)
            self.played = at
            passed = False
            while self.script and not (passed and self.script[0] is _step_mark):
                act = self.script.pop(0)
                passed = passed or act is _step_mark
                self.attempt(act)

        def before_commit(moment: Any) -> None:
            before(moment)
            self.forge(moment.memory.tensors, moment.step)

        if self.declare_data is not None:
            real.declare_data = self.declare_data
        real.after_step = after_step
        real.before_commit = before_commit
        return real

    def schedule(self, act: Callable[[], None]) -> None:
        """Act now, or of a preset, when its training has come that far."""
        if self.scene.kind == "preset" and self.phase == "training":
            self.script.append(act)
        else:
            with self.at_work():
                self.attempt(act)

    # What it hands over

    @property
    def key(self) -> Any:
        """The lab's signing key."""
        return SimulatedLab.lab_key(SimulatedLab.read_config(lab_path(self.runs[0])))

    def evidence(self, run: Path | None = None) -> Evidence:
        """The run folder to be edited."""
        return Evidence(run or self.run, self.key)

    def altered(self, *paths: str, run: Path | None = None) -> Callable[[], bool]:
        """Tell whether files of a run differ from what the lab would have handed over."""
        run = run or self.run

        def differs() -> bool:
            if not run.is_dir() or run in self.withheld:
                return False
            now, then = contents(run), self.baseline[run]
            return now != then if not paths else any(now.get(path) != then.get(path) for path in paths)

        return differs

    # The inspection

    def settings(self) -> Settings:
        """How the inspection is done."""
        seed = None if self.fresh_draw else f"secret {self.scene.seed}"
        return Settings(
            samples=self.scene.samples,
            seed=seed,
            devices=("sse41",),
            segments=self.scene.segments,
        )

    def judge(self) -> Verdict | None:
        """Inspect what the lab hands over; None where there is nothing to inspect, or an error of one line."""
        self.advance("finished")
        self.error = ""
        trust = self.trust
        if trust is None:
            self.error = "there is nothing to inspect"
            return None
        for other in self.stranger_trust:
            trust = trust.merge(other)
        trust = replace(trust, maximum_flop=self.maximum_flop)
        for run in (*self.runs, *self.strangers):
            if run.is_dir() and not self.scene.is_honest:
                hand_over(run, self.key)
        try:
            return inspect(
                [*(run for run in self.runs if run not in self.withheld), *self.strangers],
                trust,
                self.settings(),
                now=self.now,
                worker=self._work,
                sources=Sources(answers=self.answers),
            )
        except ChipwitnessError as error:
            if isinstance(error, DeviceError):
                raise
            self.error = str(error)
            return None

    @property
    def answers(self) -> list[Path]:
        """Folders with what idle chips said."""
        folders = [run.with_name(run.name + ".answers") for run in self.runs]
        return [folder for folder in folders if folder.is_dir()]

    def _work(self, name: str, job: dict[str, Any]) -> dict[str, Any]:
        """The device, before which the lab's folders may change places."""
        if self.swap is not None and job["run"] == str(self.swap[0].resolve()):
            shown, other = self.swap
            spare = shown.with_name(shown.name + ".spare")
            shown.rename(spare)
            other.rename(shown)
            try:
                return self.worker(name, job)
            finally:
                shown.rename(other)
                spare.rename(shown)
        return self.worker(name, job)

    @property
    def told(self) -> list[Lie]:
        """Lies that made something untrue."""
        return [lie for lie in self.lies if lie.effective]

    def close(self) -> None:
        """Take the power away and remove everything."""
        for chip in (*self.chips, *self.idle_chips):
            self.attempt(chip.cut_power)
        shutil.rmtree(self.folder, ignore_errors=True)

    def random(self, pick: int) -> random.Random:
        """Choices of an action."""
        return random.Random(f"{self.scene.seed}/{pick}")


class _Lenient(StepNumbers):
    """In place of what an honest lab checks its own numbers by."""

    def take(self, *step: Any) -> None:
        with suppress(EvidenceError):
            super().take(*step)
        self.contradicted = False


def _step_mark() -> None:
    """Marks a step in what a preset's host is to do."""


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    """The body of an honest step."""
    optimizer.zero_grad()
    model(batch).square().sum().backward()
    optimizer.step()
