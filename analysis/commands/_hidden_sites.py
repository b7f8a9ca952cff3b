"""The options that describe hidden sites, and those of a source that finds them."""

from __future__ import annotations

import argparse
from argparse import ArgumentParser
from typing import TYPE_CHECKING, Any

from analysis.commands._common import count, number

if TYPE_CHECKING:
    from inspector.probability.hidden_sites import FindingRate

__all__ = ["add_finding", "add_hidden", "finding_of", "options_of"]

H100_FLOP_PER_DAY = 989e12 * 86_400
"""Of one H100 equivalent, as `analysis.public_data` has it, which takes longer to load than a command's help may."""


def add_hidden(parser: ArgumentParser, *, flop: float | None, days: float, sites: bool = True) -> None:
    """Add the options that describe hidden sites; ``sites``: whether their number is one of them."""
    option = parser.add_argument
    note = "default: what all chips can do" if flop is None else f"default {flop:g}"
    option("--flop", type=number, default=flop, metavar="H", help=f"FLOP of the run ({note})")
    option("--days", type=number, default=days, metavar="T", help=f"days that the run lasts (default {days:g})")
    option("--utilisation", type=number, default=0.4, metavar="U", help="share of peak FLOP in use, MFU (default 0.4)")
    option(
        "--flop-per-day",
        type=number,
        default=H100_FLOP_PER_DAY,
        metavar="A",
        help="peak of a chip (default: an H100's)",
    )
    option(
        "--watts", type=number, default=1_400.0, metavar="W", help="watts of a busy chip, with cooling (default 1400)"
    )
    option("--idle", type=number, default=0.1, metavar="I", help="share of --watts that idle chips draw (default 0.1)")
    option(
        "--age",
        type=number,
        default=0.0,
        metavar="D",
        help="days that the chips were idle at the sites before the work (default 0)",
    )
    if sites:
        option("--sites", type=count, default=1, metavar="N", help="equal sites that hold the chips (default 1)")


def add_finding(parser: ArgumentParser, per_year: float | None) -> None:
    """Add the options of a source that finds undeclared sites."""
    option = parser.add_argument
    note = "in place of a scenario's sources" if per_year is None else f"default {per_year:g}"
    option(
        "--per-year",
        type=number,
        default=per_year,
        metavar="R",
        help=f"how often in a year a hidden site is found ({note})",
    )
    option("--at-megawatts", type=number, default=10.0, metavar="P", help="power of such a site, in MW (default 10)")
    option("--exponent", type=number, default=0.5, metavar="X", help="the rate grows with power^X (default 0.5)")


def finding_of(arguments: argparse.Namespace) -> FindingRate:
    """Return the source of ``add_finding``."""
    from inspector.probability.hidden_sites import FindingRate

    return FindingRate(per_year=arguments.per_year, reference=arguments.at_megawatts, exponent=arguments.exponent)


def options_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of ``add_hidden`` but for the FLOP, as fields of the description."""
    names = ("days", "utilisation", "flop_per_day", "watts", "idle", "age", "sites")
    return {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}
