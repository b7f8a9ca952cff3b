"""A plan in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from analysis.commands import _plan_costs
from analysis.commands._common import plural

__all__ = ["plan_lines"]

_YEAR = 365.0


def plan_lines(data: Mapping[str, Any]) -> list[str]:
    """A plan in words, from the document that ``--json`` prints."""
    from analysis.report.tables import aligned

    responses = [
        [
            f"  {each['evasion']}",
            *(f"{each[key]:.4f}" for key in ("detection", "false_alarm", "excess")),
            "never" if each["median_day"] is None else f"day {each['median_day']:g} of {each['run_days']:g}",
        ]
        for each in data["responses"]
    ]
    lines = [
        *aligned(_site_table(data)),
        "",
        f"{data['samples_per_year']:,} chips and {data['visits_per_year']:.1f} visits a year: "
        f"{plural(data['inspectors'], 'inspector')} at {data['inspector_load']:,.0f} chips' work a year "
        "(the IAEA had 280 in 2021).",
        f"Work {data['work']:,.0f} chips a year; no schedule over these periods needs less than "
        f"{data['lower_bound']:,.0f}"
        + (
            f": at most {100 * data['dearer_at_most']:.1f} % dearer than the cheapest."
            if data["dearer_at_most"] is not None
            else "."
        ),
        *_allowance_lines(data),
        f"A run may be noticed {data['noticed_within_days']:g} days after it begins"
        + ("; this plan is one visit a year." if all(v["period"] >= _YEAR for v in _visited(data)) else "."),
        f"The run takes {data['run']['chips']:,.0f} chips, {data['run']['chip_hours']:.3g} chip-hours and "
        f"{data['run']['megawatts']:.3g} MW.",
        *_plan_costs.cost_lines(data),
        *_plan_costs.lab_lines(data),
        f"Guarantee: a run of {data['guaranteed_flop']:.3g} FLOP or more is caught with probability "
        f"{data['detection']:.4f} at least, whichever of these the lab picks:",
        *aligned([["  evasion", "detection", "honest lab accused", "excess", "half are caught by"], *responses]),
        f"An honest lab that cannot show {data['parameters']['honest_refusal_rate']:g} of its drawn chips is accused "
        f"with probability {data['false_alarm']:.4f} at most (cap {data['parameters']['false_alarms']:g}).",
    ]
    return [*lines, *_notes(data)]


def _site_table(data: Mapping[str, Any]) -> list[list[str]]:
    chips = {site["name"]: site["chips"] for site in data["parameters"]["sites"]}
    head = ["site", "chips", "samples", "not shown, tolerated", "every (days)", "samples a year"]
    body = [
        [
            each["site"],
            f"{chips[each['site']]:,.0f}",
            f"{each['samples']:,}",
            f"{each['refusals_allowed']:,}",
            f"{each['period']:g}",
            f"{each['samples'] * each['visits_per_year']:,.1f}",
        ]
        if each["samples"]
        else [each["site"], f"{chips[each['site']]:,.0f}", "0", "-", "-", "0"]
        for each in data["visits"]
    ]
    return [head, *body]


def _notes(data: Mapping[str, Any]) -> list[str]:
    """What else is to be known of a plan."""
    from analysis.report.tables import aligned

    late = [
        each["evasion"] for each in data["responses"] if each["median_day"] and each["median_day"] > each["run_days"]
    ]
    lines = []
    if late:
        lines.append(
            f"Warning: the run is over before half of such runs are caught: {', '.join(late)}. --delay caps how late."
        )
    lines += _too_rare(data)
    if data["deterrence"] is not None:
        lines.append(_deterrence_line(data["deterrence"]))
    if data["not_covered"]:
        lines.append("Not covered: a lab that refuses drawn chips with evidence while that is tolerated (refuse).")
    if data["impossible"]:
        lines.append(f"Not enough chips for: {', '.join(data['impossible'])}.")
    if data["stocks_as_of"]:
        lines.append(
            f"Chips are H100 equivalents of {data['stocks_as_of']}, public estimates (chipwitness table --sources); "
            "what the world bought beyond the named owners counts as one site."
        )
    if data["sensitivity"] is not None:
        rows = [["parameter", "halved", "doubled", "elasticity"]]
        for each in data["sensitivity"]:
            figures = (each[key] for key in ("lower", "higher", "elasticity"))
            rows.append([each["parameter"], *("-" if value is None else f"{value:.3f}" for value in figures)])
        lines += ["", "Work relative to the plan's", *aligned(rows)]
    return lines


def _visited(data: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [each for each in data["visits"] if each["samples"]]


def _allowance_lines(data: Mapping[str, Any]) -> list[str]:
    """Say what the other way to allow refusals needs: an allowance for each site, or one over all sites."""
    other = data["other"]
    if other is None:
        return []
    one, each = "one allowance over all sites (for sites of one party)", "an allowance for each site"
    chosen, rest = (each, one) if other["allowances"] == 1 else (one, each)
    return [f"Recommended: {chosen}, the cheaper; {rest} needs work {other['work']:,.0f} chips a year."]


def _too_rare(data: Mapping[str, Any]) -> list[str]:
    """Warn of visits that are further apart than a run is long."""
    period = max((each["period"] for each in data["visits"] if each["samples"]), default=0.0)
    short = [each for each in data["responses"] if each["run_days"] < period]
    if not short:
        return []
    days = min(each["run_days"] for each in short)
    return [
        f"Warning: a visit every {period:g} days meets a run of {days:g} days when it is over: that run is found, not "
        "stopped."
    ]


def _deterrence_line(found: Mapping[str, float | None]) -> str:
    utility, penalty = found["utility"], found["deterring_penalty"]
    pays = "pays" if utility is None or utility > 0 else "does not pay"
    enough = "no penalty would deter" if penalty is None else f"a penalty of {penalty:.4g} would deter"
    return (
        f"A violation that gains {found['gain']:g} and costs {found['penalty']:g} if caught {pays} (risk aversion "
        f"{found['aversion']:g}): detection of {found['deterring_detection']:.4f} deters; at this plan's, {enough}."
    )
