"""Readers of a scenario file's evidence beyond chips: ``[[evidence]]``, ``[dependence]``, what a regime has of it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from inspector.campaign._sections import source_of
from inspector.campaign._toml import Table
from inspector.campaign.evidence import Books, Monitor, Observation, Observations, Sightings, Target
from inspector.probability.alarms import FALSE_ALARMS
from inspector.probability.hidden_sites import FindingRate

__all__ = ["chosen_evidence", "evidence_of"]


def evidence_of(root: Table) -> Observations:
    """Return the evidence beyond chips of a file, with the common causes of its groups; empty if it has none."""
    tables = root.tables("evidence", required=False)
    found = tuple(_observation(table) for table in tables)
    shared: list[tuple[str, float]] = []
    if root.has("dependence"):
        given = root.table("dependence")
        shared = [(group, given.number(group, share=True)) for group in given.names()]
    root.mapping("dependence")
    groups = {each.of(Target()).group for each in found}
    for group, _ in shared:
        if group not in groups:
            raise given.fail(f"no [[evidence]] has the group {group!r}", group)
    made = Observations(each=found, shared=tuple(shared))
    if found:
        root.build(lambda: made.of(Target()))
    return made


def chosen_evidence(table: Table, known: Observations) -> Observations:
    """Return the evidence that a regime has: what it names, by default all, with its cap on their false alarms."""
    names = table.texts("evidence", ("all",))
    cap = table.number("evidence_false_alarms", FALSE_ALARMS, share=True)
    for key in ("evidence", "evidence_false_alarms"):
        if table.has(key) and not known.each:
            raise table.fail("changes nothing without [[evidence]]", key)
    if not known.each or not names:
        return Observations()
    return replace(table.build(lambda: known.among(names), "evidence"), cap=cap)


def _observation(table: Table) -> Observation:
    about: dict[str, Any] = {
        "name": table.text("name"),
        "origin": source_of(table, "assumed"),
        "group": table.text("group", ""),
        "false_alarm": table.number("false_alarm", 0.0, share=True),
    }
    made: partial[Sightings] | partial[Books] | partial[Monitor]
    if table.has("found_per_year"):
        finding = table.build(lambda: _finding(table))
        made = partial(Sightings, **about, finding=finding, concealed=table.number("concealed", 0.0, share=True))
    elif table.has("error_chips"):
        explained = table.number("explained", 0.0, share=True)
        made = partial(Books, **about, error=table.number("error_chips"), explained=explained)
    elif table.has("detection"):
        detection = table.number("detection", share=True)
        if not table.has("per") and not about["origin"].startswith("assumed"):
            raise table.fail(
                "is cited from a source: write 'per = \"run\"' if the source states it for whole runs", "detection"
            )
        if (per := table.text("per", "run")) != "run":
            message = f"a chance per {per!a:.40} is not a chance per run: state that of a run, and call it assumed"
            raise table.fail(message, "per")
        made = partial(Monitor, **about, detection=detection, evaded=table.number("evaded", detection, share=True))
    else:
        raise table.fail(
            "give 'detection' (a monitor of declared sites), 'found_per_year' (a search for others) or 'error_chips' "
            "(books of chips)"
        )
    table.close()
    return table.build(made)


def _finding(table: Table) -> FindingRate:
    if table.number("least_megawatts", 0.0) > table.number("at_megawatts", 10.0):
        raise table.fail(
            "is above the power for which 'found_per_year' is stated, so that such a site would never be found",
            "least_megawatts",
        )
    return FindingRate(
        per_year=table.number("found_per_year"),
        reference=table.number("at_megawatts", 10.0),
        exponent=table.number("exponent", 0.5),
        least=table.number("least_megawatts", 0.0),
    )
