"""Plans under a cap on false alarms: hand sums, brute force over samples, and random placements."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from firmware_sim.errors import CallerError
from inspector.probability.detection import FLOP_PER_CHIP_DAY, OutOfReachError
from inspector.probability.planning import (
    AS_DECLARED,
    Evasion,
    Problem,
    VisitedSite,
    Visits,
    best_response,
    cheapest_plan,
    false_alarm,
    holding_inputs,
    pooled_plan,
)

REFUSE = Evasion(name="refuse", refuses=True)


def passes(visit: Visits, broken: float, evident: float, *, refuses: bool) -> float:
    """P(one visit accuses nobody) by the multinomial sum over chips not shown; ``evident`` would be seen if shown."""
    total = 0.0
    for missing in range(min(visit.refusals_allowed, visit.samples) + 1):
        innocent = broken + (1 - broken) * evident if refuses else broken
        clean = (1 - broken) * (1 - evident)
        total += math.comb(visit.samples, missing) * innocent**missing * clean ** (visit.samples - missing)
    return total


def problem(*chips: float, used: float = 500.0, **changes: object) -> Problem:
    sites = tuple(VisitedSite(name=f"site {number}", chips=count) for number, count in enumerate(chips))
    values = {"flop": used * FLOP_PER_CHIP_DAY * 365, "sites": sites, "honest_refusal_rate": 0.02} | changes
    return Problem(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize("evasion", [AS_DECLARED, REFUSE], ids=lambda each: each.name)
@pytest.mark.parametrize("allowed", [0, 1, 4])
def test_one_site_by_hand(evasion: Evasion, allowed: int) -> None:
    given = problem(10_000, rate=0.05)
    visit = Visits(site="site 0", period=73.0, samples=60, refusals_allowed=allowed)
    response = best_response(given, [visit], evasion)
    evident = 500 / 10_000 * -math.expm1(-0.05 * 73)
    assert response.detection == pytest.approx(1 - passes(visit, 0.02, evident, refuses=evasion.refuses) ** 5, rel=1e-9)
    assert response.false_alarm == pytest.approx(1 - passes(visit, 0.02, 0.0, refuses=False) ** 5, rel=1e-9)
    assert response.excess == response.detection - response.false_alarm


def test_false_alarms_of_two_sites_by_hand() -> None:
    given = problem(10_000, 500)
    visits = [
        Visits(site="site 0", period=73.0, samples=60, refusals_allowed=2),
        Visits(site="site 1", period=730.0, samples=20, refusals_allowed=1),
    ]
    first, second = (passes(each, 0.02, 0.0, refuses=False) for each in visits)
    # A run of a year meets five visits of the first site, and one of the second although it is shorter than its period.
    assert false_alarm(given, visits, 365.0) == pytest.approx(1 - first**5 * second, rel=1e-9)
    assert false_alarm(given, [Visits(site="site 0", period=73.0, samples=0), visits[1]], 365.0) == pytest.approx(
        1 - second, rel=1e-9
    )


def test_nothing_is_refused_nothing_is_tolerated() -> None:
    plan = cheapest_plan(problem(1e5, 3e4, honest_refusal_rate=0.0, evasions=(AS_DECLARED, REFUSE)))
    assert [each.refusals_allowed for each in plan.visits] == [0, 0]
    assert plan.false_alarm == 0
    assert plan.excess == plan.detection >= 0.9
    declared, refuse = sorted(plan.responses, key=lambda each: each.evasion)
    assert declared.detection == pytest.approx(refuse.detection, rel=1e-12)


@pytest.mark.parametrize("evasion", [AS_DECLARED, REFUSE], ids=lambda each: each.name)
def test_no_cheaper_number_of_samples_holds(evasion: Evasion) -> None:
    """Brute force over every number of samples at one site, each with the fewest refusals that keep the cap."""
    given = problem(5_000, periods=(365.0,), evasions=(evasion,))
    evident = 0.1 * -math.expm1(-0.1 * 365)
    for samples in range(1, 5_000):
        visit = next(
            each
            for allowed in range(samples + 1)
            if passes(
                each := Visits(site="site 0", period=365.0, samples=samples, refusals_allowed=allowed),
                0.02, 0.0, refuses=False,
            ) >= 0.99
        )  # fmt: skip
        if passes(visit, 0.02, evident, refuses=evasion.refuses) <= 0.1:
            break
    plan = cheapest_plan(given)
    # Whole tolerated refusals make the detection a saw-tooth: the search finds its first tooth.
    assert plan.visits[0].samples == visit.samples
    assert plan.false_alarm <= 0.01
    assert plan.lower_bound <= plan.work


@pytest.mark.parametrize("refusals", [1e-4, 0.01, 0.1])
@pytest.mark.parametrize("cap", [1e-4, 0.01, 0.2])
def test_plans_keep_the_cap_over_the_longest_run(refusals: float, cap: float) -> None:
    longer = Evasion(name="longer", stretch=4)
    given = problem(
        3_000, 900, 40, honest_refusal_rate=refusals, false_alarms=cap, evasions=(AS_DECLARED, longer, REFUSE)
    )
    plan = cheapest_plan(given)
    quiet = math.prod(
        passes(each, refusals, 0.0, refuses=False) ** max(1, 4 * 365 / each.period)
        for each in plan.visits
        if each.samples
    )
    assert 1 - quiet == pytest.approx(plan.false_alarm, rel=1e-6)
    assert plan.false_alarm <= cap
    assert plan.detection >= 0.9
    assert plan.excess >= 0.9 - cap
    assert all(each.excess >= plan.excess for each in plan.responses)


@pytest.mark.parametrize("refuses", [False, True])
def test_no_random_placement_beats_the_best_response(refuses: bool) -> None:
    """2,000 placements (numpy PCG64, seed 8061); the response found lies within 1e-6 of the least of all."""
    given = problem(3_000, 900, 400, used=600.0)
    visits = [
        Visits(site="site 0", period=365.0, samples=120, refusals_allowed=6),
        Visits(site="site 1", period=90.0, samples=30, refusals_allowed=2),
        Visits(site="site 2", period=180.0, samples=25, refusals_allowed=4),
    ]
    response = best_response(given, visits, Evasion(name="x", refuses=refuses))
    assert sum(response.placement) == pytest.approx(600.0, rel=1e-9)
    chips = np.array([3_000.0, 900.0, 400.0])

    def detection(used: np.ndarray) -> float:
        quiet = 1.0
        for visit, part in zip(visits, used / chips, strict=True):
            evident = part * -math.expm1(-0.1 * visit.period)
            quiet *= passes(visit, 0.02, evident, refuses=refuses) ** (365 / visit.period)
        return 1 - quiet

    assert response.detection == pytest.approx(detection(np.array(response.placement)), rel=1e-9)
    rng = np.random.default_rng(8061)
    others = [rng.dirichlet([0.5, 0.5, 0.5]) * 600 for _ in range(1_000)]
    near = [np.array(response.placement) + rng.normal(0, 5, 3) for _ in range(1_000)]
    for used in others + [each * 600 / each.sum() for each in near if (each > 0).all()]:
        if (used <= chips).all():
            assert detection(used) >= response.detection - 1e-6


def test_a_confidence_that_only_false_alarms_would_reach() -> None:
    with pytest.raises(
        OutOfReachError, match=r"no schedule found that reaches 0\.9 with false alarms of 0\.01 at most"
    ):
        cheapest_plan(problem(1e5, used=1.0, evasions=(REFUSE,)))
    with pytest.raises(OutOfReachError, match="does not catch the best evasion, 'blind'"):
        cheapest_plan(problem(1e5, evasions=(AS_DECLARED, Evasion(name="blind", readout=0.0))))
    with pytest.raises(OutOfReachError, match="where 1 of honest labs' chips cannot be shown:"):
        cheapest_plan(problem(1e5, honest_refusal_rate=1.0))


@pytest.mark.parametrize(("rate", "samples", "tolerated"), [(0.001, 2_822, 7), (0.002, 4_344, 16), (0.003, 5_670, 27)])
def test_the_cheapest_of_one_site(rate: float, samples: int, tolerated: int) -> None:
    given = Problem(
        flop=1e25,
        sites=(VisitedSite(name="all", chips=1e5),),
        honest_refusal_rate=rate,
        evasions=(AS_DECLARED, REFUSE),
    )
    plan = cheapest_plan(given)
    visit = Visits(site="all", period=365.0, samples=samples, refusals_allowed=tolerated)
    assert plan.visits == (visit,)
    assert plan.dearer == 0
    assert passes(visit, rate, 0.0, refuses=False) >= 0.99
    thirds = dataclasses.replace(given, sites=tuple(VisitedSite(name=each, chips=1e5 / 3) for each in "abc"))
    assert pooled_plan(thirds).visits[0].samples == samples


def test_what_would_make_a_schedule_hold() -> None:
    given = problem(1e5, used=50.0, evasions=(AS_DECLARED, REFUSE), periods=(365.0,))
    with pytest.raises(OutOfReachError):
        cheapest_plan(given)
    found = holding_inputs(given)
    assert {"honest_refusal_rate", "flop"} <= set(found)
    for name, value in found.items():
        change: dict[str, Any] = {name: value}
        assert pooled_plan(dataclasses.replace(given, **change)).detection >= 0.89 * (name != "confidence")
    with pytest.raises(OutOfReachError):
        cheapest_plan(dataclasses.replace(given, honest_refusal_rate=found["honest_refusal_rate"] * 1.01))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"honest_refusal_rate": 1.5}, "honest refusal rate must be at least 0 and at most 1"),
        ({"false_alarms": -0.1}, "false alarms must be at least 0 and at most 1"),
        ({"false_alarms": math.nan}, "false alarms must be a finite number"),
        (
            {"false_alarms": 0.9},
            r"a false-alarm rate of 0\.9 already reaches the wanted confidence of 0\.9, so detection would show "
            r"nothing",
        ),
    ],
)
def test_nonsense(change: dict[str, Any], text: str) -> None:
    with pytest.raises(CallerError, match=text):
        problem(1e5, **change)
    with pytest.raises(CallerError, match="tolerated chips of site 'a' that could not be shown must be at least 0"):
        Visits(site="a", period=30.0, samples=1, refusals_allowed=-1)
