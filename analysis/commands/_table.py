"""``table``: Table 1 of Shavit 2023, the same question for today's models and stocks, and the user's own rows."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from analysis.commands._common import add_json, finish
from analysis.commands._detection_options import add_scheme, named, scheme_of
from firmware_sim.errors import CallerError

if TYPE_CHECKING:
    from argparse import ArgumentParser, _SubParsersAction

    from analysis.report.tables import Stock, TrainedModel

__all__ = ["register"]

_KEYS = """
JSON keys: parameters; table_1 (model, flop, chips_needed, cells: a list of chips, per_year or null for a dash);
footnote (samples, inspectors, iaea_inspectors_2021); today (parameters, stocks: holder, chips_h100_equivalent, as_of,
kind, source, confirmed; models: model, organisation, published, training_flop, kind, source, confirmed, chips_needed,
cells: a list of holder, as_of, per_year); chips (the rows of chips.csv, with flop_per_day); own (as table_1, for --row
and --fleet).
"""

_SHOWN_HOLDERS = ("Google", "Microsoft", "Meta", "xAI", "China", "World (sold)")


def register(subparsers: _SubParsersAction[ArgumentParser]) -> None:
    """Add ``table``."""
    table = subparsers.add_parser(
        "table",
        help="Table 1 of the paper, and the same for today's models, chips and stocks",
        description="Chips to inspect a year so that a run is caught (Shavit 2023, Table 1), then and today. "
        "The options change the parameters of every part except the footnote; --flop-per-day does not change today's, "
        "which is in H100 equivalents.",
        epilog=_KEYS,
    )
    add_scheme(table)
    option = table.add_argument
    option("--row", type=named("FLOP"), action="append", default=[], metavar="NAME=FLOP", help="a run of your own")
    option(
        "--fleet", type=named("CHIPS"), action="append", default=[], metavar="NAME=CHIPS", help="a fleet of your own"
    )
    option("--since", default="2024-01", metavar="YYYY-MM", help="today's models published since (default 2024-01)")
    option("--sources", action="store_true", help="also print where each of today's figures comes from")
    add_json(table)
    table.set_defaults(handler=_table)


def _table(arguments: argparse.Namespace) -> int:
    from analysis.report import tables

    scheme = scheme_of(arguments)
    fleets = [(f"{chips:g} chips", chips) for chips in tables.TABLE_1_FLEETS]
    rows = [(row.model, row.flop) for row in tables.TABLE_1]
    own_rows = arguments.row or (rows if arguments.fleet else [])
    foot = tables.footnote()
    models = [each for each in tables.trained_models() if each.published >= arguments.since]
    if not models:
        raise CallerError(f"no model has been published since {arguments.since}")
    newest = max(stock.as_of for stock in tables.stocks())
    stocks = [stock for stock in tables.stocks() if stock.as_of == newest]
    today = {**scheme, "flop_per_day": tables.H100_FLOP_PER_DAY}
    data = {
        "parameters": scheme,
        "table_1": _cells(rows, fleets, scheme),
        "footnote": dataclasses.asdict(foot),
        "today": {
            "parameters": today,
            "stocks": [dataclasses.asdict(stock) for stock in stocks],
            "models": [_model(model, stocks, today) for model in models],
        },
        "chips": [dataclasses.asdict(chip) | {"flop_per_day": chip.flop_per_day} for chip in tables.chips()],
        "own": _cells(own_rows, arguments.fleet or fleets, scheme),
    }
    return finish(arguments, data, _text(data, stocks, sources=arguments.sources))


def _cells(rows: list[tuple[str, float]], fleets: list[tuple[str, float]], scheme: dict[str, Any]) -> list[Any]:
    from analysis.report.tables import cell

    return [
        {
            "model": model,
            "flop": flop,
            "chips_needed": _chips_needed(flop, scheme),
            "cells": [
                {"fleet": name, "chips": chips, "per_year": cell(flop=flop, chips=chips, **scheme)}
                for name, chips in fleets
            ],
        }
        for model, flop in rows
    ]


def _model(model: TrainedModel, stocks: list[Stock], scheme: dict[str, Any]) -> dict[str, Any]:
    from analysis.report.tables import cell

    flop = model.training_flop
    cells = [
        {
            "holder": stock.holder,
            "as_of": stock.as_of,
            "per_year": cell(flop=flop, chips=stock.chips_h100_equivalent, **scheme),
        }
        for stock in stocks
    ]
    return dataclasses.asdict(model) | {"chips_needed": _chips_needed(flop, scheme), "cells": cells}


def _chips_needed(flop: float, scheme: dict[str, Any]) -> int:
    import math

    from inspector.probability.detection import chips_needed

    return math.ceil(chips_needed(flop=flop, days=scheme["days"], flop_per_day=scheme["flop_per_day"]))


def _text(data: dict[str, Any], stocks: list[Stock], *, sources: bool) -> list[str]:
    scheme, foot, today = data["parameters"], data["footnote"], data["today"]
    lines = [
        "Chips to inspect a year (Eq. 1; - means that the Prover owns fewer chips than the run needs)",
        f"T = {scheme['days']:g} days, T_m = {scheme['period']:g} days, f = {scheme['rate']:g} snapshots per chip and "
        f"day, p = {scheme['confidence']:g}, a = {scheme['flop_per_day']:g} FLOP per chip and day",
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
    head = ["model", "published", "kind", "confirmed", "FLOP", "chips needed", *names]
    body = [
        [
            model["model"],
            model["published"],
            model["kind"],
            "yes" if model["confirmed"] else "no",
            f"{model['training_flop']:.3g}",
            f"{model['chips_needed']:,}",
            *(_cell(model["cells"][place]["per_year"]) for place in shown),
        ]
        for model in today["models"]
    ]
    owned = ["", "", "", "", "", "H100 eq.", *(f"{stocks[place].chips_h100_equivalent:,}" for place in shown)]
    lines += [
        "",
        f"Today: if one holder of {stocks[0].as_of} trained such a model within {scheme['days']:g} days, on H100 "
        f"equivalents (a = {today['parameters']['flop_per_day']:.4g})",
        *aligned([head, owned, *body], left=4),
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


def _grid(rows: list[Any], scheme: dict[str, Any]) -> list[str]:
    from analysis.report.tables import aligned

    head = ["model", "FLOP", f"chips for {scheme['days']:g} days", *(each["fleet"] for each in rows[0]["cells"])]
    body = [
        [
            row["model"],
            f"{row['flop']:.3g}",
            f"{row['chips_needed']:,}",
            *(_cell(each["per_year"]) for each in row["cells"]),
        ]
        for row in rows
    ]
    return aligned([head, *body])


def _cell(per_year: int | None) -> str:
    return "-" if per_year is None else f"{per_year:,}"
