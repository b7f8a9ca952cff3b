"""``adversary``: a simulated lab that lies in thousands of random ways, and an honest one, both inspected.

The machines live beside the tests of a checkout, which are not installed with the program.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from analysis.bench.origin import write_among
from firmware_sim.errors import CallerError

__all__ = ["run", "table", "verdict", "write"]

Row = dict[str, Any]


def run(
    *,
    sequences: int = 2000,
    honest: int = 200,
    seed: int = 0,
    jobs: int = 1,
    guards_off: bool = False,
    progress: Callable[[int], object] = lambda done: None,
) -> list[Row]:
    """Play sequences of a lying and of an honest lab, in process with kept devices; one of 100 on another process.

    Args:
        sequences: of the lying lab; about a quarter is inspected with fewer chips than there are.
        honest: sequences of the honest lab.
        seed: number of the first sequence; a number decides a sequence.
        jobs: processes.
        guards_off: then also switch the guards off one by one and search for the first lie that passes.
        progress: called with the number of sequences that have ended since the last call.

    Returns:
        Rows with ``work``, ``mode``, ``seconds`` (of all processes together), ``ratio`` (None), ``sequences``, lies by
        row, and ``kept``: the violations, each as a scene and a list of actions.

    Raises:
        CallerError: an impossible number, or no checkout.
    """
    if min(sequences, honest, seed) < 0 or jobs < 1 or not (sequences or honest or guards_off):
        raise CallerError("give numbers of sequences of at least 0, not all of them 0, and at least one process")
    rows: list[Row] = importlib.import_module("tests.adversary.mass").run(
        sequences=sequences, honest=honest, seed=seed, jobs=jobs, guards_off=guards_off, progress=progress
    )
    return rows


def write(rows: Sequence[Row], path: Path) -> None:
    """Put the rows in a file; those of other seeds that are in it stay, each with the commit that it was made at."""
    write_among(rows, path, by=("work", "mode", "seed"))


def verdict(rows: Sequence[Row]) -> str | None:
    """What broke a law, or None."""
    problems = []
    for row in rows:
        if row.get("violations"):
            problems.append(f"{row['violations']} sequences of the {row['work']} ({row['mode']})")
        if row.get("accepted_too_often"):
            problems.append(f"accepted more often than stated: {', '.join(row['accepted_too_often'])}")
        if row["work"] == "guard off" and row["found_after"] is None:
            problems.append(f"nothing shows that the guard {row['mode']!r} is off")
    return "; ".join(problems) or None


def table(rows: Sequence[Row]) -> list[str]:
    """Lines for a person."""
    lines = []
    for row in rows:
        if row["work"] == "guard off":
            after = row["found_after"]
            found = "nothing found" if after is None else f"a lie passes after {after} sequences"
            lines.append(f"without {row['mode']:20} {', '.join(row['rows']):12} {found}")
            continue
        outcomes = ", ".join(f"{count} {name}" for name, count in sorted(row["outcomes"].items()))
        lines.append(f"{row['work']}, {row['mode']}: {row['sequences']} sequences, {outcomes}")
        for name, counts in sorted(row.get("lies", {}).items()):
            lines.append(f"  {name:20} {_told(counts)}")
        for name, counts in sorted(row.get("deferred", {}).items()):
            lines.append(f"  {name:20} {_told(counts)} (deferred)")
        lines += [f"  violation: {each['problem']}: {each['actions']} in {each['scene']}" for each in row["kept"]]
    return lines


def _told(counts: Mapping[str, Any]) -> str:
    if "told" in counts:
        return f"told in {counts['told']:6} worlds, accepted in {counts['accepted']}"
    return f"told in {counts['worlds']:6} worlds, accepted in {counts['accepted']} where {counts['escapes']:.1f} may be"
