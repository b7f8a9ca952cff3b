"""``evidence unmetered``: work that no chip meters, and what sees it all the same."""

from __future__ import annotations

import argparse
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from analysis.commands._answers import keys_text
from analysis.commands._common import add_json, count, finish, number, plural
from analysis.commands._hidden_sites import add_finding, add_hidden, finding_of, options_of
from analysis.hidden_sites import KEYS, described, sentence
from analysis.parser import show_every_day
from firmware_sim.errors import CallerError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

__all__ = ["register"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WayRow:
    """A way to do the work.

    Attributes:
        needed: share of the capacity of this kind of place that the work takes.
        possible: whether needed is at most 1.
        chips, time, energy, census, sites: chance that each reveals it.
        any: chance that at least one of these reveals it, by `rule`.
    """

    way: str
    needed: float
    possible: bool
    chips: float
    time: float
    energy: float
    census: float
    sites: float
    any: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UnmeteredAnswer:
    """Work that no chip meters, and what sees it.

    Attributes:
        chips: registered chips of the lab.
        needed: chips that the hidden work takes.
        hidden: description of hidden sites that could do it.
        censuses: completed in these days.
        false_alarm: of the energy budget.
    """

    flop: float
    days: float
    chips: int
    explained: float
    energy_error: float
    needed: int
    hidden: Mapping[str, float]
    censuses: int
    false_alarm: float
    rule: str = "by one means at least, taken as independent"
    rows: Sequence[WayRow]


def register(kinds: _SubParsersAction[ArgumentParser]) -> None:
    """Add ``evidence unmetered``."""
    text = "work that no chip meters: the chance that a census, or an account of time or energy, reveals it"
    unmetered = kinds.add_parser(
        "unmetered",
        help=text,
        description="Some work shows in no chip's log: work on the host, by raw pointers, in another process, or on "
        "unregistered chips. The command prints the chance that other evidence reveals each. All rates are "
        "assumptions; replace them by your own.",
        epilog=keys_text(UnmeteredAnswer) + KEYS,
    )
    option = unmetered.add_argument
    add_hidden(unmetered, flop=1e24, days=90.0)
    option(
        "--held",
        type=number,
        metavar="N",
        help="unregistered chips at hidden sites (default: only those that do the work)",
    )
    option("--chips", type=count, default=1_000, metavar="C", help="registered chips of the lab (default 1000)")
    option(
        "--explained", type=float, default=0.7, metavar="X", help="share of chips' time that their meters account for"
    )
    option(
        "--energy-error", type=float, default=0.02, metavar="S", help="error of an energy budget, 1 sd (default 0.02)"
    )
    option("--false-alarms", type=float, default=0.01, metavar="P", help="false alarms of the budget (default 0.01)")
    option("--fleet", type=count, default=1_000_000, metavar="N", help="chips in the directory (default 1e6)")
    option("--census", type=count, default=1_000, metavar="M", help="chips of each census (default 1000)")
    option("--per-month", type=float, default=1.0, metavar="K", help="censuses a month (default 1)")
    add_finding(unmetered, 0.3)
    add_json(unmetered)
    show_every_day(unmetered, "flop days sites held chips explained energy-error census per-month per-year")
    unmetered.set_defaults(handler=_unmetered)


def _unmetered(arguments: argparse.Namespace) -> int:
    from math import ceil

    from inspector.probability.hidden_sites import HiddenSites
    from inspector.probability.unmetered_work import Budgets, unmetered_ways
    from inspector.registry.leakage import unseen_probability

    budgets = Budgets(
        chips=arguments.chips,
        explained=arguments.explained,
        energy_error=arguments.energy_error,
        false_alarm=arguments.false_alarms,
    )
    there = HiddenSites.doing(arguments.flop, held=arguments.held, **options_of(arguments))
    missing = ceil(there.held)
    if missing > arguments.fleet:
        raise CallerError(f"the hidden work takes {missing:,} chips, which is more than --fleet {arguments.fleet:,}")
    months = arguments.days * 12 / 365
    unseen = unseen_probability(
        diverted=missing,
        fleet=arguments.fleet,
        census=arguments.census,
        months=months,
        per_month=arguments.per_month,
    )
    ways = unmetered_ways(
        flop=arguments.flop,
        there=there,
        budgets=budgets,
        census=1 - float(unseen),
        finding=finding_of(arguments),
    )
    names = ("flop", "days", "chips", "explained", "energy_error")
    answer = UnmeteredAnswer(
        **{name: getattr(arguments, name) for name in names},
        needed=int(there.working),
        hidden=described(there),
        censuses=int(months * arguments.per_month),
        false_alarm=arguments.false_alarms,
        rows=[
            WayRow(way=way.name, needed=way.needed, possible=way.needed <= 1, **way.seen, any=way.any) for way in ways
        ],
    )
    return finish(arguments, answer, _unmetered_lines(answer))


def _unmetered_lines(data: UnmeteredAnswer) -> list[str]:
    from analysis.report.tables import aligned

    means = ("chips", "time", "energy", "census", "sites", "any")
    rows = [
        [
            row.way,
            *([f"{getattr(row, name):.4f}" for name in means] if row.possible else ["-"] * 5 + ["cannot be done"]),
        ]
        for row in data.rows
    ]
    return [
        f"{data.flop:.3g} FLOP in {data.days:g} days where no chip meters it, which takes {data.needed:,} "
        f"chips, by a lab of {data.chips:,}: the chance that it is seen; any: {data.rule}",
        *aligned([["work", *means], *rows]),
        f"Elsewhere: {sentence(data.hidden)}",
        f"In that time {plural(data.censuses, 'census')} of whole intervals count: one that is not completed sees "
        "nothing.",
        f"{data.explained:.0%} of its chips' time is accounted for; without anything hidden the budget of energy "
        f"raises an alarm with {data.false_alarm:g}, and by construction nothing else does",
    ]
