"""Runs of an accelerator repeated on CPUs, and the reverse: an emulated one everywhere, CUDA where there is a card."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from inspector.devices import device
from inspector.inspection.guards import Settings
from inspector.inspection.inspection import inspect
from inspector.inspection.transcripts import open_run
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome
from monitor.transcript import RunFolder

CHILD = Path(__file__).parents[1] / "loop_child.py"
ACCELERATORS = ["emulated-accelerator", pytest.param("cuda", marks=pytest.mark.cuda)]


def at_hand(name: str) -> None:
    missing = device(name).missing()
    if missing is not None:
        pytest.skip(missing)


def start(name: str, *words: object) -> subprocess.CompletedProcess[bytes]:
    environment = device(name).process_environment()
    return subprocess.run(
        [sys.executable, *map(str, words)], env=environment, capture_output=True, check=False, timeout=500
    )


def train(name: str, out: Path, *words: object) -> Trust:
    done = start(name, "-m", "analysis.cli", "train", "--device", name, "--out", out, "--json", *words)
    assert done.returncode == 0, done.stderr.decode()
    return Trust.load([out.with_name(f"{out.name}.trust.json")], [out])


def state_of(run: RunFolder) -> str:
    leaves, _ = run.load_steps()
    return str(leaves[-1].state.root)


@pytest.mark.parametrize(("numerics", "preset"), [("exact", "tiny-gpt"), ("rounded", "digits-cnn")])
@pytest.mark.parametrize("name", ACCELERATORS)
def test_cpus_repeat_the_run_of_an_accelerator(name, numerics, preset, tmp_path, devices):
    at_hand(name)
    words = ("--preset", preset, "--numerics", numerics, "--steps", 2, "--seed", 4, "--chips", 3, "--snapshot-rate", 1)
    trust = train(name, tmp_path / "away", *words)
    settings = Settings(samples=3, seed="x", devices=("sse41", "mkl-compatible"))
    verdict = inspect([tmp_path / "away"], trust, settings, now=datetime.now(UTC), worker=devices.run)
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons
    away = open_run(tmp_path / "away", trust)
    assert away.metadata.device["name"] == name
    assert away.metadata.settings["accelerator"] is not None
    if numerics == "exact":
        here = open_run(tmp_path / "here", train("native", tmp_path / "here", *words))
        assert state_of(here) == state_of(away)


@pytest.mark.parametrize("numerics", ["exact", "rounded"])
@pytest.mark.parametrize("name", ACCELERATORS)
def test_an_accelerator_repeats_the_run_of_a_cpu_and_finds_a_changed_sample(name, numerics, make_run, devices):
    at_hand(name)
    settings = Settings(samples=3, seed="x", devices=(name,))
    honest = make_run("honest", numerics=numerics)
    assert inspect([honest.run], honest.trust, settings, now=honest.now, worker=devices.run).outcome is Outcome.ACCEPT
    cheat = make_run("cheat", numerics=numerics, lie="change-sample")
    verdict = inspect([cheat.run], cheat.trust, settings, now=cheat.now, worker=devices.run)
    assert verdict.outcome is Outcome.REJECT
    assert any(reason.where.get("step") == 3 for reason in verdict.reasons)


@pytest.mark.parametrize("name", ACCELERATORS)
def test_dispute_between_a_cpu_and_an_accelerator(name: str, tmp_path: Path) -> None:
    """The provers run their steps again on the accelerator."""
    at_hand(name)
    words = ("--preset", "digits-cnn", "--numerics", "exact", "--steps", 2, "--seed", 4, "--chips", 2)
    for lab, where, lie in (("a", "native", ()), ("b", name, ("--lie", "wrong-operator"))):
        train(where, tmp_path / lab, *words, "--lab", lab, *lie)
    runs = (tmp_path / "a", tmp_path / "b")
    trust = [word for run in runs for word in ("--trust", f"{run}.trust.json")]
    done = start(name, "-m", "analysis.cli", "dispute", *runs, *trust, "--device", name, "--json")
    assert done.returncode == 1, done.stderr.decode()
    found = json.loads(done.stdout)
    assert found["guilty"] == "b"
    assert found["operators_executed"] <= 1


@pytest.mark.parametrize("name", ACCELERATORS)
def test_loops_of_ones_own_on_an_accelerator(name, tmp_path, devices):
    """Attention, dropout, clipping and optimizers take other operators there; the bits, W_0's too, and verdict stay."""
    at_hand(name)
    loops = [("exact", "adamw"), ("rounded", "sgd")]
    states = []
    for where, other in (("native", name), (name, "sse41")):
        runs = [tmp_path / where / numerics for numerics, _ in loops]
        done = start(where, CHILD, *(word for run, loop in zip(runs, loops, strict=True) for word in (run, *loop)))
        assert done.returncode == 0, done.stderr.decode()
        states.append(done.stdout.split())
        for run in runs:
            trust = replace(Trust.load([run.with_name(f"{run.name}.trust.json")], [run]), maximum_flop=10**15)
            settings = Settings(samples=2, seed="x", devices=(other,))
            verdict = inspect([run], trust, settings, now=datetime.now(UTC), worker=devices.run)
            assert verdict.outcome is Outcome.ACCEPT, verdict.reasons
    assert states[0] == states[1]
    assert len(set(states[0])) == len(loops)
