"""``loops``: training loops of many kinds, recorded and inspected on devices that differ, or refused.

A loop that is not recorded is taken once more as a dry run, which says all that was refused and what to write instead.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from analysis.bench.origin import write
from firmware_sim.errors import CallerError
from inspector.inspection.guards import Settings
from inspector.inspection.inspection import inspect
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome, Verdict
from inspector.replay.pool import DevicePool
from monitor import Recorder
from monitor.recording.rehearsal import rehearsals
from tests.measurements._image_cases import image_cases
from tests.measurements._library_cases import library_cases
from tests.measurements._loop_cases import Case, Loop, plain_cases

__all__ = ["DEVICES", "LIBRARIES", "absent", "all_cases", "run", "table", "verdict", "write"]

Row = dict[str, Any]

DEVICES = ("sse41", "mkl-compatible")
"""Replay devices whose native arithmetic differs."""

LIBRARIES: Mapping[str, Callable[[], Iterator[Case]]] = {"transformers": library_cases, "timm": image_cases}
"""Cases that need more than PyTorch, by package."""

_UNUSABLE = (ImportError, RuntimeError)
_LAB = "lab"
_STARTED = datetime(2026, 1, 1, tzinfo=UTC)
_STEPS = 3


def all_cases() -> Iterator[Case]:
    """Every case whose package can be imported."""
    yield from plain_cases()
    for cases in LIBRARIES.values():
        with contextlib.suppress(*_UNUSABLE):
            yield from cases()


def absent() -> dict[str, str]:
    """The packages whose cases are left out, and why."""
    found = {}
    for name, cases in LIBRARIES.items():
        try:
            next(cases())
        except _UNUSABLE as error:
            found[name] = str(error).splitlines()[0]
    return found


def run(
    *,
    cases: Sequence[str] | None = None,
    seeds: int = 1,
    sizes: Sequence[int] | None = None,
    progress: Callable[[int], object] = lambda done: None,
) -> list[Row]:
    """Record three steps of each loop, and inspect it with all chips drawn on both devices.

    Args:
        cases: names; all by default.
        seeds: how many, from 0 on.
        sizes: numbers of samples in a batch; each case's own by default.
        progress: called with 1 after each row.

    Returns:
        Rows with ``work`` (the case), ``mode`` (numerics), ``seconds``, ``ratio`` (None), ``package``, ``version``,
        ``seed``, ``batch_size``, ``recorded``, ``equal`` (replayed to the same bits on both devices; None where nothing
        was recorded), ``outcome`` and ``reasons`` (of the inspection), ``refusals`` (a list of cause and remedy) and
        ``devices``.

    Raises:
        CallerError: no such case, fewer than one seed, or an empty batch.
    """
    known = {case.name: case for case in all_cases()}
    for name in cases or ():
        if name not in known:
            raise CallerError(f"there is no case {name!r}; one of them is {next(iter(known))!r}")
    if seeds < 1 or any(size < 1 for size in sizes or ()):
        raise CallerError("give at least one seed, and batches of at least one sample")
    rows = []
    with DevicePool() as devices:
        for name in cases or known:
            for size in sizes or (known[name].samples,):
                for seed in range(seeds):
                    rows.append(_row(known[name], seed, size, devices))
                    progress(1)
    return rows


def _row(case: Case, seed: int, size: int, devices: DevicePool) -> Row:
    started = time.perf_counter()
    row: Row = {
        "work": case.name,
        "mode": "exact",
        "seconds": 0.0,
        "ratio": None,
        "package": case.package,
        "version": importlib.metadata.version(case.package),
        "seed": seed,
        "batch_size": size,
        "recorded": False,
        "equal": None,
        "outcome": None,
        "reasons": [],
        "refusals": [],
        "devices": list(DEVICES),
    }
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = Path(folder) / "run"
        try:
            _record(case, seed, size, out)
            row["recorded"] = True
            found = _inspect(out, seed, devices)
            row["outcome"] = found.outcome.value
            row["reasons"] = [reason.text for reason in found.reasons]
            row["equal"] = _is_equal(found)
        except CallerError as error:
            row["refusals"] = _refusals(case, seed, size, out) or [{"cause": str(error), "remedy": ""}]
        except Exception as error:  # a loop that ends with any other error is a row, not the end of the table
            row["outcome"], row["reasons"] = type(error).__name__, [str(error)[:500]]
    row["seconds"] = time.perf_counter() - started
    return row


def _record(case: Case, seed: int, size: int, out: Path) -> None:
    torch.manual_seed(seed)
    loop = case.make()
    recorder = Recorder(
        loop.model,
        loop.optimizer,
        out=out,
        seed=seed,
        chips=2,
        lab=_LAB,
        snapshot_rate=Fraction(1),
        started=_STARTED,
        hours=1.0,
        **loop.options,
    )
    _take_steps(loop, recorder, seed, size)
    recorder.finish()


def _take_steps(loop: Loop, recorder: Recorder, seed: int, size: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for number in range(1, _STEPS + 1):
        batch = loop.batch(size, generator)
        with recorder.step(batch) as step:
            loss = loop.body(batch)
            if loss is not None:
                step.commit(loss=loss)
        loop.between(number)


def _inspect(out: Path, seed: int, devices: DevicePool) -> Verdict:
    trust = Trust.load([out.with_name(f"{out.name}.trust.json")], [out])
    settings = Settings(samples=len(trust.chips_of(_LAB)), seed=str(seed), devices=DEVICES)
    return inspect([out], trust, settings, now=_STARTED + timedelta(minutes=30), worker=devices.run)


def _is_equal(found: Verdict) -> bool:
    """Whether each device took all the steps, and nothing spoke against what they led to."""
    replays = found.evidence.get("replays", [])
    taken = [each["steps"] for each in replays]
    return found.outcome is not Outcome.REJECT and len(taken) >= len(DEVICES) and min(taken) > 0


def _refusals(case: Case, seed: int, size: int, out: Path) -> list[dict[str, str]]:
    """What a dry run says of a loop that was refused."""
    with rehearsals() as found:
        torch.manual_seed(seed)
        loop = case.make()
        with contextlib.suppress(Exception):  # one that no dry run can go on after; the others are known
            _take_steps(loop, Recorder(loop.model, loop.optimizer, out=out, **loop.options), seed, size)
    seen = {(each.cause, each.remedy): None for made in found.made for each in made.refusals}
    return [{"cause": cause, "remedy": remedy} for cause, remedy in seen]


def verdict(rows: Sequence[Row]) -> str | None:
    """Which loops were recorded and not found equal, or refused without a remedy; None if there is none."""
    unequal = [row["work"] for row in rows if row["recorded"] and not row["equal"]]
    refused = [row for row in rows if not row["recorded"]]
    silent = [row["work"] for row in refused if not row["refusals"] or not all(r["remedy"] for r in row["refusals"])]
    if unequal:
        where = " and ".join(DEVICES)
        return f"{len(unequal)} recorded loops were not found equal on {where}; the first is {unequal[0]!r}"
    return f"{len(silent)} loops are refused without a remedy; the first is {silent[0]!r}" if silent else None


def table(rows: Sequence[Row]) -> list[str]:
    """Lines for a person."""
    lines = [f"{'case':42} {'package':13} {'seed':>4} {'batch':>5}  outcome"]
    for row in rows:
        outcome = (
            f"recorded, {'equal' if row['equal'] else 'NOT EQUAL'}, {row['outcome']}" if row["recorded"] else "refused"
        )
        lines.append(f"{row['work']:42} {row['package']:13} {row['seed']:4} {row['batch_size']:5}  {outcome}")
        if row["reasons"] and not row["equal"]:
            lines += [f"    {text}" for text in row["reasons"]]
        for refusal in row["refusals"]:
            lines += [f"    {refusal['cause']}", f"    instead: {refusal['remedy']}"]
    if {case.name for case in all_cases()} <= {row["work"] for row in rows}:
        lines += [f"left out: the cases of {name} ({why})" for name, why in absent().items()]
    good = sum(bool(row["equal"]) for row in rows)
    lines.append(f"{good} of {len(rows)} recorded and equal on {' and '.join(DEVICES)}; a device takes {_STEPS} steps")
    return lines
