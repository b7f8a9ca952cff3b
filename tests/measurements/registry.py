"""``registry``: importing a fleet, moving chips, a census and an audit, beside plain SQL on the same machine."""

from __future__ import annotations

import random
import sqlite3
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import SigningKey
from inspector.registry import Registry, Role, audit, draw_census, read_chips, record_census, summarise

__all__ = ["run"]

_SEED = 1
_T = TypeVar("_T")
_BASELINE = (
    "CREATE TABLE owners (chip TEXT PRIMARY KEY, model TEXT, owner TEXT)",
    "INSERT INTO owners VALUES (?, ?, 'maker')",
)


def run(
    *, chips: int = 1_000_000, census: int = 10_000, transfers: int = 200, url: str | None = None
) -> list[dict[str, Any]]:
    """Measure one directory of ``chips`` chips; ``url`` takes another database than a temporary SQLite file.

    Rows hold ``work``, ``mode`` ("plain": an unsigned SQLite table that does the same, without log or proof;
    "registry": this package), ``seconds``, and ``ratio`` to the plain row of the same work (None where there is none).
    Import covers reading the CSV, hashing, signing and the commit; census covers draw, answers and result; transfers
    move one chip each and commit each.
    """
    with tempfile.TemporaryDirectory(prefix="chipwitness-bench-") as name:
        folder = Path(name)
        path = folder / "chips.csv"
        _write_csv(path, chips)
        plain = _plain(folder / "plain.db", path, census, transfers)
        measured = _registry(url or str(folder / "registry.db"), path, census, transfers)
    rows = []
    for work, seconds in measured.items():
        if work in plain:
            rows.append({"work": work, "mode": "plain", "seconds": plain[work], "ratio": 1.0})
        ratio = seconds / plain[work] if plain.get(work) else None
        rows.append({"work": work, "mode": "registry", "seconds": seconds, "ratio": ratio})
    return rows


def _write_csv(path: Path, chips: int) -> None:
    """Chip ids as makers' serials look: in no order."""
    serials = random.Random(_SEED).sample(range(16**10), chips)
    with path.open("w", encoding="ascii") as file:
        file.write("chip,model\n")
        file.writelines(f"{serial:010X},H100\n" for serial in serials)


def _plain(database: Path, path: Path, census: int, transfers: int) -> dict[str, float]:
    laps: dict[str, float] = {}
    table, insertion = _BASELINE
    with closing(sqlite3.connect(database, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(table)

        def load() -> int:
            with path.open(encoding="ascii") as file:
                next(file)
                rows = [line.rstrip("\n").split(",") for line in file]
            connection.execute("BEGIN")
            connection.executemany(insertion, rows)
            connection.execute("COMMIT")
            return len(rows)

        chips = _timed(laps, "import", load)
        some = [row[0] for row in connection.execute("SELECT chip FROM owners LIMIT ?", (transfers,))]

        def move() -> None:
            for chip in some:
                connection.execute("UPDATE owners SET owner = 'lab' WHERE chip = ?", (chip,))

        _timed(laps, "transfers", move)
        query = "SELECT chip, owner FROM owners ORDER BY random() LIMIT ?"
        _timed(laps, "census", lambda: connection.execute(query, (census,)).fetchall())
    return _named(laps, chips, census, transfers)


def _registry(where: str, path: Path, census: int, transfers: int) -> dict[str, float]:
    laps: dict[str, float] = {}
    keys = {name: SigningKey.generate() for name in ("registrar", "maker", "lab", "inspector")}
    with Registry.create(where, name="bench", registrar=keys["registrar"]) as registry:
        for name, role in (("maker", Role.MAKER), ("lab", Role.OWNER), ("inspector", Role.INSPECTOR)):
            registry.enrol(name, role, keys[name].verifying)

        def load() -> list[str]:
            records = read_chips(path)
            registry.import_chips(records, maker="maker", label="bench", key=keys["maker"])
            return [record.chip for record in records[:transfers]]

        some = _timed(laps, "import", load)

        def move() -> None:
            for chip in some:
                registry.transfer([chip], sender="maker", receiver="lab", release=keys["maker"], acceptance=keys["lab"])

        _timed(laps, "transfers", move)

        def ask() -> None:
            drawn = draw_census(registry, count=census, seed=bytes(32), inspector="inspector", key=keys["inspector"])
            # One chip in a hundred is not shown.
            answers = {chip: chip for position, chip in enumerate(drawn.chips) if position % 100}
            record_census(registry, drawn.number, answers, inspector="inspector", key=keys["inspector"])

        _timed(laps, "census", ask)
        chips = summarise(registry).chips
        report = _timed(laps, "audit", lambda: audit(registry, registrar=keys["registrar"].verifying))
        if not report.ok:
            raise EvidenceError(f"the measured registry is not consistent: {report.findings[0]}")
    return _named(laps, chips, census, transfers)


def _timed(laps: dict[str, float], work: str, function: Callable[[], _T]) -> _T:
    start = time.perf_counter()
    result = function()
    laps[work] = time.perf_counter() - start
    return result


def _named(laps: dict[str, float], chips: int, census: int, transfers: int) -> dict[str, float]:
    names = {
        "import": f"import {chips:,} chips",
        "transfers": f"{transfers:,} transfers",
        "census": f"census of {census:,}",
        "audit": f"audit {chips:,} chips",
    }
    return {names[work]: seconds for work, seconds in laps.items()}
