"""The main job: honest and cheating labs train, are inspected and judged; then the report (``chipwitness demo``)."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

from analysis.demo_processes import dispute_between_processes, require_server, round_between_processes
from analysis.registration import registered_trust
from analysis.version import version
from analysis.words import parts
from firmware_sim.errors import CallerError
from inspector.bundle.checker import check_bundle
from inspector.dispute.dispute import Disputant, settle
from inspector.inspection.drift import drift, drift_text
from inspector.inspection.guards import Sampling, Settings
from inspector.inspection.inspection import inspect
from inspector.inspection.transcripts import open_run
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome
from inspector.probability.chances import hidden_training_detection, unseen
from inspector.probability.odds import Violation
from inspector.replay.pool import DevicePool
from inspector.rounds.turns import play_round, world_of
from inspector.rounds.world import World
from monitor.environment import processor
from monitor.files import write_whole
from monitor.lab.lies import LAB_LIES
from monitor.lab.prover import LabProver
from monitor.lab.rounds import LabSide
from monitor.lab.simulated_lab import LabConfig
from monitor.presets.task import Task
from monitor.recording.options import RunConfig
from monitor.recording.recipes import reference_of, train

__all__ = ["LABS", "Demo", "Lab", "run_demo"]

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lab:
    """One lab of the demo; a lie has the name that ``train --lie`` takes."""

    name: str
    lie: str | None = None

    @property
    def story(self) -> str:
        """What it does, in one line."""
        return "trains what it declares" if self.lie is None else LAB_LIES[self.lie].text


LIES = ("change-sample", "extra-steps", "edited-chip-log", "forged-initialisation")
LABS = (Lab(name="honest"), *(Lab(name=lie, lie=lie) for lie in LIES))

SEED = 2026
"""Of everything that is random, unless the caller names another."""
STEPS = 8
CHIPS = 8
SAMPLES = 4
SNAPSHOT_RATE = Fraction(1, 3)
HELD_TICKS = 2
"""For how long a lab keeps another model in its chips' memory, in the case whose odds the report draws."""
REPLAY_DEVICES = ("sse41", "mkl-compatible")
_AGAINST = "data:0.05"
SAMPLING = Sampling(confidence=0.9, against=Violation.parse(_AGAINST))
CONTROL_DEVICES = (*REPLAY_DEVICES, "emulated-split-k")
"""Tried in turn until one rounds otherwise: kernel families of some processors add products in the same order."""
DISPUTE_STEPS = 6
_CELL_TRIALS = 100
"""Campaigns of each cell of the regimes in the explorer that the report links to."""


@dataclass(slots=True, kw_only=True)
class Demo:
    """Everything that the demo found, and how long each part took."""

    out: Path
    devices: DevicePool
    seed: int
    processes: bool = False
    summary: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the time of the block to a part."""
        started = time.perf_counter()
        yield
        self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - started


def run_demo(out: Path, *, say: Say, advance: Callable[[], None], seed: int = SEED, processes: bool = False) -> Demo:
    """Run all scenes; write ``summary.json``, figures, ``report.html``, what it links to, and a PDF where Chromium is.

    Args:
        seed: of the labs' training, their secrets and the inspector's draws; at least 0.
        say: called with a line for the person who watches.
        advance: called after each of ``len(LABS)`` + 4 parts.
        processes: play the round and the dispute once more between processes that talk over HTTP.

    Raises:
        CallerError: ``out`` exists and is not empty, the seed is negative, or what servers need is not installed.
    """
    if processes:
        require_server()
    if seed < 0:
        raise CallerError(f"--seed must be at least 0, not {seed}")
    if out.exists() and any(out.iterdir()):
        raise CallerError(f"{out} is not empty; choose another --out")
    runs, inspectorate = out / "runs", out / "inspectorate"
    runs.mkdir(parents=True, exist_ok=True)
    inspectorate.mkdir(exist_ok=True)
    with DevicePool() as devices:
        return _run(Demo(out=out, devices=devices, seed=seed, processes=processes), runs, inspectorate, say, advance)


def _run(demo: Demo, runs: Path, inspectorate: Path, say: Say, advance: Callable[[], None]) -> Demo:
    labs = []
    trusts: dict[str, Trust] = {}
    for lab in LABS:
        say(f"{lab.name}: {lab.story}")
        trusts[lab.name] = _train(demo, runs / lab.name, inspectorate, lab)
        row = _inspect(demo, runs / lab.name, trusts[lab.name], lab)
        say(f"  {row['outcome']}: {parts(row['reasons'][0]['text'])[0]}")
        labs.append(row)
        advance()
    honest = runs / LABS[0].name
    say("without control: the honest run again in plain FP32, and with rounding decisions taken freely")
    control = _control(demo, honest, trusts[LABS[0].name], labs[0])
    say(f"  {control['text']}")
    advance()
    say("rounds: the honest lab again, among parties that do not trust each other")
    rounds = _rounds(demo, honest, trusts[LABS[0].name])
    say(f"  {rounds['outcome']}, and its bundle without lab and cluster: {rounds['shown']}")
    if demo.processes:
        say(f"  between processes over HTTP: {rounds['between_processes']}")
    advance()
    say("a dispute: two labs, one task, one wrong operator result")
    dispute = _dispute(demo, runs, inspectorate)
    say(f"  {parts(dispute['reasons'][0]['text'])[0]}")
    if demo.processes:
        say(f"  between processes over HTTP: {parts(dispute['between_processes']['reasons'][0]['text'])[0]}")
    advance()
    replays = labs[0]["evidence"]["replays"]
    demo.summary = {
        "made": _made(demo.seed),
        "labs": labs,
        "training_device": labs[0]["evidence"]["runs"][0]["training_device"],
        "replay_devices": [{"name": each["device"], "fingerprint": each["fingerprint"]} for each in replays],
        "equal_on": [each["device"] for each in replays if each["equal"]],
        "control": control,
        "rounds": rounds,
        "dispute": dispute,
        "detection": _detection(),
    }
    with demo.timed("figures and report"):
        from analysis.report.page import write_report

        write_report(demo.out, demo.summary)
    demo.summary["seconds"] = {part: round(value, 3) for part, value in demo.seconds.items()}
    write_whole(demo.out / "summary.json", json.dumps(demo.summary, indent=2).encode() + b"\n")
    _pages(demo)
    advance()
    return demo


def _pages(demo: Demo) -> None:
    """Write what the report links to: the explorer of its runs, and the glossary."""
    from analysis.explorer.campaign_tables import precomputed
    from analysis.explorer.page import explorer_page
    from analysis.explorer.runs import opened_runs
    from analysis.report.page import glossary_page

    page = explorer_page(
        campaigns=precomputed(["regimes"], trials=_CELL_TRIALS, seed=demo.seed),
        runs=opened_runs(demo.out),
        command=f"chipwitness demo --seed {demo.seed}",
        report="report.html",
    )
    write_whole(demo.out / "explorer.html", page.encode())
    write_whole(demo.out / "glossary.html", glossary_page().encode())


def _made(seed: int) -> dict[str, object]:
    """When, by which release and on what the demo ran."""
    import os
    import platform

    import torch

    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "version": version(),
        "seed": seed,
        "command": f"chipwitness demo --seed {seed}",
        "processor": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def as_expected(summary: dict[str, Any]) -> bool:
    """Tell whether the honest lab was accepted, each cheat rejected, and the dispute settled against the liar."""
    outcomes = all(
        row["outcome"] == (Outcome.ACCEPT if row["lie"] is None else Outcome.REJECT).value for row in summary["labs"]
    )
    rounds = summary["rounds"]["outcome"] == summary["rounds"]["shown"] == Outcome.ACCEPT.value
    disputes = [summary["dispute"], summary["dispute"].get("between_processes", summary["dispute"])]
    guilty = all(each["evidence"]["guilty"] == "wrong-operator" for each in disputes)
    rounds &= summary["rounds"].get("between_processes", Outcome.ACCEPT.value) == Outcome.ACCEPT.value
    return outcomes and rounds and guilty and len(summary["equal_on"]) >= 2


def _train(demo: Demo, run: Path, inspectorate: Path, lab: Lab) -> Trust:
    task = Task.for_preset("tiny-gpt", seed=demo.seed, steps=STEPS, checkpoint_every=4, shards=CHIPS)
    with demo.timed("training with snapshots"):
        return _train_task(task, run, inspectorate, lab, STEPS // 2)


def _train_task(task: Task, run: Path, inspectorate: Path, lab: Lab, lie_step: int) -> Trust:
    config = LabConfig(
        lab=lab.name,
        seed=task.seed,
        chips=task.shards,
        lie=lab.lie,
        lie_step=lie_step,
        snapshot_rate=SNAPSHOT_RATE,
        started=datetime.now(UTC),
        duration=timedelta(hours=1),
    )
    trust = Trust.from_json(reference_of(task, config), "the simulated world")
    trust = registered_trust(inspectorate / "registry", config, trust)
    train(task, run, config, device="native", run=RunConfig(reference=trust.to_json()))
    trust_file = inspectorate / f"{run.name}.trust.json"
    run.with_name(trust_file.name).rename(trust_file)
    return Trust.load([trust_file], [run])


def _inspect(demo: Demo, run: Path, trust: Trust, lab: Lab) -> dict[str, Any]:
    settings = Settings(samples=SAMPLES, seed=f"inspection {demo.seed}", devices=REPLAY_DEVICES, sampling=SAMPLING)
    with demo.timed("inspection with replay"):
        verdict = inspect([run], trust, settings, now=datetime.now(UTC), worker=demo.devices.run)
    # An honest run replays to the same bits, so the odds of a verdict have no false alarms.
    return {"lab": lab.name, "lie": lab.lie, "story": lab.story, "false_alarm": 0.0, **verdict.to_json()}


def _control(demo: Demo, folder: Path, trust: Trust, honest: dict[str, Any]) -> dict[str, Any]:
    """How far native FP32 drifts on another device, and how many free decisions would have gone the other way."""
    with demo.timed("without control"):
        for row in drift(folder, trust, CONTROL_DEVICES, worker=demo.devices.run):
            if row["turned_decisions"]:
                break
    replays = honest["evidence"]["replays"]
    return {
        **row,
        "rounded_logged_decisions": replays[0]["logged_decisions"],
        "rounded_turned_decisions": replays[0]["turned_decisions"],
        "text": drift_text(row),
    }


def _rounds(demo: Demo, run: Path, trust: Trust) -> dict[str, Any]:
    """A round among parties, as a time line; its bundle is checked once labs' and cluster's folders are gone."""
    settings = Settings(samples=SAMPLES, seed=None, devices=REPLAY_DEVICES[:1], sampling=SAMPLING)
    with demo.timed("rounds"):
        world = world_of(demo.out / "parties", [(run, trust)], LabSide)
    between = {"between_processes": _outcome_between_processes(demo, world)} if demo.processes else {}
    with demo.timed("rounds"):
        decided = play_round(world, settings, now=datetime.now(UTC), worker=demo.devices.run)
        timeline, known = world.timeline(), world.trust()
        for party in ("labs", "cluster"):
            shutil.rmtree(world.folder / party)
        shown = check_bundle(decided.bundle.read_bytes(), known)
    return {
        "outcome": decided.verdict.outcome.value,
        "shown": shown.outcome.value,
        "bundle": str(decided.bundle.relative_to(demo.out)),
        "text": shown.reasons[0].text,
        "timeline": [{"kind": kind, "sender": sender, "to": to} for _, _, kind, sender, to in timeline],
        **between,
    }


def _outcome_between_processes(demo: Demo, world: World) -> str:
    """The outcome of the same round, of processes that see their own folders alone."""
    words = ["--samples", str(SAMPLES), "--device", REPLAY_DEVICES[0], "--against", _AGAINST]
    with demo.timed("round between processes"):
        return str(round_between_processes(world, demo.out / "machines", words)["outcome"])


def _dispute(demo: Demo, runs: Path, inspectorate: Path) -> dict[str, Any]:
    task = Task.for_preset(
        "tiny-gpt", seed=demo.seed, steps=DISPUTE_STEPS, checkpoint_every=3, shards=2, batch_size=4, numerics="exact"
    )
    labs = (Lab(name="right-operator"), Lab(name="wrong-operator", lie="wrong-operator"))
    with demo.timed("dispute"):
        disputants, parties = [], []
        for lab in labs:
            run = runs / lab.name
            trust = _train_task(task, run, inspectorate, lab, lie_step=4)
            disputants.append(Disputant(run=open_run(run, trust), prover=LabProver(run)))
            parties.append((run, trust.labs[lab.name], "native" if lab.lie else REPLAY_DEVICES[0]))
        verdict = settle(disputants[0], disputants[1])
    if not demo.processes:
        return verdict.to_json()
    with demo.timed("dispute between processes"):
        found = dispute_between_processes(parties, demo.out / "providers")
    return {**verdict.to_json(), "between_processes": found.to_json()}


def _detection() -> dict[str, object]:
    """The predicted chance of a lie that the draw decides about, and what it rests on.

    Hidden steps are counted by the meter and caught for certain. A model that is put into the chips' memory past every
    operator just after a snapshot, and gone after two ticks, is caught where the next one of a drawn chip falls on it.
    """
    return {
        "chips": CHIPS,
        "drawn": SAMPLES,
        "snapshot_rate_per_tick": str(SNAPSHOT_RATE),
        "held_ticks": HELD_TICKS,
        "false_alarm": 0.0,
        "catch_per_chip": 1 - unseen(HELD_TICKS, SNAPSHOT_RATE),
        "predicted_probability": hidden_training_detection(CHIPS, SAMPLES, SNAPSHOT_RATE, HELD_TICKS),
    }
