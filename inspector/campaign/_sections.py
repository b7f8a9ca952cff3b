"""Readers of a scenario file's sections: kinds, labs, runs, rules, strategies, rates and regimes."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TypeVar

from inspector.campaign._toml import Table
from inspector.campaign.checks import fraction, probability
from inspector.campaign.fleet import (
    Evidence,
    Fleet,
    Inspection,
    Kind,
    Lab,
    LogSpan,
    Pool,
    Run,
    Sampling,
    Site,
    Status,
    Threshold,
)
from inspector.campaign.policies import Policy, Strategy, policy_from
from inspector.campaign.rates import RateBook, load_rates
from inspector.campaign.scenario import Catalogue, Cost
from inspector.probability.alarms import FALSE_ALARMS
from inspector.probability.detection import CHIPS_PER_INSPECTOR
from inspector.probability.hidden_sites import IDLE_POWER, WATTS_PER_CHIP

__all__ = [
    "assumed_of",
    "cap_of",
    "check_exempt",
    "cost_of",
    "inspection_of",
    "kind_of",
    "lab_of",
    "rates_of",
    "rule_of",
    "run_of",
    "source_of",
    "strategy_of",
    "wanted_of",
]

SECONDS_PER_DAY = 86_400.0
_EQUIVALENT = "H100 SXM"
_PLACE = re.compile(r"\bassumed\b|arXiv \d{4}\.\d{4,5}|\b10\.\d{4,}/|https?://|\b(?:19|20)\d\d\b", re.IGNORECASE)
_BUSY = float(CHIPS_PER_INSPECTOR)
E = TypeVar("E", bound=StrEnum)


def _choice(table: Table, key: str, kind: type[E], default: E) -> E:
    text = table.text(key, default)
    try:
        return kind(text)
    except ValueError:
        raise table.fail(f"unknown value {text!r}; known: {', '.join(kind)}", key) from None


def kind_of(table: Table) -> Kind:
    """Return a chip model."""
    name, speed, watts = table.text("name"), table.number("flop_per_second"), table.number("watts", WATTS_PER_CHIP)
    link = table.number("link_gbps") if table.has("link_gbps") else None
    if link is None:
        table.text("link_gbps", "")
    table.close()
    return table.build(lambda: Kind(name=name, flop_per_day=speed * SECONDS_PER_DAY, link_gbps=link, watts=watts))


def lab_of(table: Table, kinds: Mapping[str, Kind], known: Catalogue, searched: bool) -> Lab:
    """Return a lab; ``searched`` says whether any regime searches sites."""
    name = table.text("name")
    sites = []
    for entry in table.tables("site"):
        pools = tuple(_pool(chips, kinds, known) for chips in entry.tables("chips"))
        site_name, declared = entry.text("name"), entry.switch("declared", True)
        hidden = {
            "age_days": entry.number("age_days", 0.0),
            "sites": entry.whole("sites", 1),
            "idle_power": entry.number("idle_power", IDLE_POWER, share=True),
        }
        entry.close()
        for key in hidden:
            if declared and entry.has(key):
                raise entry.fail("has no effect at a declared site, which needs no search", key)
        if not declared and not searched:
            message = (
                "false has no effect without a search for sites: it needs 'searches = true' in [inspection], or "
                "[[evidence]]"
            )
            raise entry.fail(message, "declared")
        made = partial(Site, name=site_name, pools=pools, declared=declared, **hidden)  # type: ignore[arg-type]
        sites.append(entry.build(made))
    table.close()
    return table.build(lambda: Lab(name=name, sites=tuple(sites)))


def _pool(table: Table, kinds: Mapping[str, Kind], known: Catalogue) -> Pool:
    status = _choice(table, "status", Status, Status.REGISTERED)
    month = ""
    if table.has("stock"):
        holder, month = table.text("stock"), table.text("as_of")
        share = table.number("share", 1.0, share=True)
        if (holder, month) not in known.stocks:
            wrong = "as_of" if any(holder == other for other, _ in known.stocks) else "stock"
            raise table.fail(f"no public stock of {holder!r} at {month!r}; {_stocks_of(month, known)}", wrong)
        if not 0 < share <= 1:
            raise table.fail(f"must be above 0 and at most 1, got {share!r}", "share")
        kind_name, chips = known.stocks[holder, month]
        count, key = max(1, round(chips * share)), "stock"
    else:
        kind_name, count, key = table.text("kind"), table.whole("count"), "kind"
        for unused in ("stock", "as_of"):
            if table.has(unused):
                raise table.fail("needs 'stock' and 'as_of' together", unused)
    table.close()
    if kind_name not in kinds:
        raise table.fail(f"unknown chip kind {kind_name!r}; known: {', '.join(kinds)}", key)
    return table.build(lambda: Pool(kind=kinds[kind_name], count=count, status=status, as_of=month))


def _stocks_of(month: str, known: Catalogue) -> str:
    """Say which stocks there are: those of the month, or else the months."""
    there = [holder for holder, when in known.stocks if when == month]
    if there:
        return _listed(there)
    return f"no stock of that month; {_listed(when for _, when in known.stocks)}"


def _listed(names: Iterable[str]) -> str:
    return f"known: {', '.join(sorted(set(names))) or 'none'}"


def _flop(table: Table, key: str, known: Catalogue) -> float:
    if not table.has("model"):
        return table.number(key)
    if table.has(key):
        raise table.fail(f"give either {key!r} or 'model'", "model")
    model, times = table.text("model"), table.number("times", 1.0)
    if model not in known.models:
        raise table.fail(f"unknown model {model!r}; {_listed(known.models)}", "model")
    return known.models[model] * times


def rule_of(table: Table, known: Catalogue) -> Threshold:
    """Return the rule."""
    threshold = _flop(table, "threshold_flop", known)
    evidence = _choice(table, "evidence", Evidence, Evidence.AFTER_THRESHOLD)
    table.number("exempt_chips", 0.0)
    table.close()
    return table.build(lambda: Threshold(threshold_flop=threshold, evidence=evidence))


def check_exempt(table: Table, labs: Iterable[Lab], kinds: Mapping[str, Kind]) -> None:
    """Refuse exempt chips at a site that holds more than the rule exempts."""
    most = table.number("exempt_chips", math.inf)
    if not table.has("exempt_chips"):
        return
    if _EQUIVALENT not in kinds:
        raise table.fail(
            f"counts chips of the kind {_EQUIVALENT!r}, which the scenario does not define", "exempt_chips"
        )
    for lab in labs:
        for site in lab.sites:
            pools = [pool for pool in site.pools if pool.status is Status.EXEMPT]
            speed = sum(pool.count * pool.kind.flop_per_day for pool in pools)
            held = speed / site.sites / kinds[_EQUIVALENT].flop_per_day
            if held > most:
                message = (
                    f"{lab.name!r} exempts {held:.4g} H100 equivalents at {site.name!r}, but at most {most:g} are "
                    "allowed"
                )
                raise table.fail(message, "exempt_chips")


def run_of(table: Table, known: Catalogue) -> Run:
    """Return a run."""
    flop = _flop(table, "flop", known)
    name, lab, days = table.text("name"), table.text("lab"), table.number("days")
    start, utilisation = table.number("start", 0.0), table.number("utilisation", 1.0, share=True)
    table.close()
    return table.build(lambda: Run(name=name, lab=lab, flop=flop, days=days, start=start, utilisation=utilisation))


def strategy_of(table: Table) -> Strategy:
    """Return a strategy."""
    policies: list[Policy] = []
    for entry in table.tables("policies", required=False):
        name = entry.text("policy")
        policies.append(entry.build(lambda n=name, e=entry: policy_from(n, e.rest())))  # type: ignore[misc]
    name, evades = table.text("name"), table.texts("evades")
    table.close()
    strategy = table.build(lambda: Strategy(name=name, policies=tuple(policies), evades=evades))
    table.build(strategy.behaviour)
    return strategy


def rates_of(table: Table, folder: Path, under: Mapping[str, float], told: Collection[str]) -> RateBook:
    """Return the rates of [detection], whose table lies in ``folder``; those assumed ``under`` a regime go first."""
    measured = {}
    device = table.text("device", "") or None
    settings = table.text("settings", "") or None
    if table.has("table"):
        path = folder / table.text("table")
        measured = table.build(lambda: load_rates(path, device=device, settings=settings), "table")
    elif device or settings:
        raise table.fail("needs 'table'", "device" if device else "settings")
    else:
        table.text("table", "")
    assumed = {**assumed_of(table, told), **under}
    table.close()
    return table.build(lambda: RateBook(measured=measured, assumed=assumed), "assumed")


def assumed_of(table: Table, told: Collection[str]) -> dict[str, float]:
    """Return the assumed rates of a section by lie; empty where it has none. Each is of a lie that can be told."""
    given = table.table("assumed") if table.has("assumed") else None
    table.mapping("assumed")
    if given is None:
        return {}
    for lie in given.names():
        if lie not in told:
            raise given.fail(f"no strategy uses the lie {lie!r}; the lies are {', '.join(sorted(told))}", lie)
    return {lie: given.number(lie, share=True) for lie in given.names()}


def inspection_of(table: Table, fleet: Fleet) -> tuple[Inspection, bool]:
    """Return the regime, and whether the file gives its samples ("all": every registered chip)."""
    sampled = table.has("samples")
    every = table.is_text("samples") and table.text("samples") == "all"
    if not sampled and not table.has("confidence"):
        raise table.fail("give 'samples' or 'confidence'")
    samples = fleet.registered() if every else table.whole("samples", 0)
    period = table.number("period_days")
    inspectors, busy = table.number("inspectors", -1.0), table.number("chips_per_inspector_year", _BUSY)
    capacity = int(inspectors * busy * period / 365) if table.has("inspectors") else None
    alarm = table.number("loss_alarm", share=True) if table.has("loss_alarm") else None
    allowed = 0 if table.is_text("refusals_allowed") else table.whole("refusals_allowed", 0)
    values = {
        "snapshot_rate": table.number("snapshot_rate"),
        "sampling": _choice(table, "sampling", Sampling, Sampling.POOLED),
        "replacement": table.switch("replacement", False),
        "redraw": table.switch("redraw", True),
        "log": _choice(table, "log", LogSpan, LogSpan.PERIOD),
        "honest_refusal_rate": table.number("honest_refusal_rate", 0.0, share=True),
        "refusals_allowed": allowed,
        "searches": table.switch("searches", False),
        "search_chips": table.whole("search_chips") if table.has("search_chips") else None,
        "aggregates": table.number("aggregates", 0.0, share=True),
        "loss_rate_per_year": table.number("loss_rate_per_year", 0.0),
    }
    table.number("loss_alarm", 0.0)
    table.whole("search_chips", 0)
    for key, needs, there in (
        ("search_chips", "searches = true", values["searches"]),
        ("loss_rate_per_year", "loss_alarm", alarm is not None),
    ):
        if table.has(key) and not there:
            raise table.fail(f"has no effect without '{needs}'", key)
    wanted = samples if sampled else fleet.registered()
    if capacity == 0 and wanted:
        raise table.fail(
            f"{inspectors:g} inspectors cannot examine even one chip in a period of {period:g} days", "inspectors"
        )
    if 0 < wanted <= allowed:
        raise table.fail(f"all {wanted} drawn chips may be missing, so no draw can fail", "refusals_allowed")
    made = table.build(
        lambda: Inspection(period_days=period, samples=samples, capacity=capacity, loss_alarm=alarm, **values)  # type: ignore[arg-type]
    )
    return made, sampled


def source_of(table: Table, default: str) -> str:
    """Return where a table's numbers are from: a place to look, or that they are assumed."""
    source = table.text("source", default)
    if source and not _PLACE.search(source):
        message = (
            f"{source!a:.80} does not say where to look: give an arXiv number, a DOI, an address or a year of "
            "publication, or call the numbers assumed"
        )
        raise table.fail(message, "source")
    return source


def wanted_of(table: Table) -> tuple[float, float]:
    """Return the wanted confidence, and the chips that keep an inspector busy for a year."""
    wanted = table.number("confidence", 0.9, share=True)
    table.build(lambda: fraction("inspection.confidence", wanted))
    return wanted, table.number("chips_per_inspector_year", _BUSY)


def cap_of(table: Table, given: float | None) -> tuple[float, bool]:
    """Return the cap on false alarms, and whether tolerated refusals are to be chosen."""
    cap = table.number("false_alarms", FALSE_ALARMS, share=True)
    if given is not None:
        probability("false alarms", given)
    chooses = table.is_text("refusals_allowed")
    if chooses and table.text("refusals_allowed") != "fewest":
        raise table.fail("must be a whole number or 'fewest'", "refusals_allowed")
    return cap if given is None else given, chooses


def cost_of(table: Table) -> Cost:
    """Return what the regime costs in money."""
    inspector, fixed = table.number("inspector_cost", 0.0), table.number("fixed_cost", 0.0)
    return table.build(lambda: Cost(inspector=inspector, fixed=fixed))
