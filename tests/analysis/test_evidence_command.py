"""``evidence``: what it prints agrees with what it computes, and its mistakes are one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from analysis.cli import main
from analysis.scenarios import scenario_text


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["evidence", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_alarms_are_weighed_together(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("weigh", "--strategy", "on smuggled chips", "--alarm", "tips", "--silent", "all", "--trials", "4000")
    found = answer(capsys, *words)
    assert found["false_alarm"] <= found["cap"]
    for each in found["simulated"].values():
        assert each["low"] <= each["exact"] <= each["high"]
    caught = [each["detection"] for each in found["evasions"]]
    assert caught == sorted(caught, reverse=True)
    seen = found["observed"]
    odds = seen["posterior"] / (1 - seen["posterior"]) / (0.1 / 0.9)
    assert seen["ratio"] == pytest.approx(odds)
    assert len(seen["silent"]) == 7
    origins = {each["name"]: each["origin"] for each in found["sources"]}
    assert "2606.19262" in origins["telemetry of work"]
    assert origins["satellites"] == "assumed"
    # A tip is worth its own ratio, and what the silence of all others takes away from it.
    (tip,) = [each for each in found["sources"] if each["name"] == "tips"]
    assert 1 < seen["ratio"] < tip["alarm_ratio"]


def test_a_scenario_says_what_evidence_adds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["campaign", "evidence", "--trials", "500", "--draws", "20", "--json"]) == 0
    rows = {row["strategy"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["honest"]["evidence"] is None
    evading = rows["on smuggled chips, evading"]
    assert 0 < evading["evidence"]["accused"] < rows["on smuggled chips"]["evidence"]["accused"]
    assert evading["evidence"]["evades"] == ["all"]
    assert evading["predicted"] >= evading["evidence"]["accused"]
    assert evading["band"]["low"] < evading["band"]["high"]


def test_sites_by_size_power_and_age(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    figure = tmp_path / "f.svg"
    found = answer(capsys, "site", "--chips", "100,1e4,1.4e5", "--out", str(figure))
    chances = [row["any"] for row in found["rows"]]
    assert chances == sorted(chances)
    assert "probability that they are found" in figure.read_text()
    older = answer(capsys, "site", "--chips", "1e4", "--age", "365")["rows"][0]["any"]
    hidden = answer(capsys, "site", "--chips", "1e4", "--evade")["rows"][0]["any"]
    assert hidden < chances[1] < older


def test_a_split_job_is_linked_or_not(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "split", "--samples", "30", "--trials", "5000")
    assert (found["nodes"], found["chips"], found["alone"]) == (50, 800, 0.0)
    assert found["simulated"]["low"] <= found["linked"] <= found["simulated"]["high"]
    assert answer(capsys, "split", "--recognised", "0", "--trials", "10")["linked"] == 0


def test_ways_past_all_meters_and_what_else_sees_them(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "unmetered", "--flop", "1e21", "--chips", "1000")
    assert found["needed"] == 1
    rows = {row["way"]: row for row in found["rows"]}
    assert len(rows) == 6
    assert all(row["chips"] == 0 and row["possible"] for row in rows.values())
    assert all(0 < row["any"] < 0.1 for row in rows.values())
    much = answer(capsys, "unmetered", "--flop", "1e24", "--chips", "1000")["rows"]
    assert [row["possible"] for row in much] == [False, *[True] * 5]
    assert all(more["any"] > rows[more["way"]]["any"] for more in much)
    assert (much[1]["time"], much[4]["energy"], much[4]["census"]) == (1, 0, 0)
    assert main(["evidence", "unmetered"]) == 0
    assert "cannot be done" in capsys.readouterr().out
    assert main(["evidence", "unmetered", "--fleet", "10", "--flop", "1e25"]) == 2
    assert "which is more than --fleet 10" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("weigh paper-table-1", "the scenario has no [[evidence]] here"),
        ("weigh --strategy x", "no strategy 'x'; known: on declared chips,"),
        ("weigh --alarm x", "no evidence is named 'x'"),
        ("weigh --alarm tips --silent tips", "'tips' cannot both have given an alarm and have given none"),
        ("weigh --prior 2 --alarm tips", "prior must be between 0 and 1"),
        ("weigh --trials 0", "trials must be at least 1"),
        ("site --sites 0", "--sites must be between 1 and"),
        ("site --chips -5", "chips must be at least 0"),
        ("site --chips 5 --out x.svg", "from a number above 0 to a larger one"),
        ("split --node-chips 0", "chips of a node must be at least 1"),
        ("split --chips 100", "more chips than --chips 100"),
        ("split --efficiency 0", "efficiency must be above 0"),
    ],
)
def test_mistakes_are_one_line(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evidence", *line.split()]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_what_nobody_gives_is_silent_either_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A source that never speaks, alarmed: 0/0 is neither a number nor an accusation."""
    text = scenario_text("evidence")
    visits = "found_per_year = 0.1\nexponent = 0\nfalse_alarm = 0\n"
    assert visits in text
    path = tmp_path / "s.toml"
    path.write_text(text.replace(visits, "found_per_year = 0\nexponent = 0\nfalse_alarm = 0\n"))
    words = ("weigh", str(path), "--alarm", "spot visits", "--alarm", "tips", "--silent", "all", "--trials", "100")
    seen = answer(capsys, *words)["observed"]
    assert (seen["ratio"], seen["posterior"], seen["ratio_evaded"], seen["accused"]) == (None, None, None, None)
    assert main(["evidence", *words]) == 0
    out = capsys.readouterr().out
    assert "The odds of a violation change by silent either way (by silent either way" in out
    assert "the rule" not in out.split("Alarm: ")[1].split("\n")[0]
    (visited,) = [line for line in out.splitlines() if line.startswith("spot visits ")]
    assert "silent either way" in visited
    assert "unbounded" not in visited


def test_a_site_names_where_its_rates_are_from(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "site")
    assert (found["false_alarm"], set(found["origins"].values())) == (0, {"assumed"})
    assert main(["evidence", "site"]) == 0
    out = capsys.readouterr().out
    assert "by construction no find is a false alarm" in out
    assert "tips: assumed" in out
