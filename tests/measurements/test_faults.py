from __future__ import annotations

import json
from pathlib import Path

import pytest

from firmware_sim.errors import CallerError
from tests.guards import off
from tests.measurements import faults
from tests.measurements.__main__ import main as measure


def test_chip_survives_faults_of_each_kind(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A seeded few; `python -m tests.measurements faults` fails every write."""
    out = tmp_path / "faults.json"
    assert measure(["faults", "--faults", "70", "--seed", "3", "--json", "--out", str(out)]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert json.loads(out.read_text())["rows"] == rows
    assert sum(row["faults"] for row in rows) == 70
    assert {row["work"] for row in rows} == set(faults.KINDS)
    assert {"manufacture", "install", "work"} <= {row["mode"] for row in rows}
    assert not any(row["lost"] or row["problems"] for row in rows)


def test_each_write_of_manufacture_and_first_boot(tmp_path: Path) -> None:
    for fatal in range(1, 13):
        for kind in ("raise", "lost", "kill"):
            assert faults._survive(tmp_path / f"{fatal} {kind}", fatal, kind, 1) is None


@pytest.mark.parametrize("kind", ["lost", "short", "flip"])
def test_guard_off_silent_faults(kind: str, tmp_path: Path) -> None:
    """Without reading back, what a disk says that it has written is gone."""
    with off("read back"):
        problems = [faults._survive(tmp_path / str(fatal), fatal, kind, 0) for fatal in range(13, 40)]
    assert sum(problem is not None for problem in problems) > 9
    rows = [{"faults": 27, "lost": 10}]
    assert faults.verdict(rows) == "10 of 27 lives did not end as they must"


def test_no_fault_is_no_measurement() -> None:
    with pytest.raises(CallerError, match="at least one write"):
        faults.run(faults=0)
