"""``engines`` at a small size: closed form and both engines agree, and a wrong closed form is noticed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.measurements import engines
from tests.measurements.__main__ import main as measure


def test_closed_form_and_engines_agree_on_random_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "e.json"
    words = ["--settings", "6", "--trials", "4000", "--agents", "400", "--seed", "5", "--out", str(out)]
    assert measure(["engines", *words, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["setting"], row["engine"]) for row in rows] == [(n, e) for n in range(6) for e in ("counts", "agents")]
    assert any(row["evidence"] for row in rows)
    assert any(0 < row["false_alarm"]["closed_form"] < 0.5 for row in rows)
    assert json.loads(out.read_text())["rows"] == rows


def test_a_wrong_closed_form_is_noticed() -> None:
    rows = engines.run(settings=1, trials=4000, agents=200, seed=5)
    assert engines.verdict(rows) is None
    found = rows[0]["excess"]
    found["closed_form"] = found["high"] + 0.01
    assert engines.verdict(rows) == "the closed form lies outside of what was simulated: setting 0 (counts)"
    assert "!" in engines.table(rows)[1]


def test_the_committed_rows_agree_and_are_many() -> None:
    data = json.loads(Path("analysis/data/engines.json").read_text())
    assert len({row["setting"] for row in data["rows"]}) >= 30
    assert engines.verdict(data["rows"]) is None
    assert data["hardware"]["processor"]
