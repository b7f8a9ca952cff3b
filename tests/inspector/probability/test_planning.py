"""The plan holds against every placement and evasion, and is as cheap as exhaustive search says."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import scipy.optimize

from firmware_sim.errors import CallerError, DeviceError
from inspector.probability import detection as closed
from inspector.probability.planning import (
    AS_DECLARED,
    Evasion,
    Problem,
    VisitedSite,
    Visits,
    best_response,
    cheapest_plan,
    sensitivity,
)
from inspector.probability.sites import sites_log_miss

PALM = 2.56e24
EVASIONS = (
    AS_DECLARED,
    Evasion(name="longer", stretch=4),
    Evasion(name="shorter", stretch=0.25),
    Evasion(name="hidden", visible=0.7),
    Evasion(name="tampered", readout=0.8),
)


def problem(*sites: tuple[str, float, float], **changes: Any) -> Problem:
    places = tuple(VisitedSite(name=name, chips=chips, visit_work=work) for name, chips, work in sites)
    given: dict[str, Any] = {"flop": PALM, "sites": places}
    return Problem(**(given | changes))


def test_one_site_one_period_is_eq_1() -> None:
    plan = cheapest_plan(problem(("all", 1e5, 0), periods=(30.0,)))
    exact = float(closed.samples_needed(flop=PALM, chips=1e5, period=30))
    assert plan.visits == (Visits(site="all", period=30.0, samples=math.ceil(exact)),)
    assert plan.lower_bound == plan.work == pytest.approx(math.ceil(exact) * 365 / 30)
    assert plan.detection >= 0.9


def test_whole_plan_is_consistent(capfd: pytest.CaptureFixture[str]) -> None:
    given = problem(("a", 1e5, 10), ("b", 3e4, 100), ("c", 1e3, 5), evasions=EVASIONS)
    plan = cheapest_plan(given)
    assert capfd.readouterr().out == ""
    work = sum(v.per_year * (s.visit_work + v.samples) for s, v in zip(given.sites, plan.visits, strict=True))
    assert plan.work == pytest.approx(work)
    assert plan.lower_bound <= plan.work <= plan.lower_bound * 1.005
    assert plan.inspectors == math.ceil(work / 1000)
    assert plan.samples_per_year == math.ceil(sum(v.per_year * v.samples for v in plan.visits))
    assert plan.responses[0].evasion == "hidden"
    assert sorted(r.evasion for r in plan.responses) == sorted(e.name for e in EVASIONS)
    assert plan.detection == min(r.detection for r in plan.responses) >= 0.9
    assert plan.impossible == ()


def test_no_random_placement_beats_the_plan() -> None:
    """2,000 placements (numpy PCG64, seed 20261120), every one of them caught with the confidence; none may escape."""
    given = problem(("a", 1e5, 10), ("b", 3e4, 100), ("c", 1e3, 5))
    plan = cheapest_plan(given)
    chips = np.array([site.chips for site in given.sites])
    total = float(closed.chips_needed(flop=PALM, days=365))
    rng = np.random.default_rng(20261120)
    used = np.minimum(rng.dirichlet([0.5, 0.5, 0.5], size=2000) * total, chips)
    samples = [each.samples * max(1.0, 365 / each.period) for each in plan.visits]
    catch = [closed.snapshot_probability(rate=0.1, days=min(365.0, each.period)) for each in plan.visits]
    caught = closed.detection(sites_log_miss(used=used, chips=chips, samples=samples, catch=catch))
    assert (caught >= 0.9 - 1e-12).all()


def test_cheaper_schedules_do_not_hold() -> None:
    """Every schedule over two small sites, two periods each: the cheapest that holds costs what the plan does."""
    sites = (("a", 24.0, 3.0), ("b", 15.0, 8.0))
    given = problem(*sites, flop=5 * closed.FLOP_PER_CHIP_DAY * 365, periods=(90.0, 365.0), confidence=0.7)
    plan = cheapest_plan(given, gap=0.0)
    choices = [
        [Visits(site=name, period=365.0, samples=0)]
        + [
            Visits(site=name, period=period, samples=samples)
            for period in given.periods
            for samples in range(1, int(chips) + 1)
        ]
        for name, chips, _ in sites
    ]

    def work(schedule: tuple[Visits, ...]) -> float:
        return sum(v.per_year * (s[2] + v.samples) for s, v in zip(sites, schedule, strict=True))

    for schedule in sorted(itertools.product(*choices), key=work):
        if best_response(given, schedule, AS_DECLARED).detection >= 0.7:
            break
    assert plan.detection >= 0.7
    assert work(schedule) <= plan.work + 1e-9
    assert plan.lower_bound <= work(schedule) + 1e-6
    assert plan.work <= work(schedule) + 1.0 + 1e-9


@pytest.mark.parametrize("rate", [0.001, 0.1, 10.0])
@pytest.mark.parametrize("evasion", EVASIONS, ids=lambda each: each.name)
def test_a_longer_period_is_never_dearer(rate: float, evasion: Evasion) -> None:
    bounds = [
        cheapest_plan(problem(("a", 1e6, 10), rate=rate, periods=(period,), evasions=(evasion,))).lower_bound
        for period in (7.0, 30.0, 90.0, 365.0)
    ]
    assert all(late <= early * (1 + 1e-3) for early, late in itertools.pairwise(bounds))


def test_a_site_with_too_few_chips_is_visited_more_often() -> None:
    """One chip of 100 for a year takes 230 samples: one visit draws 100 at most, two visits 101 (365/180 of them)."""
    given = problem(("a", 100, 10), flop=closed.FLOP_PER_CHIP_DAY * 365, periods=(45.0, 90.0, 180.0, 365.0))
    plan = cheapest_plan(given)
    assert plan.visits[0].period == 90
    assert plan.visits[0].samples == math.ceil(float(closed.log_miss(hit=0.9, samples=1)) / math.log(0.99) * 90 / 365)


def test_unreachable_site_is_not_sampled() -> None:
    given = problem(("a", 1e5, 10), ("b", 1e5, 10), evasions=(Evasion(name="only a", sites=("a",)),))
    assert [each.samples > 0 for each in cheapest_plan(given).visits] == [True, False]


def test_best_response_goes_where_nobody_looks() -> None:
    given = problem(("a", 1e5, 10), ("b", 1e5, 10))
    visits = [Visits(site="a", period=30.0, samples=300), Visits(site="b", period=30.0, samples=0)]
    response = best_response(given, visits, AS_DECLARED)
    assert response.detection == 0
    assert response.placement[0] == 0
    with pytest.raises(CallerError, match="one line for each site"):
        best_response(given, visits[:1], AS_DECLARED)
    with pytest.raises(closed.ChipsTooFewError, match="evasion 'rush' needs more chips"):
        best_response(given, visits, Evasion(name="rush", stretch=1e-4))
    with pytest.raises(CallerError, match="samples of site 'a' must be at least 0"):
        Visits(site="a", period=30.0, samples=-1)
    with pytest.raises(CallerError, match="period of site 'a' must be above 0"):
        Visits(site="a", period=0.0, samples=1)


def test_impossible_evasions_are_named() -> None:
    given = problem(("a", 100, 10), evasions=(AS_DECLARED, Evasion(name="rush", stretch=0.1)))
    assert cheapest_plan(given).impossible == ("rush",)
    with pytest.raises(closed.ChipsTooFewError, match="under every evasion"):
        cheapest_plan(dataclasses.replace(given, evasions=(Evasion(name="rush", stretch=0.1),)))


def test_out_of_reach_is_said() -> None:
    with pytest.raises(CallerError, match=r"no schedule reaches 0\.9: examining every chip every 7 days"):
        cheapest_plan(problem(("a", 100, 10), rate=1e-6))
    with pytest.raises(CallerError, match="no schedule reaches"):
        cheapest_plan(problem(("a", 1e5, 10), evasions=(Evasion(name="all hidden", visible=0),)))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"sites": ()}, "at least one site"),
        ({"evasions": ()}, "at least one evasion"),
        ({"evasions": (AS_DECLARED, AS_DECLARED)}, "evasion names must be unique"),
        ({"evasions": (Evasion(name="x", sites=("nowhere",)),)}, "names a site that is not in the plan"),
        ({"confidence": 1.0}, "confidence must be above 0 and below 1"),
        ({"confidence": 0.0}, "confidence must be above 0 and below 1"),
        ({"rate": 0.0}, "rate must be above 0"),
        ({"periods": (0.0,)}, "periods must be above 0"),
        ({"periods": ()}, "periods"),
        ({"flop": math.nan}, "flop must be a finite number"),
    ],
)
def test_nonsense(change: dict[str, object], text: str) -> None:
    with pytest.raises(CallerError, match=text):
        problem(("a", 1e5, 10), **change)
    with pytest.raises(CallerError, match="chips of site 'a' must be at least 1"):
        VisitedSite(name="a", chips=0)


def test_too_many_sites_are_refused() -> None:
    with pytest.raises(CallerError, match="201 sites are more than 200: merge the small ones"):
        problem(*((f"site {number}", 1e5, 10) for number in range(201)))


def test_a_solver_that_gives_up_is_a_broken_device(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = scipy.optimize.OptimizeResult(x=None, message="out of memory")
    monkeypatch.setattr(scipy.optimize, "linprog", lambda *_, **__: answer)
    with pytest.raises(DeviceError, match="the solver found no schedule: out of memory"):
        cheapest_plan(problem(("a", 1e5, 10), ("b", 1e5, 10)))


def test_sensitivity_ranks_by_elasticity() -> None:
    def answer(at: Mapping[str, float]) -> float:
        if at["limited"] > 15:
            raise CallerError("too much")
        return at["square"] ** 2 / at["inverse"] * at["nothing"] ** 0 * at["limited"] ** 0.5

    rows = sensitivity(answer, {"nothing": 4.0, "inverse": 2.0, "square": 3.0, "limited": 10.0})
    assert [row.parameter for row in rows] == ["square", "inverse", "limited", "nothing"]
    assert [row.elasticity for row in rows] == pytest.approx([2, -1, 0.5, 0])
    assert (rows[0].lower, rows[0].higher) == (0.25, 4)
    assert math.isnan(rows[2].higher)
    with pytest.raises(CallerError, match="factor must be above 1"):
        sensitivity(answer, {"square": 1.0}, factor=1.0)
