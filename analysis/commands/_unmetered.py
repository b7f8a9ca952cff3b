"""``evidence unmetered``: work that no chip meters, and what sees it all the same."""

from __future__ import annotations

import argparse
from argparse import ArgumentParser
from typing import TYPE_CHECKING, Any

from analysis.commands._common import add_json, finish
from firmware_sim.errors import CallerError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

__all__ = ["H100_FLOP_PER_DAY", "register"]

H100_FLOP_PER_DAY = 989e12 * 86_400
"""Of one H100 equivalent, as `analysis.public_data` has it, which takes longer to load than a command's help may."""

_KEYS = """
JSON keys: flop, days, chips (registered ones of the lab), needed (chips that the hidden work takes), explained,
energy_error, false_alarm (of the budget of energy, where nothing is hidden), rows (way, needed: share of what could be
done there; possible: whether that is at most 1; chips, time, energy, census, sites: chance by each; any: of one of
them at least, taken as independent).
"""


def register(kinds: _SubParsersAction[ArgumentParser]) -> None:
    """Add ``evidence unmetered``."""
    text = "work that no chip meters: the chance that a census or a budget of time or energy sees it"
    unmetered = kinds.add_parser(
        "unmetered",
        help=text,
        description="What runs on the host, past the meter by raw pointers, in another process or on chips of no "
        "registry shows in no chip's log. All rates are assumptions to replace.",
        epilog=_KEYS,
    )
    option = unmetered.add_argument
    option("--flop", type=float, default=1e24, metavar="H", help="hidden (default 1e24)")
    option("--days", type=float, default=90.0, metavar="T", help="in so many days (default 90)")
    option("--chips", type=int, default=1_000, metavar="C", help="registered chips of the lab (default 1000)")
    option("--utilisation", type=float, default=0.4, metavar="U", help="of a chip (default 0.4)")
    option("--flop-per-day", type=float, default=H100_FLOP_PER_DAY, metavar="A", help="of a chip (default: an H100's)")
    option("--watts", type=float, default=1_400.0, metavar="W", help="of a chip, cooling included (default 1400)")
    option(
        "--explained", type=float, default=0.7, metavar="X", help="share of chips' time that their meters account for"
    )
    option(
        "--energy-error", type=float, default=0.02, metavar="S", help="of a site's energy budget, 1 sd (default 0.02)"
    )
    option("--false-alarms", type=float, default=0.01, metavar="P", help="of that budget (default 0.01)")
    option("--fleet", type=int, default=1_000_000, metavar="N", help="chips in the directory (default 1e6)")
    option("--census", type=int, default=1_000, metavar="M", help="chips drawn by each census (default 1000)")
    option("--per-month", type=float, default=1.0, metavar="K", help="censuses a month (default 1)")
    option("--per-year", type=float, default=0.3, metavar="R", help="finds a year of an undeclared site (default 0.3)")
    option("--at-megawatts", type=float, default=10.0, metavar="P", help="of a site of this power (default 10)")
    add_json(unmetered)
    unmetered.set_defaults(handler=_unmetered)


def _unmetered(arguments: argparse.Namespace) -> int:
    from inspector.probability.hidden import FindingRate
    from inspector.probability.unmetered import Budgets, chips_needed, unmetered_ways
    from inspector.registry.leakage import unseen_probability

    budgets = Budgets(
        chips=arguments.chips,
        explained=arguments.explained,
        energy_error=arguments.energy_error,
        false_alarm=arguments.false_alarms,
    )
    work = {name: getattr(arguments, name) for name in ("flop", "days", "utilisation", "flop_per_day")}
    needed = chips_needed(**work)
    if needed > arguments.fleet:
        raise CallerError(f"{needed:,} chips, which the hidden work takes, are more than --fleet {arguments.fleet:,}")
    unseen = unseen_probability(
        diverted=needed,
        fleet=arguments.fleet,
        census=arguments.census,
        months=arguments.days * 12 / 365,
        per_month=arguments.per_month,
    )
    ways = unmetered_ways(
        **work,
        budgets=budgets,
        census=1 - float(unseen),
        finding=FindingRate(per_year=arguments.per_year, reference=arguments.at_megawatts),
        watts=arguments.watts,
    )
    names = ("flop", "days", "chips", "explained", "energy_error")
    data = {name: getattr(arguments, name) for name in names}
    data |= {"needed": needed, "false_alarm": arguments.false_alarms}
    data["rows"] = [
        {"way": way.name, "needed": way.needed, "possible": way.needed <= 1, **way.seen, "any": way.any} for way in ways
    ]
    return finish(arguments, data, _unmetered_lines(data))


def _unmetered_lines(data: dict[str, Any]) -> list[str]:
    from analysis.report.tables import aligned

    means = ("chips", "time", "energy", "census", "sites", "any")
    rows = [
        [row["way"], *([f"{row[name]:.4f}" for name in means] if row["possible"] else ["-"] * 5 + ["cannot be done"])]
        for row in data["rows"]
    ]
    return [
        f"{data['flop']:.3g} FLOP in {data['days']:g} days where no chip meters it, which takes {data['needed']:,} "
        f"chips, by a lab of {data['chips']:,}: the chance that it is seen, by",
        *aligned([["work", *means], *rows]),
        f"{data['explained']:.0%} of its chips' time is accounted for; without anything hidden the budget of energy "
        f"raises an alarm with {data['false_alarm']:g}, and by construction nothing else does",
    ]
