"""Forty descriptions of hidden sites through every command that takes them: one question has one answer.

What is expected is computed here anew, by nothing of the product.
"""

from __future__ import annotations

import json
import math
import shutil
from typing import Any

import numpy as np
import pytest
from scipy.stats import binomtest

from analysis.bench.explore import answers_in_javascript
from analysis.cli import main
from analysis.commands.dispatch import build_parser
from analysis.explorer.answers import answers, defaults

NUMBER, TRIALS, LEVEL = 40, 2_000, 1 - 1e-3 / 80
"""Of intervals: two simulations of each description fail jointly with 1e-3 at most."""

SCENARIO = """\
title = "one hidden stock"
days = {horizon}
[rule]
threshold_flop = {threshold!r}
[[regime]]
name = "one"
period_days = 30
samples = 1
snapshot_rate = 0.1
evidence_false_alarms = 0.1
[[regime]]
name = "two"
period_days = 60
samples = 2
snapshot_rate = 0.1
evidence_false_alarms = 0.1
[detection]
assumed = {{ undeclared-run = 1.0 }}
[[evidence]]
name = "looks"
found_per_year = {per_year!r}
at_megawatts = {at_megawatts!r}
exponent = {exponent!r}
false_alarm = 0.02
[[kind]]
name = "chip"
flop_per_second = {per_second!r}
watts = {watts!r}
[[lab]]
name = "lab"
[[lab.site]]
name = "declared"
chips = [{{ kind = "chip", count = 10 }}]
[[lab.site]]
name = "hidden"
declared = false
sites = {sites}
age_days = {age!r}
idle_power = {idle!r}
chips = [{{ kind = "chip", count = {held}, status = "undeclared" }}]
[[run]]
name = "run"
lab = "lab"
flop = {flop!r}
days = {days!r}
utilisation = {utilisation!r}
[[strategy]]
name = "smuggled"
policies = [{{ policy = "divert", status = "undeclared" }}]
"""


def descriptions() -> list[dict[str, Any]]:
    """Half of them such as the explorer takes: one site, chips and a source as it has them."""
    rng = np.random.default_rng(38)
    found = []
    for place in range(NUMBER):
        plain = place < NUMBER // 2
        sites = 1 if plain else int(rng.integers(1, 30))
        at: dict[str, Any] = {
            "sites": sites,
            "days": float(rng.integers(20, 700)),
            "age": float(rng.integers(0, 1_000)),
            "utilisation": float(rng.uniform(0.1, 1)),
            "per_second": float(10 ** rng.uniform(14, 16)),
            "watts": 1_400.0 if plain else float(rng.uniform(200, 3_000)),
            "idle": 0.1 if plain else float(rng.uniform(0, 0.5)),
            "per_year": float(rng.uniform(0.01, 2)),
            "at_megawatts": 10.0 if plain else float(rng.uniform(1, 100)),
            "exponent": 0.5 if plain else float(rng.uniform(0, 1.2)),
        }
        needed = 10 ** rng.uniform(1, 5)
        at["flop"] = needed * at["days"] * at["per_second"] * 86_400 * at["utilisation"]
        at["held"] = sites * math.ceil(needed / sites) * int(rng.integers(1, 20))
        found.append(at)
    return found


def expected(at: dict[str, Any]) -> dict[str, float]:
    """Chips at work, megawatts, chip-hours and the chance to be found, from their definitions."""
    each = math.ceil(at["flop"] / (at["days"] * at["per_second"] * 86_400 * at["utilisation"]) / at["sites"] - 1e-9)
    working, held = each * at["sites"], at["held"]
    during = (working + (held - working) * at["idle"]) * at["watts"] / 1e6
    before = held * at["idle"] * at["watts"] / 1e6
    finds = 0.0
    for power, days in ((before, at["age"]), (during, at["days"])):
        a_year = at["per_year"] * (power / at["sites"] / at["at_megawatts"]) ** at["exponent"] if power else 0.0
        finds += at["sites"] * a_year * days / 365
    return {
        "held": held,
        "working": working,
        "sites": at["sites"],
        "days": at["days"],
        "age": at["age"],
        "watts": at["watts"],
        "idle": at["idle"],
        "utilisation": at["utilisation"],
        "megawatts": during,
        "megawatts_working": working * at["watts"] / 1e6,
        "megawatts_before": before,
        "chip_hours": working * at["days"] * 24,
        "flop": working * at["days"] * 86_400 * at["per_second"] * at["utilisation"],
        "found": -math.expm1(-finds),
    }


def simulated(at: dict[str, Any], right: dict[str, float], rng: np.random.Generator) -> int:
    """In how many trials somebody found a site, by the days at which each would be."""
    found = np.zeros(TRIALS, bool)
    for power, days in ((right["megawatts_before"], at["age"]), (right["megawatts"], at["days"])):
        if power:
            a_year = at["per_year"] * (power / at["sites"] / at["at_megawatts"]) ** at["exponent"]
            found |= (rng.exponential(365 / a_year, (TRIALS, at["sites"])) < days).any(axis=1)
    return int(found.sum())


def options(at: dict[str, Any]) -> list[str]:
    named = {name: at[name] for name in ("flop", "days", "utilisation", "watts", "idle", "age")}
    named |= {"flop-per-day": at["per_second"] * 86_400}
    named |= {name.replace("_", "-"): at[name] for name in ("per_year", "at_megawatts", "exponent")}
    return [word for name, value in named.items() for word in (f"--{name}", repr(value))]


def test_one_description_has_one_answer_in_every_command(capsys, tmp_path):
    parser = build_parser()  # once: it takes longer than most of these answers

    def asked(*words: str) -> dict[str, Any]:
        arguments = parser.parse_args([*words, "--json"])
        assert arguments.handler(arguments) == 0
        answered: dict[str, Any] = json.loads(capsys.readouterr().out)
        return answered

    rng, path = np.random.default_rng(1), tmp_path / "s.toml"
    for at in descriptions():
        right = expected(at)
        chance = right.pop("found")
        low, high = binomtest(simulated(at, right | {"found": chance}, rng), TRIALS).proportion_ci(LEVEL)
        assert low <= chance <= high

        def same(hidden: dict[str, Any], found: float, right=right, chance=chance) -> None:
            assert {name: hidden[name] for name in right} == pytest.approx(right, rel=1e-9)
            assert found == pytest.approx(chance, rel=1e-9, abs=1e-12)

        sites = ["--sites", str(at["sites"])]
        (row,) = asked("evidence", "site", "--chips", str(at["held"]), *sites, *options(at))["rows"]
        same(row["hidden"], row["found"]["one source"])
        assert row["any"] == pytest.approx(chance)

        words = ["--held", str(at["held"]), "--fleet", "1e9", "--chips", "1e9", *sites]
        data = asked("evidence", "unmetered", *words, *options(at))
        (way,) = [each for each in data["rows"] if each["way"] == "on chips of no registry, elsewhere"]
        same(data["hidden"], way["sites"])

        node = at["held"] // at["sites"]
        needed = at["flop"] / (at["days"] * at["per_second"] * 86_400 * at["utilisation"])
        nodes = math.ceil(needed / node - 1e-9)
        split = expected(at | {"sites": nodes, "held": nodes * node})
        words = ["--node-chips", str(node), "--efficiency", "1", "--chips", "1e9", "--trials", "1"]
        data = asked("evidence", "split", *words, *options(at))
        assert {name: data["hidden"][name] for name in right} | {"found": data["found"]} == pytest.approx(split)

        horizon = math.ceil(at["days"]) + 60
        path.write_text(SCENARIO.format(**at, horizon=horizon, threshold=at["flop"] / 2))
        words = ["--regime", "one", "--trials", str(TRIALS), "--confidence", repr(LEVEL)]
        data = asked("evidence", "weigh", str(path), *words)
        (source,) = data["sources"]
        same(data["hidden"][0], source["found"])
        assert source["detection"] == pytest.approx(1 - 0.98 * (1 - chance))
        for each in data["simulated"].values():
            assert each["low"] <= each["exact"] <= each["high"]

        data = asked("campaign", str(path), "--regime", "one", "--trials", "20", "--draws", "1")
        row = data["rows"][1]
        same(row["hidden"][0], row["evidence"]["found"]["looks"])
        assert row["hidden_chips"] == right["working"]
        data = asked("campaign", str(path), "--trials", "5")
        for each in data["regimes"]:
            same(data["hidden"]["smuggled"][0], each["cells"][0]["found"]["looks"])


def test_the_explorer_answers_the_same():
    points, rights = [], []
    for at in descriptions()[: NUMBER // 2]:
        of = {"smuggled": at["held"], "finds": at["per_year"], "flop_per_day": at["per_second"] * 86_400}
        points.append(defaults() | {name: at[name] for name in ("flop", "days", "age", "utilisation")} | of)
        rights.append(expected(at))
    answered = [[answers(each) for each in points]]
    if shutil.which("node"):
        answered.append(answers_in_javascript(points))
    for found in answered:
        for one, right in zip(found, rights, strict=True):
            assert one["hidden"] == 1
            shown = {name: one[name] for name in ("working", "megawatts", "chip_hours", "found")}
            assert shown == pytest.approx({name: right[name] for name in shown}, rel=1e-9, abs=1e-12)


def test_every_combined_figure_names_its_rule(capsys):
    for words in (["site"], ["split", "--trials", "1"], ["unmetered"]):
        assert main(["evidence", *words, "--json"]) == 0
        rule = json.loads(capsys.readouterr().out)["rule"]
        assert main(["evidence", *words]) == 0
        assert rule in capsys.readouterr().out
    assert main(["evidence", "unmetered", "--days", "90"]) == 0
    assert "2 censuses of whole intervals count" in capsys.readouterr().out
    assert main(["evidence", "split"]) == 0
    assert "18 visits of whole periods draw 18,000 chips" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["140000", "1.4e5", "140,000"])
def test_counts_are_written_as_people_write_them(text, capsys):
    assert main(["evidence", "unmetered", "--fleet", text, "--held", text, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["hidden"]["held"] == 140_000


def test_a_count_that_is_none_is_refused(capsys):
    for words, message in (
        (["split", "--trials", "1.5"], "'1.5' is not a whole number: write 2000000, 2,000,000 or 2e6"),
        (["site", "--chips", "2,000,000"], "commas separate numbers here, so write 2e6 or 2000000"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["evidence", *words])
        assert message in capsys.readouterr().err


def test_a_run_for_too_few_chips_is_not_found(capsys):
    assert main(["evidence", "site", "--flop", "1e25", "--chips", "100,1e5", "--json"]) == 0
    few, enough = json.loads(capsys.readouterr().out)["rows"]
    assert (few["hidden"], few["any"]) == (None, None)
    assert enough["any"] > 0
    assert main(["evidence", "site", "--flop", "1e25", "--chips", "100,1e5"]) == 0
    assert "cannot do the run" in capsys.readouterr().out
