"""Two sides for people who decide: question, answer with band, three assumptions, what is not covered."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from analysis.cli import main

PLAN = "plan --flop 1e25 --site all=1e5 --periods 365 --evasion declared --input 'money=USD 2026'"
SCENARIO = """\
title = "two ways"
days = 60
money = "EUR 2026"
[rule]
threshold_flop = 6e22
evidence = "whole-run"
[[regime]]
name = "few"
period_days = 30
samples = 2
snapshot_rate = 0.1
[[regime]]
name = "many"
period_days = 30
samples = "10/20/40"
snapshot_rate = 0.1
inspector_cost = 1000
[detection]
assumed = { undeclared-run = 0.8, swap-weights = 0.3 }
[[kind]]
name = "unit"
flop_per_second = 1e15
[[lab]]
name = "A"
site = [{ name = "s", chips = [{ kind = "unit", count = 200 }] }]
[[run]]
name = "r"
lab = "A"
flop = 1.2e23
days = 60
[[strategy]]
name = "plain"
[[strategy]]
name = "swaps"
policies = [{ policy = "weight-swap" }]
"""


@pytest.fixture
def asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def ask(line: str) -> tuple[dict[str, Any], str, list[list[str]]]:
        path = tmp_path / "two-sides.md"
        assert main([*shlex.split(line), "--brief", str(path), "--json"]) == 0
        text = path.read_text(encoding="utf-8")
        assert [part for part in text.splitlines() if part.startswith("#")][1:] == [
            "## The question", "## The answer", "## What it rests on most", "## What it does not cover",
        ]  # fmt: skip
        rows = [part.strip("| ").split(" | ") for part in text.splitlines() if part.startswith("|")][2:]
        assert 1 <= len(rows) <= 3
        return json.loads(capsys.readouterr().out), text, rows

    return ask


def thousands(text: str) -> float:
    return float(text.split()[0].replace(",", ""))


def test_a_plan_names_what_moves_it_most(asked: Any) -> None:
    data, text, rows = asked(f"{PLAN} --inspector-cost 2e5/3e5/4e5")
    assert [row[0].split(" (")[0] for row in rows] == [each["parameter"] for each in data["sensitivity"][:3]]
    for row, each in zip(rows, data["sensitivity"], strict=False):
        ends = [each["lower"] * data["work"], each["higher"] * data["work"]]
        assert [thousands(part) for part in row[1:]] == pytest.approx(ends, rel=0.01)
    assert f"Inspect {data['samples_per_year']:,} chips a year at 1 site: 1 inspector" in text
    assert f"caught with {data['detection']:.3f}. An honest lab is accused with 0.0000" in text
    assert "a year, USD 2026." in text
    assert "Evasions other than as declared." in text


def test_the_command_of_a_plan_gives_its_figures_again(asked: Any, capsys: pytest.CaptureFixture[str]) -> None:
    data, text, _ = asked(f"{PLAN} --site b=2e4")
    (command,) = [line.split("`")[1] for line in text.splitlines() if line.startswith("Again: ")]
    assert main([*shlex.split(command)[1:], "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert (again["visits"], again["money"]) == (data["visits"], data["money"])


def test_a_plan_of_uncertain_inputs_has_their_band(asked: Any) -> None:
    data, text, rows = asked("plan --flop 1e25/2e25/4e25 --site all=1e5 --periods 365 --evasion declared --draws 20")
    low, high = data["bands"]["work"]["low"], data["bands"]["work"]["high"]
    (line,) = [part for part in text.splitlines() if "over the uncertain inputs" in part]
    shown = [thousands(part) for part in line.split("; ")[1].split(" to ")[:2]]
    assert shown == pytest.approx([low, high], rel=0.01)
    assert rows[0][0] == "flop (5 %, 95 %)"


def test_campaigns_and_regimes_name_their_worst_case(asked: Any, tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text(SCENARIO, encoding="utf-8")
    data, text, rows = asked(f"campaign {path} --regime many --trials 50 --draws 20")
    caught = {row["strategy"]: row["detection"]["value"] for row in data["rows"][1:]}
    assert f"Caught least is 'swaps': {caught['swaps']:.4f}" in text
    assert caught["swaps"] == min(caught.values())
    assert data["scenario"]["money"] == "EUR 2026"
    assert data["scenario"]["inspectors"] == 1
    assert {row[0] for row in rows} >= {"detection of swap-weights (halved, doubled)"}
    (halved,) = [row for row in rows if "swap-weights" in row[0]]
    assert float(halved[1]) < caught["swaps"] < float(halved[2])
    data, text, _ = asked(f"campaign {path} --trials 20")
    for regime in data["regimes"]:
        assert f"{regime['regime']}: at worst {regime['worst']['detection']:.4f}" in text
    assert "caught most by 'many'" in text
    assert [each["inspectors"] for each in data["regimes"]] == [1, 1]
    assert data["regimes"][1]["cost_per_year"] == 1_000


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*shlex.split(PLAN), "--brief", "sides.txt"])
    assert "does not end in .md" in capsys.readouterr().err
    assert main([*shlex.split(PLAN), "--brief", str(tmp_path / "no" / "s.md")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
