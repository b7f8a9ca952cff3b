"""Figures that commands print, computed anew from their definitions, by nothing of the product.

One process prints all JSON; what is here imports the standard library and pytest alone.
"""

from __future__ import annotations

import ast
import json
import math
import shlex
import subprocess
import sys
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest

PLAN = "plan --flop 1e25 --site all=1e5 --evasion declared --evasion refuse"
THREE = "plan --flop 1e25 --site a=1e5 --site b=1e5 --site c=1e5 --refusals 0.001 --evasion declared --evasion refuse"
COMMANDS = {
    "samples": "samples --flop 3.14e23 --chips 1000",
    "used": "samples --flop 1e25 --chips 1e6 --utilisation 0.4",
    "table": "table --as-of 2026-11 --growth 3.35",
    "plan .001": f"{PLAN} --refusals 0.001",
    "plan .002": f"{PLAN} --refusals 0.002",
    "plan .003": f"{PLAN} --refusals 0.003",
    "second look": f"{PLAN} --refusals 0.01 --shown-later 0.9 --inspector-cost 300000 --chip-overhead 0.01 "
    "--chip-year 20000",
    "three": THREE,
    "deterrence": "plan --flop 1e25 --site all=1e5 --gain 1 --penalty 5",
    "alarms": "alarms --flop 1e25 --chips 1e5 --refusals 0.001 --prior 0.001",
    "odds": "odds --steps 80957 --audited 25",
    "site": "evidence site --chips 1.4e5",
    "idle": "evidence site --chips 1.4e5 --flop 1.2e25 --age 180",
    "weigh": "evidence weigh --strategy 'on smuggled chips' --alarm tips --trials 10",
    "split": "evidence split --samples 30 --trials 10",
    "unmetered": "evidence unmetered",
    "regimes": "campaign regimes --trials 10",
    "evidence": "campaign evidence --trials 20 --draws 20",
    "table 1": "campaign paper-table-1 --trials 10",
}
CHILD = """\
import contextlib, io, json, sys
from analysis.cli import main
found = {}
for name, words in json.load(sys.stdin).items():
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main([*words, "--json"]) == 0, words
    found[name] = json.loads(out.getvalue())
json.dump(found, sys.stdout)
"""
SPEED = 1e15 * 86_400
H100 = 989e12 * 86_400
CAP, CONFIDENCE = 0.01, 0.9


@pytest.fixture(scope="module")
def printed() -> dict[str, Any]:
    words = {name: shlex.split(line) for name, line in COMMANDS.items()}
    made = subprocess.run(
        [sys.executable, "-c", CHILD], input=json.dumps(words), capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(made.stdout)
    return found


def at_most(allowed: int, draws: int, chance: float) -> float:
    """P(Binomial(draws, chance) <= allowed), as a sum."""
    terms = (
        math.lgamma(draws + 1) - math.lgamma(k + 1) - math.lgamma(draws - k + 1) + k * math.log(chance)
        + (draws - k) * math.log1p(-chance)
        for k in range(min(allowed, draws) + 1)
    )  # fmt: skip
    return min(1.0, math.fsum(math.exp(term) for term in terms))


def seen(samples: int, tolerated: int, share: float, refusals: float, visits: float, days: float) -> tuple[float, ...]:
    """Chance to catch the run as declared, the one that refuses, and to accuse an honest lab."""
    hit = share * -math.expm1(-0.1 * days)
    shown = 1 - (1 - hit) * (1 - refusals)
    declared = 1 - (within(samples, tolerated, hit, refusals)) ** visits
    refuses = 1 - at_most(tolerated, samples, shown) ** visits
    return declared, refuses, 1 - at_most(tolerated, samples, refusals) ** visits


def within(samples: int, tolerated: int, hit: float, refusals: float) -> float:
    """No drawn chip that is shown incriminates, and no more than are tolerated are not shown: chance of a visit."""
    quiet = 1 - (1 - refusals) * hit  # of one chip: it is not shown, or shows nothing
    return quiet**samples * at_most(tolerated, samples, refusals / quiet)


def cheapest(share: float, refusals: float, visit_work: float = 10.0) -> tuple[float, int, int]:
    """Work a year, samples and tolerated chips of the cheapest schedule: every period and number tolerated."""
    best = (math.inf, 0, 0)
    for period in (7, 14, 30, 60, 90, 180, 365):
        visits = 365 / period
        for tolerated in range(40):
            low, high = 0, 200_000
            while high - low > 1:
                middle = (low + high) // 2
                caught = min(seen(middle, tolerated, share, refusals, visits, period)[:2])
                low, high = (low, middle) if caught >= CONFIDENCE else (middle, high)
            if seen(high, tolerated, share, refusals, visits, period)[2] <= CAP:
                best = min(best, (visits * (high + visit_work), high, tolerated))
    return best


def find(power: float, days: float, per_year: float, at: float, exponent: float, least: float) -> float:
    return per_year * (power / at) ** exponent * days / 365 if power >= least else 0.0


SOURCES = {  # of the ready scenario: finds a year, at megawatts, exponent, least megawatts
    "satellites": (0.5, 50, 1.0, 2),
    "grid and heat": (0.3, 20, 0.7, 0.5),
    "tips": (0.2, 10, 0.3, 0),
    "spot visits": (0.1, 10, 0, 0),
}


def test_this_file_imports_nothing_of_the_product() -> None:
    tree = ast.parse(Path(__file__).read_text(encoding="utf-8"))
    names = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [each.name for each in node.names] if isinstance(node, ast.Import)
            else [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        )
    }  # fmt: skip
    assert names <= {*sys.stdlib_module_names, "pytest"}


def test_samples_of_equation_1(printed: dict[str, Any]) -> None:
    """Figures 1 to 4: samples, chips, chip-hours and megawatts; half the utilisation takes twice the chips."""
    found = printed["samples"]
    chips = 3.14e23 / (SPEED * 365)
    draws = math.log(0.1) / math.log1p(-chips / 1000 * -math.expm1(-3))
    assert found["per_period"] == pytest.approx(draws * 30 / 365)
    assert found["per_year"] == math.ceil(draws) == 243
    assert found["chip_hours"] == pytest.approx(chips * 365 * 24)
    assert found["megawatts"] == pytest.approx(chips * 1400 / 1e6)
    assert printed["used"]["chips_needed"] == pytest.approx(1e25 / (SPEED * 365) / 0.4)


def test_table_1_and_every_cell_of_today(printed: dict[str, Any]) -> None:
    """Figures 5 and 6: samples a year of each run and fleet; a stock of a later month is its last one's, grown."""
    table, cells = printed["table"], 0
    grown = {each["holder"]: each for each in table["today"]["stocks"]}
    for parts, speed in ((table["table_1"], SPEED), (table["today"]["models"], H100)):
        for row in parts:
            chips = (row["flop"] if speed == SPEED else row["training_flop"]) / (speed * 365)
            for cell in row["cells"]:
                fleet = cell["chips"] if speed == SPEED else grown[cell["holder"]]["projected"]
                share = chips / fleet
                right = None if share > 1 else math.ceil(math.log(0.1) / math.log1p(-share * -math.expm1(-3)) - 1e-9)
                assert cell["per_year"] == (right if right is None else pytest.approx(right, abs=1)), (row, cell)
                cells += 1
    assert cells > 400
    for stock in table["today"]["stocks"]:
        months = 12 * (2026 - int(stock["as_of"][:4])) + 11 - int(stock["as_of"][5:])
        assert stock["projected"] == pytest.approx(stock["chips_h100_equivalent"] * 3.35 ** (months / 12), rel=1e-4)


@pytest.mark.parametrize(("rate", "samples", "tolerated"), [(0.001, 2822, 7), (0.002, 4344, 16), (0.003, 5670, 27)])
def test_a_plan_with_refusals_is_the_cheapest(
    rate: float, samples: int, tolerated: int, printed: dict[str, Any]
) -> None:
    """Figures 7 to 9, with a search of its own over periods, tolerated chips and samples."""
    found = printed[f"plan {rate:g}".replace("0.", ".")]
    (visit,) = found["visits"]
    share = 1e25 / (SPEED * 365) / 1e5
    assert (visit["samples"], visit["refusals_allowed"], visit["period"]) == (samples, tolerated, 365)
    declared, refuses, alarm = seen(samples, tolerated, share, rate, 1, 365)
    assert found["detection"] == pytest.approx(min(declared, refuses))
    assert found["detection"] >= CONFIDENCE
    assert found["false_alarm"] == pytest.approx(alarm)
    assert alarm <= CAP
    assert found["excess"] == pytest.approx(found["detection"] - alarm)
    expected: Any = (pytest.approx(found["work"]), samples, tolerated)
    assert cheapest(share, rate) == expected
    assert found["lower_bound"] <= found["work"] <= found["lower_bound"] * (1 + found["dearer_at_most"]) * (1 + 1e-12)


def test_three_sites_share_one_allowance(printed: dict[str, Any]) -> None:
    """Figures 10 and 11: over all sites the problem is that of one site of all chips; an allowance each is dearer."""
    found = printed["three"]
    work, samples, tolerated = cheapest(1e25 / (SPEED * 365) / 3e5, 0.001, visit_work=30.0)
    assert (found["samples_per_year"], found["visits"][0]["refusals_allowed"]) == (samples, tolerated) == (17_001, 27)
    assert found["work"] == pytest.approx(work)
    other = found["other"]
    passes = math.prod(at_most(each["refusals_allowed"], each["samples"], 0.001) for each in other["visits"])
    assert other["false_alarm"] == pytest.approx(1 - passes)
    assert other["work"] == sum(each["samples"] + 10 for each in other["visits"]) > found["work"]


def test_a_second_look_costs_and_deterrence(printed: dict[str, Any]) -> None:
    """Figures 12 to 14: a tenth of the chips is still not shown; money; what a violation is worth."""
    found, first = printed["second look"], printed["plan .001"]
    assert (found["detection"], found["visits"]) == (pytest.approx(first["detection"]), first["visits"])
    costs = found["costs"]
    assert costs["staff"] == math.ceil((2_822 + 10) / 1_000) * 300_000
    assert costs["chips_time"] == pytest.approx(1e5 * 0.01 * 20_000)
    assert found["cost"] == pytest.approx(sum(each for name, each in costs.items() if name != "total"))
    worth, caught = printed["deterrence"]["deterrence"], printed["deterrence"]["excess"]
    assert worth["utility"] == pytest.approx(1 - caught - 5 * caught)
    assert worth["deterring_detection"] == pytest.approx(1 / 6)
    assert worth["deterring_penalty"] == pytest.approx((1 - caught) / caught)


def test_alarms_and_what_never_inspecting_costs(printed: dict[str, Any]) -> None:
    """Figures 15 to 17: rates, odds after an accusation, costs."""
    found = printed["alarms"]
    share, prior = 1e25 / (SPEED * 365) / 1e5, 0.001
    assert found["samples"] == math.ceil(math.log(0.1) / math.log1p(-share * -math.expm1(-3)) * 30 / 365)
    for row in found["rows"]:
        declared, refuses, alarm = seen(found["samples"], row["tolerated"], share, 0.001, 365 / 30, 30)
        caught = min(declared, refuses)
        assert (row["detection"], row["false_alarm"]) == (
            pytest.approx(caught, rel=1e-6),
            pytest.approx(alarm, rel=1e-6),
        )
        assert row["likelihood_ratio"] == pytest.approx(caught / alarm, rel=1e-6)
        assert row["posterior"] == pytest.approx(prior * caught / (prior * caught + (1 - prior) * alarm), rel=1e-6)
        assert row["expected_cost"] == pytest.approx(prior * (1 - caught) + (1 - prior) * alarm)
    least = min(row["expected_cost"] for row in found["rows"])
    assert found["never"] == prior
    assert found["saved"] == pytest.approx(1 - least / prior, abs=1e-9)


def test_odds_of_twenty_five_audited_segments(printed: dict[str, Any]) -> None:
    """Figures 18 and 19: what would have shown up, and draws that a violation needs."""

    def escapes(false: int, drawn: int) -> float:
        return math.exp(math.fsum(math.log1p(-false / (80_957 - place)) for place in range(drawn)))

    found = printed["odds"]
    assert escapes(found["shown_segments"], 25) <= 0.1 < escapes(found["shown_segments"] - 1, 25)
    assert found["shown_segments"] == 7_123
    for row in found["violations"]:
        assert row["escapes"] == pytest.approx(escapes(row["segments_touched"], 25))
        if row["segments_touched"] > 1:
            assert escapes(row["segments_touched"], row["needed_draws"]) <= 0.1
            assert escapes(row["segments_touched"], row["needed_draws"] - 1) > 0.1


def test_a_hidden_site_of_140000_chips(printed: dict[str, Any]) -> None:
    """Figures 20 to 23: megawatts and finds with all chips at work, and with those that a run takes."""
    (row,) = printed["site"]["rows"]
    finds = {name: find(196, 120, *source) for name, source in SOURCES.items()}
    assert row["megawatts"] == pytest.approx(140_000 * 1400 / 1e6)
    assert row["found"] == {name: pytest.approx(-math.expm1(-each)) for name, each in finds.items()}
    assert row["any"] == pytest.approx(-math.expm1(-sum(finds.values()))) == pytest.approx(0.7342, abs=1e-4)
    (row,) = printed["idle"]["rows"]
    working = math.ceil(1.2e25 / (120 * H100 * 0.4))
    during, before = (working + (140_000 - working) * 0.1) * 1400 / 1e6, 140_000 * 0.1 * 1400 / 1e6
    both = {name: find(during, 120, *source) + find(before, 180, *source) for name, source in SOURCES.items()}
    assert row["hidden"]["working"] == working
    assert row["found"] == {name: pytest.approx(-math.expm1(-each)) for name, each in both.items()}
    assert row["any"] == pytest.approx(-math.expm1(-sum(both.values())))


def test_sources_weighed_together(printed: dict[str, Any]) -> None:
    """Figures 24 to 27: the campaign's and the command's sources find as one description says; books; a tip's worth."""
    found = printed["weigh"]
    sources = {each["name"]: each for each in found["sources"]}
    (row,) = printed["idle"]["rows"]
    for name in SOURCES:
        chance, alarm = sources[name]["found"], sources[name]["false_alarm"]
        assert chance == pytest.approx(row["found"][name])
        assert sources[name]["detection"] == pytest.approx(1 - (1 - chance) * (1 - alarm))
    normal = NormalDist()
    books = sources["fab and sales accounting"]
    for key, missing in (("detection", 140_000), ("evaded", 140_000 * 0.6)):
        assert books[key] == pytest.approx(normal.cdf(missing / 80_000 + normal.inv_cdf(0.003)), rel=1e-3)
    tip, seen_ = sources["tips"], found["observed"]
    assert seen_["ratio"] == pytest.approx(tip["detection"] / tip["false_alarm"])
    odds = seen_["ratio"] * 0.1 / 0.9
    assert seen_["posterior"] == pytest.approx(odds / (1 + odds))
    (smuggled,) = [each for each in printed["evidence"]["rows"] if each["strategy"] == "on smuggled chips"]
    assert smuggled["evidence"]["found"] == {name: pytest.approx(row["found"][name]) for name in SOURCES}
    (rule,) = [each for each in found["strategies"] if each["strategy"] == "on smuggled chips"]
    assert smuggled["evidence"]["accused"] == pytest.approx(rule["detection"])


def test_a_job_in_parts_and_work_past_meters(printed: dict[str, Any]) -> None:
    """Figures 28 to 33: nodes, their power, links between them; chips, energy, finds; 90 days hold two censuses."""
    found = printed["split"]
    nodes = math.ceil(1e25 / (547.5 * H100 * 0.4 * 0.67 * 16))
    assert (found["nodes"], found["chips"]) == (nodes, nodes * 16)
    assert found["megawatts"] == pytest.approx(nodes * 16 * 1400 / 1e6)
    finds = nodes * 0.3 * (16 * 1400 / 1e6 / 10) ** 0.5 * 547.5 / 365
    assert found["found"] == pytest.approx(-math.expm1(-finds))
    hit, draws = 16 / 1e5 * -math.expm1(-3), 18 * 30
    none, others = (1 - nodes * hit) ** draws, (1 - (nodes - 1) * hit) ** draws
    assert (found["draws"], found["hit"]) == (draws, pytest.approx(hit))
    assert found["linked"] == pytest.approx(0.6 * (1 - none - nodes * (others - none)))
    found = printed["unmetered"]
    assert found["needed"] == math.ceil(1e24 / (90 * H100 * 0.4))
    assert found["censuses"] == int(90 / (365 / 12))
    rows = {each["way"]: each for each in found["rows"]}
    elsewhere = rows["on chips of no registry, elsewhere"]["sites"]
    assert elsewhere == pytest.approx(-math.expm1(-0.3 * (found["needed"] * 1400 / 1e7) ** 0.5 * 90 / 365))
    normal, share = NormalDist(), 1e24 / (1000 * 90 * H100 * 0.4)
    energy = normal.cdf(share * 0.9 / (0.02 * (0.7 + 0.3 * 0.1)) + normal.inv_cdf(0.01))
    assert rows["on its chips, by raw pointers"]["energy"] == pytest.approx(energy)
    gone = rows["on registered chips that left their owner"]
    assert gone["any"] == pytest.approx(1 - (1 - gone["census"]) * (1 - elsewhere))


def test_regimes_and_campaigns(printed: dict[str, Any]) -> None:
    """Figures 34 to 39: false alarms, what catches by its false alarms alone, splits below the cap, Table 1's run."""
    found = printed["regimes"]
    first = found["regimes"][0]
    draws = first["samples_per_period"]
    allowed = next(k for k in range(draws) if 1 - at_most(k, draws, 0.001) ** 16 <= CAP)
    assert first["false_alarm"] == pytest.approx(1 - at_most(allowed, draws, 0.001) ** 16)
    for regime in found["regimes"]:
        for cell in regime["cells"]:
            assert cell["excess"] == pytest.approx(cell["detection"] - cell["false_alarm"])
            assert cell["evidence"] == (cell["excess"] > 1e-12), cell
    assert not any("location" in each["regime"] for each in found["regimes"])
    planned = {cell["strategy"]: cell for cell in first["cells"]}["as planned"]
    chips = math.ceil(5e25 / (120 * H100 * 0.4))
    missed = 1.0
    for _ in range(4):  # visits on days 30, 60, 90 and 120
        missed *= visit_missed(1_100_000, chips * -math.expm1(-3), draws, 0.001, allowed)
    missed *= at_most(allowed, draws, 0.001) ** 12
    assert planned["detection"] == pytest.approx(1 - missed, abs=2e-4)  # draws without replacement differ so little
    data = printed["evidence"]["scenario"]
    rule = printed["weigh"]["false_alarm"]
    chips_alarm = 1 - at_most(data["refusals_allowed"], 20, 0.001) ** 16
    assert data["false_alarm"] == pytest.approx(1 - (1 - chips_alarm) * (1 - rule))
    rows = {row["strategy"]: row for row in printed["table 1"]["rows"]}
    chips = math.ceil(1.152e24 / (730 * SPEED))
    # H FLOP are spent on day 365: of the log of 30 days read on day 390, 25 count.
    logs = [25, *[30] * 11]
    # A chip that is drawn twice at one visit shows no more than once: the mean over the chips that hold a snapshot.
    holds = [-math.expm1(-0.1 * days) for days in logs]
    missed = math.prod(
        math.fsum(
            math.comb(chips, k) * each**k * (1 - each) ** (chips - k) * (1 - k / 1000) ** 11 for k in range(chips + 1)
        )
        for each in holds
    )
    assert rows["as planned"]["predicted"] == pytest.approx(1 - missed)


def visit_missed(chips: int, holding: float, draws: int, refusals: float, allowed: int) -> float:
    """One visit sees nothing: no shown chip holds evidence, no more than ``allowed`` are not shown."""
    return within(draws, allowed, holding / chips, refusals)
