"""Fleet, policies and placement: what is refused, and what a strategy does to the plan."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firmware_sim.errors import CallerError
from inspector.campaign import (
    POLICIES,
    CountsWorld,
    Evidence,
    Fleet,
    Inspection,
    Kind,
    Lab,
    MissingRate,
    Plan,
    Pool,
    RateBook,
    Run,
    Sampling,
    Site,
    Status,
    Strategy,
    Threshold,
    honest_plan,
    make_plan,
    policy_from,
    predict,
    simulate_agents,
    simulate_counts,
)
from inspector.campaign.plan import Search
from inspector.campaign.reactions import Control, PauseWhenDrawn, QuitWhenDrawn, ShrinkWhenDrawn

UNIT = Kind(name="unit", flop_per_day=1.0, link_gbps=900.0)
SLOW = Kind(name="slow", flop_per_day=1.0, link_gbps=64.0)
RATES = RateBook(assumed=dict.fromkeys(("undeclared-run", "run-old-firmware", "undeclared-chips", "swap-weights"), 0.5))
REGIME: dict[str, Any] = {"period_days": 30.0, "samples": 5, "snapshot_rate": 0.1}


def lab(name: str, *pools: Pool, declared: bool = True) -> Lab:
    return Lab(name=name, sites=(Site(name="site", pools=pools, declared=declared),))


def registered(count: int) -> Pool:
    return Pool(kind=UNIT, count=count)


def plan(
    *policies: tuple[str, dict[str, Any]],
    fleet: Fleet | None = None,
    used: float = 20,
    days: float = 100,
    horizon: float = 300,
    evidence: Evidence = Evidence.WHOLE_RUN,
    threshold: float | None = None,
    rates: RateBook = RATES,
    **regime: Any,
) -> Plan:
    return make_plan(
        fleet or Fleet(labs=(lab("A", registered(100)), lab("B", registered(300)))),
        [Run(name="run", lab="A", flop=used * days, days=days)],
        Threshold(threshold_flop=threshold or used * days / 2, evidence=evidence),
        Inspection(**{**REGIME, **regime}),
        Strategy(name="s", policies=tuple(policy_from(name, p) for name, p in policies)),
        rates,
        days=horizon,
    )


NONSENSE: dict[str, tuple[Callable[[], object], str]] = {
    "no chips": (lambda: Pool(kind=UNIT, count=0), "chips.count must be at least 1"),
    "half a chip": (lambda: Pool(kind=UNIT, count=1.5), "chips.count must be a whole number"),  # type: ignore[arg-type]
    "true chips": (lambda: Pool(kind=UNIT, count=True), "chips.count must be a whole number"),
    "no speed": (lambda: Kind(name="k", flop_per_day=0), "flop_per_day must be above 0"),
    "NaN speed": (lambda: Kind(name="k", flop_per_day=math.nan), "flop_per_day must be a finite number"),
    "infinite speed": (lambda: Kind(name="k", flop_per_day=math.inf), "flop_per_day must be a finite number"),
    "no link": (lambda: Kind(name="k", flop_per_day=1, link_gbps=0), "link_gbps must be above 0"),
    "no name": (lambda: Kind(name=" ", flop_per_day=1), "kind.name must be a non-empty text"),
    "no pool": (lambda: Site(name="s", pools=()), "has no chips"),
    "no site": (lambda: Lab(name="l", sites=()), "has no site"),
    "no lab": (lambda: Fleet(labs=()), "at least one lab"),
    "twins": (lambda: Fleet(labs=(lab("A", registered(1)), lab("A", registered(1)))), "named 'A'"),
    "hidden site with registered chips": (lambda: lab("A", registered(1), declared=False), "not declared"),
    "no flop": (lambda: Run(name="r", lab="A", flop=0, days=1), "run.flop must be above 0"),
    "negative days": (lambda: Run(name="r", lab="A", flop=1, days=-1), "run.days must be above 0"),
    "negative start": (lambda: Run(name="r", lab="A", flop=1, days=1, start=-1), "run.start must be at least 0"),
    "utilisation 0": (lambda: Run(name="r", lab="A", flop=1, days=1, utilisation=0), "utilisation must be above 0"),
    "utilisation 2": (lambda: Run(name="r", lab="A", flop=1, days=1, utilisation=2), "between 0 and 1"),
    "no threshold": (lambda: Threshold(threshold_flop=0), "threshold_flop must be above 0"),
    "no period": (lambda: Inspection(**{**REGIME, "period_days": 0}), "period_days must be above 0"),
    "negative samples": (lambda: Inspection(**{**REGIME, "samples": -1}), "samples must be at least 0"),
    "negative rate": (lambda: Inspection(**{**REGIME, "snapshot_rate": -0.1}), "snapshot_rate must be at least 0"),
    "NaN rate": (lambda: Inspection(**{**REGIME, "snapshot_rate": math.nan}), "snapshot_rate must be a finite"),
    "refusal rate 2": (lambda: Inspection(**REGIME, honest_refusal_rate=2), "between 0 and 1"),
    "negative refusals": (lambda: Inspection(**REGIME, refusals_allowed=-1), "refusals_allowed must be at least 0"),
    "alarm 1": (lambda: Inspection(**REGIME, loss_alarm=1.0), "strictly between 0 and 1"),
    "alarm 0": (lambda: Inspection(**REGIME, loss_alarm=0.0), "strictly between 0 and 1"),
    "negative capacity": (lambda: Inspection(**REGIME, capacity=-1), "capacity must be at least 0"),
    "negative losses": (lambda: Inspection(**REGIME, loss_rate_per_year=-1), "loss_rate_per_year must be at least 0"),
    "replacement without redraw": (
        lambda: Inspection(**REGIME, replacement=True, redraw=False),
        "needs inspection.replacement = false",
    ),
    "draw above stock": (lambda: plan(samples=401), "inspection.samples: 401 cannot be drawn from the 400 chips"),
    "never again, too many": (lambda: plan(samples=41, redraw=False), "need 410 chips, but 'world' has only 400"),
    "too few chips": (lambda: plan(used=101), r"needs 101 FLOP a day .* but the labs own only 100 \(100 chips\)"),
    "rush without chips": (lambda: plan(("rush", {"factor": 5.01})), "strategy 's', run 'run': rush.factor: needs"),
    "waves without chips": (lambda: plan(("waves", {"groups": 6})), r"6 group\(s\)"),
    "ends too late": (lambda: plan(("stretch", {"factor": 4})), "end on day 400, after the horizon of 300 days"),
    "no whole period": (lambda: plan(horizon=29.0), "is shorter than one period of 30 days"),
    "NaN horizon": (lambda: plan(horizon=math.nan), "days must be above 0"),
    "unknown lab": (lambda: plan(("collude", {"labs": ["C"]})), "unknown lab 'C'; known: A, B"),
    "hide with redraw": (lambda: plan(("hide-in-inspected", {})), "needs inspection.redraw = false"),
    "share of nothing": (lambda: plan(("divert", {"status": "undeclared", "share": 0.5})), "'A' has no undeclared"),
    "no run": (
        lambda: make_plan(
            Fleet(labs=(lab("A", registered(9)),)), [], Threshold(threshold_flop=1), Inspection(**REGIME),
            Strategy(name="s"), RATES, days=30,
        ),
        "at least one run",
    ),
    "nothing registered": (
        lambda: honest_plan(
            Fleet(labs=(lab("A", Pool(kind=UNIT, count=5, status=Status.EXEMPT)),)), Inspection(**REGIME), days=30
        ),
        "no registered chip",
    ),
    "unknown policy": (lambda: policy_from("magic", {}), "unknown policy 'magic'; known: stretch"),
    "unknown parameter": (lambda: policy_from("stretch", {"factor": 2, "speed": 1}), "no parameter 'speed'"),
    "missing parameter": (lambda: policy_from("stretch", {}), "policy 'stretch' needs 'factor'"),
    "text for a number": (lambda: policy_from("stretch", {"factor": "2"}), "factor must be a finite number"),
    "stretch below 1": (lambda: policy_from("stretch", {"factor": 0.5}), "at least 1"),
    "no group": (lambda: policy_from("waves", {"groups": 0}), "at least 1"),
    "unknown status": (lambda: policy_from("divert", {"status": "gone"}), "unknown status 'gone'"),
    "divert to registered": (lambda: policy_from("divert", {"status": "registered"}), "undeclared, exempt or lost"),
    "share above 1": (lambda: policy_from("divert", {"status": "lost", "share": 1.1}), "between 0 and 1"),
    "labs as text": (lambda: policy_from("collude", {"labs": "B"}), "non-empty list"),
    "no lie": (lambda: policy_from("spoof", {"lie": ""}), "non-empty text"),
    "chain of one": (lambda: policy_from("chain", {"parts": 1}), "at least 2"),
    "two reactions": (lambda: plan(("pause-when-drawn", {}), ("quit-when-drawn", {})), "one reaction"),
    "no trial, agents": (lambda: simulate_agents(plan(), 0, None), "trials must be at least 1"),  # type: ignore[arg-type]
    "no trial, counts": (lambda: simulate_counts(plan(), 0, None), "trials must be at least 1"),  # type: ignore[arg-type]
    "urn too large": (
        lambda: CountsWorld(plan(fleet=Fleet(labs=(lab("A", registered(10**9)),))), 1),
        "the aggregated engine takes at most 999999999",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_is_the_callers_mistake(name: str) -> None:
    make, message = NONSENSE[name]
    with pytest.raises(CallerError, match=message):
        make()


@given(
    used=st.integers(1, 100),
    days=st.floats(1, 300),
    factor=st.floats(1, 20),
    speeds=st.lists(st.floats(0.1, 10), min_size=1, max_size=4),
)
def test_the_chips_of_a_plan_do_the_work_and_hardly_more(
    used: int, days: float, factor: float, speeds: list[float]
) -> None:
    pools = tuple(Pool(kind=Kind(name=str(i), flop_per_day=speed), count=200) for i, speed in enumerate(speeds))
    flop = min(speeds) * used * days
    made = make_plan(
        Fleet(labs=(lab("A", *pools),)),
        [Run(name="run", lab="A", flop=flop, days=days)],
        Threshold(threshold_flop=flop / 2),
        Inspection(**REGIME),
        Strategy(name="s", policies=(policy_from("stretch", {"factor": factor}),)),
        RATES,
        days=max(30.0, days * factor),
    )
    assert made.end == pytest.approx(days * factor)
    total = sum(speeds)
    least = flop / (days * factor) / total * len(speeds)
    assert least * (1 - 1e-9) <= made.involved <= least + len(speeds) * (1 + 1e-9)


def test_exact_division_needs_no_extra_chip() -> None:
    assert plan(used=30).involved == 30
    assert plan(("stretch", {"factor": 3}), used=30).involved == 10
    assert plan(used=0.1).involved == 1


def test_evidence_after_the_threshold_starts_when_it_is_reached() -> None:
    (stratum,) = plan(evidence=Evidence.AFTER_THRESHOLD).strata
    assert (stratum.begin, stratum.end) == (50.0, 100.0)
    (stratum,) = plan(evidence=Evidence.WHOLE_RUN).strata
    assert (stratum.begin, stratum.end) == (0.0, 100.0)


def test_a_run_at_the_threshold_leaves_no_evidence() -> None:
    made = plan(("stay-under", {"times": 1.0}))
    assert predict(made).detection == 0.0
    assert made.end == 50.0
    assert plan(threshold=2000.0).strata[0].rate == 0.0


def test_waves_follow_each_other_without_a_gap() -> None:
    strata = plan(("waves", {"groups": 4})).strata
    assert [s.count for s in strata] == [20] * 4
    assert [(s.busy_begin, s.busy_end) for s in strata] == [(0, 25), (25, 50), (50, 75), (75, 100)]


def test_hidden_chips_are_used_first_and_never_drawn() -> None:
    fleet = Fleet(labs=(lab("A", registered(100), Pool(kind=UNIT, count=15, status=Status.UNDECLARED)),))
    made = plan(("divert", {"status": "undeclared", "share": "stock"}), fleet=fleet)
    assert (made.involved, made.hidden_chips) == (5, 15)
    made = plan(("divert", {"status": "undeclared", "share": 0.25}), fleet=fleet)
    assert (made.involved, made.hidden_chips) == (15, 5)
    assert made.urns[0].chips == 100


def test_a_slow_link_costs_consumer_chips() -> None:
    """S4: 64 GB/s instead of 900; a step with 30 % communication takes 0.7 + 0.3·900/64 = 4.919 times as long."""
    fleet = Fleet(labs=(lab("A", registered(100), Pool(kind=SLOW, count=90, status=Status.EXEMPT)),))
    made = plan(("consumer", {"communication": 0.3, "share": "stock"}), fleet=fleet)
    assert made.hidden_chips == 90
    assert made.involved == math.ceil(20 - 90 / 4.91875)
    free = plan(("consumer", {"communication": 0.0}), fleet=fleet)
    assert (free.hidden_chips, free.involved) == (20, 0)


def test_only_declared_sites_are_searched() -> None:
    hidden = Pool(kind=UNIT, count=50, status=Status.UNDECLARED)
    policy = ("divert", {"status": "undeclared", "share": "stock"})
    shown = plan(policy, fleet=Fleet(labs=(lab("A", registered(100), hidden),)), searches=True)
    assert shown.searches == (Search(site="site", busy_begin=0.0, busy_end=100.0, catch=0.5),)
    bunker = Site(name="bunker", pools=(hidden,), declared=False)
    labs = (Lab(name="A", sites=(Site(name="site", pools=(registered(100),)), bunker)),)
    assert plan(policy, fleet=Fleet(labs=labs), searches=True).searches == ()
    assert plan(policy, fleet=Fleet(labs=(lab("A", registered(100), hidden),))).searches == ()


def test_colluding_labs_share_in_proportion_and_are_sampled_as_one() -> None:
    made = plan(("collude", {"labs": ["B"]}))
    assert made.involved == 20
    assert len(made.strata) == 1
    apart = plan(("collude", {"labs": ["B"]}), sampling=Sampling.PER_LAB)
    assert [s.count for s in apart.strata] == [5, 15]
    assert [u.chips for u in apart.urns] == [100, 300]


@given(samples=st.integers(0, 1000), chips=st.lists(st.integers(1, 500), min_size=1, max_size=6))
def test_samples_are_split_without_loss(samples: int, chips: list[int]) -> None:
    samples = min(samples, sum(chips))
    labs = tuple(lab(str(i), registered(count)) for i, count in enumerate(chips))
    made = honest_plan(
        Fleet(labs=labs), Inspection(**{**REGIME, "samples": samples}, sampling=Sampling.PER_LAB), days=30
    )
    assert made.samples_per_period == samples
    assert all(abs(u.samples - samples * u.chips / sum(chips)) < 1 for u in made.urns)


def test_two_runs_never_share_a_chip() -> None:
    runs = [Run(name=name, lab="A", flop=6000, days=100) for name in ("x", "y")]
    fleet = Fleet(labs=(lab("A", registered(120)),))
    made = make_plan(
        fleet, runs, Threshold(threshold_flop=100), Inspection(**REGIME), Strategy(name="s"), RATES, days=100
    )
    assert made.involved == 120
    with pytest.raises(CallerError, match="run 'y'"):
        make_plan(
            Fleet(labs=(lab("A", registered(119)),)), runs, Threshold(threshold_flop=100), Inspection(**REGIME),
            Strategy(name="s"), RATES, days=100,
        )  # fmt: skip


def test_an_unknown_rate_names_the_lie() -> None:
    with pytest.raises(MissingRate, match="for the lie 'fake-layers'"):
        plan(("spoof", {}))
    with pytest.raises(MissingRate, match="for the lie 'undeclared-run'; known: none"):
        plan(rates=RateBook())
    hidden = Pool(kind=UNIT, count=50, status=Status.UNDECLARED)
    with pytest.raises(MissingRate, match="for the lie 'undeclared-chips'"):
        plan(
            ("divert", {"status": "undeclared", "share": "stock"}),
            searches=True, rates=RateBook(assumed={"undeclared-run": 1.0}),
            fleet=Fleet(labs=(lab("A", registered(100), hidden),)),
        )  # fmt: skip


def test_policies_compose_in_any_order() -> None:
    first = plan(("stretch", {"factor": 2}), ("weight-swap", {}), ("hide-logs", {}))
    second = plan(("hide-logs", {}), ("weight-swap", {}), ("stretch", {"factor": 2}))
    assert first == second
    assert plan(("stretch", {"factor": 4}), ("rush", {"factor": 4})).strata == plan().strata


def test_capacity_caps_the_samples() -> None:
    assert plan(samples=50, capacity=7).samples_per_period == 7
    assert plan(samples=5, capacity=7).samples_per_period == 5


@given(samples=st.integers(0, 398), rate=st.floats(0, 3), allowed=st.integers(0, 3))
def test_one_sample_more_never_detects_less(samples: int, rate: float, allowed: int) -> None:
    less, more = (
        predict(plan(("waves", {"groups": 2}), samples=s, snapshot_rate=rate, refusals_allowed=allowed)).log_miss
        for s in (samples, samples + 1)
    )
    assert less is not None
    assert more is not None
    assert more <= less + 1e-9


def test_every_policy_can_be_named() -> None:
    assert set(POLICIES) == {
        "stretch", "rush", "waves", "divert", "consumer", "firmware", "hide-logs", "weight-swap", "spoof", "chain",
        "stay-under", "collude", "pause-when-drawn", "quit-when-drawn", "shrink-when-drawn", "hide-in-inspected",
        "split",
    }  # fmt: skip


def test_reactions_move_only_what_they_name() -> None:
    hits = np.array([0, 1, 2])
    control = Control.fresh(3)
    PauseWhenDrawn(periods=2).react(control, hits)
    assert control.pause.tolist() == [0, 2, 2]
    assert control.advance(30.0).tolist() == [30.0, 0.0, 0.0]
    for left in ([0, 1, 1], [0, 0, 0], [0, 0, 0]):
        PauseWhenDrawn(periods=2).react(control, np.zeros(3, np.int64))
        assert control.pause.tolist() == left
    ShrinkWhenDrawn(factor=4.0).react(control, hits)
    assert control.advance(30.0).tolist() == [30.0, 7.5, 7.5]
    control.drawn += hits
    QuitWhenDrawn(limit=2).react(control, hits)
    assert control.stopped.tolist() == [False, False, True]
    assert control.advance(30.0).tolist() == [30.0, 7.5, 0.0]
