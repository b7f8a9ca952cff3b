"""Evidence beyond chips in a campaign: closed form, both engines, and what a scenario file says of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binomtest

from inspector.campaign import Scenario, ScenarioError, load_scenario, predict, simulate_agents, simulate_counts

TEXT = """
title = "t"
days = 120
[rule]
threshold_flop = 1e22
evidence = "whole-run"
[inspection]
period_days = 30
samples = 4
snapshot_rate = 0.1
evidence_false_alarms = 0.05
aggregates = 0.4
searches = true
search_chips = 5
[detection]
assumed = { undeclared-run = 1.0, undeclared-chips = 0.5 }
[[evidence]]
name = "meter"
group = "g"
detection = 0.9
evaded = 0.4
false_alarm = 0.03
[[evidence]]
name = "taps"
group = "g"
detection = 0.7
evaded = 0.2
false_alarm = 0.02
[[evidence]]
name = "satellites"
found_per_year = 2
at_megawatts = 0.02
concealed = 0.5
false_alarm = 0.01
[[evidence]]
name = "books"
error_chips = 20
explained = 0.5
false_alarm = 0.02
[dependence]
g = 0.5
[[kind]]
name = "k"
flop_per_second = 1.1574074074074074e13
watts = 1000
[[lab]]
name = "L"
site = [
    { name = "hall", chips = [{ kind = "k", count = 200 }, { kind = "k", count = 20, status = "lost" }] },
    { name = "cave", declared = false, age_days = 90, chips = [{ kind = "k", count = 40, status = "undeclared" }] },
]
[[lab]]
name = "M"
site = [{ name = "far", chips = [{ kind = "k", count = 100 }] }]
[[run]]
name = "r"
lab = "L"
flop = 1.2e22
days = 120
[[strategy]]
name = "declared"
[[strategy]]
name = "evading"
evades = ["meter", "satellites"]
[[strategy]]
name = "cave"
policies = [{ policy = "divert", status = "undeclared", share = "stock" }]
[[strategy]]
name = "lost"
policies = [{ policy = "divert", status = "lost", share = "stock" }]
[[strategy]]
name = "split"
policies = [{ policy = "split", labs = ["M"] }]
evades = "all"
"""


def scenario(folder: Path, *changes: tuple[str, str]) -> Scenario:
    text = TEXT
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    (folder / "s.toml").write_text(text)
    return load_scenario(folder / "s.toml")


def test_engines_and_closed_form_agree(tmp_path: Path) -> None:
    """Six worlds and two engines: each interval at 1e-3/12."""
    loaded = scenario(tmp_path, ("period_days = 30", "period_days = 30\nloss_alarm = 0.01\nloss_rate_per_year = 0.01"))
    rng = np.random.default_rng(11)
    for plan in [loaded.honest(), *(loaded.plan(each) for each in loaded.strategies)]:
        exact = predict(plan).detection
        assert exact is not None
        for simulate, trials in ((simulate_counts, 20_000), (simulate_agents, 2_000)):
            caught = int(simulate(plan, trials, rng).caught.sum())
            low, high = binomtest(caught, trials).proportion_ci(1 - 1e-3 / 12)
            assert low <= exact <= high, (plan.name, simulate.__name__)


def test_evidence_misses_apart_from_inspections_and_counts_as_a_false_alarm(tmp_path: Path) -> None:
    loaded = scenario(tmp_path)
    without = scenario(tmp_path, ("evidence_false_alarms = 0.05", "evidence = []"))
    for strategy, bare in zip(loaded.strategies[1:4], without.strategies[1:4], strict=True):
        plan = loaded.plan(strategy)
        assert plan.weighing is not None
        missed = predict(without.plan(bare)).detection
        both = predict(plan).detection
        assert missed is not None
        assert both == pytest.approx(1 - (1 - missed) * (1 - plan.weighing.probability()), rel=1e-9)
    assert 0 < loaded.false_alarm() <= 0.05
    assert without.false_alarm() == 0


def test_stock_and_site_are_seen_by_their_size(tmp_path: Path) -> None:
    def detection(count: int, age: int = 90) -> dict[str, float]:
        changes = (("count = 40, status", f"count = {count}, status"), ("age_days = 90", f"age_days = {age}"))
        loaded = scenario(tmp_path, *changes)
        return {
            each.name: each.detection for each in loaded.observations.of(loaded.plan(loaded.strategies[2]).target).each
        }

    few, some, many = (detection(count) for count in (40, 80, 160))
    assert few["books"] < some["books"] < many["books"]
    # The run needs 100 chips. Of more the rest stands idle: books see it, and a satellite sees a tenth of its power.
    most = detection(320)["satellites"]
    assert few["satellites"] < some["satellites"] < many["satellites"] < most
    assert most - many["satellites"] < many["satellites"] - some["satellites"]
    assert detection(40, age=0)["satellites"] < few["satellites"] < detection(40, age=900)["satellites"]


def test_a_search_finds_many_hidden_chips_sooner_than_few(tmp_path: Path) -> None:
    loaded = scenario(tmp_path)
    (search,) = loaded.plan(loaded.strategies[3]).searches
    assert search.catch == pytest.approx(1 - (1 - 0.5 * 20 / 220) ** 5)
    (more,) = (
        scenario(tmp_path, ('count = 20, status = "lost"', 'count = 100, status = "lost"'))
        .plan(loaded.strategies[3])
        .searches
    )
    assert more.catch > search.catch
    (plain,) = scenario(tmp_path, ("search_chips = 5", "")).plan(loaded.strategies[3]).searches
    assert plain.catch == 0.5


def test_parts_below_the_threshold_show_only_where_labs_are_aggregated(tmp_path: Path) -> None:
    loaded = scenario(tmp_path)
    split = loaded.plan(loaded.strategies[4])
    # 120 FLOP over 300 chips: 80 with the one lab, 40 with the other.
    assert {stratum.catch_snapshot for stratum in split.strata} == {0.4}
    alone = scenario(tmp_path, ("aggregates = 0.4", "")).plan(loaded.strategies[4])
    assert {stratum.catch_snapshot for stratum in alone.strata} == {0.0}
    with pytest.raises(ScenarioError, match=r"labs: .* the part of 'L' is 8e\+21 FLOP, above the threshold of 5e\+21"):
        scenario(tmp_path, ("threshold_flop = 1e22", "threshold_flop = 5e21"))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("detection = 0.9\n", "", "line 17: evidence[1]: give 'detection'"),
        (
            "evaded = 0.4",
            "evaded = 0.95",
            "line 21: evidence[1].evaded: evidence.evaded must not be above the detection",
        ),
        ("g = 0.5", "h = 0.5", "line 41: dependence.h: no [[evidence]] has the group 'h'"),
        ("[dependence]\ng = 0.5", "", "shared causes of 'g' are not stated"),
        ('evades = "all"', 'evades = "x"', "no evidence is named 'x'; known: meter, taps, satellites, books"),
        ("evidence_false_alarms = 0.05", 'evidence = ["x"]', "no evidence is named 'x'"),
        ("error_chips = 20", "error_chips = 0", "error_chips: must be between 1 and"),
        ("search_chips = 5", "search_chips = 1.5", "search_chips: must be a whole number"),
        ("watts = 1000", "watts = 0", "watts: must be between 10 and"),
        ('labs = ["M"]', 'labs = "M"', "must be a non-empty list of lab names"),
        ("found_per_year = 2", "found_per_year = -2", "must be between 0 and"),
    ],
)
def test_mistakes_about_evidence_are_named(old: str, new: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ScenarioError) as raised:
        scenario(tmp_path, (old, new))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_evasions_without_evidence_are_refused(tmp_path: Path) -> None:
    begin, end = TEXT.index("[[evidence]]"), TEXT.index("[[kind]]")
    text = (TEXT[:begin] + TEXT[end:]).replace("evidence_false_alarms = 0.05\n", "")
    (tmp_path / "s.toml").write_text(text)
    with pytest.raises(ScenarioError, match=r"evades: has no effect without \[\[evidence\]\]"):
        load_scenario(tmp_path / "s.toml")
