"""``samples``, ``table``, ``curve`` and ``plan``: how many inspections catch a run, and how likely."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from analysis.commands._common import add_json, finish
from analysis.commands._detection_options import add_run, add_scheme, scheme_of

if TYPE_CHECKING:
    from argparse import ArgumentParser, _SubParsersAction

__all__ = ["register"]

_SAMPLES_KEYS = """
JSON keys: per_period (real s of Eq. 1, chips to inspect every period), per_year (ceil(365·s/period)),
inspectors (at 1,000 chips each a year), chips_needed (H/(a·T)), share (b), snapshot_probability (1-e^(-f·period)),
hit_probability (one sampled chip incriminates), guaranteed_flop (2H: only work beyond H leaves incriminating
snapshots), and the parameters flop, chips, days, period, rate, confidence, flop_per_day.
"""


def register(subparsers: _SubParsersAction[ArgumentParser]) -> None:
    """Add the subcommands of this group."""
    from analysis.commands import _curves, _plan, _table

    samples = subparsers.add_parser(
        "samples",
        help="how many chips to inspect to catch a run (Eq. 1)",
        description="How many chips to inspect in every period so that a run is caught (Shavit 2023, Eq. 1).",
        epilog=_SAMPLES_KEYS,
    )
    add_run(samples)
    add_scheme(samples)
    add_json(samples)
    samples.set_defaults(handler=_samples)
    _table.register(subparsers)
    _curves.register(subparsers)
    _plan.register(subparsers)


def _samples(arguments: argparse.Namespace) -> int:
    from inspector.probability import detection as closed

    flop, chips, scheme = arguments.flop, arguments.chips, scheme_of(arguments)
    per_period = float(closed.samples_needed(flop=flop, chips=chips, **scheme))
    per_year = int(closed.samples_per_year(per_period=per_period, period=scheme["period"]))
    fleet = {key: scheme[key] for key in ("days", "flop_per_day")}
    share = float(closed.used_share(flop=flop, chips=chips, **fleet))
    snapshot = float(closed.snapshot_probability(rate=scheme["rate"], days=scheme["period"]))
    data = {
        "per_period": per_period,
        "per_year": per_year,
        "inspectors": -(-per_year // closed.CHIPS_PER_INSPECTOR),
        "chips_needed": float(closed.chips_needed(flop=flop, **fleet)),
        "share": share,
        "snapshot_probability": snapshot,
        "hit_probability": share * snapshot,
        "guaranteed_flop": 2.0 * flop,
        "flop": flop,
        "chips": chips,
        **scheme,
    }
    lines = [
        f"{per_year:,} chips a year, {per_period:,.2f} every {scheme['period']:g} days "
        f"({data['inspectors']:,} inspectors at {closed.CHIPS_PER_INSPECTOR:,} chips each a year)",
        f"The run keeps {data['chips_needed']:,.1f} of {chips:,.0f} chips busy for {scheme['days']:g} days; "
        f"a sampled chip incriminates it with probability {data['hit_probability']:.3g}.",
        f"Guarantee: a run of {data['guaranteed_flop']:.3g} FLOP or more is caught with probability "
        f"{scheme['confidence']:g} at least.",
    ]
    return finish(arguments, data, lines)
