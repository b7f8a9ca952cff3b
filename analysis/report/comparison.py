"""The table of what it costs to be convinced of a training, by scheme (``python -m tests.measurements comparison``)."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources

from firmware_sim.evidence import canonical

__all__ = ["Line", "load", "shown"]

_FILE = resources.files("analysis") / "data" / "comparison.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One scheme, as people read it; a cost is a multiple of native training, or what was published."""

    scheme: str
    work: str
    source: str
    prover: str
    verifier: str
    received: str
    trust: str
    covers: str
    misses: str


def load() -> list[Line]:
    """The committed rows; measured ones first."""
    rows = canonical.loads(_FILE.read_text(encoding="utf-8"))["rows"]
    same = ("scheme", "work", "source", "trust", "covers", "misses")
    return [
        Line(
            prover=shown(row["prover"]),
            verifier=shown(row["verifier"]),
            received=shown(row["bytes"]),
            **{name: row[name] for name in same},
        )
        for row in sorted(rows, key=lambda row: row["mode"] != "measured")
    ]


def shown(value: float | str | None) -> str:
    """A figure for people: bytes are whole numbers, ratios are not."""
    if value is None:
        return "not published"
    if isinstance(value, str):
        return value
    return f"{value:,} bytes" if isinstance(value, int) else f"{value:.2g} ×"
