"""``table``: Table 1 of Shavit 2023, the same question for today's models and stocks, and the user's own rows."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from analysis.commands._common import add_json, finish
from analysis.commands._detection_options import NO_ALARM, add_scheme, named, scheme_of, worked
from analysis.commands._uncertainty import (
    UNCERTAIN,
    add_draws,
    band_text,
    banded,
    described,
    fixed,
    is_uncertain,
    ranged,
    within,
)
from analysis.parser import show_every_day
from firmware_sim.errors import CallerError

if TYPE_CHECKING:
    from argparse import ArgumentParser, _SubParsersAction

    from analysis.report.tables import Stock, TrainedModel
    from inspector.probability.distributions import Distribution

    Named = Sequence[tuple[str, Distribution]]

__all__ = ["register"]

_KEYS = """
JSON keys: parameters; table_1 (model, flop, chips_needed, cells: a list of fleet, chips, per_year or null for a dash,
and band: low, median, high per year, over the draws in which the chips are enough, and possible: the share of these
draws; null without draws); inputs ("assumed", "chosen" or a distribution), draws, seed (null without); false_alarm (0,
by construction); footnote (samples, inspectors, iaea_inspectors_2021); today (parameters; stocks_as_of; as_of and
growth: of the projection, or null; left_out: models published before --since; without_figures: later models that no
source has a figure for; stocks: holder, chips_h100_equivalent, as_of, projected, low and high (of either), chips_low,
chips_high, kind, source, confirmed; models: model, organisation, published, training_flop and its _low and _high, kind,
source, confirmed, chips_needed, cells: a list of holder, as_of, per_year, band); chips (the rows of chips.csv, with
flop_per_day); own (as table_1, for --row and --fleet).
"""

_SHOWN_HOLDERS = ("Google", "Microsoft", "Meta", "xAI", "China", "World (sold)")


def register(subparsers: _SubParsersAction[ArgumentParser]) -> None:
    """Add ``table``."""
    table = subparsers.add_parser(
        "table",
        description="Chips to inspect a year so that a run is caught (Shavit 2023, Table 1), then and today. "
        "The options change the parameters of every part except the footnote; --flop-per-day does not change today's, "
        "which is in H100 equivalents." + UNCERTAIN,
        epilog=_KEYS,
    )
    add_scheme(table, uncertain=True)
    option = table.add_argument
    option(
        "--row",
        type=named("FLOP", uncertain=True),
        action="append",
        default=[],
        metavar="NAME=~FLOP",
        help="a run of your own",
    )
    option(
        "--fleet",
        type=named("CHIPS", uncertain=True),
        action="append",
        default=[],
        metavar="NAME=~CHIPS",
        help="a fleet of your own",
    )
    option(
        "--bands",
        action="store_true",
        help="also print bands, from the ranges that the sources of the public figures state",
    )
    add_draws(table, default=10_000, what="for each cell")
    option(
        "--as-of",
        metavar="YYYY-MM",
        help="project today's stocks to this month by --growth (default: as they are, at the end of the newest month)",
    )
    option(
        "--growth",
        type=within("positive"),
        default=None,
        metavar="~X",
        help="factor by which stocks grow in a year, for --as-of (default uniform(3.3,3.4): Epoch AI, of the world)",
    )
    option("--since", default="2024-01", metavar="YYYY-MM", help="today's models published since (default 2024-01)")
    option("--sources", action="store_true", help="also print where each of today's figures comes from")
    add_json(table)
    show_every_day(table, "days period rate confidence row fleet bands as-of since sources")
    table.set_defaults(handler=_table)


def _table(arguments: argparse.Namespace) -> int:
    from analysis.report import tables
    from inspector.probability.distributions import Fixed

    given = scheme_of(arguments)
    scheme = {name: fixed(value) for name, value in given.items()}
    fleets = [(f"{chips:g} chips", Fixed(chips)) for chips in tables.TABLE_1_FLEETS]
    rows = [(row.model, Fixed(row.flop)) for row in tables.TABLE_1]
    own_fleets = [(name, ranged(chips)) for name, chips in arguments.fleet] or fleets
    own_rows = [(name, ranged(flop)) for name, flop in arguments.row] or (rows if arguments.fleet else [])
    foot = tables.footnote()
    models = [each for each in tables.trained_models() if each.published >= arguments.since]
    if not models:
        raise CallerError(f"no model has been published since {arguments.since}")
    left_out = [each for each in tables.trained_models() if each.published < arguments.since]
    newest = max(stock.as_of for stock in tables.stocks())
    stocks = [stock for stock in tables.stocks() if stock.as_of == newest]
    if arguments.growth is not None and arguments.as_of is None:
        raise CallerError("--growth changes nothing without --as-of")
    grows = tables.GROWTH if arguments.growth is None else arguments.growth
    if not fixed(grows) > 0:
        raise CallerError(f"--growth must be above 0, not {fixed(grows):g}")
    growth = ranged(grows)
    years = 0.0 if arguments.as_of is None else tables.years_since(newest, arguments.as_of)
    named = [*given.values(), *(value for _, value in (*arguments.row, *arguments.fleet))]
    if arguments.as_of is not None:
        named.append(grows)
    drawn = arguments if arguments.bands or any(map(is_uncertain, named)) else None
    today = {**given, "flop_per_day": tables.H100_FLOP_PER_DAY}
    holders = [(stock.holder, stock.chips) for stock in stocks]
    of_today = _cells([(model.model, model.flop) for model in models], holders, today, drawn, (growth, years))
    data = {
        "parameters": scheme,
        "table_1": _cells(rows, fleets, given, drawn),
        "footnote": dataclasses.asdict(foot),
        "false_alarm": 0.0,
        "today": {
            "parameters": {name: fixed(value) for name, value in today.items()},
            "stocks_as_of": newest,
            "as_of": arguments.as_of,
            "growth": None if arguments.as_of is None else str(growth),
            "stocks": [_stock(stock, growth, years) for stock in stocks],
            "left_out": [each.model for each in left_out],
            "without_figures": list(tables.WITHOUT_FIGURES),
            "models": [_model(model, row, stocks) for model, row in zip(models, of_today, strict=True)],
        },
        "chips": [dataclasses.asdict(chip) | {"flop_per_day": chip.flop_per_day} for chip in tables.chips()],
        "own": _cells(own_rows, own_fleets, given, drawn),
        "inputs": None if drawn is None else described({name: ranged(value) for name, value in given.items()}),
        "draws": None if drawn is None else drawn.draws,
        "seed": None if drawn is None else drawn.seed,
    }
    return finish(arguments, data, _text(data, stocks, sources=arguments.sources))


def _cells(
    rows: Named,
    fleets: Named,
    given: dict[str, Any],
    drawn: argparse.Namespace | None,
    grown: tuple[Distribution, float] | None = None,
) -> list[dict[str, Any]]:
    """Return the rows with a cell for each fleet, at the medians and, where there are draws, with its band.

    ``grown`` is by how much all fleets grow in a year, and for how many years.
    """
    from analysis.report.tables import cell

    scheme = {name: fixed(value) for name, value in given.items()}
    growth, years = grown or (ranged(1.0), 0.0)
    factor = fixed(growth) ** years
    found: list[dict[str, Any]] = [
        {
            "model": model,
            "flop": fixed(flop),
            "chips_needed": _chips_needed(fixed(flop), scheme),
            "cells": [
                {
                    "fleet": name,
                    "chips": fixed(chips) * factor,
                    "per_year": cell(flop=fixed(flop), chips=fixed(chips) * factor, **worked(scheme)),
                    "band": None,
                }
                for name, chips in fleets
            ],
        }
        for model, flop in rows
    ]
    if drawn is not None and rows:
        for row, bands in zip(found, _bands(rows, fleets, given, drawn, (growth, years)), strict=True):
            for place, one in enumerate(row["cells"]):
                one["band"] = bands[place]
    return found


def _bands(
    rows: Named, fleets: Named, given: dict[str, Any], drawn: argparse.Namespace, grown: tuple[Distribution, float]
) -> list[list[dict[str, Any]]]:
    """Return the band of each cell; a run's FLOP, a fleet's chips, growth and the scheme are drawn independently."""
    import numpy as np

    from inspector.probability.detection import DAYS_PER_YEAR
    from inspector.probability.uncertainty import Band, band, draws, samples_where_possible

    inputs = {("scheme", name): ranged(value) for name, value in given.items()}
    inputs |= {("row", name): flop for name, flop in rows} | {("fleet", name): chips for name, chips in fleets}
    inputs[("growth", "")] = grown[0]
    at = draws({repr(key): value for key, value in inputs.items()}, number=drawn.draws, seed=drawn.seed)
    scheme = worked({name: at[repr(("scheme", name))] for name in given})
    chips = np.stack([at[repr(("fleet", name))] for name, _ in fleets]) * at[repr(("growth", ""))] ** grown[1]
    found = []
    for name, _ in rows:
        samples = samples_where_possible(flop=at[repr(("row", name))], chips=chips, **scheme)
        cells = band(np.maximum(np.ceil(DAYS_PER_YEAR * samples / scheme["period"]), 1.0))
        parts = zip(cells.low, cells.median, cells.high, cells.possible, strict=True)
        found.append([banded(Band(low=low, median=mid, high=high, possible=share)) for low, mid, high, share in parts])
    return found


def _model(model: TrainedModel, row: dict[str, Any], stocks: list[Stock]) -> dict[str, Any]:
    cells = [
        {"holder": stock.holder, "as_of": stock.as_of, "per_year": one["per_year"], "band": one["band"]}
        for stock, one in zip(stocks, row["cells"], strict=True)
    ]
    return dataclasses.asdict(model) | {"chips_needed": row["chips_needed"], "cells": cells}


def _stock(stock: Stock, growth: Distribution, years: float) -> dict[str, Any]:
    """Return a holder's stock and what it is projected to, with the band of its source, of growth, or of both."""
    chips, low, high = stock.chips_h100_equivalent, stock.chips_low, stock.chips_high
    found = dataclasses.asdict(stock) | {"projected": None, "low": low, "high": high}
    if years:
        least, most = (float(growth.ppf(end)) ** years for end in (0.05, 0.95))
        found |= {"projected": chips * fixed(growth) ** years}
        if least < most or low is not None:
            found |= {"low": (low or chips) * least, "high": (high or chips) * most}
    return found


def _chips_needed(flop: float, scheme: dict[str, Any]) -> int:
    import math

    from inspector.probability.detection import chips_needed

    return math.ceil(chips_needed(flop=flop, days=scheme["days"], flop_per_day=worked(scheme)["flop_per_day"]))


def _text(data: dict[str, Any], stocks: list[Stock], *, sources: bool) -> list[str]:
    scheme, foot, today = data["parameters"], data["footnote"], data["today"]
    bands = data["draws"] is not None
    lines = [
        "Chips to inspect a year (Eq. 1; - means that the lab owns fewer chips than the run needs)",
        f"T = {scheme['days']:g} days, T_m = {scheme['period']:g} days, f = {scheme['rate']:g} snapshots per chip and "
        f"day, p = {scheme['confidence']:g}, a = {scheme['flop_per_day']:g} FLOP per chip and day, "
        f"of which a run gets {scheme['utilisation']:g}",
        NO_ALARM,
        *(_band_note(data) if bands else ()),
        "",
        "Table 1 of Shavit 2023",
        *_grid(data["table_1"], scheme),
        "",
        f"Footnote: 1e7 chips three times faster, 9.9e24 FLOP: {foot['samples']:,} samples a year, "
        f"{foot['inspectors']} inspectors (the IAEA had {foot['iaea_inspectors_2021']} in 2021).",
    ]
    if data["own"]:
        lines += ["", "Your rows", *_grid(data["own"], scheme)]
    from analysis.report.tables import aligned, holder_names

    short = [holder_names()[stock.holder, stock.as_of] for stock in stocks]
    shown = [place for place, name in enumerate(short) if name in _SHOWN_HOLDERS]
    names = [short[place] for place in shown]
    head = [
        "model",
        "published",
        "kind",
        "confirmed",
        *(["5 % to 95 %"] if bands else ()),
        "FLOP",
        "chips needed",
        *names,
    ]
    body = [
        [
            model["model"],
            model["published"],
            model["kind"],
            "yes" if model["confirmed"] else "no",
            *([_stated(model["training_flop_low"], model["training_flop_high"])] if bands else ()),
            f"{model['training_flop']:.3g}",
            f"{model['chips_needed']:,}",
            *(_cell(model["cells"][place]) for place in shown),
        ]
        for model in today["models"]
    ]
    blank = ["", "", "", "", "", *([""] if bands else ())]
    held = [each["projected"] or each["chips_h100_equivalent"] for each in today["stocks"]]
    owned = [*blank, "projected" if today["as_of"] else "H100 eq.", *(f"{held[place]:,.0f}" for place in shown)]
    if bands:
        owned_range = [
            *blank,
            "5 % to 95 %",
            *(_stated(today["stocks"][place]["low"], today["stocks"][place]["high"]) for place in shown),
        ]
    lines += [
        "",
        f"Today: if one holder of {today['as_of'] or today['stocks_as_of']} trained such a model within "
        f"{scheme['days']:g} days, on H100 equivalents (a = {today['parameters']['flop_per_day']:.4g})",
        *_about_stocks(today),
        *aligned([head, owned, *([owned_range] if bands else ()), *body], left=4),
    ]
    if sources:
        lines += ["", "Sources of the models", *(f"  {each['model']}: {each['source']}" for each in today["models"])]
        lines += ["", "Sources of the stocks"]
        lines += [
            f"  {each.holder}, {each.as_of}, {each.kind}, confirmed: {'yes' if each.confirmed else 'no'}: {each.source}"
            for each in stocks
        ]
        lines += ["", "Chips"]
        lines += [
            f"  {each['chip']} ({each['released']}): {each['peak_dense_flops_bf16']:.4g} FLOP/s, confirmed: "
            f"{'yes' if each['confirmed'] else 'no'}: {each['source']}"
            for each in data["chips"]
        ]
    else:
        lines += ["--sources says where each figure comes from."]
    return lines


def _about_stocks(today: dict[str, Any]) -> list[str]:
    """Say how old the stocks are, how they are projected, and which models are not there."""
    stocks = f"Stocks are public estimates of the end of {today['stocks_as_of']}; nothing newer is complete. "
    if today["as_of"] is None:
        stocks += f"The world's has grown since: --as-of YYYY-MM projects by {_growth_text()} times a year."
    else:
        stocks += (
            f"PROJECTED to {today['as_of']}: {today['growth']} times a year for every holder alike, an assumption."
        )
    models = [f"No source states a figure for {', '.join(today['without_figures'])}."]
    if today["left_out"]:
        newest = ", ".join(today["left_out"][-1:-4:-1])
        models.append(f"--since leaves out {len(today['left_out'])} earlier models (the latest: {newest}).")
    return [stocks, " ".join(models)]


def _growth_text() -> str:
    from analysis.report.tables import GROWTH

    return f"{GROWTH.low:g} to {GROWTH.high:g}"


def _band_note(data: dict[str, Any]) -> list[str]:
    known = ", ".join(f"{name} {text}" for name, text in data["inputs"].items() if text not in ("assumed", "chosen"))
    return [
        f"{data['draws']:,} draws (seed {data['seed']}): median (5 % to 95 %) where the chips are enough for the run; "
        f"uncertain: {known + ', ' if known else ''}models and stocks whose source states a range; the rest is assumed"
    ]


def _stated(low: float | None, high: float | None) -> str:
    return "assumed" if low is None or high is None else f"{low:.3g} to {high:.3g}"


def _grid(rows: list[Any], scheme: dict[str, Any]) -> list[str]:
    from analysis.report.tables import aligned

    head = ["model", "FLOP", f"chips for {scheme['days']:g} days", *(each["fleet"] for each in rows[0]["cells"])]
    body = [
        [
            row["model"],
            f"{row['flop']:.3g}",
            f"{row['chips_needed']:,}",
            *(_cell(each) for each in row["cells"]),
        ]
        for row in rows
    ]
    return aligned([head, *body])


def _cell(cell: dict[str, Any]) -> str:
    if cell["band"] is not None:
        return band_text(cell["band"])
    return "-" if cell["per_year"] is None else f"{cell['per_year']:,}"
