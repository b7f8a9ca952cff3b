"""``bench quality``: whether training under controlled numerics learns as well as native FP32 does.

Same initial weights and data for all; the statistic of a run is the mean loss of its last 50 steps, its gap the
distance from native on the reference device, averaged over seeds. The criterion: a mode's gap is at most max(1e-4,
3 × the gap of native on another kernel family). A control goes with it: native FP32 with the operands of every
matrix product and convolution rounded to 11 significant bits.

What the criterion can show is limited, and the control shows how far. Training is chaotic: after the first few dozen
steps two runs that differed in a last bit may be as far apart as two that differed in the twelfth, and then a gap is
the spread of equally good endings, not an error. Where that has happened (``digits-cnn``) a mode passes unless it
learns markedly worse; where it has not (``tiny-gpt``) the floor of 1e-4 is wide next to the gap between families. So
there is a second, sharper criterion: ``early_gap``, the mean distance over the first 20 steps, where the error of a
step is still visible, is at most max(1e-6, 3 × that of the other kernel family). (1e-6 is two units in the last place
of a loss of 4; families of one library share most of their errors, so they may lie closer together than to the truth.)
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from analysis.bench.origin import Row, hardware
from firmware_sim.errors import CallerError, file_error
from firmware_sim.evidence import canonical
from firmware_sim.evidence.canonical import JsonObject
from inspector.devices import device
from inspector.inspection.drift import executable_run
from inspector.inspection.trust import Trust
from inspector.replay.curve import CONTROL
from inspector.replay.pool import DevicePool
from monitor.presets import preset

__all__ = ["COLUMNS", "EARLY", "FLOOR", "LAST", "PRESETS", "REFERENCE", "judge", "load", "run", "table", "verdict"]


PRESETS = ("tiny-gpt", "digits-cnn")
REFERENCE = ("native", "native-1")
FAMILY = ("native", "sse41")
COLUMNS = (REFERENCE, FAMILY, ("native", "avx2"), ("exact", "native-1"), ("rounded", "native-1"), (CONTROL, "native-1"))
"""Mode and device of each run. The third family shows what an innocent difference scores."""

JUDGED = ("exact", "rounded")
STEPS = 300
SEEDS = 5
LAST = 50
EARLY = 20
FLOOR = 1e-4
EARLY_FLOOR = 1e-6
FACTOR = 3.0
_KEY = ("work", "mode", "device", "steps", "seed")


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in _KEY)


def load(path: Path) -> JsonObject:
    """The document in a file, ``hardware`` and ``rows`` with losses; CallerError where it is not one."""
    try:
        document: dict[str, object] = canonical.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CallerError(f"cannot read the table {path}: {error}") from None
    rows = document.get("rows") if isinstance(document, dict) else None
    if not isinstance(rows, list) or "hardware" not in document:
        raise CallerError(f"{path} was not written by this command")
    for row in rows:
        if not isinstance(row, dict) or set(row) != {*_KEY, "losses", "seconds"} or len(row["losses"]) != row["steps"]:
            raise CallerError(f"{path} has a row that this command does not write")
    return document


def _kept_rows(out: Path | None) -> list[Row]:
    if out is None or not out.exists():
        return []
    document = load(out)
    if document["hardware"] != hardware():
        raise CallerError(f"{out} was made on another machine or with other versions; choose another file")
    rows: list[Row] = document["rows"]
    return rows


def _save(out: Path, rows: Iterable[Row]) -> None:
    """One line for each run."""
    part = out.with_name(out.name + ".part")
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    try:
        part.write_text(f'{{"hardware":{json.dumps(hardware())},\n"rows":[\n{lines}\n]}}\n', encoding="utf-8")
        part.replace(out)
    except OSError as error:
        raise file_error(f"cannot write {out}", error) from None


def run(
    *,
    presets: Sequence[str] = PRESETS,
    steps: int = STEPS,
    seeds: int = SEEDS,
    out: Path | None = None,
    recorded: tuple[Path, Trust] | None = None,
    progress: Callable[[int], object] = lambda done: None,
) -> list[Row]:
    """Train what ``out`` does not hold yet, each run in the process of its device; return what all runs come to.

    Args:
        recorded: a run folder, whose steps and their losses are compared instead of presets; with one seed, its own.
        seeds: number of seeds, counted from 0; a seed decides initial weights and data order.
        out: file that is written after each run.
        progress: called with 1 after each run.

    Raises:
        CallerError: an unknown preset, too few steps or seeds, or a file that is not one of this machine's.
        DeviceError: a device broke.
    """
    for name in presets:
        preset(name)
    if recorded is not None and out is not None:
        raise CallerError("--out keeps runs of presets only; leave it out with --run")
    if steps < 2 or seeds < 1:
        raise CallerError(f"--steps must be at least 2 and --seeds at least 1, not {steps} and {seeds}")
    wanted = [
        {"work": work, "mode": mode, "device": name, "steps": steps, "seed": seed}
        for work in presets
        for seed in range(seeds)
        for mode, name in COLUMNS
    ]
    named: dict[str, str] = {}
    if recorded is not None:
        opened, named = executable_run(*recorded)
        if not opened.leaf(1).loss:
            raise CallerError(f"{opened.folder.name} commits to no losses, so there is nothing to compare")
        head = {"work": opened.folder.name, "steps": opened.committed, "seed": opened.declared.seed}
        wanted = [{**head, "mode": mode, "device": name} for mode, name in COLUMNS]
    done = {_key(row): row for row in _kept_rows(out)}
    with DevicePool() as pool:
        for row in wanted:
            if _key(row) not in done:
                done[_key(row)] = _trained(pool, row, named)
                if out is not None:
                    _save(out, done.values())
            progress(1)
    return judge([done[_key(row)] for row in wanted])


def _trained(pool: DevicePool, row: Row, named: Mapping[str, str]) -> Row:
    """Train one run, and add its losses."""
    job = {"action": "curve", "mode": row["mode"], **named}
    if not named:
        job |= {"preset": row["work"], "steps": row["steps"], "seed": row["seed"]}
    found = pool.run(device(str(row["device"])).name, job)
    losses = [float(f"{loss:.9g}") for loss in found["losses"]]  # 9 digits hold an FP32 value
    return {**row, "losses": losses, "seconds": round(found["seconds"], 2)}


def _tail(losses: Sequence[float]) -> float:
    return statistics.fmean(losses[-LAST:])


def _gaps(runs: dict[int, list[float]], reference: dict[int, list[float]]) -> Row:
    """Distances of one column from the reference, averaged over seeds."""
    signed = [_tail(runs[seed]) - _tail(reference[seed]) for seed in reference]
    early = [
        statistics.fmean(abs(a - b) for a, b in zip(runs[seed][:EARLY], reference[seed][:EARLY], strict=True))
        for seed in reference
    ]
    return {
        "seeds": len(reference),
        "loss": statistics.fmean(_tail(losses) for losses in runs.values()),
        "gap": statistics.fmean(abs(each) for each in signed),
        "bias": statistics.fmean(signed),
        "bias_error": statistics.stdev(signed) / len(signed) ** 0.5 if len(signed) > 1 else None,
        "early_gap": statistics.fmean(early),
    }


def judge(rows: Sequence[Row]) -> list[Row]:
    """One row for each preset and column.

    Keys: work, mode, device, steps, seeds; ``loss`` (mean of the last 50, over seeds); ``gap``; ``bias``, the signed
    gap, with its standard error over seeds; ``threshold``, ``passes``; ``early_gap``, ``early_ratio`` and
    ``passes_early``.

    Raises:
        CallerError: a run is missing.
    """
    grouped: dict[tuple[str, int], dict[tuple[str, str], dict[int, list[float]]]] = {}
    for row in rows:
        columns = grouped.setdefault((row["work"], row["steps"]), {})
        columns.setdefault((row["mode"], row["device"]), {})[row["seed"]] = row["losses"]
    judged = []
    for (work, steps), columns in grouped.items():
        if set(columns) != set(COLUMNS) or any(set(runs) != set(columns[REFERENCE]) for runs in columns.values()):
            raise CallerError(f"{work} lacks runs: every seed needs {len(COLUMNS)}")
        found = {column: _gaps(columns[column], columns[REFERENCE]) for column in COLUMNS}
        threshold = max(FLOOR, FACTOR * found[FAMILY]["gap"])
        unit = found[FAMILY]["early_gap"]
        for (mode, name), gaps in found.items():
            ratio = gaps["early_gap"] / unit if unit else None
            head = {"work": work, "mode": mode, "device": name, "steps": steps}
            late = {"threshold": threshold, "passes": gaps["gap"] <= threshold}
            early = {"early_ratio": ratio, "passes_early": gaps["early_gap"] <= max(EARLY_FLOOR, FACTOR * unit)}
            judged.append({**head, **gaps, **late, **early})
    return judged


def verdict(judged: Sequence[Row]) -> str | None:
    """Which controlled mode trains worse than the criterion allows, or None."""
    for row in judged:
        if row["mode"] in JUDGED and not row["passes"]:
            return f"{row['work']}, {row['mode']}: gap {row['gap']:.2e} is above the threshold {row['threshold']:.2e}"
        if row["mode"] in JUDGED and not row["passes_early"]:
            return f"{row['work']}, {row['mode']}: early gap {row['early_gap']:.2e} is above its threshold"
    return None


def table(judged: Sequence[Row]) -> list[str]:
    """Lines for a person."""
    lines: list[str] = []
    for work in dict.fromkeys(row["work"] for row in judged):
        group = [row for row in judged if row["work"] == work]
        steps, seeds, threshold = (group[0][name] for name in ("steps", "seeds", "threshold"))
        lines += [
            "",
            f"{work}, {steps} steps, {seeds} seeds: mean of the last {LAST} losses; threshold {threshold:.2e}",
        ]
        lines.append(
            f"  {'mode':24}{'device':10}{'loss':>12}{'gap':>11}{'passes':>8}{'early gap':>11}{'ratio':>9}{'passes':>8}"
        )
        for row in group:
            ratio = "" if row["early_ratio"] is None else f"{row['early_ratio']:.2f}"
            lines.append(
                f"  {row['mode']:24}{row['device']:10}{row['loss']:12.7f}{row['gap']:11.2e}"
                f"{'yes' if row['passes'] else 'no':>8}{row['early_gap']:11.2e}{ratio:>9}"
                f"{'yes' if row['passes_early'] else 'no':>8}"
            )
    return lines[1:]
