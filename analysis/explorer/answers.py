"""What the explorer's sliders answer, in Python: the reference that its JavaScript is compared with.

One regime against one run: the registered fleet is drawn from every period, and the lab does what it can of the run
on smuggled chips, of which no draw knows. How many chips are drawn follows from Eq. 1 for a lab without any.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.random import Generator

from inspector.probability import alarms
from inspector.probability import detection as closed
from inspector.probability.hidden_sites import FindingRate, HiddenSites
from inspector.probability.planning import Evasion, Problem, VisitedSite, Visits, best_response, tolerating
from inspector.probability.timing import log_miss_by_day, time_to_detection

__all__ = ["CONTROLS", "Control", "answers", "defaults", "random_points"]

_STRETCH = 4.0
_OF_A_RUN = (
    "working", "megawatts", "chip_hours", "found", "hidden", "share", "hit", "caught", "caught_half", "median_day",
    "detection", "excess", "ratio", "posterior", "pass_posterior", "stretch",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """One slider.

    Attributes:
        name: key of the value in links, and in ``answers``.
        label: what a person reads.
        unit: of the value.
        low, high: ends of the slider.
        value: where it starts.
        log: whether equal steps are equal factors; a slider from 0 has 0 at its left end and factors beyond 1.
        whole: whether the value is a count.
    """

    name: str
    label: str
    unit: str
    low: float
    high: float
    value: float
    log: bool = False
    whole: bool = False


CONTROLS = (
    Control(name="flop", label="Compute of the run, H", unit="FLOP", low=1e22, high=1e28, value=1e25, log=True),
    Control(
        name="chips", label="Registered chips, C", unit="chips", low=100, high=1e7, value=1e5, log=True, whole=True
    ),
    Control(name="smuggled", label="Smuggled chips held", unit="chips", low=0, high=1e6, value=0, log=True, whole=True),
    Control(name="finds", label="Finds of a hidden 10 MW site", unit="a year", low=0, high=3, value=0.3),
    Control(name="age", label="Age of the hidden site", unit="days", low=0, high=3650, value=0, whole=True),
    Control(name="days", label="Length of the run, T", unit="days", low=7, high=730, value=365, whole=True),
    Control(name="period", label="Days between visits", unit="days", low=1, high=365, value=30, whole=True),
    Control(name="rate", label="Snapshots per chip and day, f", unit="a day", low=1e-3, high=10, value=0.1, log=True),
    Control(name="confidence", label="Wanted detection, p", unit="", low=0.3, high=0.999, value=0.9),
    Control(
        name="flop_per_day",
        label="Speed of a chip, a",
        unit="FLOP a day",
        low=1e18,
        high=1e21,
        value=closed.FLOP_PER_CHIP_DAY,
        log=True,
    ),
    Control(name="utilisation", label="Utilisation of chips at work (MFU)", unit="share", low=0.05, high=1, value=1),
    Control(name="refusals", label="Drawn chips that honest labs cannot show", unit="share", low=0, high=0.1, value=0),
    Control(name="cap", label="Cap on false alarms", unit="", low=1e-4, high=0.2, value=alarms.FALSE_ALARMS, log=True),
    Control(name="prior", label="Chance of a violation beforehand", unit="", low=0.001, high=0.999, value=0.1),
)


def defaults() -> dict[str, float]:
    """Return where the sliders start."""
    return {control.name: control.value for control in CONTROLS}


def answers(at: Mapping[str, float]) -> dict[str, float | None]:
    """Return what the explorer shows for a setting of its sliders.

    Returns:
        chips_needed, fits (1 where the run fits registered and smuggled chips, else 0), hidden (share of the run on
        smuggled chips), working (smuggled chips at work), megawatts and chip_hours (of the one site that holds them),
        found (that site, by the end of the run; the rate of finding grows with the root of its power), share (b, of the
        registered fleet), hit (a drawn chip incriminates), per_period (Eq. 1), per_year, inspectors, draws (whole chips
        drawn at a visit), caught (no chip is refused), caught_half (by half of the run), median_day (first visit by
        which half are caught; None if never), tolerated (refusals), detection and false_alarm of the regime with them,
        excess, ratio (None where no honest lab is accused), posterior and pass_posterior (None where no one gets that
        verdict), stretch (detection of a run four times as long on a quarter of the chips, App. C.1, the smuggled ones
        first; None where it fills the fleet). Of a run that does not fit, all that needs one is None.
    """
    work = {"flop": at["flop"], "days": at["days"], "flop_per_day": at["flop_per_day"] * at["utilisation"]}
    scheme = {name: at[name] for name in ("period", "rate")}
    needed = float(closed.chips_needed(**work))
    fits = needed <= (at["chips"] + at["smuggled"]) * (1.0 + closed.SHARE_SLACK)
    hidden = min(1.0, at["smuggled"] / needed)
    share = min(1.0, needed * (1.0 - hidden) / at["chips"])
    declared = min(1.0, needed / at["chips"])
    # Of a run that the registered chips alone could not do, Eq. 1 is asked as if it filled them.
    fleet = max(at["chips"], needed)
    per_period = float(closed.samples_needed(**work, **scheme, chips=fleet, confidence=at["confidence"]))
    per_year = float(closed.samples_per_year(per_period=per_period, period=at["period"]))
    draws = int(min(max(1, math.ceil(per_period)), at["chips"]))
    seen = {"share": share, "samples": draws, "days": at["days"], **scheme}
    median = time_to_detection(**seen).quantile(0.5)
    accused = _with_refusals(at, hidden, draws, fits)
    found: dict[str, float | None] = {
        "chips_needed": needed,
        "fits": float(fits),
        "hidden": hidden,
        **_site(at, needed),
        "share": share,
        "hit": share * float(closed.snapshot_probability(rate=at["rate"], days=at["period"])),
        "per_period": per_period,
        "per_year": per_year,
        "inspectors": float(math.ceil(per_year / closed.CHIPS_PER_INSPECTOR)),
        "draws": float(draws),
        "caught": float(closed.detection(log_miss_by_day(np.inf, **seen))),
        "caught_half": float(closed.detection(log_miss_by_day(at["days"] / 2.0, **seen))),
        "median_day": median if math.isfinite(median) else None,
        **accused,
        **_verdicts(at["prior"], accused["detection"], accused["false_alarm"]),
        "stretch": None if declared >= 1 else _stretched(declared, at["smuggled"] / at["chips"], at["confidence"]),
    }
    return found if fits else found | dict.fromkeys(_OF_A_RUN)


def _stretched(declared: float, smuggled: float, confidence: float) -> float:
    """Return p_d(k) of App. C.1 of what a stretched run leaves to registered chips, draws as for the whole of it."""
    left = max(0.0, declared / _STRETCH - smuggled)
    return -math.expm1(_STRETCH * math.log1p(-left) / math.log1p(-declared) * math.log1p(-confidence)) + 0.0


def _hidden(at: Mapping[str, float], needed: float) -> HiddenSites:
    """Return the one hidden site: its chips do what they can of a run that needs so many."""
    working = min(at["smuggled"], float(math.ceil(needed * (1 - 1e-12))))
    same = {name: at[name] for name in ("days", "age", "utilisation", "flop_per_day")}
    return HiddenSites(held=at["smuggled"], working=working, **same)  # type: ignore[arg-type]


def _with_refusals(at: Mapping[str, float], hidden: float, draws: int, fits: bool) -> dict[str, float]:
    """Return the refusals to tolerate, the least detection with them, and how often an honest lab is accused."""
    speed = at["flop_per_day"] * at["utilisation"]
    visible = 1.0 - hidden if fits else at["chips"] / (at["chips"] + at["smuggled"])
    evasions = tuple(Evasion(name=str(refuses), visible=visible, refuses=refuses) for refuses in (False, True))
    problem = Problem(
        # A run that does not fit is asked about as far as it does.
        flop=at["flop"] if fits else (at["chips"] + at["smuggled"]) * at["days"] * speed,
        sites=(VisitedSite(name="all", chips=at["chips"]),),
        evasions=evasions,
        periods=(at["period"],),
        days=at["days"],
        rate=at["rate"],
        confidence=at["confidence"],
        flop_per_day=speed,
        honest_refusal_rate=at["refusals"],
        false_alarms=at["cap"],
    )
    visits = tolerating(problem, [Visits(site="all", period=at["period"], samples=draws)])
    found = [best_response(problem, visits, each) for each in evasions]
    return {
        "tolerated": float(visits[0].refusals_allowed),
        "detection": min(each.detection for each in found),
        "false_alarm": max(each.false_alarm for each in found),
    }


def _finite(value: object) -> float | None:
    number = float(np.asarray(value))
    return number if math.isfinite(number) else None


def random_points(number: int, rng: Generator) -> list[dict[str, float]]:
    """Return settings spread over the sliders, where the run fits the chips that there are.

    A slider that may be 0 is 0 in a third of them.
    """
    points: list[dict[str, float]] = []
    while len(points) < number:
        at = {control.name: _drawn(control, rng) for control in CONTROLS}
        needed = at["flop"] / at["days"] / (at["flop_per_day"] * at["utilisation"])
        if 1e-3 < needed <= at["chips"] + at["smuggled"]:
            points.append(at)
    return points


def _drawn(control: Control, rng: Generator) -> float:
    if control.low == 0 and rng.random() < 1 / 3:
        return 0.0
    low = max(control.low, 1.0) if control.log and control.low == 0 else control.low
    if control.log:
        value = float(np.exp(rng.uniform(np.log(low), np.log(control.high))))
    else:
        value = float(rng.uniform(low, control.high))
    return float(round(value)) if control.whole else value


def _site(at: Mapping[str, float], needed: float) -> dict[str, float]:
    """The one site that holds the smuggled chips."""
    there = _hidden(at, needed)
    found = FindingRate(per_year=at["finds"]).found(there)
    return {"working": there.working, "megawatts": there.megawatts, "chip_hours": there.chip_hours, "found": found}


def _verdicts(prior: float, detection: float, false_alarm: float) -> dict[str, float | None]:
    """What an accusation and a pass say."""
    chance = partial(alarms.posterior, prior=prior, detection=detection, false_alarm=false_alarm)
    return {
        "excess": detection - false_alarm,
        "ratio": _finite(alarms.likelihood_ratio(detection=detection, false_alarm=false_alarm)),
        "posterior": _finite(chance()),
        "pass_posterior": _finite(chance(accused=False)),
    }
