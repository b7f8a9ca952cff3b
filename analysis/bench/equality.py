"""``bench equality``: the same training on devices that compute differently, and whether it ends in the same bits.

``rounded`` is recorded on one device and replayed under its log on the others; ``exact`` and ``native`` run freely on
each. Rows of a file are not run again, so that a table of hours can be made in pieces.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import Any

from firmware_sim.errors import CallerError, DeviceError
from inspector.devices import DEVICES, DevicePool, device
from monitor.numerics import NUMERICS
from monitor.numerics.exact.sweep import machine
from monitor.presets import preset

__all__ = ["COMMITTED", "CUDA", "WORKS", "counts", "load", "run", "summary", "table", "verdict"]

Row = dict[str, Any]

WORKS: dict[str, tuple[int, int | None]] = {
    "tiny-gpt": (20, None),
    "digits-cnn": (20, None),
    "llama-small": (20, None),
    "gpt2-117m": (3, 1),
    "resnet50-cifar": (3, 4),
}
"""Steps, and the batch size where it is not the preset's own: the large ones take small batches."""

CUDA = "cuda"
"""A row for the graphics card of the machine, computed by the process of the device ``native``."""

COMMITTED = Path(str(resources.files("analysis"))) / "data" / "equality.json"
"""The table that comes with the program."""

SEED = 1
_DIGESTS = ("weights", "optimizer", "losses")
_KEY = ("work", "mode", "device", "steps", "batch_size", "seed")
_TIMEOUT = 6 * 3600


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in _KEY)


def hardware() -> dict[str, Any]:
    """What the rows of a file have in common."""
    return {**machine(), "cores": os.cpu_count()}


def load(path: Path) -> dict[str, Any]:
    """The document in a file: ``hardware`` and ``rows``; CallerError where it is not one."""
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CallerError(f"cannot read the table {path}: {error}") from None
    rows = document.get("rows") if isinstance(document, dict) else None
    if not isinstance(rows, list) or "hardware" not in document:
        raise CallerError(f"{path} is not a table of this command")
    if not all(isinstance(row, dict) and {*_KEY, "status"} <= set(row) for row in rows):
        raise CallerError(f"{path} has a row that is not one of this command")
    return {"hardware": document["hardware"], "rows": rows}


def _kept_rows(out: Path | None) -> list[Row]:
    """Finished rows of an earlier call; CallerError where they come from other hardware or versions."""
    if out is None or not out.exists():
        return []
    document = load(out)
    if document["hardware"] != hardware():
        raise CallerError(f"{out} was made on another machine or with other versions; choose another file")
    return [row for row in document["rows"] if row["status"] in ("run", "not run")]


def _save(out: Path, rows: list[Row]) -> None:
    part = out.with_name(out.name + ".part")
    try:
        part.write_text(json.dumps({"hardware": hardware(), "rows": rows}, indent=1) + "\n", encoding="utf-8")
        part.replace(out)
    except OSError as error:
        raise CallerError(f"cannot write {out}: {error.strerror}") from None


def _measured(pool: DevicePool, row: Row, role: str, logs: Path) -> Row:
    """The row with what its device found; a device or a log that fails says so in ``status``."""
    accelerator, name = (CUDA, "native") if row["device"] == CUDA else ("cpu", row["device"])
    job = {
        "action": "trial",
        "preset": row["work"],
        "steps": row["steps"],
        "seed": row["seed"],
        "batch_size": row["batch_size"],
        "numerics": row["mode"],
        "accelerator": accelerator,
        "role": role,
        "logs": str(logs),
    }
    try:
        result = pool.run(name, job)
    except DeviceError as error:
        return {**row, "status": f"broke: {error}"}
    if "not_run" in result:
        return {**row, "status": "not run", "reason": result["not_run"]}
    if "evidence_error" in result:
        return {**row, "status": f"rejected: {result['evidence_error']}"}
    names = (*_DIGESTS, "last_loss", "step_seconds", "seconds", "log_bytes", "entries", "forced")
    return {**row, "status": "run", "role": role, **{name: result[name] for name in names}}


def _wanted(presets: Sequence[str], steps: int | None, devices: Sequence[str], numerics: Sequence[str]) -> list[Row]:
    """All rows of the table in the order in which they run: the first device of ``devices`` records."""
    rows = []
    for work in presets:
        default_steps, batch_size = WORKS.get(work, (3, None))
        for name in devices:
            rows += [
                {
                    "work": work,
                    "mode": mode,
                    "device": name,
                    "kind": CUDA if name == CUDA else device(name).kind,
                    "steps": steps or default_steps,
                    "batch_size": batch_size or preset(work).batch_size,
                    "seed": SEED,
                }
                for mode in numerics
            ]
    return rows


def run(
    *,
    presets: Sequence[str] = tuple(WORKS),
    steps: int | None = None,
    devices: Sequence[str] = (*DEVICES, CUDA),
    numerics: Sequence[str] = NUMERICS,
    out: Path | None = None,
    progress: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Run what ``out`` does not hold yet, and return all rows asked for.

    Args:
        steps: instead of those of WORKS.
        devices: the first records the rounding logs.
        out: file that is written after each row; logs lie beside it, in ``out`` with the suffix ``.logs``.
        progress: called after each row.

    Raises:
        CallerError: an unknown name, or a file that is not one of this machine's.
    """
    for name in numerics:
        if name not in NUMERICS:
            raise CallerError(f"unknown numerics {name!r}; choose {', '.join(NUMERICS)}")
    if steps is not None and steps < 1:
        raise CallerError(f"--steps must be at least 1, not {steps}")
    wanted = _wanted(presets, steps, devices, numerics)
    kept = _kept_rows(out)
    done = {_key(row): row for row in kept}
    with tempfile.TemporaryDirectory() as scratch:
        logs = Path(scratch) if out is None else out.with_suffix(".logs")
        for _, group in groupby(wanted, key=lambda row: (row["work"], row["device"])):
            with DevicePool(timeout=_TIMEOUT) as pool:  # one process for each work, so that its memory is freed
                for row in group:
                    if _key(row) not in done:
                        _fill(row, wanted, done, pool, logs)
                        if out is not None:
                            _save(out, list(done.values()))
                    progress(done[_key(row)])
    return [done[_key(row)] for row in wanted]


def _fill(row: Row, wanted: list[Row], done: dict[tuple[Any, ...], Row], pool: DevicePool, logs: Path) -> None:
    """Run one row, and before it the recording that it needs where no earlier call has left one."""
    folder = logs / "-".join(str(row[name]) for name in ("work", "steps", "batch_size", "seed"))
    first = next(other for other in wanted if all(other[k] == row[k] for k in _KEY if k != "device"))
    if row["mode"] == "rounded" and first is not row and not (folder / f"step-{row['steps']:04d}.log").exists():
        done[_key(first)] = _measured(pool, first, "recording", folder)
    role = "replaying" if row["mode"] == "rounded" and first is not row else "recording"
    done[_key(row)] = _measured(pool, row, role, folder)


def _whole(row: Row) -> tuple[str, ...]:
    return tuple(row[name] for name in _DIGESTS)


def _groups(rows: Iterable[Row]) -> dict[tuple[str, int, int], list[Row]]:
    groups: dict[tuple[str, int, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["work"], row["steps"], row["batch_size"]), []).append(row)
    return groups


def counts(rows: Iterable[Row]) -> dict[tuple[str, str], tuple[int, int]]:
    """(devices that ran, different endings among them) by (work, mode).

    An ending is the digests of weights, optimizer state and losses together.
    """
    endings: dict[tuple[str, str], list[tuple[str, ...]]] = {}
    for row in rows:
        if row["status"] == "run":
            endings.setdefault((row["work"], row["mode"]), []).append(_whole(row))
    return {key: (len(values), len(set(values))) for key, values in endings.items()}


def summary(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """For each work its steps, batch size, number of devices, and different endings by mode."""
    found = []
    for (work, steps, batch_size), group in _groups(rows).items():
        ends = counts(group)
        modes: dict[str, int] = {str(mode): ends.get((work, mode), (0, 0))[1] for mode in NUMERICS}
        devices = {row["device"] for row in group if row["status"] == "run"}
        found.append({"work": work, "steps": steps, "batch_size": batch_size, "devices": len(devices), **modes})
    return found


def verdict(rows: Sequence[Row]) -> str | None:
    """Why the controlled rows do not all end in the same bits, or None where they do.

    Raises:
        DeviceError: a device broke.
    """
    for row in rows:
        if row["status"] not in ("run", "not run"):
            problem = f"{row['work']}, {row['mode']}, {row['device']}: {row['status']}"
            if row["status"].startswith("broke"):
                raise DeviceError(problem)
            return problem
    for (work, mode), (ran, distinct) in counts(rows).items():
        if mode != "native" and distinct != 1:
            return f"{work}, {mode}: {distinct} endings on {ran} devices"
    return None


def table(rows: Sequence[Row]) -> list[str]:
    """Lines for a person: for each work a row a device and a column a mode, with eight digits of the ending."""
    lines: list[str] = []
    for (work, steps, batch_size), group in _groups(rows).items():
        modes = list(dict.fromkeys(row["mode"] for row in group))
        lines += ["", f"{work}, {steps} steps, batches of {batch_size}: weights/optimizer/losses"]
        lines.append(f"  {'device':22}" + "".join(f"{mode:30}" for mode in modes))
        cells = {(row["device"], row["mode"]): _cell(row) for row in group}
        for name in dict.fromkeys(row["device"] for row in group):
            lines.append(f"  {name:22}" + "".join(f"{cells.get((name, mode), ''):30}" for mode in modes))
        found = counts(group)
        ends = (found.get((work, mode), (0, 0)) for mode in modes)
        lines.append(f"  {'different endings':22}" + "".join(f"{f'{distinct} on {ran}':30}" for ran, distinct in ends))
    return lines[1:]


def _cell(row: Row) -> str:
    if row["status"] != "run":
        return str(row["status"])[:28]
    return "/".join(row[name].partition(":")[2][:8] for name in _DIGESTS)
