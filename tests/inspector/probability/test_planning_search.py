"""Plans against exhaustive search on a few seeded problems; ``tests.measurements.planner`` measures many."""

from __future__ import annotations

import pytest

from analysis.report.tables import H100_FLOP_PER_DAY, owners_today
from inspector.probability import _allowance_search, _search
from inspector.probability.detection import OutOfReachError
from inspector.probability.planning import (
    AS_DECLARED,
    Evasion,
    Problem,
    VisitedSite,
    best_response,
    cheapest_plan,
    false_alarm,
    holding_inputs,
    pooled_plan,
)
from tests.measurements.planner import several, summary


def of_today(flop: float) -> Problem:
    return Problem(
        flop=flop,
        sites=tuple(VisitedSite(name=name, chips=chips) for name, chips in owners_today()),
        evasions=(
            Evasion(name="stretch", stretch=4.0),
            AS_DECLARED,
            Evasion(name="rush", stretch=0.25),
            Evasion(name="refuse", refuses=True),
        ),
        flop_per_day=H100_FLOP_PER_DAY,
        honest_refusal_rate=0.001,
    )


@pytest.fixture
def effort(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Count what a search tries: visits of one site, in blocks, and whole schedules."""
    tried = {"log_tolerated": 0, "best_response": 0}
    for module, name in ((_search, "log_tolerated"), (_allowance_search, "best_response")):
        original = getattr(module, name)

        def counted(*args: object, original: object = original, name: str = name, **named: object) -> object:
            tried[name] += 1
            return original(*args, **named)  # type: ignore[operator]

        monkeypatch.setattr(module, name, counted)
    return tried


def test_a_run_too_small_to_find_among_the_chips_of_today_is_answered(effort: dict[str, int]) -> None:
    problem = of_today(1e25)
    for plan in (pooled_plan, cheapest_plan):
        with pytest.raises(OutOfReachError):
            plan(problem)
    alone = holding_inputs(problem)
    assert alone["flop"] == pytest.approx(1.205e25, rel=2e-3)
    assert alone["honest_refusal_rate"] == pytest.approx(6.892e-4, rel=2e-3)
    assert effort["log_tolerated"] < 20_000
    assert effort["best_response"] < 500


def test_nine_sites_with_their_own_allowances_cost_no_more_than_in_proportion_to_chips(effort: dict[str, int]) -> None:
    problem = of_today(1e27)
    plan = cheapest_plan(problem)
    assert effort["best_response"] < 3_000
    # 35,387 is the least of the schedules with an equal part of the cap for each visit.
    assert 0 < plan.lower_bound <= plan.work < 35_387
    assert min(best_response(problem, plan.visits, each).detection for each in problem.evasions) >= 0.9
    assert false_alarm(problem, plan.visits, problem.longest) <= 0.01


def test_one_site_is_as_cheap_as_exhaustive_search() -> None:
    found = summary(several(8, sites=1, most=50, seed=1))
    assert found["dearest"] <= 1.0 + 1e-9
    assert 0.95 <= found["least_bound"] <= found["largest_bound"] <= 1.0 + 1e-9


def test_two_sites_are_as_cheap_as_exhaustive_search() -> None:
    for work, bound, least in several(3, sites=2, most=5, seed=1):
        assert work <= max(least * 1.01, least + 1.0) + 1e-9
        assert 0.8 * least <= bound <= least + 1e-6
