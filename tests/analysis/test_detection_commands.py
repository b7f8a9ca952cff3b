"""samples, table, curve and plan from the command line."""

from __future__ import annotations

import bisect
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from analysis.cli import main
from analysis.commands._evasions import parse_evasion, spoken
from analysis.report import tables
from analysis.scenarios import public_catalogue
from firmware_sim.errors import CallerError
from inspector.probability import detection as closed

KINDS = ("stretch", "chips", "rate", "samples", "time", "cost", "evasion", "leakage")


def run_json(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main([*words, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return json.loads(captured.out, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Exit code 2, nothing on stdout and one line on stderr, which is returned."""
    code: int | str | None
    try:
        code = main(list(words))
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_samples_of_gpt_3(capsys: pytest.CaptureFixture[str]) -> None:
    data = run_json(capsys, "samples", "--flop", "3.14e23", "--chips", "1000")
    assert data["per_year"] == 243
    assert data["per_period"] == pytest.approx(19.908452, abs=1e-6)
    assert data["per_year"] == math.ceil(365 * data["per_period"] / data["period"])
    assert data["guaranteed_flop"] == 2 * 3.14e23
    assert data["inspectors"] == 1
    assert main(["samples", "--flop", "3.14e23", "--chips", "1000"]) == 0
    assert capsys.readouterr().out.startswith("243 chips a year, 19.91 every 30 days")


def test_samples_takes_every_parameter(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "samples --flop 9.9e24 --chips 1e7 --days 365 --period 30 --rate 0.1 --confidence 0.9 --flop-per-day 2.592e20"
    )
    data = run_json(capsys, *words.split())
    assert (data["per_year"], data["inspectors"]) == (231_572, 232)
    weekly = run_json(capsys, *words.replace("--period 30", "--period 7").split())
    assert weekly["per_year"] == math.ceil(365 * weekly["per_period"] / 7)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--flop -1 --chips 1000", "flop must be above 0, not -1"),
        ("--flop -1e25 --chips 1000", "flop must be above 0, not -1e+25"),
        ("--flop 1e24 --chips -.5e3", "chips must be above 0, not -500"),
        ("--flop -inf --chips 1000", "flop must be a finite number, not -inf"),
        ("--flop nan --chips 1000", "flop must be a finite number, not nan"),
        ("--flop 3.14e23 --chips 9", "the run needs 9.95687 chips but the lab owns 9"),
        ("--flop 3.14e23 --chips 1000 --confidence 1", "confidence must be below 1"),
        ("--flop 3.14e23 --chips 1000 --rate 0", "rate is 0: no chip ever takes a snapshot"),
        ("--flop 3.14e23 --chips 1000 --period inf", "period must be a finite number, not inf"),
        ("--flop many --chips 1000", "argument --flop: 'many' must be NUMBER, LOW/MEDIAN/HIGH"),
        ("--chips 1000", "the following arguments are required: --flop"),
    ],
)
def test_samples_refuses_nonsense(capsys: pytest.CaptureFixture[str], words: str, text: str) -> None:
    assert text in refused(capsys, "samples", *words.split())


def test_samples_needs_no_heavy_library() -> None:
    code = (
        "import sys; from analysis.cli import main; main(['samples', '--flop', '3.14e23', '--chips', '1000']); "
        "print(sorted({'torch', 'matplotlib', 'sklearn', 'numba', 'sqlalchemy'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"


def test_table_has_the_paper_beside_today(capsys: pytest.CaptureFixture[str]) -> None:
    data = run_json(capsys, "table", "--row", "mine=1e25", "--fleet", "ours=2e4")
    cells = {row["model"]: [cell["per_year"] for cell in row["cells"]] for row in data["table_1"]}
    assert cells["GPT-3"] == [243, 24_337, 2_433_726]
    assert cells["Chinchilla-10T (projected)"] == [None, None, 58]
    assert sum(cell is None for row in cells.values() for cell in row) == 3
    assert data["footnote"] == {"samples": 231_572, "inspectors": 232, "iaea_inspectors_2021": 280}
    assert {"kind", "confirmed", "source", "published"} <= set(data["today"]["models"][0])
    assert {"kind", "confirmed", "source", "as_of"} <= set(data["today"]["stocks"][0])
    assert {"source", "confirmed", "flop_per_day"} <= set(data["chips"][0])
    assert [row["model"] for row in data["own"]] == ["mine"]
    assert data["own"][0]["cells"][0]["fleet"] == "ours"


def test_table_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["table", "--sources"]) == 0
    text = capsys.readouterr().out
    assert "231,572 samples a year, 232 inspectors (the IAEA had 280 in 2021)" in text
    assert len(re.findall(r"^Chinchilla-10T \(projected\) +1\.3e\+28 +412,228 +- +- +58$", text, re.MULTILINE)) == 1
    assert "Sources of the stocks" in text
    assert "no model has been published since 2099-01" in refused(capsys, "table", "--since", "2099-01")
    assert "'x' is not NAME=FLOP" in refused(capsys, "table", "--row", "x")


@pytest.mark.parametrize("kind", KINDS)
def test_every_curve_is_a_figure_with_its_numbers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str
) -> None:
    file = tmp_path / f"{kind}.svg"
    data = run_json(capsys, "curve", kind, "--out", str(file))
    assert file.read_bytes().startswith(b"<?xml")
    assert data["kind"] == kind
    assert data["file"] == str(file)
    assert data["command"].startswith(f"chipwitness curve {kind} --")
    assert all(len(line["x"]) == len(line["y"]) > 0 for line in data["series"])
    assert data["series"]
    assert f"command: {data['command']}" in file.read_text(encoding="utf-8").replace("&gt;", ">")


def test_curve_stretch_gives_the_minimum_of_figure_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    data = run_json(capsys, "curve", "stretch", "--out", str(tmp_path / "a.png"))
    assert round(data["minimum"], 4) == 0.9703
    assert min(line["y"][-1] for line in data["series"]) == pytest.approx(data["minimum"], rel=1e-12)


def test_curve_samples_marks_an_inspection(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ("curve", "samples", "--flop", "1e24", "--chips", "1000", "--mark", "72", "--out", str(tmp_path / "a.png"))
    data = run_json(capsys, *words)
    assert data["needed"] == 72
    assert data["detection"] >= 0.9
    rare = run_json(capsys, *words, "--rate", "1e-6")
    assert rare["needed"] is None


def test_curve_evasion_draws_a_campaign(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    campaign = {
        "scenario": {"title": "Two strategies", "wanted": 0.9},
        "confidence": 0.95,
        "rows": [
            {
                "strategy": "honest",
                "detection": {"value": 0.0, "low": 0.0, "high": 0.1},
                "predicted": 0.0,
                "false_alarm": 0,
            },
            {
                "strategy": "adaptive",
                "detection": {"value": 0.5, "low": 0.4, "high": 0.6},
                "predicted": None,
                "false_alarm": 0.125,
            },
        ],
    }
    file = tmp_path / "campaign.json"
    file.write_text(json.dumps(campaign))
    data = run_json(capsys, "curve", "evasion", "--results", str(file), "--out", str(tmp_path / "a.pdf"))
    assert [row["detection"] for row in data["strategies"]] == [0.0, 0.5]
    assert [row["closed_form"] for row in data["strategies"]] == [0.0, None]
    file.write_text('{"rows": 3}')
    text = refused(capsys, "curve", "evasion", "--results", str(file), "--out", str(tmp_path / "a.pdf"))
    assert "is not what campaign --json prints" in text


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("stretch --out {tmp}/a.txt", "the extension must be .png, .svg or .pdf"),
        ("stretch --out {tmp}/none/a.png", "cannot be written: No such file or directory"),
        ("stretch --share 1 --out {tmp}/a.png", "share must be below 1"),
        ("stretch --longest 1 --out {tmp}/a.png", "--longest must be between 2"),
        ("chips --fleets 3 --out {tmp}/a.png", "--fleets needs two positive numbers"),
        ("rate --rates 5,1 --out {tmp}/a.png", "--rates needs two positive numbers"),
        ("samples --mark 100001 --out {tmp}/a.png", "--mark must be between 0 and the 100000 chips"),
        ("time --chips 3 --out {tmp}/a.png", "the run needs 81.1771 chips but the lab owns 3"),
        ("evasion --results {tmp}/none.json --out {tmp}/a.png", "cannot be read: No such file"),
        ("evasion --evasion fly --out {tmp}/a.png", "evasion 'fly': must be declared"),
        ("leakage --diverted 2000000 --out {tmp}/a.png", "diverted and census cannot exceed the fleet"),
        ("leakage --months 0 --out {tmp}/a.png", "--months must be between 1 and 1200"),
        ("nothing --out {tmp}/a.png", "there is no 'nothing'"),
    ],
)
def test_curve_refuses_nonsense(capsys: pytest.CaptureFixture[str], tmp_path: Path, words: str, text: str) -> None:
    assert text in refused(capsys, "curve", *words.format(tmp=tmp_path).split())
    assert list(tmp_path.iterdir()) == []


def test_plan_of_two_sites(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["plan", "--flop", "2.56e24", "--site", "a=1e5", "--site", "b=3e4", "--inspector-cost", "2e5"]
    data = run_json(capsys, *words)
    assert data["detection"] >= 0.9
    assert [each["site"] for each in data["visits"]] == ["a", "b"]
    assert data["cost"] == data["inspectors"] * 2e5 == math.ceil(data["work"] / 1000) * 2e5
    assert data["inspectors"] == math.ceil(data["work"] / 1000)
    assert data["lower_bound"] <= data["work"] <= 1.005 * data["lower_bound"]
    assert sum(data["responses"][0]["placement"].values()) > 0
    assert data["sensitivity"] is None
    sites = tmp_path / "sites.csv"
    sites.write_text("name,chips,visit_work\na,1e5,10\nb,3e4,10\n")
    again = run_json(capsys, "plan", "--flop", "2.56e24", "--sites", str(sites))
    assert again["visits"] == data["visits"]
    assert main(words) == 0
    assert "Cost " in capsys.readouterr().out


def test_plan_tells_the_honest_figure_and_the_excess(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--flop", "2.56e26", "--site", "a=1e5", "--refusals", "0.01", "--evasion", "declared"]
    data = run_json(capsys, *words)
    assert data["reason"] is None
    assert data["not_covered"] == ["refuse"]
    assert 0 < data["false_alarm"] <= 0.01 < 0.9 <= data["detection"]
    for row in (data, *data["responses"]):
        assert row["excess"] == row["detection"] - row["false_alarm"]
    assert data["visits"][0]["refusals_allowed"] > 0
    strict = run_json(capsys, *words, "--false-alarms", "1e-6")
    assert strict["false_alarm"] <= 1e-6
    assert strict["visits"][0]["refusals_allowed"] > data["visits"][0]["refusals_allowed"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert re.search(r"evasion +detection +honest lab accused +excess +half are caught by\n", out)
    assert "Not covered: a lab that refuses drawn chips with evidence" in out
    covered = run_json(capsys, *words[:-2])
    assert covered["responses"][0]["evasion"] == "refuse"
    assert covered["not_covered"] == []
    without = run_json(capsys, *words[:5])
    assert (without["false_alarm"], without["excess"]) == (0, without["detection"])


def test_plan_says_what_matters_most(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    figure = tmp_path / "a.svg"
    data = run_json(capsys, "plan", "--flop", "2.56e24", "--site", "a=1e5", "--sensitivity", "--out", str(figure))
    rows = {row["parameter"]: row for row in data["sensitivity"]}
    assert abs(data["sensitivity"][0]["elasticity"]) == max(abs(row["elasticity"]) for row in rows.values())
    assert rows["FLOP of the run H"]["elasticity"] == pytest.approx(-1, abs=0.02)
    assert rows["chips C"]["elasticity"] == pytest.approx(1, abs=0.02)
    assert figure.exists()


def test_plan_for_today_covers_the_world(capsys: pytest.CaptureFixture[str]) -> None:
    data = run_json(capsys, "plan", "--flop", "1e26", "--today", "--delay", "90", "--evasion", "declared")
    assert sum(site["chips"] for site in data["parameters"]["sites"]) == 20_000_000
    assert max(each["period"] for each in data["visits"]) <= 90
    assert data["parameters"]["flop_per_day"] == 989e12 * 86_400
    assert data["stocks_as_of"] == "2025-12"
    assert data["detection"] >= 0.9


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--site a=10", "the sites hold fewer chips than the run needs"),
        ("--site a", "'a' is not NAME=CHIPS"),
        ("--site a=1e5 --confidence 1", "confidence must be above 0 and below 1"),
        ("--site a=1e5 --rate 0", "rate must be above 0, not 0"),
        ("--site a=1e5 --site a=1e5", "site names must be unique"),
        ("--site a=1e5 --delay 3", "every period of --periods is longer than --delay 3"),
        ("--site a=1e5 --evasion hide=2", "X must be between 0 and 1"),
        ("--site a=1e5 --evasion stretch=0.5", "K must be at least 1"),
        ("--site a=1e5 --evasion only=b", "names a site that is not in the plan"),
        ("--site a=1e5 --refusals 1.5", "honest refusal rate must be at least 0 and at most 1, not 1.5"),
        ("--site a=1e5 --refusals 0.1 --false-alarms 0.9", "already reaches the wanted confidence of 0.9"),
        ("--site a=1e5 --refusals 0.01", "no schedule found that reaches 0.9 with false alarms of 0.01 at most"),
        ("--site a=1e5 --inspector-cost -1", "--inspector-cost must be at least 0"),
        ("--site a=nan", "chips of site 'a' must be a finite number, not nan"),
        ("--sites {tmp}/none.csv", "cannot be read: No such file or directory"),
        ("", "one of the arguments --site --sites --today is required"),
    ],
)
def test_plan_refuses_nonsense(capsys: pytest.CaptureFixture[str], tmp_path: Path, words: str, text: str) -> None:
    assert text in refused(capsys, "plan", "--flop", "2.56e24", *words.format(tmp=tmp_path).split())


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("name,size\na,1\n", "the columns must be name, chips"),
        ("name,chips\na,many\n", "line 2: a number is missing or malformed"),
        ("name,chips\na,1e5\nb\n", "line 3: a number is missing or malformed"),
        ("name,chips\na,-4\n", "line 2: chips of site 'a' must be at least 1"),
        ("name,chips\n", "at least one site"),
        ("", "the columns must be name, chips"),
    ],
)
def test_plan_names_the_bad_line_of_a_site_list(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str, text: str
) -> None:
    file = tmp_path / "sites.csv"
    file.write_text(content)
    assert text in refused(capsys, "plan", "--flop", "2.56e24", "--sites", str(file))


def test_closed_evasions_are_those_of_a_campaign(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Whole visits from the run's first day on: a run of 36.5 days meets two, as in a campaign, not 36.5/30."""
    words = ("curve", "evasion", "--days", "36.5", "--out", str(tmp_path / "a.png"))
    drawn = run_json(capsys, *words, "--evasion", "declared", "--evasion", "stretch=4", "--evasion", "tamper=0.5")
    samples = math.ceil(closed.samples_needed(flop=2.56e24, chips=1e5, days=36.5))
    file = tmp_path / "same.toml"
    file.write_text(
        f"""
title = "same"
days = 180
rule = {{ threshold_flop = 1e15, evidence = "whole-run" }}
inspection = {{ period_days = 30, samples = {samples}, snapshot_rate = 0.1, replacement = true }}
detection = {{ assumed = {{ undeclared-run = 1.0, swap-weights = 0.5 }} }}
kind = [{{ name = "k", flop_per_second = 1e15 }}]
lab = [{{ name = "L", site = [{{ name = "s", chips = [{{ kind = "k", count = 100000 }}] }}] }}]
run = [{{ name = "r", lab = "L", flop = 2.56e24, days = 36.5 }}]
strategy = [
    {{ name = "as planned" }},
    {{ name = "longer", policies = [{{ policy = "stretch", factor = 4 }}] }},
    {{ name = "swap", policies = [{{ policy = "weight-swap" }}] }},
]
""",
        encoding="utf-8",
    )
    simulated = run_json(capsys, "campaign", str(file), "--trials", "50")["rows"][1:]
    assert [row["visits"] for row in drawn["strategies"]] == [2, 5, 2]
    for one, other in zip(drawn["strategies"], simulated, strict=True):
        assert one["detection"] == pytest.approx(other["predicted"], abs=2e-3)
    assert drawn["strategies"][0]["detection"] - drawn["strategies"][0]["eq_1"] > 0.03
    assert main(list(words)) == 0
    text = capsys.readouterr().out
    assert "as declared: caught with probability 0.9421 in 2 visits" in text
    assert "Spread evenly, as in Eq. 1: as declared 0.90" in text


def test_curve_chips_says_which_runs_no_fleet_can_do(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = ("--out", str(tmp_path / "a.svg"))
    message = refused(capsys, "curve", "chips", "--run", "Big=1e30", *out)
    assert "there is no run to draw: 'Big' needs 3.171e+07 chips, but the largest fleet holds 1e+07" in message
    assert not (tmp_path / "a.svg").exists()
    data = run_json(capsys, "curve", "chips", "--run", "Big=1e30", "--run", "PaLM=2.56e24", *out)
    assert data["left_out"] == ["Big"]
    assert [line["name"] for line in data["series"]] == ["PaLM (2.56e+24 FLOP)"]


def test_sites_have_whole_chips(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    message = "chips of site 'a' must be a whole number, not 100000.7"
    assert message in refused(capsys, "plan", "--flop", "1e25", "--site", "a=100000.7")
    file = tmp_path / "sites.csv"
    file.write_text("name,chips\na,100000.7\n", encoding="utf-8")
    assert message in refused(capsys, "plan", "--flop", "1e25", "--sites", str(file))


def test_stocks_have_one_name_in_tables_plans_and_scenarios(capsys: pytest.CaptureFixture[str]) -> None:
    named = tables.holder_names()
    catalogue = public_catalogue()
    assert set(catalogue.stocks) >= {(holder, month) for holder, month in named}
    assert all(
        catalogue.stocks[name, month] == catalogue.stocks[holder, month] for (holder, month), name in named.items()
    )
    assert main(["table"]) == 0
    (head,) = [line for line in capsys.readouterr().out.splitlines() if "published" in line]
    for name in ("Google", "China", "World (sold)"):
        assert name in head
        assert (name, "2025-12") in catalogue.stocks
    assert {name for name, _ in tables.owners_today()} - {"everybody else"} <= {name for name, _ in catalogue.stocks}


UNCERTAIN_RUN = ("--flop", "1e25/2e25/5e25", "--chips", "1e5", "--rate", "triangular(0.05,0.1,0.3)")


def test_utilisation_turns_chips_into_flop_with_a_band(capsys: pytest.CaptureFixture[str]) -> None:
    """Each figure from its definition: chips, hours and megawatts of a run that gets 40 % out of its chips."""
    words = ("samples", "--flop", "1e25", "--chips", "1,000,000")
    data = run_json(capsys, *words, "--utilisation", "0.3/0.4/0.5", "--draws", "2e3")
    needed = 1e25 / (8.64e19 * 0.4 * 365)
    samples = math.log(0.1) / math.log1p(-needed / 1e6 * -math.expm1(-3)) * 30 / 365
    assert data["per_period"] == pytest.approx(samples)
    assert (data["chips_needed"], data["chip_hours"]) == pytest.approx((needed, needed * 8_760))
    assert data["megawatts"] == pytest.approx(needed * 1.4e-3)
    band = [data["bands"]["megawatts"][key] / data["megawatts"] for key in ("low", "median", "high")]
    assert band == pytest.approx([0.8, 1, 4 / 3], rel=0.02)
    assert run_json(capsys, *words)["chips_needed"] == pytest.approx(needed * 0.4)
    alarms = ("alarms", "--flop", "1e25", "--chips", "1e5", "--samples", "100", "--refusals", "0.01", "--prior", "0.1")
    half = run_json(capsys, *alarms, "--utilisation", "0.5")["rows"]
    assert half == run_json(capsys, *alarms, "--flop-per-day", "4.32e19")["rows"]
    row = ("table", "--row", "a=1e25", "--fleet", "b=1e5")
    own = run_json(capsys, *row, "--utilisation", "0.5")["own"]
    assert own == run_json(capsys, *row, "--flop-per-day", "4.32e19")["own"]


def test_samples_of_uncertain_inputs_are_bands(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    exact = run_json(capsys, "samples", "--flop", "2e25", "--chips", "1e5")
    data = run_json(capsys, "samples", *UNCERTAIN_RUN, "--out", str(tmp_path / "a.svg"))
    assert "bands" not in exact
    assert data["inputs"] == {
        "flop": "1e+25/2e+25/5e+25", "chips": "assumed", "days": "assumed", "period": "chosen",
        "rate": "triangular(0.05,0.1,0.3)", "confidence": "chosen", "flop_per_day": "assumed",
        "utilisation": "assumed",
    }  # fmt: skip
    # Samples fall with the run's size, and a little with the rate, so their 5 % belongs to a run of about 5e25.
    band = data["bands"]["per_year"]
    assert band["low"] == pytest.approx(153, rel=0.05)
    assert band["median"] == pytest.approx(exact["per_year"], rel=0.05)
    assert band["high"] == pytest.approx(750, rel=0.05)
    assert band["possible"] == 1
    assert [row["parameter"] for row in data["tornado"]] == ["flop", "rate"]
    assert data["tornado"][0]["low"] > exact["per_year"] > data["tornado"][0]["high"]
    assert [row["parameter"] for row in data["sobol"]] == ["flop", "rate"]
    assert sum(row["first"] for row in data["sobol"]) == pytest.approx(1, abs=0.05)
    assert (tmp_path / "a.svg").stat().st_size > 1000
    assert main(["samples", *UNCERTAIN_RUN]) == 0
    text = capsys.readouterr().out
    assert "assumed: days, chips" in text or "assumed: chips, days, flop_per_day, utilisation; chosen" in text
    assert "no input is uncertain" in refused(
        capsys, "samples", "--flop", "1e25", "--chips", "1e5", "--out", str(tmp_path / "b.svg")
    )
    assert "a range has three numbers" in refused(capsys, "samples", "--flop", "1e25/2e25", "--chips", "1e5")


def test_draws_in_which_the_chips_are_too_few_have_no_answer(capsys: pytest.CaptureFixture[str]) -> None:
    data = run_json(capsys, "samples", "--flop", "table(1e25:3,1e28:1)", "--chips", "1e5", "--draws", "1000")
    assert data["bands"]["per_year"]["possible"] == 0.75
    assert data["bands"]["chips_needed"]["possible"] == 1
    assert data["sobol"] is None
    assert "25 % of the draws have no answer" in data["sobol_reason"]


def test_table_gives_bands_where_sources_state_a_range(capsys: pytest.CaptureFixture[str]) -> None:
    data = run_json(capsys, "table", "--bands", "--since", "2023-01", "--draws", "10000")
    models = {model["model"]: model for model in data["today"]["models"]}
    for name, model in models.items():
        for cell in model["cells"]:
            stated = name in ("GPT-4", "GPT-5") or cell["holder"].partition(" (")[0] in (
                "CoreWeave", "Google DeepMind", "OpenAI", "Anthropic"
            )  # fmt: skip
            assert (cell["band"]["low"] < cell["band"]["high"]) == stated, (name, cell["holder"])
            assert cell["band"]["median"] == pytest.approx(cell["per_year"], rel=0.1)
    assert models["GPT-4"]["training_flop_low"] == 8.2e24
    assert data["table_1"][0]["cells"][0]["band"] == {"low": 243, "median": 243, "high": 243, "possible": 1}
    assert main(["table", "--bands", "--since", "2023-03"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"GPT-4 +2023-03 +estimated +yes +8.2e\+24 to 4.4e\+25", text)
    assert re.search(r"PaLM-2 +2023-05 +estimated +yes +assumed", text)
    assert run_json(capsys, "table")["draws"] is None


PRICED = (
    "plan", "--flop", "1e25", "--site", "a=50000", "--periods", "30", "--evasion", "declared",
    "--inspector-cost", "3e5",
)  # fmt: skip


def test_a_plan_chooses_how_many_segments_to_replay(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        *PRICED,
        "--segments",
        "100",
        "--replay-price",
        "1e-20",
        "--travel-cost",
        "2000",
        "--chip-overhead",
        "0.01",
    ]
    data = run_json(capsys, *words, "--chip-year", "100", "--confidentiality", "0.5")
    replaying, costs = data["replaying"], data["costs"]
    # Five of the hundred segments are false.
    miss = math.prod((95 - place) / (100 - place) for place in range(replaying["replayed"]))
    assert replaying["caught"] == pytest.approx(1 - miss)
    totals = {each["replayed"]: each["total"] for each in replaying["tried"]}
    assert totals[replaying["replayed"]] == min(totals.values()) == pytest.approx(data["cost"])
    assert {1, 100} < set(totals)
    assert replaying["flop_per_year"] == pytest.approx(
        sum(each["samples"] * each["visits_per_year"] for each in data["visits"]) * 1e25 * replaying["replayed"] / 100
    )
    assert costs["replay"] == pytest.approx(replaying["flop_per_year"] * 1e-20)
    assert costs["confidentiality"] == pytest.approx(costs["replay"] / 2)
    assert costs["travel"] == pytest.approx(data["visits_per_year"] * 2000)
    assert costs["chips_time"] == 50_000 * 0.01 * 100
    assert costs["total"] == pytest.approx(sum(value for name, value in costs.items() if name != "total"))
    assert {"false transcript", "as declared"} == {each["evasion"] for each in data["responses"]}
    assert data["detection"] >= 0.9
    # The dearer a replay, the fewer.
    dear = run_json(capsys, *PRICED, "--segments", "100", "--replay-price", "1e-16")["replaying"]["replayed"]
    assert dear < replaying["replayed"]


def test_a_visit_a_year_meets_a_run_of_ninety_days_too_late(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--flop", "1e25", "--site", "a=50000", "--days", "90", "--evasion", "declared"]
    assert main([*words, "--periods", "365"]) == 0
    text = capsys.readouterr().out
    assert "Warning: a visit every 365 days meets a run of 90 days when it is over" in text
    assert main([*words, "--periods", "30"]) == 0
    assert "Warning" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--segments 0 --replay-price 1", "--segments must be between 1 and"),
        ("--segments 10", "--segments needs --inspector-cost and --replay-price"),
        ("--replay-price -1", "--replay-price must be at least 0"),
        ("--false-segments 2", "--false-segments must be between 0 and 1"),
        ("--segments 10 --replay-price 1 --days 100/200/300", "--segments works with exact inputs"),
        ("--inspector-cost 0 --travel-cost 5", "--travel-cost needs --inspector-cost"),
    ],
)
def test_costs_refuse_nonsense(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refused(capsys, *PRICED, *words.split())


def test_plan_of_uncertain_inputs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = (
        "plan",
        "--flop",
        "1e25/2e25/4e25",
        "--site",
        "a=uniform(5e4,1e5)",
        "--periods",
        "30",
        "--evasion",
        "declared",
    )
    data = run_json(capsys, *words, "--draws", "20", "--out", str(tmp_path / "a.svg"))
    assert data["bands"]["work"]["low"] < data["work"] < data["bands"]["work"]["high"]
    assert data["bands"]["detection"]["low"] < data["detection"] < data["bands"]["detection"]["high"]
    assert [row["parameter"] for row in data["tornado"]] == ["flop", "chips of a"]
    assert data["inputs"]["rate"] == "assumed"
    assert [row["parameter"] for row in data["sobol"]] == ["flop", "chips of a"]
    assert sum(row["first"] for row in data["sobol"]) == pytest.approx(1, abs=0.02)
    assert data["sobol_explained"] > 0.95
    assert (tmp_path / "a.svg").exists()
    assert main([*words, "--draws", "20"]) == 0
    assert "The plan above, which is for the medians, detects in 1,000 draws with" in capsys.readouterr().out
    assert "--sensitivity works with exact inputs" in refused(capsys, *words, "--sensitivity")


def test_curves_of_uncertain_inputs_have_bands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.svg"
    exact = run_json(capsys, "curve", "chips", "--run", "r=2e25", "--out", str(file))
    size = file.stat().st_size
    data = run_json(capsys, "curve", "chips", "--run", "r=1e25/2e25/5e25", "--out", str(file))
    assert data["series"][0]["y"] == exact["series"][0]["y"]  # the line is at the medians
    assert file.stat().st_size > size
    run_json(capsys, "curve", "rate", "--flop", "1e25/2e25/5e25", "--days", "uniform(90,365)", "--out", str(file))
    assert file.stat().st_size > size


def test_alarms_say_what_an_accusation_means(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ("alarms", "--flop", "2.56e24", "--chips", "1e5", "--refusals", "1e-4", "--prior", "0.05")
    data = run_json(capsys, *words, "--cost-miss", "10", "--out", str(tmp_path / "roc.svg"))
    assert [row["tolerated"] for row in data["rows"]] == list(range(len(data["rows"])))
    for one, other in zip(data["rows"], data["rows"][1:], strict=False):
        assert other["false_alarm"] < one["false_alarm"]
        assert other["detection"] <= one["detection"] + 1e-9
    for row in data["rows"]:
        odds = 0.05 / 0.95 * row["likelihood_ratio"]
        assert row["posterior"] == pytest.approx(odds / (1 + odds))
        assert row["pass_posterior"] < 0.05 < row["posterior"]
        cost = 0.05 * (1 - row["detection"]) * 10 + 0.95 * row["false_alarm"]
        assert row["expected_cost"] == pytest.approx(cost)
    assert data["rows"][data["best"]]["expected_cost"] == min(row["expected_cost"] for row in data["rows"])
    dear = run_json(capsys, *words, "--cost-alarm", "1000")
    assert dear["best"] > data["best"] or data["best"] == len(data["rows"]) - 1
    assert main([*words]) == 0
    assert "factor on the odds of a violation" in capsys.readouterr().out
    assert "--samples must be between 1" in refused(capsys, *words, "--samples", "0")
    assert "prior must be" in refused(capsys, *words, "--prior", "2")
    never = run_json(capsys, *words[:-4], "--refusals", "0", "--prior", "0.05")
    assert never["rows"][0]["likelihood_ratio"] is None
    assert never["rows"][0]["posterior"] == 1


def test_plan_warns_where_a_visit_a_year_meets_a_run_of_ninety_days(capsys):
    words = ["plan", "--flop", "1e25", "--days", "90", "--site", "a=100000", "--evasion", "declared", "--periods"]
    assert main([*words, "365"]) == 0
    assert "Warning: the run is over before half of such runs are caught: as declared." in capsys.readouterr().out
    assert main([*words, "365", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["responses"]
    assert (found["run_days"], found["median_day"]) == (90, 365)
    assert main([*words, "30"]) == 0
    text = capsys.readouterr().out
    assert "Warning" not in text
    assert "day 30 of 90" in text


def test_plan_says_whether_a_violation_pays(capsys):
    words = ["plan", "--flop", "1e25", "--site", "a=100000", "--evasion", "declared"]
    assert main([*words, "--gain", "10", "--penalty", "100", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["deterrence"]["deterring_detection"] == pytest.approx(1 / 11)
    assert data["deterrence"]["utility"] < 0
    assert data["deterrence"]["deterring_penalty"] == pytest.approx(10 * (1 - data["detection"]) / data["detection"])
    assert main([*words, "--gain", "10", "--penalty", "0"]) == 0
    assert "if caught pays" in capsys.readouterr().out
    assert main([*words, "--gain", "10"]) == 2
    assert main([*words, "--gain", "-1", "--penalty", "1"]) == 2


def test_evasions_are_joined_by_commas() -> None:
    found = parse_evasion("stretch=2,hide=0.2,tamper=0.5,refuse,only=a,b")
    assert (found.stretch, found.visible, found.readout, found.refuses, found.sites) == (2, 0.8, 0.5, True, ("a,b",))
    assert parse_evasion("rush=4").stretch == 0.25
    assert spoken("hide=0.2,refuse") == "20% of its chips undeclared and refuses to show chips with evidence"
    for wrong in ("", "refuse,", "refuse=1", "hide", "hide=2", "stretch=0.5", "hide=0.1,,refuse", "only=", "sneak=1"):
        with pytest.raises(CallerError):
            parse_evasion(wrong)


def test_stocks_say_how_old_they_are_and_are_projected_by_an_input(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("table", "--since", "2025-01")
    plain = run_json(capsys, *words)["today"]
    assert (plain["stocks_as_of"], plain["as_of"], plain["growth"]) == ("2025-12", None, None)
    assert {each["projected"] for each in plain["stocks"]} == {None}
    data = run_json(capsys, *words, "--as-of", "2026-11", "--draws", "4000")
    today = data["today"]
    assert (today["as_of"], today["growth"], data["draws"]) == ("2026-11", "uniform(3.3,3.4)", 4000)
    world = next(each for each in today["stocks"] if each["holder"] == "World (sold)")
    assert world["projected"] == pytest.approx(2e7 * 3.35 ** (11 / 12))
    assert world["low"] == pytest.approx(2e7 * 3.305 ** (11 / 12))
    assert world["high"] == pytest.approx(2e7 * 3.395 ** (11 / 12))
    for old, new in zip(plain["models"], today["models"], strict=True):
        for before, after in zip(old["cells"], new["cells"], strict=True):
            if before["per_year"] is not None:
                assert after["per_year"] / before["per_year"] == pytest.approx(3.35 ** (11 / 12), rel=0.1)
                assert after["band"]["low"] <= after["per_year"] <= after["band"]["high"]
    fixed = run_json(capsys, *words, "--as-of", "2026-12", "--growth", "2")
    assert fixed["draws"] is None
    assert next(each for each in fixed["today"]["stocks"] if each["holder"] == "Oracle")["projected"] == 2 * 1_144_180
    assert main(["table", "--as-of", "2026-11"]) == 0
    assert "PROJECTED to 2026-11: uniform(3.3,3.4) times a year" in capsys.readouterr().out
    assert main(["table"]) == 0
    out = capsys.readouterr().out
    assert "Stocks are public estimates of the end of 2025-12; nothing newer is complete." in out
    assert "--since leaves out 19 earlier models (the latest: " in out
    assert "No source states a figure for GPT-4o, Claude Opus 4" in out
    assert "GPT-4" in plain["left_out"]
    wrong: list[tuple[tuple[str, ...], str]] = [
        (("--as-of", "2025-06"), "projected to a month from 2025-12 on"),
        (("--growth", "3"), "--growth has no effect without --as-of"),
        (("--as-of", "2026-11", "--growth", "0"), "--growth must be above 0"),
    ]
    for given, message in wrong:
        assert message in refused(capsys, "table", *given)


def test_alarms_stand_beside_never_inspecting(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("alarms", "--flop", "1e23", "--chips", "1e5", "--refusals", "0.01", "--prior", "0.001")
    data = run_json(capsys, *words)
    assert data["never"] == 0.001
    assert data["saved"] == pytest.approx(1 - min(row["expected_cost"] for row in data["rows"]) / 0.001)
    assert data["saved"] < 0.01
    assert main([*words]) == 0
    assert "Never to inspect costs 0.001; " in (out := capsys.readouterr().out)
    assert "these costs and this prior do not pay for an inspection" in out
    words = ("alarms", "--flop", "2.56e24", "--chips", "1e5", "--refusals", "1e-4", "--prior", "0.05")
    assert run_json(capsys, *words)["saved"] > 0.1
    assert main([*words]) == 0
    assert "do not pay" not in capsys.readouterr().out


def passed(draws: int, allowed: int, missing: float) -> float:
    """P(at most ``allowed`` of the drawn chips are missing), as a sum of binomial terms."""
    return math.fsum(
        math.comb(draws, number) * missing**number * math.exp((draws - number) * math.log1p(-missing))
        for number in range(allowed + 1)
    )


def test_a_second_look_leaves_the_chips_that_it_does_not_show(capsys: pytest.CaptureFixture[str]) -> None:
    """One chip in a hundred is not shown, nine of ten of those are five days later: a thousandth stays unseen."""
    words = "plan --flop 1e25 --site all=1e5 --evasion declared --evasion refuse --refusals"
    data = run_json(capsys, *words.split(), "0.01", "--shown-later", "0.9", "--second-look", "5")
    (visit,) = data["visits"]
    draws, allowed = visit["samples"], visit["refusals_allowed"]
    assert (draws, allowed, visit["period"], data["noticed_within_days"]) == (2_822, 7, 365, 370)

    # A run of 1e25 FLOP takes 317 chips of 1e15 FLOP/s a year; a drawn one incriminates if a snapshot fell into a year.
    unseen = 0.01 * (1 - 0.9)
    evident = 1e25 / (1e15 * 86_400 * 365) / 1e5 * -math.expm1(-0.1 * 365)
    refused_ = unseen + (1 - unseen) * evident
    assert data["false_alarm"] == pytest.approx(1 - passed(draws, allowed, unseen), rel=1e-6)
    assert data["detection"] == pytest.approx(1 - passed(draws, allowed, refused_), rel=1e-6)
    for other in range(20):  # whatever is tolerated, no smaller sample both keeps the cap and catches
        most = bisect.bisect_right(range(draws), -0.99, lo=1, key=lambda each: -passed(each, other, unseen)) - 1
        assert passed(most, min(other, most), refused_) > 0.1


def test_a_second_look_at_the_ends_of_its_range(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "plan",
        "--flop",
        "1e26",
        "--site",
        "all=1e5",
        "--evasion",
        "declared",
        "--evasion",
        "refuse",
        "--refusals",
        "0.001",
    ]
    never, always = (run_json(capsys, *words, "--shown-later", each)["visits"] for each in "01")
    assert never == run_json(capsys, *words)["visits"]
    assert [each["refusals_allowed"] for each in always] == [0]
    assert always[0]["samples"] == run_json(capsys, *words[:-2])["visits"][0]["samples"] < never[0]["samples"]
    assert "--shown-later must be between 0 and 1, not 1.5" in refused(capsys, *words, "--shown-later", "1.5")
    assert "--second-look must be at least 0 days, not -1" in refused(capsys, *words, "--second-look", "-1")


def test_a_plan_counts_whole_inspectors_money_and_what_a_lab_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--flop", "1e25", "--site", "all=1e5", "--periods", "365", "--inspector-cost", "2e5/3e5/5e5"]
    words += ["--input", "money=USD 2026", "--input", "load=100/300/500"]
    data = run_json(capsys, *words)
    assert (data["inspectors"], data["inspector_load"], data["money"]) == (3, pytest.approx(300), "USD 2026")
    assert data["cost"] == pytest.approx(9e5)
    assert data["cost_band"]["low"] < data["cost"] < data["cost_band"]["high"]
    assert all(each["low"] <= each["median"] <= each["high"] for each in data["lab"].values())
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "a year, USD 2026: staff 900,000" in text
    assert "3 inspectors at 300 chips' work a year" in text
    assert "Of the lab it asks: steps " in text
    used = run_json(capsys, "plan", "--flop", "1e25", "--site", "all=1e5", "--periods", "365", "--utilisation", "0.4")
    assert used["run"]["chips"] == pytest.approx(data["run"]["chips"] / 0.4)
    assert used["work"] < data["work"]
    assert main([*words, "--input", "money=euro"]) == 2
    assert "'euro' is not a currency with the year of its prices" in capsys.readouterr().err
