"""From fleet, runs and behaviour to what an engine simulates: urns to draw from and strata of involved chips.

Chips with the same window, rates and urn are exchangeable, so a stratum is a count. Plan time is measured in days of
the run's schedule; it equals world time unless a reaction slows or stops the run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from firmware_sim.errors import CallerError
from inspector.campaign._allocation import Share, allocate
from inspector.campaign.evidence import Target, Weighing
from inspector.campaign.fleet import Evidence, Fleet, Inspection, LogSpan, Run, Sampling, Site, Status, Threshold
from inspector.campaign.policies import HIDDEN_LIE, Behaviour, Strategy
from inspector.campaign.rates import IntervalEnd, RateBook
from inspector.campaign.reactions import Control, Reaction
from inspector.probability.hidden_sites import HiddenSites

__all__ = ["LossTest", "Plan", "Search", "Stratum", "Urn", "honest_plan", "make_plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stratum:
    """``count`` involved chips of one urn.

    Attributes:
        urn: index of the urn.
        begin, end: plan days between which a snapshot incriminates (empty if begin ≥ end).
        busy_begin, busy_end: plan days between which the chips work on the run.
        rate: incriminating snapshots per chip and day.
        catch_snapshot: probability that an inspection of a chip with such a snapshot ends in a REJECT.
        catch_bare: the same without one (a trace of tampered firmware), from the first day of work on.
    """

    urn: int
    count: int
    begin: float
    end: float
    busy_begin: float
    busy_end: float
    rate: float
    catch_snapshot: float
    catch_bare: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Urn:
    """A stock of registered chips and the number drawn from it in each period."""

    name: str
    chips: int
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """A declared site that hides working chips between two plan days; each search in that time finds them so often."""

    site: str
    busy_begin: float
    busy_end: float
    catch: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTest:
    """Claimed losses (honest Binomial ones plus diverted chips) above ``tolerated`` at the end are investigated."""

    chips: int
    loss: float
    diverted: int
    tolerated: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One strategy against one inspection regime, ready to simulate.

    ``lawful`` names the runs that spend the threshold or less: they break no rule, and nothing incriminates them.
    ``target`` is what the plan shows to others than chips, ``weighing`` what they make of it, if there are any.
    """

    name: str
    inspection: Inspection
    days: float
    periods: int
    urns: tuple[Urn, ...]
    strata: tuple[Stratum, ...]
    searches: tuple[Search, ...]
    loss_test: LossTest | None
    end: float
    refuse: bool
    reaction: Reaction | None
    lies: tuple[str, ...]
    hidden_chips: int
    lawful: tuple[str, ...] = ()
    target: Target = field(default_factory=Target)
    weighing: Weighing | None = None

    @property
    def involved(self) -> int:
        """Registered chips that work on the runs."""
        return sum(stratum.count for stratum in self.strata)

    @property
    def samples_per_period(self) -> int:
        """Chips drawn in a period over all urns."""
        return sum(urn.samples for urn in self.urns)


def honest_plan(fleet: Fleet, inspection: Inspection, *, days: float) -> Plan:
    """Return the plan of a world without violation; whatever is caught there is a false alarm."""
    urns, _ = _urns(fleet, inspection)
    periods = _periods(days, inspection, urns)
    return Plan(
        name="honest",
        inspection=inspection,
        days=days,
        periods=periods,
        urns=urns,
        strata=(),
        searches=(),
        loss_test=_loss_test(fleet, inspection, days, 0),
        end=0.0,
        refuse=False,
        reaction=None,
        lies=(),
        hidden_chips=0,
    )


def make_plan(
    fleet: Fleet,
    runs: Sequence[Run],
    rule: Threshold,
    inspection: Inspection,
    strategy: Strategy,
    rates: RateBook,
    *,
    days: float,
    bound: IntervalEnd = IntervalEnd.POINT,
    confidence: float = 0.95,
) -> Plan:
    """Place the runs on chips as the strategy says.

    Args:
        days: the horizon; inspections are at the end of each whole period within it.
        bound: which end of measured rates to use, each at ``confidence``.

    Raises:
        CallerError: A lab is unknown or owns too few chips, the horizon ends before a run does, or the draw is larger
            than the stock.
        MissingRate: The strategy tells a lie whose detection rate is unknown.
    """
    if not runs:
        raise CallerError("a campaign needs at least one run")
    behaviour = strategy.behaviour()
    urns, urn_of = _urns(fleet, inspection)
    periods = _periods(days, inspection, urns)
    if behaviour.reaction is not None and behaviour.reaction.hides_in_inspected and inspection.redraw:
        raise CallerError(f"strategy {strategy.name!r}: hide-in-inspected needs inspection.redraw = false")
    book = _Book(rates, bound, confidence)
    strata: list[Stratum] = []
    hidden = _HiddenChips()
    lawful: list[str] = []
    end = 0.0
    free: dict[tuple[str, str, int], int] = {}
    for run in runs:
        try:
            if run.start >= days:
                raise CallerError(f"run.start: it begins on day {run.start:g}, but the horizon ends on day {days:g}")
            placed = _place(fleet, run, rule, inspection, behaviour, free)
        except CallerError as error:
            raise CallerError(f"strategy {strategy.name!r}, run {run.name!r}: {error}") from None
        end = max(end, placed.busy_end)
        if math.isinf(placed.incriminating_from):
            lawful.append(run.name)
        for share, window in placed.shares:
            if share.pool.status is Status.REGISTERED:
                strata.append(_stratum(share, window, placed, behaviour, inspection, book, urn_of))
            else:
                hidden.add(share, window, run.utilisation, inspection, book)
    if behaviour.reaction is None and end > days * (1 + 1e-12):
        key = "stretch.factor" if behaviour.stretch > 1 else "days"
        raise CallerError(
            f"{key}: the runs of strategy {strategy.name!r} end on day {end:g}, after the horizon of {days:g} days"
        )
    return Plan(
        name=strategy.name,
        inspection=inspection,
        days=days,
        periods=periods,
        urns=urns,
        strata=_merged(strata),
        searches=_one_per_site(hidden.searches),
        loss_test=_loss_test(fleet, inspection, days, hidden.diverted),
        end=end,
        refuse=behaviour.refuse,
        reaction=behaviour.reaction,
        lies=tuple(sorted(book.used)),
        hidden_chips=hidden.count,
        lawful=tuple(lawful),
        target=Target(
            declared=any(stratum.count for stratum in strata) and len(lawful) < len(runs),
            sites=hidden.sites,
            missing=_stock(fleet, Status.UNDECLARED) if Status.UNDECLARED in hidden.statuses else 0,
        ),
    )


@dataclass(slots=True)
class _HiddenChips:
    """Chips of the runs that no draw can reach: how many, where, and which searches may find them."""

    count: int = 0
    diverted: int = 0
    statuses: set[Status] = field(default_factory=set)
    sites: dict[tuple[str, str], HiddenSites] = field(default_factory=dict)
    searches: list[Search] = field(default_factory=list)

    def add(
        self, share: Share, window: tuple[float, float], utilisation: float, inspection: Inspection, book: _Book
    ) -> None:
        """Count a share of a run's chips, at work from the window's begin to its end (days)."""
        status = share.pool.status
        self.count += share.count
        self.statuses.add(status)
        if not share.site.declared and status is not Status.EXEMPT:
            _hide(self.sites, share, window, utilisation)
        self.diverted += share.count if status is Status.LOST else 0
        if inspection.searches and share.site.declared:
            catch = _search_catch(share.site, status, inspection, book.rate(HIDDEN_LIE))
            self.searches.append(Search(site=share.site.name, busy_begin=window[0], busy_end=window[1], catch=catch))


def _hide(
    sites: dict[tuple[str, str], HiddenSites], share: Share, window: tuple[float, float], utilisation: float
) -> None:
    """Add chips at work to their undeclared site; of several kinds or runs the description has the mean."""
    key, site, kind = (share.lab.name, share.site.name), share.site, share.pool.kind
    there = sites.get(key)
    before = 0.0 if there is None else there.working
    working = before + share.count

    def mean(name: str, value: float) -> float:
        return value if there is None else (getattr(there, name) * before + value * share.count) / working

    sites[key] = HiddenSites(
        held=float(sum(pool.count for pool in site.pools if pool.status is not Status.EXEMPT)),
        working=working,
        days=max(window[1] - window[0], 0.0 if there is None else there.days),
        age=min(site.age_days + window[0], math.inf if there is None else there.age),
        sites=site.sites,
        watts=mean("watts", kind.watts),
        idle=site.idle_power,
        utilisation=mean("utilisation", utilisation),
        flop_per_day=mean("flop_per_day", kind.flop_per_day),
    )


def _search_catch(site: Site, status: Status, inspection: Inspection, rate: float) -> float:
    """Return how often a search of a site finds its chips of a status, at work or not."""
    if inspection.search_chips is None:
        return rate
    there = sum(pool.count for pool in site.pools)
    hidden = sum(pool.count for pool in site.pools if pool.status is status)
    return -math.expm1(inspection.search_chips * math.log1p(-min(rate * hidden / there, 1 - 2**-53)))


def _stock(fleet: Fleet, status: Status) -> int:
    return sum(pool.count for lab in fleet.labs for site in lab.sites for pool in site.pools if pool.status is status)


class _Book:
    """Looks rates up and remembers which lies were asked for."""

    def __init__(self, rates: RateBook, bound: IntervalEnd, confidence: float) -> None:
        self._rates, self._bound, self._confidence = rates, bound, confidence
        self.used: set[str] = set()

    def rate(self, lie: str) -> float:
        self.used.add(lie)
        return self._rates.rate(lie, self._bound, self._confidence)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placed:
    shares: list[tuple[Share, tuple[float, float]]]
    incriminating_from: float
    small: frozenset[str]
    busy_end: float


def _place(
    fleet: Fleet,
    run: Run,
    rule: Threshold,
    inspection: Inspection,
    behaviour: Behaviour,
    free: dict[tuple[str, str, int], int],
) -> _Placed:
    most = rule.threshold_flop * (1 + 1e-12)
    flop = run.flop if behaviour.flop_cap is None else min(run.flop, behaviour.flop_cap * rule.threshold_flop)
    if behaviour.flop_cap is not None and flop == run.flop:
        raise CallerError(
            f"stay-under.times: {behaviour.flop_cap:g} times the threshold is not below the run's "
            f"{run.flop / rule.threshold_flop:.4g} times, so the run would not be cut short"
        )
    if behaviour.parts > 1 and flop > most * behaviour.parts:
        raise CallerError(
            f"chain.parts: each of {behaviour.parts} runs spends {flop / behaviour.parts:.4g} FLOP, above the "
            f"threshold of {rule.threshold_flop:.4g} that each has to stay under; {math.ceil(flop / most)} runs would "
            "stay under it"
        )
    # Cutting a run short also cuts its days: the chips stay as planned.
    duration = run.days * behaviour.stretch * (flop / run.flop)
    shares = allocate(fleet, run, behaviour, flop / duration, free)
    begin, end = run.start, run.start + duration
    if flop <= most:
        incriminating = math.inf
    elif rule.evidence is Evidence.WHOLE_RUN or behaviour.parts > 1:
        incriminating = begin
    else:
        incriminating = begin + duration * rule.threshold_flop / flop
    step = duration / behaviour.waves
    windows = [(begin + wave * step, begin + (wave + 1) * step) for wave in range(behaviour.waves)]
    placed: list[tuple[Share, tuple[float, float]]] = []
    for share in shares:
        if share.pool.status is Status.REGISTERED:
            placed.extend((share, window) for window in windows)
        else:
            placed.append((share, (begin, end)))
    work: dict[str, float] = {}
    for share in shares:
        work[share.lab.name] = work.get(share.lab.name, 0.0) + share.work * duration
    small = [lab for lab, done in work.items() if behaviour.split and done <= most]
    if behaviour.split and len(small) < len(work):
        lab, done = max(work.items(), key=lambda pair: pair[1])
        raise CallerError(
            f"split.labs: the part of {lab!r} is {done:.4g} FLOP, above the threshold of {rule.threshold_flop:.4g} "
            "that each part has to stay under"
        )
    return _Placed(shares=placed, incriminating_from=incriminating, small=frozenset(small), busy_end=end)


def _stratum(
    share: Share,
    window: tuple[float, float],
    placed: _Placed,
    behaviour: Behaviour,
    inspection: Inspection,
    book: _Book,
    urn_of: dict[tuple[str, str], int],
) -> Stratum:
    bare = 0.0 if behaviour.chip_lie is None else book.rate(behaviour.chip_lie)
    lawful = math.isinf(placed.incriminating_from)
    rate = 0.0 if lawful else inspection.snapshot_rate * behaviour.snapshot_share
    begin = window[1] if lawful else max(window[0], min(placed.incriminating_from, window[1]))
    if share.lab.name in placed.small and not lawful:
        seen, begin = inspection.aggregates, window[0]
    else:
        seen = book.rate(behaviour.snapshot_lie) if rate > 0 else 0.0
    return Stratum(
        urn=urn_of[share.lab.name, share.site.name],
        count=share.count,
        begin=begin,
        end=window[1],
        busy_begin=window[0],
        busy_end=window[1],
        rate=rate,
        catch_snapshot=1 - (1 - seen) * (1 - bare),
        catch_bare=bare,
    )


def _merged(strata: list[Stratum]) -> tuple[Stratum, ...]:
    counts: dict[Stratum, int] = {}
    for stratum in strata:
        key = replace(stratum, count=0)
        counts[key] = counts.get(key, 0) + stratum.count
    merged = [replace(key, count=count) for key, count in counts.items() if count]
    return tuple(sorted(merged, key=lambda stratum: (stratum.urn, stratum.busy_begin)))


def _one_per_site(searches: list[Search]) -> tuple[Search, ...]:
    return tuple(dict.fromkeys(searches))


def _urns(fleet: Fleet, inspection: Inspection) -> tuple[tuple[Urn, ...], dict[tuple[str, str], int]]:
    names: list[str] = []
    chips: list[int] = []
    urn_of: dict[tuple[str, str], int] = {}
    for lab in fleet.labs:
        for site in lab.sites:
            count = sum(pool.count for pool in site.pools if pool.status is Status.REGISTERED)
            name = {
                Sampling.POOLED: "world",
                Sampling.PER_LAB: lab.name,
                Sampling.PER_SITE: f"{lab.name}/{site.name}",
            }[inspection.sampling]
            if not names or names[-1] != name:
                names.append(name)
                chips.append(0)
            chips[-1] += count
            urn_of[lab.name, site.name] = len(names) - 1
    total = sum(chips)
    if total == 0:
        raise CallerError("the fleet has no registered chip to inspect")
    samples = _proportional(inspection.samples_done(), chips)
    urns = tuple(Urn(name=n, chips=c, samples=s) for n, c, s in zip(names, chips, samples, strict=True))
    for urn in urns:
        if not inspection.replacement and urn.samples > urn.chips:
            raise CallerError(
                f"inspection.samples: {urn.samples} cannot be drawn from the {urn.chips} chips of {urn.name!r} at once"
            )
    return urns, urn_of


def _proportional(samples: int, chips: list[int]) -> list[int]:
    """Split samples by stock; whole numbers by largest remainder, so that they add up."""
    total = sum(chips)
    shares = [samples * count // total for count in chips]
    remainders = [samples * count % total for count in chips]
    order = sorted(range(len(chips)), key=lambda index: (-remainders[index], index))
    for index in order[: samples - sum(shares)]:
        shares[index] += 1
    return shares


def _periods(days: float, inspection: Inspection, urns: Sequence[Urn]) -> int:
    if not (math.isfinite(days) and days > 0):
        raise CallerError(f"days must be above 0, got {days!r}")
    periods = int(days / inspection.period_days * (1 + 1e-12))
    if periods == 0:
        raise CallerError(
            f"inspection.period_days: the horizon of {days:g} days is shorter than one period of "
            f"{inspection.period_days:g} days"
        )
    if not inspection.redraw:
        for urn in urns:
            if urn.samples * periods > urn.chips:
                need = urn.samples * periods
                raise CallerError(
                    f"inspection.redraw: without it, {periods} periods need {need} chips, but {urn.name!r} has only "
                    f"{urn.chips}"
                )
    return periods


def _loss_test(fleet: Fleet, inspection: Inspection, days: float, diverted: int) -> LossTest | None:
    if inspection.loss_alarm is None:
        return None
    from scipy.stats import binom

    chips = fleet.registered()
    loss = -math.expm1(-inspection.loss_rate_per_year * days / 365)
    tolerated = int(binom.isf(inspection.loss_alarm, chips, loss)) if loss > 0 else 0
    return LossTest(chips=chips, loss=loss, diverted=diverted, tolerated=tolerated)


def finished(plan: Plan, control: Control) -> NDArray[np.bool_]:
    """Return where the runs reach their end by the horizon, which may lie after the last inspection."""
    rest = control.advance(max(0.0, plan.days - plan.periods * plan.inspection.period_days))
    return np.asarray(control.clock + rest >= plan.end * (1 - 1e-12))


def forgets(plan: Plan) -> bool:
    """Return whether logs reach back one period only."""
    return plan.inspection.log is LogSpan.PERIOD
