"""One description of hidden sites, for JSON and in words, that commands and pages share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inspector.campaign.evidence import Target
    from inspector.probability.hidden_sites import HiddenSites

__all__ = ["KEYS", "described", "hidden_lines", "sentence", "target_json"]

KEYS = """
Each description of hidden sites: held (chips over all sites), working (those that do the work), sites, days (that the
run takes), age (days for which the sites had existed before), watts
(of a chip at work), idle (share of watts that an idle chip draws), utilisation, megawatts (of all chips while the run
lasts), megawatts_working (of those at work), megawatts_before (before the run, when all chips idle), chip_hours, flop
(of the chips at work).
"""

_FIELDS = (
    "held", "working", "sites", "days", "age", "watts", "idle", "utilisation", "megawatts", "megawatts_working",
    "megawatts_before", "chip_hours", "flop",
)  # fmt: skip


def described(there: HiddenSites) -> dict[str, float]:
    """Return the description for JSON."""
    return {name: getattr(there, name) for name in _FIELDS}


def target_json(target: Target) -> list[dict[str, object]]:
    """Return the descriptions of a violation's hidden sites for JSON, each with its lab and site."""
    return [{"lab": lab, "site": site, **described(there)} for (lab, site), there in target.sites.items()]


def hidden_lines(of: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Return what each strategy hides, in words; strategies that hide the same share a line."""
    named: dict[str, list[str]] = {}
    for strategy, sites in of.items():
        for there in sites:
            named.setdefault(sentence(there), []).append(strategy)
    return [f"hidden by {', '.join(map(repr, names))}: {text}" for text, names in named.items()]


def sentence(there: Mapping[str, Any]) -> str:
    """Return a description, as ``described`` gives it, in words."""
    where = f"{there['lab']}, {there['site']}: " if "lab" in there else ""
    sites = f"{there['sites']:,} site{'' if there['sites'] == 1 else 's'}"
    return (
        f"{where}{there['held']:,.0f} chips held at {sites}, {there['working']:,.0f} at work for "
        f"{there['days']:g} days after {there['age']:g} of standing, at a utilisation of {there['utilisation']:g} "
        f"({there['chip_hours']:.3g} chip-hours): {there['megawatts']:.3g} MW, {there['megawatts_working']:.3g} by "
        f"chips at work, {there['megawatts_before']:.3g} MW before (an idle chip draws {there['idle']:.3g} of its "
        f"{there['watts']:g} W)"
    )
