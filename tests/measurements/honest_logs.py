"""``honest-logs``: how often an honest rounding log decides unlike a device that replays it.

One device records a preset's first steps, another replays them under its log. The rows are the counts by which an
inspection judges what a log decided (``inspector.inspection.rounding_logs``). Each pair is judged here as an inspection
would, by the counts of all the others.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from analysis.bench.origin import commit, hardware
from firmware_sim.errors import CallerError
from firmware_sim.evidence import canonical
from inspector.inspection.rounding_logs import Counts, examine
from inspector.replay.decisions import Decisions
from inspector.replay.pool import DevicePool
from monitor.environment import processor

__all__ = ["PAIRS", "WORKS", "run", "table", "verdict"]

PAIRS = (("native", "sse41"), ("emulated-tensor-core", "mkl-compatible"), ("native", "emulated-split-k"))
"""Recording and replaying device."""

WORKS: dict[str, tuple[int, int | None, int]] = {
    "tiny-gpt": (10, None, 20),
    "digits-cnn": (20, None, 20),
    "llama-small": (3, None, 20),
    "resnet50-cifar": (1, 4, 4),
    "gpt2-117m": (1, 1, 4),
}
"""Steps, batch size where it is not the preset's own, and seeds; of the large ones ten pairs each."""
_MOST_LARGE = 10
_BY = ("work", "mode", "recorded_on", "replayed_on", "seed")
_TIMEOUT = 6 * 3600


def _wanted(presets: Sequence[str], numerics: Sequence[str], pairs: int | None) -> list[dict[str, Any]]:
    """Rows to measure, seed by seed, so that both halves of a recording that two devices replay come together."""
    rows = []
    for work in presets:
        steps, batch_size, seeds = WORKS[work]
        mine = [
            {
                "work": work,
                "mode": mode,
                "recorded_on": recorder,
                "replayed_on": replayer,
                "seed": seed,
                "steps": steps,
                "batch_size": batch_size,
            }
            for mode in numerics
            for seed in range(1, seeds + 1)
            for recorder, replayer in sorted(PAIRS, key=lambda pair: pair[0])
        ]
        most = pairs if pairs is not None else _MOST_LARGE if batch_size else len(mine)
        rows += mine[:most]
    return rows


def _trial(pool: DevicePool, row: dict[str, Any], role: str, logs: Path) -> dict[str, Any]:
    job = {"action": "trial", "preset": row["work"], "numerics": row["mode"], "role": role, "logs": str(logs)}
    name = row["recorded_on" if role == "recording" else "replayed_on"]
    found = pool.run(name, {**job, **{key: row[key] for key in ("steps", "seed", "batch_size")}})
    if "evidence_error" in found:
        raise CallerError(f"{name} rejects the honest log of {row['work']}, seed {row['seed']}: {found}")
    return found


def run(
    *,
    presets: Sequence[str] = tuple(WORKS),
    numerics: Sequence[str] = ("rounded",),
    pairs: int | None = None,
    out: Path | None = None,
    progress: Callable[[int], object] = lambda done: None,
) -> list[dict[str, Any]]:
    """Measure what ``out`` does not hold yet, and write it there pair by pair.

    Args:
        pairs: of each preset; by default 60, and 10 of the large ones.

    Returns:
        All rows of ``out``, and what was measured.

    Raises:
        CallerError: an unknown preset, or a file that is not one of this command's.
    """
    for name in presets:
        if name not in WORKS:
            raise CallerError(f"unknown preset {name!r}; choose {', '.join(WORKS)}")
    done = {} if out is None or not out.exists() else {_key(row): row for row in _read(out)}
    recorded = None
    with tempfile.TemporaryDirectory() as scratch, DevicePool(timeout=_TIMEOUT) as pool:
        for number, row in enumerate(_wanted(presets, numerics, pairs)):
            if _key(row) not in done:
                recording = tuple(row[name] for name in ("work", "mode", "recorded_on", "seed"))
                if recorded is None or recorded[0] != recording:
                    recorded = recording, Path(scratch) / str(number)
                    _trial(pool, row, "recording", recorded[1])
                found = _trial(pool, row, "replaying", recorded[1])
                row |= {name: found[name] for name in ("seconds", "entries", "decisions")}
                row |= {"processor": processor(), **commit()}
                done[_key(row)] = row
                if out is not None:
                    _write(list(done.values()), out)
            progress(1)
    return list(done.values())


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in _BY)


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        return list(canonical.loads(path.read_text(encoding="utf-8"))["rows"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CallerError(f"{path} holds no measurements: {error}") from None


def _write(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """A row on each line, with the machine of the latest."""
    lines = ",\n".join(json.dumps(row) for row in rows)
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(f'{{"hardware": {json.dumps(hardware())}, "rows": [\n{lines}\n]}}\n', encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise CallerError(f"cannot write {path}: {error.strerror}") from None


def _judged(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with ``turned``, ``allowed`` and ``doubts``: each as an inspection judges it by all other rows."""
    found = []
    for row in rows:
        counts = Counts.of([other for other in rows if other is not row])
        seen = examine(Decisions.from_json(row["decisions"]), row["mode"], row["replayed_on"], counts)
        found.append({**row, **seen.to_json(), "doubts": list(seen.doubts)})
    return found


def verdict(rows: Sequence[dict[str, Any]]) -> str | None:
    """Which pair is in doubt, or None."""
    for row in _judged(rows):
        if row["doubts"]:
            return (
                f"{row['work']}, seed {row['seed']}, {row['recorded_on']} to {row['replayed_on']}: {row['doubts'][0]}"
            )
    return None


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Lines for a person: pairs of a preset together."""
    lines = [
        "work            numerics               recorded on           replayed on       pairs     free  unlike doubts"
    ]
    every = _judged(rows)
    for key in dict.fromkeys(_key(row)[:4] for row in every):
        mine = [row for row in every if _key(row)[:4] == key]
        free, turned = (sum(row[name] for row in mine) for name in ("free_decisions", "turned_decisions"))
        doubts = sum(bool(row["doubts"]) for row in mine)
        lines.append(f"{key[0]:15} {key[1]:22} {key[2]:21} {key[3]:17} {len(mine):5} {free:8,} {turned:7} {doubts:6}")
    return lines
