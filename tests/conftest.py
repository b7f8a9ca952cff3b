"""Small recorded runs, made by real training in this process."""

from __future__ import annotations

import gc
import os
import shutil
import sys

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is imported: test processes share the cores
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from tests.selection import pytest_addoption, pytest_collection_modifyitems, pytest_configure

__all__ = ["pytest_addoption", "pytest_collection_modifyitems", "pytest_configure"]

# An example takes as long as its machine is busy; examples are the same in each run.
settings.register_profile("repeatable", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")

if TYPE_CHECKING:
    from inspector.inspection.trust import Trust
    from inspector.replay.pool import DevicePool
    from tests.forks import Forks

STARTED = datetime(2026, 1, 1, tzinfo=UTC)
NOW = STARTED + timedelta(minutes=30)
LATE = STARTED + timedelta(hours=2)


@dataclass(frozen=True, slots=True)
class Recorded:
    """A run folder and what the inspector knows about the world that it was made in."""

    run: Path
    trust: Trust
    now: datetime = NOW
    late: datetime = LATE


def record_run(
    run: Path,
    *,
    lab: str = "lab",
    lie: str | None = None,
    lie_step: int = 3,
    steps: int = 6,
    chips: int = 3,
    seed: int = 5,
    rate: Fraction = Fraction(1, 2),
    preset: str = "digits-cnn",
    checkpoint_every: int = 3,
    device: str = "native",
    after: Path | None = None,
    parent: Path | None = None,
    idle_chips: int = 0,
    beacon_every: int = 0,
    shares: tuple[int, ...] | None = None,
    **changes: Any,
) -> Recorded:
    """Train a small run; the declared end is an hour after ``STARTED``."""
    from inspector.inspection.trust import Trust
    from monitor.lab.simulated_lab import LabConfig
    from monitor.presets.task import Task
    from monitor.recording.options import RunConfig
    from monitor.recording.recipes import train

    task = Task.for_preset(preset, seed=seed, steps=steps, checkpoint_every=checkpoint_every, shards=chips, **changes)
    told: dict[str, Any] = {"lie": lie, "lie_step": lie_step, "started": STARTED, "duration": timedelta(hours=1)}
    chosen: dict[str, Any] = {"seed": seed, "chips": chips, "idle_chips": idle_chips, "beacon_every": beacon_every}
    config = (
        LabConfig(lab=lab, snapshot_rate=rate, **chosen, **told)
        if after is None
        else LabConfig.following(after, **told)
    )
    train(task, run, config, device=device, run=RunConfig(shares=shares), parent=parent)
    files = [each.with_name(f"{each.name}.trust.json") for each in (after, parent, run) if each is not None]
    return Recorded(run, Trust.load(files, [run]))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[None]:
    """The garbage collector lets what tests and modules consist of alone: it stays, and is hundreds of thousands of
    objects, as are the operators of a step that is recorded. Looking through them again and again took a fifth of the
    processor time of some folders.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(5000, *gc.get_threshold()[1:])
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Neighbours stay in one process, whose module fixtures they share; who is done early takes from who is not."""
    if config.getvalue("dist") != "load":
        return None
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


@pytest.fixture(scope="session", autouse=True)
def forks() -> Iterator[Forks]:
    """Replay devices and ranks are forked from a process that has imported what they need: a start takes seconds."""
    from monitor import processes
    from tests.forks import Forks

    kept = Forks()
    before, processes.start = processes.start, kept.start
    yield kept
    processes.start = before
    kept.close()


@pytest.fixture
def started_processes(monkeypatch: pytest.MonkeyPatch, forks: Forks) -> None:
    """Each process is started as the product does it."""
    monkeypatch.setattr("monitor.processes.start", forks.started)


@pytest.fixture(scope="session")
def record() -> Callable[..., Recorded]:
    """The function that records a run at a path."""
    return record_run


@pytest.fixture(scope="session")
def kept_runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Recorded]:
    """The function that records a run at a path, or copies one that was recorded with the same options before.

    Recording it again would give the same bytes, and takes forty times as long.
    """
    from tests import guards

    kept = dict[str, Recorded]()

    def record(run: Path, **options: Any) -> Recorded:
        if guards.are_off() or any(isinstance(each, Path) for each in options.values()):
            return record_run(run, **options)
        key = repr((run.name, sorted(options.items())))
        if key not in kept:
            kept[key] = record_run(tmp_path_factory.mktemp("kept") / run.name, **options)
        found = kept[key]
        run.parent.mkdir(parents=True, exist_ok=True)
        for each in found.run.parent.iterdir():  # the run, its lab, its trust file, answers of idle chips
            target = run.with_name(each.name)
            shutil.copytree(each, target, symlinks=True) if each.is_dir() else shutil.copyfile(each, target)
        return replace(found, run=run)

    return record


@pytest.fixture
def make_run(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., Recorded]:
    """Return a function that records a run of that name in this test's folder.

    A test that replaces anything of the product, itself or by a fixture of its own, records each of its runs.
    """
    found = request.node._fixtureinfo
    users = [each[-1].argnames for name, each in found.name2fixturedefs.items() if name not in _REPLACE_NO_RECORDER]
    is_patched = hasattr(request.module, "mock") or any("monkeypatch" in names for names in (found.argnames, *users))
    record = record_run if is_patched else request.getfixturevalue("kept_runs")
    return lambda name="run", **options: record(tmp_path / name, **options)


_REPLACE_NO_RECORDER = ("kept_devices", "started_processes")


@pytest.fixture(scope="session")
def devices() -> Iterator[DevicePool]:
    """Replay devices whose processes live as long as this test process."""
    from inspector.replay.pool import DevicePool

    with DevicePool() as pool:
        yield pool


@pytest.fixture
def kept_devices(monkeypatch: pytest.MonkeyPatch, devices: DevicePool) -> None:
    """Commands that a test calls in this process replay on those devices too, instead of starting some of their own."""
    monkeypatch.setattr("inspector.replay.pool.DevicePool.__enter__", lambda _: devices)


@pytest.fixture(scope="session")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """An honest run that no test may change."""
    return record_run(tmp_path_factory.mktemp("honest") / "run")


def loop_recorder(folder: Path) -> Callable[..., Recorded]:
    """Return a function that records a loop of the test's own in this folder.

    ``body(model, optimizer, batch)`` is the body of a step; ``prepare(recorder)`` may make the lab cheat, and
    ``before(recorder, step)`` runs between steps.
    """

    def record(
        model: Any,
        optimizer: Any,
        batches: Any,
        body: Callable[..., object],
        *,
        name: str = "loop",
        prepare: Callable[..., object] | None = None,
        before: Callable[..., object] | None = None,
        **options: Any,
    ) -> Recorded:
        from inspector.inspection.trust import Trust
        from monitor import Recorder

        defaults = {"seed": 5, "chips": 3, "checkpoint_every": 3, "snapshot_rate": Fraction(1, 2), "lab": "lab"}
        run = folder / name
        recorder = Recorder(model, optimizer, out=run, started=STARTED, hours=1.0, **{**defaults, **options})
        if prepare is not None:
            prepare(recorder)
        for step, batch in enumerate(batches, start=1):
            if before is not None:
                before(recorder, step)
            with recorder.step(batch):
                body(model, optimizer, batch)
        recorder.finish()
        return Recorded(run, Trust.load([folder / f"{name}.trust.json"], [run]))

    return record


@pytest.fixture
def record_loop(tmp_path: Path) -> Callable[..., Recorded]:
    """Return a function that records a loop in this test's folder."""
    return loop_recorder(tmp_path)


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads that take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)
