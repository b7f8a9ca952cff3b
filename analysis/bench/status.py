"""How old the committed measurements are: their commit, their formats, and what of the product changed since.

A file is older than the code where the product changed after its commit. Whether that change touches what was measured
is for a reader to judge: the rows name the folders that changed most.
"""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from analysis.bench.origin import DATA, FORMATS, Row, write
from firmware_sim import limits
from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import canonical
from monitor import processes

__all__ = ["run", "table", "write"]

_ROOT = DATA.parents[1]
_PRODUCT = ("firmware_sim", "monitor", "inspector", "analysis")
_FOLDERS = [DATA, _ROOT / "inspector" / "inspection" / "data"]
_SHOWN = 3


def run() -> list[Row]:
    """Return a row for each file of measurements, oldest code first.

    A row has ``file``; ``commits`` that measured it (empty: none is noted); ``formats``: current, older or unnoted;
    ``processor``; and, in a checkout that has all of these commits, ``changed``: by folder, lines of Python that the
    product gained or lost since the oldest of them, else None.

    Raises:
        CallerError: a file cannot be read.
    """
    rows = [_row(path) for folder in _FOLDERS for path in sorted(folder.glob("*.json"))]
    return sorted(rows, key=lambda row: -1 if row["changed"] is None else -sum(row["changed"].values()))


def table(rows: list[Row]) -> list[str]:
    """Return the rows as lines for people."""
    lines = [f"{'file':28} {'commit':10} {'formats':8} changed since (lines of Python, most changed folders)"]
    for row in rows:
        commits = row["commits"]
        commit = "unnoted" if not commits else commits[0] if len(commits) == 1 else f"{len(commits)} of them"
        lines.append(f"{row['file']:28} {commit:10} {row['formats']:8} {_changes(row['changed'])}")
    return lines


def _changes(changed: dict[str, int] | None) -> str:
    if changed is None:
        return "unknown here"
    if not changed:
        return "nothing"
    most = sorted(changed, key=lambda folder: -changed[folder])[:_SHOWN]
    return f"{sum(changed.values()):,}: " + ", ".join(f"{folder} {changed[folder]:,}" for folder in most)


def _row(path: Path) -> Row:
    try:
        document = canonical.loads(limits.read_file(path, limits.JSON_BYTES).decode())
    except (OSError, EvidenceError, ValueError) as error:
        raise CallerError(f"{path} holds no measurements that can be read: {error}") from None
    found = document if isinstance(document, dict) else {}
    rows = [row for row in found.get("rows", ()) if isinstance(row, dict)]
    noted = {part["commit"].removesuffix("+") for part in (found, *rows) if isinstance(part.get("commit"), str)}
    formats = found.get("formats")
    hardware = found.get("hardware")
    return {
        "file": path.name,
        "commits": sorted(noted),
        "formats": "unnoted" if formats is None else "current" if _are_current(formats) else "older",
        "processor": hardware.get("processor") if isinstance(hardware, dict) else None,
        "changed": _changed_since(noted),
    }


def _are_current(noted: Sequence[str]) -> bool:
    """Whether each noted format has today's version; of a format that is not noted, nothing was measured."""
    return set(noted) <= set(FORMATS)


def _changed_since(commits: set[str]) -> dict[str, int] | None:
    """Return, by folder, lines of the product that changed since the oldest commit; None where that is unknown."""
    if not commits:
        return None
    counted = [_changed_by(commit) for commit in commits]
    known = [lines for lines in counted if lines is not None]
    return max(known, key=lambda lines: sum(lines.values())) if len(known) == len(counted) else None


@cache
def _changed_by(commit: str) -> dict[str, int] | None:
    words = ["git", "--no-optional-locks", "-C", str(_ROOT), "diff", "--numstat", "-M", f"{commit}..HEAD", "--"]
    try:
        done = processes.run([*words, *(f"{folder}/*.py" for folder in _PRODUCT)])
        done.check_returncode()
    except (OSError, subprocess.CalledProcessError):
        return None
    lines: Counter[str] = Counter()
    for each in done.stdout.splitlines():
        added, removed, name = each.split("\t")
        lines["/".join(name.replace("{", "").split("/")[:2]).removesuffix(".py")] += int(added) + int(removed)
    return dict(lines)
