"""The sites of a plan: named with their chips, those of the world today, or read from a table."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from analysis.commands import _plan_costs
from analysis.commands._detection_options import named
from analysis.commands._uncertainty import is_uncertain
from firmware_sim.errors import CallerError, file_error

if TYPE_CHECKING:
    from argparse import ArgumentParser

    from inspector.probability.planning import VisitedSite

__all__ = ["add_sites", "sites_of"]


def add_sites(plan: ArgumentParser) -> None:
    """Add the three ways to say where chips are."""
    where = plan.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--site",
        type=named("CHIPS", uncertain=True),
        action="append",
        metavar="NAME=~CHIPS",
        help="a site and its number of chips (repeat for each site)",
    )
    where.add_argument(
        "--sites",
        type=Path,
        metavar="CSV",
        help="file of sites, with columns name and chips. Optional columns: visit_work (as --visit-work), sample_work "
        "(work to inspect one chip, default 1)",
    )
    where.add_argument(
        "--today",
        action="store_true",
        help="today's large owners of chips as sites, in H100 equivalents (also sets --flop-per-day)",
    )


def sites_of(arguments: argparse.Namespace, at: Mapping[str, float]) -> list[VisitedSite]:
    """The sites that the options name, with the numbers of chips as in ``at``."""
    from analysis.report.tables import owners_today
    from inspector.probability.planning import VisitedSite

    if arguments.sites is not None:
        return _read_sites(arguments.sites, arguments.visit_work, _plan_costs.price_of_travel(arguments))
    if arguments.today:
        named_sites = owners_today()
    else:
        # A drawn number of chips is a real one; one that somebody wrote is not rounded.
        named_sites = [
            (name, float(round(at[f"chips of {name}"])) if is_uncertain(chips) else _whole(name, chips))
            for name, chips in arguments.site
        ]
    visit_work = arguments.visit_work + _plan_costs.price_of_travel(arguments)
    return [VisitedSite(name=name, chips=chips, visit_work=visit_work) for name, chips in named_sites]


def _whole(name: str, chips: float) -> float:
    if math.isfinite(chips) and chips != math.floor(chips):
        raise CallerError(f"chips of site {name!r} must be a whole number, not {chips:.12g}")
    return chips


def _read_sites(path: Path, visit_work: float, travel: float) -> list[VisitedSite]:
    import csv

    from inspector.probability.planning import VisitedSite

    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise file_error(f"{path} cannot be read", error) from None
    except UnicodeDecodeError as error:
        raise CallerError(f"{path} cannot be read: {error}") from None
    reader = csv.DictReader(text.splitlines())
    columns = reader.fieldnames or []
    unknown = set(columns) - {"name", "chips", "visit_work", "sample_work"}
    if unknown or not {"name", "chips"} <= set(columns) or len(set(columns)) < len(columns):
        raise CallerError(f"{path}: the columns must be name, chips and, if wanted, visit_work and sample_work")
    sites = []
    for row in reader:
        try:
            sites.append(
                VisitedSite(
                    name=row["name"],
                    chips=_whole(row["name"], float(row["chips"])),
                    visit_work=float(row.get("visit_work") or visit_work) + travel,
                    sample_work=float(row.get("sample_work") or 1.0),
                )
            )
        except (TypeError, ValueError):
            raise CallerError(f"{path} line {reader.line_num}: a number is missing or malformed") from None
        except CallerError as error:
            raise CallerError(f"{path} line {reader.line_num}: {error}") from None
    return sites
