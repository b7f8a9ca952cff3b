"""Small recorded runs, made by real training in this process."""

from __future__ import annotations

import gc
import hashlib
import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is imported: test processes share the cores
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

# An example takes as long as its machine is busy; examples are the same in each run.
settings.register_profile("repeatable", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")

if TYPE_CHECKING:
    from inspector.inspection.trust import Trust
    from inspector.replay.pool import DevicePool

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
    told = {"lie": lie, "lie_step": lie_step, "started": STARTED, "duration": timedelta(hours=1)}
    chosen = {"seed": seed, "chips": chips, "idle_chips": idle_chips, "beacon_every": beacon_every}
    config = (
        LabConfig(lab=lab, snapshot_rate=rate, **chosen, **told)
        if after is None
        else LabConfig.following(after, **told)
    )
    train(task, run, config, device=device, run=RunConfig(shares=shares), parent=parent)
    files = [each.with_name(f"{each.name}.trust.json") for each in (after, parent, run) if each is not None]
    return Recorded(run, Trust.load(files, [run]))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="run all members of tests that are marked as sampled")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a sampled test keep one member for each value of the named parameters, drawn by a hash of the names.

    Members that were asked for one by one are run.
    """
    if config.getoption("whole") or any("[" in str(each) for each in config.args):
        return
    members: dict[object, list[pytest.Item]] = {}
    for item in items:
        for mark in item.iter_markers("sampled"):
            values = tuple(str(item.callspec.params[name]) for name in mark.args)
            members.setdefault((item.nodeid.partition("[")[0], values), []).append(item)
    left = [item for each in members.values() for item in each if item is not min(each, key=_lot)]
    items[:] = [item for item in items if item not in left]
    config.hook.pytest_deselected(items=left)


def _lot(item: pytest.Item) -> bytes:
    return hashlib.sha256(item.nodeid.encode()).digest()


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


@pytest.fixture(scope="session")
def record() -> Callable[..., Recorded]:
    """The function that records a run at a path."""
    return record_run


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Recorded]:
    """Return a function that records a run of that name in this test's folder."""
    return lambda name="run", **options: record_run(tmp_path / name, **options)


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
