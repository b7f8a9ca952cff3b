"""``chipwitness campaign`` and the fleet benchmark, from the outside."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from analysis.bench import fleet as bench
from analysis.cli import main
from analysis.scenarios import open_regimes, ready_scenarios, scenario_text

SCENARIO = """\
title = "small"
days = 60
[rule]
threshold_flop = 6e22
evidence = "whole-run"
[inspection]
period_days = 30
samples = 10
snapshot_rate = 0.1
[detection]
assumed = { undeclared-run = 1.0 }
[[kind]]
name = "unit"
flop_per_second = 1.1574074074074073e15
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
name = "quit"
policies = [{ policy = "quit-when-drawn" }]
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SCENARIO, encoding="utf-8")
    return path


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main([str(word) for word in words])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def document(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    code, out, err = run(capsys, *words, "--json")
    assert (code, err) == (0, "")
    data = json.loads(out)
    assert isinstance(data, dict)
    return data


@pytest.mark.parametrize("engine", ["agents", "counts"])
def test_json_holds_every_documented_key(engine: str, small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = document(capsys, "campaign", small, "--trials", 300, "--seed", 3, "--engine", engine)
    assert set(data) == {"scenario", "engine", "trials", "seed", "confidence", "rows", "uncertain", "draws", "prior"}
    assert (data["engine"], data["trials"], data["seed"]) == (engine, 300, 3)
    assert data["scenario"] == {
        "title": "small", "threshold_flop": 6e22, "period_days": 30, "snapshot_rate": 0.1, "days": 60, "periods": 2,
        "registered_chips": 200, "samples_per_period": 10, "samples_per_year": 122,
        "inspectors": 1, "cost_per_year": 0, "money": None, "wanted": 0.9, "refusals_allowed": 0, "false_alarm": 0,
        "false_alarms": 0.01, "stocks_as_of": [],
    }  # fmt: skip
    honest, plain, adaptive = data["rows"]
    assert [row["strategy"] for row in data["rows"]] == ["honest", "plain", "quit"]
    assert set(plain) == {
        "strategy", "detection", "miss", "false_alarm", "excess", "predicted", "predicted_excess", "predicted_log_miss",
        "prediction", "completed", "days_to_detection", "involved_chips", "hidden_chips", "samples_needed",
        "refusals_needed", "needed_reason", "inspectors_needed", "measured_lies", "assumed_lies", "lawful_runs",
        "band", "posterior", "hidden", "evidence", "median_interval", "in_time",
    }  # fmt: skip
    assert honest["detection"]["value"] == honest["predicted"] == 0
    assert plain["detection"]["low"] < plain["detection"]["value"] < plain["detection"]["high"]
    assert plain["involved_chips"] == 20
    assert plain["prediction"] == "exact, without replacement"
    low, high = plain["median_interval"]
    assert low <= plain["days_to_detection"][1] <= high
    # The run lasts as long as the inspections do; a run that reacts has no end that is known, and the honest have none.
    assert plain["in_time"] == pytest.approx(plain["detection"]["value"])
    assert (honest["in_time"], honest["median_interval"], adaptive["in_time"]) == (None, None, None)
    assert adaptive["predicted"] is None
    assert adaptive["prediction"].startswith("none: ")


def test_honest_figure_and_excess_stand_beside_every_probability(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small.write_text(SCENARIO.replace("samples = 10", "samples = 10\nhonest_refusal_rate = 0.02"), encoding="utf-8")
    data = document(capsys, "campaign", small, "--trials", 300)
    alarm = 1 - 0.98**20
    assert data["scenario"]["false_alarm"] == pytest.approx(alarm)
    for row in data["rows"]:
        assert row["false_alarm"] == pytest.approx(alarm)
        for key in ("value", "low", "high"):
            assert row["excess"][key] == pytest.approx(row["detection"][key] - alarm)
    honest, plain, adaptive = data["rows"]
    assert honest["detection"]["low"] <= alarm <= honest["detection"]["high"]
    assert honest["predicted_excess"] == 0
    assert plain["predicted_excess"] == pytest.approx(plain["predicted"] - alarm)
    assert adaptive["predicted_excess"] is None
    assert plain["samples_needed"] is None
    assert "above the cap of 0.01" in plain["needed_reason"]
    assert adaptive["needed_reason"] == "no closed form: the lab reacts to inspections"
    code, out, _ = run(capsys, "campaign", small, "--trials", 300)
    assert code == 0
    assert "0.3324 (0 chips that could not be shown are tolerated in a draw), above the cap of 0.01" in out
    assert re.search(
        r"no samples for 0.9 against 'plain': the \d+ samples a period that reach 0.9 accuse an honest", out
    )


@pytest.mark.parametrize("name", sorted(ready_scenarios()))
def test_ready_scenarios_keep_their_cap(name: str) -> None:
    for made in open_regimes(name):
        assert made.false_alarm() <= made.false_alarms == 0.01
        assert made.source or not made.regime


@pytest.mark.parametrize("name", sorted(ready_scenarios().keys() - {"draft-agreement", "regimes"}))
def test_theory_lies_inside_the_intervals_of_ready_scenarios(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """At the default seed and trials, which decide: 40 intervals of 95 % miss two on average."""
    for row in document(capsys, "campaign", name)["rows"]:
        if row["predicted"] is not None:
            assert row["detection"]["low"] <= row["predicted"] <= row["detection"]["high"], row["strategy"]


def test_theory_outside_an_interval_is_said(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "campaign", small, "--trials", 300, "--confidence", 0.001)
    assert "theory lies outside the interval of 'plain': 1 of 2, where intervals of 0.1 % let 2 do so by chance" in out
    _, out, _ = run(capsys, "campaign", small, "--trials", 300)
    assert "lies outside" not in out


def test_a_run_at_the_threshold_is_no_violation_and_said_so(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small.write_text(SCENARIO.replace("flop = 1.2e23", "flop = 6e22"), encoding="utf-8")
    row = document(capsys, "campaign", small, "--trials", 50)["rows"][1]
    assert (row["predicted"], row["lawful_runs"]) == (0, ["r"])
    _, out, _ = run(capsys, "campaign", small, "--trials", 50)
    assert "no violation in 'plain': run 'r' spends no more than the 6e+22 FLOP that are allowed" in out
    small.write_text(SCENARIO.replace("flop = 1.2e23", "flop = 6.01e22"), encoding="utf-8")
    assert document(capsys, "campaign", small, "--trials", 50)["rows"][1]["lawful_runs"] == []


def test_uncertain_numbers_of_a_scenario_give_bands(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = SCENARIO.replace("undeclared-run = 1.0", 'undeclared-run = "0.5/0.7/0.9"')
    small.write_text(text.replace("flop = 1.2e23", 'flop = "triangular(7e+22,1.2e+23,8e+23)"'), encoding="utf-8")
    data = document(capsys, "campaign", small, "--trials", 50, "--draws", 60)
    assert data["uncertain"] == {
        "run[1].flop": "triangular(7e+22,1.2e+23,8e+23)",
        "detection.assumed.undeclared-run": "0.5/0.7/0.9",
    }
    honest, plain, adaptive = data["rows"]
    assert (honest["band"], data["draws"]) == (None, 60)
    assert plain["band"]["low"] < plain["band"]["median"] < plain["band"]["high"]
    assert plain["band"]["possible"] == 1
    assert adaptive["band"] == {"low": None, "median": None, "high": None, "possible": 0}
    assert plain["predicted"] == pytest.approx(
        document(capsys, "campaign", small, "--trials", 9)["rows"][1]["predicted"]
    )
    _, out, _ = run(capsys, "campaign", small, "--trials", 50, "--draws", 60)
    assert "theory over 60 draws of run[1].flop triangular(7e+22,1.2e+23,8e+23), detection" in out
    small.write_text(SCENARIO.replace("flop = 1.2e23", 'flop = "1.2e+23/9e+22/8e+23"'), encoding="utf-8")
    code, _, err = run(capsys, "campaign", small)
    assert code == 2
    assert (
        "small.toml, line 21: run[1].flop: must be a number: 1.2e+23/9e+22/8e+23: the numbers must be in ascending "
        "order"
    ) in err


def test_a_band_keeps_the_samples_that_the_medians_need(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An inspectorate does not know what will be drawn, so detection falls below what it is sized for."""
    text = SCENARIO.replace("samples = 10", "confidence = 0.9").replace("flop = 1.2e23", 'flop = "7e22/1.2e23/3e23"')
    small.write_text(text, encoding="utf-8")
    row = document(capsys, "campaign", small, "--trials", 9, "--draws", 60)["rows"][1]
    assert row["predicted"] >= 0.9
    assert row["band"]["low"] < 0.8 < 0.99 < row["band"]["high"]


def test_same_seed_same_answer(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, again, other = (document(capsys, "campaign", small, "--trials", 200, "--seed", s)["rows"] for s in (1, 1, 2))
    assert first == again
    assert first != other


def test_text_names_strategies_and_assumptions(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "campaign", small, "--trials", 200)
    assert code == 0
    assert "200 registered chips, 10 inspected in each of 2 periods" in out
    assert "\nplain " in out
    assert "measured: none; assumed: undeclared-run" in out


@pytest.mark.parametrize(("kind", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_figure_holds_command_and_seed(
    kind: str, start: bytes, small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figure = tmp_path / f"figure.{kind}"
    code, _, _ = run(capsys, "campaign", small, "--trials", 200, "--seed", 17, "--false-alarms", 0.02, "--out", figure)
    assert code == 0
    data = figure.read_bytes()
    assert data.startswith(start)
    if kind != "pdf":
        assert b"--seed 17" in data
        assert b"--false-alarms 0.02" in data


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    data = document(capsys, "campaign", "--list")
    names = " ".join(entry["name"] for entry in data["scenarios"])
    assert names == "draft-agreement evasions evidence paper-table-1 real-stocks real-stocks-1e25 regimes"
    assert len(data["scenarios"][-1]["regimes"]) == 6
    code, out, _ = run(capsys, "campaign", "--list")
    assert code == 0
    assert "real-stocks" in out


def test_a_ready_scenario_runs_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    data = document(capsys, "campaign", "paper-table-1", "--trials", 50)
    assert data["scenario"]["registered_chips"] == 1000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name a scenario, or use --list"),
        (["--list", "x.toml"], "--list takes no scenario"),
        (["none.toml"], "no scenario file 'none.toml'"),
        (["SMALL", "--trials", "0"], "trials must be at least 1, got 0"),
        (["SMALL", "--trials", "-5"], "trials must be at least 1"),
        (["SMALL", "--seed", "-1"], "seed must be at least 0"),
        (["SMALL", "--false-alarms", "2"], "false alarms must be between 0 and 1, got 2.0"),
        (["SMALL", "--confidence", "1"], "confidence must lie strictly between 0 and 1"),
        (["SMALL", "--confidence", "nan"], "confidence must be a finite number"),
        (["SMALL", "--trials", "10", "--out", "figure.gif"], "must be .png, .svg or .pdf"),
    ],
)
def test_mistakes_of_the_caller(
    words: list[str], message: str, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "campaign", *(str(small) if word == "SMALL" else word for word in words))
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("chipwitness campaign: ")
    assert err.count("\n") == 1


def test_a_mistake_in_the_file_names_its_line(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small.write_text(SCENARIO.replace("samples = 10", "samples = 500"), encoding="utf-8")
    code, _, err = run(capsys, "campaign", small)
    assert code == 2
    assert "small.toml, line 8: inspection.samples: 500 cannot be drawn from the 200 chips" in err


def test_a_missing_rate_names_the_lie(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small.write_text(SCENARIO.replace("undeclared-run = 1.0", "swap-weights = 1.0"), encoding="utf-8")
    code, _, err = run(capsys, "campaign", small)
    assert code == 2
    assert "no measured or assumed detection rate for the lie 'undeclared-run'" in err


def test_the_figure_is_checked_before_the_work(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "campaign", small, "--trials", 10**12, "--out", "figure.gif")
    assert code == 2
    assert "must be .png, .svg or .pdf" in err


def test_benchmark_rows_at_a_small_size() -> None:
    rows: list[dict[str, Any]] = bench.run(chips=20_000, trials=20, sizes=(1_000, 2_000), draws=(100, 200))
    for row in rows:
        assert {"work", "mode", "seconds", "ratio"} <= set(row)
        assert row["seconds"] > 0
    modes = [(row["work"], row["mode"]) for row in rows]
    assert modes == [
        ("a year, 20 trials", "counts"),
        ("a year, 1 trial", "agents"),
        ("chips", "counts"), ("chips", "counts"),
        ("samples", "counts"), ("samples", "counts"),
        *[("trials", "counts")] * 4,
        ("a miss probability of 1e-9", "splitting"),
    ]  # fmt: skip
    rare = rows[-1]
    assert abs(rare["relative_error"]) < 0.1


TWO = """\
[[regime]]
name = "few"
source = "a paper, 2023"
period_days = 30
samples = 10
snapshot_rate = 0.1
inspector_cost = 1000
fixed_cost = 5
[[regime]]
name = "all"
period_days = 30
samples = "all"
snapshot_rate = 0.1
assumed = { undeclared-run = 0.5 }
"""


@pytest.fixture
def two(small: Path) -> Path:
    head, _, rest = SCENARIO.partition("[inspection]")
    small.write_text(head + TWO + rest[rest.index("[detection]") :], encoding="utf-8")
    return small


def test_regimes_stand_side_by_side(two: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = document(capsys, "campaign", two, "--trials", 400, "--seed", 2, "--out", tmp_path / "a.svg")
    assert set(data) == {"scenario", "trials", "seed", "confidence", "hidden", "uncertain", "regimes"}
    few, every = data["regimes"]
    assert (few["samples_per_period"], every["samples_per_period"]) == (10, 200)
    assert few["cost_per_year"] == pytest.approx(1000 * few["inspectors"] + 5)
    plain, quits = few["cells"]
    single = document(capsys, "campaign", two, "--regime", "few", "--trials", 400, "--seed", 2)["rows"]
    assert plain["detection"] == single[1]["predicted"]
    assert (plain["exact"], quits["exact"]) == (True, False)
    assert quits["low"] < quits["detection"] < quits["high"]
    # A census of 200 chips misses a run on 20 of them only where every look fails.
    assert every["cells"][0]["detection"] == pytest.approx(1, abs=1e-5)
    assert few["worst"] == min(few["cells"], key=lambda cell: cell["detection"])
    assert (tmp_path / "a.svg").stat().st_size > 1000
    code, out, _ = run(capsys, "campaign", two, "--trials", 400)
    assert code == 0
    lines = out.splitlines()
    assert [line for line in lines if line.startswith("worst case")]
    assert lines.index(next(line for line in lines if line.startswith("worst"))) > lines.index(
        next(line for line in lines if line.startswith("quit"))
    )
    assert "few: a paper" in out


@pytest.mark.parametrize(
    ("old", "new", "words", "message"),
    [
        ('name = "all"', 'name = "few"', [], "two regimes are named 'few'"),
        ("[[regime]]", "[inspection]\nsamples = 1\n[[regime]]", [], "give [inspection] or [[regime]], not both"),
        ("fixed_cost = 5", "fixed_cost = -5", [], "fixed_cost: must be between 0 and"),
        ('samples = "all"', 'samples = "most"', [], "samples: must be a number: 'most' must be NUMBER"),
        ("samples = 10", "samples = 10\nassumed = { nothing = 0.5 }", [], "nothing"),
        ("x", "x", ["--regime", "none"], "has no regime 'none'; known: few, all"),
    ],
)
def test_mistakes_in_regimes(
    old: str, new: str, words: list[str], message: str, two: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two.write_text(two.read_text(encoding="utf-8").replace(old, new, 1), encoding="utf-8")
    code, out, err = run(capsys, "campaign", two, "--trials", 9, *words)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_show_prints_a_template_that_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ready_scenarios():
        code, out, _ = run(capsys, "campaign", "--show", name)
        assert code == 0
        copy = tmp_path / f"{name}.toml"
        copy.write_text(out, encoding="utf-8")
        assert open_regimes(str(copy)) == open_regimes(name)
    code, _, err = run(capsys, "campaign", "--show", "none")
    assert code == 2
    assert "there is no ready scenario 'none'; ready ones are draft-agreement, evasions" in err


def test_the_shipped_regimes_differ_where_they_should(capsys: pytest.CaptureFixture[str]) -> None:
    data = document(capsys, "campaign", "regimes", "--trials", 50)
    caught = {
        each["regime"]: {cell["strategy"]: cell["detection"] for cell in each["cells"]} for each in data["regimes"]
    }
    assert len(caught) == 6
    assert caught["sampling after Shavit"]["as planned"] >= 0.9
    control = caught["export control alone"]
    assert (
        max(chance for name, chance in control.items() if name != "smuggled chips") < 0.005 < control["smuggled chips"]
    )
    assert (
        caught["treaty with compute cap"]["chips claimed lost"]
        > 0.99
        > caught["sampling after Shavit"]["chips claimed lost"]
    )
    assert (
        caught["registry, searches, books"]["smuggled chips"] > caught["tamper-proof enclaves"]["smuggled chips"] == 0
    )
    assert caught["tamper-proof enclaves"]["weight swap"] >= caught["sampling after Shavit"]["weight swap"]


def test_an_agreement_has_several_thresholds_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ban, monitoring = document(capsys, "campaign", "draft-agreement", "--trials", 20)["regimes"]
    assert (ban["threshold_flop"], monitoring["threshold_flop"]) == (1e24, 1e22)
    for one, other in zip(ban["cells"], monitoring["cells"], strict=True):
        assert one["detection"] <= other["detection"]
    rooms = ban["cells"][-1]
    assert (rooms["strategy"], rooms["evidence"]) == ("rooms below 16 chips", False)
    _, out, _ = run(capsys, "campaign", "draft-agreement", "--trials", 20)
    assert "runs above 1e+24 (ban above 1e24), 1e+22 (monitoring from 1e22) FLOP" in out
    path = tmp_path / "s.toml"
    path.write_text(scenario_text("draft-agreement").replace("exempt_chips = 16", "exempt_chips = 15"))
    code, _, error = run(capsys, "campaign", str(path))
    assert code == 2
    assert (
        "line 12: rule.exempt_chips: 'Lab' exempts 16 H100 equivalents at 'small rooms', but at most 15 are allowed"
        in error
    )


def test_posterior_of_a_stated_prior(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small.write_text(SCENARIO.replace("samples = 10", "samples = 10\nhonest_refusal_rate = 0.02"), encoding="utf-8")
    data = document(capsys, "campaign", small, "--trials", 50, "--prior", 0.1)
    honest, plain, adaptive = data["rows"]
    assert (data["prior"], honest["posterior"]) == (0.1, None)
    for row, caught in ((plain, plain["predicted"]), (adaptive, adaptive["detection"]["value"])):
        alarm = row["false_alarm"]
        assert row["posterior"]["likelihood_ratio"] == pytest.approx(caught / alarm)
        assert row["posterior"]["accused"] == pytest.approx(0.1 * caught / (0.1 * caught + 0.9 * alarm))
        assert row["posterior"]["passed"] == pytest.approx(
            0.1 * (1 - caught) / (0.1 * (1 - caught) + 0.9 * (1 - alarm))
        )
    code, out, _ = run(capsys, "campaign", small, "--trials", 50, "--prior", 0.1)
    assert (code, "with a prior of 0.1, a violation by" in out) == (0, True)
    assert run(capsys, "campaign", small, "--trials", 50, "--prior", 2)[0] == 2


def test_a_find_after_the_end_is_told_from_one_before(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run of 60 days whose chips are drawn for a year: their logs reach back to the run."""
    text = SCENARIO.replace("days = 60\n", "days = 360\n", 1).replace("samples = 10", 'samples = 10\nlog = "run"')
    small.write_text(text, encoding="utf-8")
    plain = document(capsys, "campaign", small, "--trials", 2000)["rows"][1]
    assert plain["in_time"] < 0.9 * plain["detection"]["value"]
    code, out, _ = run(capsys, "campaign", small, "--trials", 200)
    assert code == 0
    assert "in time: caught before; unseen: not caught by the end of all days" in out


def test_a_detection_that_is_a_false_alarm_is_called_no_evidence(capsys: pytest.CaptureFixture[str]) -> None:
    data = document(capsys, "campaign", "regimes", "--trials", 20)
    for regime in data["regimes"]:
        for cell in (*regime["cells"], regime["worst"]):
            assert cell["false_alarm"] == regime["false_alarm"]
            assert cell["excess"] == pytest.approx(cell["detection"] - cell["false_alarm"])
            assert cell["evidence"] == (not cell["exact"] or cell["excess"] > 1e-12), (regime["regime"], cell)
    books = next(each for each in data["regimes"] if each["regime"] == "registry, searches, books")
    assert not books["cells"][0]["evidence"]
    assert data["scenario"]["stocks_as_of"] == ["2025-12"]
    code, out, _ = run(capsys, "campaign", "regimes", "--trials", 20)
    assert code == 0
    assert "=0.008, " in out
    assert "=: as often as honest labs are accused, which is no evidence." in out
    assert "public stocks are estimates of the end of 2025-12" in out
    assert "location checks" not in out
