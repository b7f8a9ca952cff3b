"""Alarms weighed together: by hand, by brute force, by simulation; hidden sites, books, and jobs in parts."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from scipy.stats import binomtest, norm

from firmware_sim.errors import CallerError
from inspector.probability.detection import ChipsTooFewError
from inspector.probability.evidence import AlarmSource, Sources, best_rule
from inspector.probability.hidden_sites import (
    FindingRate,
    HiddenSites,
    accounting_alarm,
    draw_linked,
    linked,
    parts_needed,
)


def source(name: str, detection: float, evaded: float, false_alarm: float, group: str = "") -> AlarmSource:
    return AlarmSource(name=name, detection=detection, evaded=evaded, false_alarm=false_alarm, group=group)


THREE = Sources(
    each=(source("a", 0.9, 0.5, 0.05, "g"), source("b", 0.8, 0.3, 0.02, "g"), source("c", 0.4, 0.2, 0.01)),
    shared={"g": 0.5},
)


def test_patterns_by_hand() -> None:
    # Of a's misses of 0.1, half are common to both; of b's false alarms of 0.02, half.
    common, a, b = 0.05, 1 - 0.05 / 0.95, 1 - 0.15 / 0.95
    violation = dict(zip(map(tuple, THREE.patterns.tolist()), THREE.violation(), strict=True))
    assert violation[False, False, False] == pytest.approx((common + 0.95 * (1 - a) * (1 - b)) * 0.6)
    assert violation[True, True, True] == pytest.approx(0.95 * a * b * 0.4)
    honest = dict(zip(map(tuple, THREE.patterns.tolist()), THREE.honest(), strict=True))
    assert honest[True, True, False] == pytest.approx((0.01 + 0.99 * 0.04 / 0.99 * 0.01 / 0.99) * 0.99)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("evading", [(), ("a",), ("all",)])
def test_each_source_keeps_the_rates_that_it_has_alone(share: float, evading: tuple[str, ...]) -> None:
    sources = Sources(each=THREE.each, shared={"g": share})
    for place, each in enumerate(sources.each):
        alarm = sources.patterns[:, place]
        wanted = each.evaded if evading == ("all",) or each.name in evading else each.detection
        assert sources.violation(evading)[alarm].sum() == pytest.approx(wanted, rel=1e-12)
        assert sources.honest()[alarm].sum() == pytest.approx(each.false_alarm, rel=1e-12)
    assert sources.violation(evading).sum() == pytest.approx(1, rel=1e-12)


def test_common_causes_make_agreeing_alarms_say_less() -> None:
    both = THREE.patterns[:, 0] & THREE.patterns[:, 1]

    def ratio(share: float) -> float:
        sources = Sources(each=THREE.each, shared={"g": share})
        return float(sources.violation()[both].sum() / sources.honest()[both].sum())

    alone = Sources(each=THREE.each, shared={"g": 0.0})
    assert ratio(0) == pytest.approx(alone.each[0].ratio(True) * alone.each[1].ratio(True))
    assert ratio(0) > ratio(0.3) > ratio(0.6) > ratio(1)


@pytest.mark.parametrize("cap", [0.0, 0.005, 0.02, 0.1])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_hardly_another_rule_within_the_cap_detects_more(cap: float, share: float) -> None:
    """Every rule over eight patterns in which an alarm more never acquits."""
    sources = Sources(each=THREE.each, shared={"g": share})
    rule = best_rule([sources], cap)
    assert rule.false_alarm <= cap
    violation, honest, places = sources.violation(("all",)), sources.honest(), np.arange(8)

    def monotone(accuses: tuple[bool, ...]) -> bool:
        return all(accuses[more] for one in range(8) if accuses[one] for more in places if more & one == one)

    assert monotone(rule.accuses)
    others = [np.array(each) for each in itertools.product((False, True), repeat=8) if not each[0] and monotone(each)]
    best = max(violation[each].sum() for each in others if honest[each].sum() <= cap)
    assert rule.detection(sources, ("all",)) >= 0.95 * best


def test_an_evasion_more_never_helps_the_inspector() -> None:
    rule = best_rule([THREE], 0.05)
    caught = [rule.worst(THREE, number)[0] for number in range(4)]
    assert caught == sorted(caught, reverse=True)
    assert caught[0] == rule.detection(THREE)
    assert caught[3] == rule.detection(THREE, ("all",))


@pytest.mark.parametrize("evading", [None, (), ("b", "c")])
def test_drawn_alarms_agree_with_the_closed_form(evading: tuple[str, ...] | None) -> None:
    """Eight patterns and the rule, 30,000 trials: each interval at 1e-3/27, all of them err with 1e-3 at most."""
    alarms = THREE.draw(30_000, np.random.default_rng(5), evading=evading)
    exact = THREE.honest() if evading is None else THREE.violation(evading)
    rule = best_rule([THREE], 0.05)
    for pattern, chance in zip(THREE.patterns, exact, strict=True):
        seen = int((alarms == pattern).all(axis=1).sum())
        low, high = binomtest(seen, 30_000).proportion_ci(1 - 1e-3 / 27)
        assert low <= chance <= high
    low, high = binomtest(int(rule.accused(alarms).sum()), 30_000).proportion_ci(1 - 1e-3 / 27)
    assert low <= (rule.false_alarm if evading is None else rule.detection(THREE, evading)) <= high


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: source("a", 0.5, 0.6, 0), "evasion would raise detection to 0.6"),
        (lambda: source("a", 1.5, 0.6, 0), "at most 1, not 1.5"),
        (lambda: Sources(each=(), shared={}), "no evidence to weigh"),
        (lambda: Sources(each=THREE.each, shared={}), "shared causes of 'g' are not stated"),
        (lambda: Sources(each=THREE.each, shared={"g": 0.5, "h": 0.1}), "no evidence belongs to the group 'h'"),
        (lambda: Sources(each=(THREE.each[2],) * 2, shared={}), "must be unique"),
        (lambda: THREE.among(("x",)), "no evidence is named 'x'; known: a, b, c"),
        (lambda: best_rule([], 0.1), "no violation for which evidence could be weighed"),
        (lambda: best_rule([THREE, Sources(each=THREE.each[2:], shared={})], 0.1), "the same evidence"),
    ],
)
def test_nonsense_about_evidence_is_refused(make, message: str) -> None:
    with pytest.raises(CallerError, match=message):
        make()


def test_a_source_that_is_silent_without_a_violation_convicts_and_its_silence_acquits_a_little() -> None:
    tip = source("tip", 0.2, 0.1, 0.0)
    assert tip.ratio(True) == math.inf
    assert tip.ratio(False) == pytest.approx(0.8)
    alone = Sources(each=(tip,), shared={})
    assert best_rule([alone], 0.0).detection(alone) == pytest.approx(0.2)


def test_a_site_is_found_the_sooner_the_larger_the_older() -> None:
    finding = FindingRate(per_year=0.5, reference=10, exponent=0.7, least=1)

    def found(chips: float, days: float = 365, concealed: float = 0.0, **more: float) -> float:
        about: dict[str, float] = {"held": chips, "working": chips, "watts": 1_000, **more}
        return finding.found(HiddenSites(days=days, **about), concealed=concealed)  # type: ignore[arg-type]

    assert found(1e4) == pytest.approx(1 - math.exp(-0.5))
    assert found(4e4) > found(1e4) > found(2e3) > 0
    assert found(1e4, 100, age=265, idle=1) == pytest.approx(found(1e4))
    assert found(1e4, 100, age=265, idle=0.05) == found(1e4, 100)  # 0.5 MW while it stood, below the least
    assert found(900) == 0
    assert found(2e4, concealed=0.5) == pytest.approx(found(1e4))
    assert found(1e5, working=0, idle=0.1) == pytest.approx(found(1e4))
    # Below an exponent of 1 it does not help to spread the same power, but for sites below the least.
    assert found(1e4, sites=5) > found(1e4)
    assert found(1e4, sites=11) == 0


def test_a_run_takes_whole_chips_as_many_at_each_site() -> None:
    speed: dict[str, Any] = {"days": 100.0, "flop_per_day": 1e20, "utilisation": 0.4}
    there = HiddenSites.doing(9.5e22, sites=4, held=100.0, watts=1_000, idle=0.2, **speed)
    assert (there.working, there.held) == (24, 100)
    assert (there.megawatts_working, there.megawatts_before) == pytest.approx((0.024, 0.02))
    assert there.megawatts == pytest.approx(0.024 + 0.076 * 0.2)
    assert there.chip_hours == 24 * 2_400
    assert there.flop == pytest.approx(24 * 100 * 0.4e20)
    assert HiddenSites.doing(9.5e22, sites=7, **speed).held == 28
    assert HiddenSites.doing(9.5e22, sites=7, held=24.0, **speed).working == 24
    with pytest.raises(ChipsTooFewError, match="24 chips are to work, but only 23 are held"):
        HiddenSites.doing(9.5e22, held=23.0, **speed)
    with pytest.raises(CallerError, match="sites"):
        HiddenSites.doing(9.5e22, sites=0, **speed)


def test_books_notice_what_exceeds_their_error() -> None:
    assert accounting_alarm(missing=0, error=1e4, false_alarm=0.01) == pytest.approx(0.01)
    chance = accounting_alarm(missing=[1e3, 1e4, 1e5], error=1e4, false_alarm=0.01)
    assert chance == pytest.approx(norm.sf(norm.isf(0.01) - np.array([0.1, 1, 10])))


def test_nodes_below_a_threshold_that_do_the_public_example() -> None:
    h100: dict[str, Any] = {"flop_per_day": 989e12 * 86_400, "chips": 16, "utilisation": 0.4 * 0.67}
    assert parts_needed(flop=1e25, days=547.5, **h100) == 50
    assert parts_needed(flop=1e20, days=547.5, **h100) == 1
    with pytest.raises(CallerError, match="too many"):
        parts_needed(flop=1e300, days=1, **h100)


def test_a_job_in_parts_shows_to_who_compares() -> None:
    # Two nodes, three draws, by hand: both seen unless all hits fall on one.
    hit = 0.2
    both = sum(
        math.comb(3, one) * math.comb(3 - one, other) * hit ** (one + other) * 0.6 ** (3 - one - other)
        for one in (1, 2)
        for other in range(1, 4 - one)
    )
    assert linked(nodes=2, hit=hit, draws=3, recognised=1) == pytest.approx(both)
    assert linked(nodes=2, hit=hit, draws=3, recognised=0) == 0
    assert linked(nodes=1, hit=hit, draws=300, recognised=1) == 0
    assert linked(nodes=5, hit=0.0, draws=0, recognised=1) == 0
    with pytest.raises(CallerError, match="cannot exceed 1"):
        linked(nodes=6, hit=hit, draws=3, recognised=1)


@pytest.mark.parametrize(("nodes", "hit", "draws"), [(2, 0.1, 8), (50, 1.5e-4, 540), (20, 0.05, 3)])
def test_drawn_parts_agree_with_the_closed_form(nodes: int, hit: float, draws: int) -> None:
    """Intervals at 1e-3/3."""
    about = {"nodes": nodes, "hit": hit, "draws": draws, "recognised": 0.6}
    seen = int(draw_linked(**about, trials=20_000, rng=np.random.default_rng(3)).sum())  # type: ignore[arg-type]
    low, high = binomtest(seen, 20_000).proportion_ci(1 - 1e-3 / 3)
    assert low <= linked(**about) <= high
