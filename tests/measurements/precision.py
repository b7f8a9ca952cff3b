"""``precision``: mixed precision over several seeds, native and under control, on real data.

Each loop trains a small network natively, and recorded in controlled numerics. The mean final loss over the seeds is to
differ from native's by less than native's standard deviation over the seeds. The first seed's run is inspected on two
devices, and recorded once more by a process that dies on the way: another one goes on with it, and has to end in the
same state.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import multiprocessing
import signal
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from analysis.bench.origin import write_among
from firmware_sim.errors import CallerError, DeviceError
from inspector.inspection.guards import Settings
from inspector.inspection.inspection import inspect
from inspector.inspection.transcripts import open_run
from inspector.inspection.trust import Trust
from inspector.replay.pool import DevicePool
from tests.measurements import _precision_loops
from tests.measurements._precision_loops import LOOPS, Recording

__all__ = ["NUMERICS", "run", "table", "verdict", "write"]

Row = dict[str, Any]

NUMERICS = ("exact", "rounded")
_LAST = 10
_DEVICES = ("sse41", "mkl-compatible")


def _train(work: str, recording: Recording, seed: int, steps: int) -> float:
    """The mean loss of the last steps."""
    torch.manual_seed(seed)
    with contextlib.redirect_stderr(io.StringIO()):  # progress of a library
        losses = LOOPS[work].train(recording, seed, steps)
    return statistics.fmean(losses[-_LAST:])


def _trust(out: Path) -> Trust:
    return Trust.load([out.with_name(f"{out.name}.trust.json")], [out])


def _states(out: Path) -> list[str]:
    """Digest of the state after each step."""
    return [str(leaf.state.root) for leaf in open_run(out, _trust(out)).load_steps()[0]]


def _resumes(work: str, recording: Recording, steps: int) -> bool:
    """Whether a run whose process was killed in its middle is brought to the states of one that was not."""
    assert recording.out is not None
    killed = recording.out.with_name("killed")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_precision_loops.__name__, *LOOPS[work].packages])
    arguments = (work, recording.numerics, killed, 0, steps, steps // 2)
    child = context.Process(target=_precision_loops.main, args=arguments)
    child.start()
    child.join()
    if child.exitcode != -signal.SIGKILL:
        raise DeviceError(f"{work} in {recording.numerics} did not die as it should, but ended with {child.exitcode}")
    _train(work, replace(recording, out=killed, resume=True), 0, steps)
    return _states(killed) == _states(recording.out)


def _measured(work: str, numerics: str, seeds: int, steps: int, pool: DevicePool) -> Row:
    found: list[float] = []
    row: Row = {}
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as place:
            recording = Recording(Path(place) / "run", numerics)
            found.append(_train(work, recording, seed, steps))
            if not seed:
                assert recording.out is not None
                settings = Settings(samples=1, seed="precision", devices=_DEVICES)
                judged = inspect(
                    [recording.out], _trust(recording.out), settings, now=datetime.now(UTC), worker=pool.run
                )
                row = {"outcome": judged.outcome.value, "resumed": _resumes(work, recording, steps)}
                row |= {} if row["outcome"] == "ACCEPT" else {"said": [reason.text for reason in judged.reasons]}
    return {**row, "loss": statistics.fmean(found)}


def run(
    *,
    seeds: int = 5,
    steps: int = 60,
    works: Sequence[str] | None = None,
    progress: Callable[[int], object] = print,
) -> list[Row]:
    """Train each loop with each seed, natively and in both numerics.

    Args:
        seeds: how many; at least 2.
        steps: of each training, at least 10, of some loops fewer (``Loop.most``); the mean loss of the last 10 counts.
        works: names of the loops; all by default.
        progress: called with 1 after each loop in each numerics.

    Raises:
        CallerError: too few seeds or steps, or a package that a loop needs is missing.
        DeviceError: a process did not die as it was to.
    """
    if seeds < 2 or steps < _LAST:
        raise CallerError(f"a comparison takes at least 2 seeds and {_LAST} steps")
    chosen = tuple(LOOPS if works is None else works)
    if unknown := sorted(set(chosen) - LOOPS.keys()):
        raise CallerError(f"no loop is called {unknown[0]!a}; these are: {', '.join(LOOPS)}")
    if missing := sorted(
        {name for work in chosen for name in LOOPS[work].packages if not importlib.util.find_spec(name)}
    ):
        raise CallerError(f"install {' and '.join(missing)}, or name loops without by --work")
    rows = []
    logging.disable(logging.WARNING)
    with DevicePool() as pool, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for work in chosen:
            many = min(steps, LOOPS[work].most)
            native = [_train(work, Recording(), seed, many) for seed in range(seeds)]
            versions = {name: version(name) for name in LOOPS[work].packages}
            for numerics in NUMERICS:
                row: Row = {"work": work, "mode": numerics, "seeds": seeds, "steps": many}
                row |= _measured(work, numerics, seeds, many, pool)
                row |= {"native_loss": statistics.fmean(native), "native_deviation": statistics.stdev(native)}
                rows.append(row | ({"versions": versions} if versions else {}))
                progress(1)
    logging.disable(logging.NOTSET)
    return rows


def table(rows: Sequence[Row]) -> Iterator[str]:
    """One line a loop and numerics."""
    for row in rows:
        yield (
            f"{row['work']:48} {row['mode']:8} {row['outcome']:12} {'resumed' if row['resumed'] else 'LOST':8} loss "
            f"{row['loss']:.4f} native {row['native_loss']:.4f} ± {row['native_deviation']:.4f}"
        )


def verdict(rows: Sequence[Row]) -> str | None:
    """What is not as it should be; None if nothing."""
    for row in rows:
        if row["outcome"] != "ACCEPT":
            return f"{row['work']} in {row['mode']} ends {row['outcome']}"
        if row.get("resumed") is False:
            return f"{row['work']} in {row['mode']} ends in another state after it died and went on"
        if abs(row["loss"] - row["native_loss"]) >= row["native_deviation"]:
            return f"{row['work']} in {row['mode']} ends with another loss than native training"
    return None


def write(rows: Sequence[Row], path: Path) -> None:
    """Put the rows in a file, among those of other loops; CallerError if that fails."""
    write_among(rows, path, by=("work", "mode"))
