"""A plan in words."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from analysis.commands import _plan_costs
from analysis.commands._common import plural

if TYPE_CHECKING:
    from analysis.commands._plan_answer import Deterrence, PlanAnswer

__all__ = ["plan_lines"]

_YEAR = 365.0


def plan_lines(answer: PlanAnswer) -> list[str]:
    """A plan in words."""
    from analysis.report.tables import aligned

    responses = [
        [
            f"  {each.evasion}",
            *(f"{value:.4f}" for value in (each.detection, each.false_alarm, each.excess)),
            "never" if math.isinf(each.median_day) else f"day {each.median_day:g} of {each.run_days:g}",
        ]
        for each in answer.responses
    ]
    lines = [
        *aligned(_site_table(answer)),
        "",
        f"{answer.samples_per_year:,} chips and {answer.visits_per_year:.1f} visits a year: "
        f"{plural(answer.inspectors, 'inspector')} at {answer.inspector_load:,.0f} chips' work a year "
        "(the IAEA had 280 in 2021).",
        f"Work {answer.work:,.0f} chips a year; no schedule over these periods needs less than "
        f"{answer.lower_bound:,.0f}"
        + (
            f": at most {100 * answer.dearer_at_most:.1f} % dearer than the cheapest."
            if math.isfinite(answer.dearer_at_most)
            else "."
        ),
        *_allowance_lines(answer),
        f"A run may be noticed {answer.noticed_within_days:g} days after it begins"
        + (
            "; this plan is one visit a year."
            if all(each.period >= _YEAR for each in answer.visits if each.samples)
            else "."
        ),
        f"The run takes {answer.run.chips:,.0f} chips, {answer.run.chip_hours:.3g} chip-hours and "
        f"{answer.run.megawatts:.3g} MW.",
        *_plan_costs.cost_lines(answer),
        *_plan_costs.lab_lines(answer),
        f"Guarantee: a run of {answer.guaranteed_flop:.3g} FLOP or more is caught with probability "
        f"{answer.detection:.4f} at least, whichever of these the lab picks:",
        *aligned([["  evasion", "detection", "honest lab accused", "excess", "half are caught by"], *responses]),
        f"An honest lab that cannot show {answer.parameters.honest_refusal_rate:g} of its drawn chips is accused "
        f"with probability {answer.false_alarm:.4f} at most (cap {answer.parameters.false_alarms:g}).",
    ]
    return [*lines, *_notes(answer)]


def _site_table(answer: PlanAnswer) -> list[list[str]]:
    chips = {site.name: site.chips for site in answer.parameters.sites}
    head = ["site", "chips", "samples", "not shown, tolerated", "every (days)", "samples a year"]
    body = [
        [
            each.site,
            f"{chips[each.site]:,.0f}",
            f"{each.samples:,}",
            f"{each.refusals_allowed:,}",
            f"{each.period:g}",
            f"{each.samples * each.visits_per_year:,.1f}",
        ]
        if each.samples
        else [each.site, f"{chips[each.site]:,.0f}", "0", "-", "-", "0"]
        for each in answer.visits
    ]
    return [head, *body]


def _notes(answer: PlanAnswer) -> list[str]:
    """What else is to be known of a plan."""
    from analysis.report.tables import aligned

    late = [each.evasion for each in answer.responses if each.run_days < each.median_day < math.inf]
    lines = []
    if late:
        lines.append(
            f"Warning: the run is over before half of such runs are caught: {', '.join(late)}. --delay caps how late."
        )
    lines += _too_rare(answer)
    if answer.deterrence is not None:
        lines.append(_deterrence_line(answer.deterrence))
    if answer.not_covered:
        lines.append("Not covered: a lab that refuses drawn chips with evidence while that is tolerated (refuse).")
    if answer.impossible:
        lines.append(f"Not enough chips for: {', '.join(answer.impossible)}.")
    if answer.stocks_as_of:
        lines.append(
            f"Chips are H100 equivalents of {answer.stocks_as_of}, public estimates (chipwitness table --sources); "
            "what the world bought beyond the named owners counts as one site."
        )
    if answer.sensitivity is not None:
        rows = [["parameter", "halved", "doubled", "elasticity"]]
        for each in answer.sensitivity:
            figures = (each.lower, each.higher, each.elasticity)
            rows.append([each.parameter, *("-" if math.isnan(value) else f"{value:.3f}" for value in figures)])
        lines += ["", "Work relative to the plan's", *aligned(rows)]
    return lines


def _allowance_lines(answer: PlanAnswer) -> list[str]:
    """Say what the other way to allow refusals needs: an allowance for each site, or one over all sites."""
    other = answer.other
    if other is None:
        return []
    one, each = "one allowance over all sites (for sites of one party)", "an allowance for each site"
    chosen, rest = (each, one) if other.allowances == 1 else (one, each)
    return [f"Recommended: {chosen}, the cheaper; {rest} needs work {other.work:,.0f} chips a year."]


def _too_rare(answer: PlanAnswer) -> list[str]:
    """Warn of visits that are further apart than a run is long."""
    period = max((each.period for each in answer.visits if each.samples), default=0.0)
    short = [each for each in answer.responses if each.run_days < period]
    if not short:
        return []
    days = min(each.run_days for each in short)
    return [
        f"Warning: a visit every {period:g} days meets a run of {days:g} days when it is over: that run is found, not "
        "stopped."
    ]


def _deterrence_line(found: Deterrence) -> str:
    utility, penalty = found.utility, found.deterring_penalty
    pays = "pays" if utility > 0 else "does not pay"
    enough = "no penalty would deter" if not math.isfinite(penalty) else f"a penalty of {penalty:.4g} would deter"
    return (
        f"A violation that gains {found.gain:g} and costs {found.penalty:g} if caught {pays} (risk aversion "
        f"{found.aversion:g}): detection of {found.deterring_detection:.4f} deters; at this plan's, {enough}."
    )
