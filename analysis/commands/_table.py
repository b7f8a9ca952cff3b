"""``table``: Table 1 of Shavit 2023, the same question for today's models and stocks, and the user's own rows."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from analysis.commands._answers import fields_of, keys_text
from analysis.commands._common import add_json, finish
from analysis.commands._detection_options import NO_ALARM, add_scheme, named, scheme_of
from analysis.commands._table_answer import Cell, HolderCell, ModelRow, Row, StockRow, TableAnswer, Today, rows_of
from analysis.commands._uncertainty import (
    UNCERTAIN,
    add_draws,
    band_text,
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

    from analysis.report.tables import Stock
    from inspector.probability.distributions import Distribution

    Named = Sequence[tuple[str, Distribution]]

__all__ = ["register"]

_SHOWN_HOLDERS = ("Google", "Microsoft", "Meta", "xAI", "China", "World (sold)")


def register(subparsers: _SubParsersAction[ArgumentParser]) -> None:
    """Add ``table``."""
    table = subparsers.add_parser(
        "table",
        description="How many chips to inspect in a year to catch a run (Shavit 2023, Table 1), in 2023 and today. "
        "The table has a part for 2023 and one for today. The part for today counts in H100 equivalents, so that "
        "--flop-per-day does not change it." + UNCERTAIN,
        epilog=keys_text(TableAnswer),
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
        help="also print ranges, from the uncertainty that the public figures' sources state",
    )
    add_draws(table, default=10_000, what="for each cell")
    option(
        "--as-of",
        metavar="YYYY-MM",
        help="project today's chip counts to this month with --growth (default: the newest month with data)",
    )
    option(
        "--growth",
        type=within("positive"),
        default=None,
        metavar="~X",
        help="factor by which chip counts grow in a year, for --as-of (default uniform(3.3,3.4): what Epoch AI "
        "states for the whole world)",
    )
    option(
        "--since",
        default="2024-01",
        metavar="YYYY-MM",
        help="show only models that were published in this month or later (default 2024-01)",
    )
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
    models = [each for each in tables.trained_models() if each.published >= arguments.since]
    if not models:
        raise CallerError(f"no model has been published since {arguments.since}")
    left_out = [each for each in tables.trained_models() if each.published < arguments.since]
    newest = max(stock.as_of for stock in tables.stocks())
    stocks = [stock for stock in tables.stocks() if stock.as_of == newest]
    grows, years = _growth(arguments, newest)
    growth = ranged(grows)
    named = [*given.values(), *(value for _, value in (*arguments.row, *arguments.fleet))]
    if arguments.as_of is not None:
        named.append(grows)
    drawn = arguments if arguments.bands or any(map(is_uncertain, named)) else None
    of_today = {**given, "flop_per_day": tables.H100_FLOP_PER_DAY}
    holders = [(stock.holder, stock.chips) for stock in stocks]
    trained = rows_of([(model.model, model.flop) for model in models], holders, of_today, drawn, (growth, years))
    today = Today(
        parameters={name: fixed(value) for name, value in of_today.items()},
        stocks_as_of=newest,
        as_of=arguments.as_of,
        growth=None if arguments.as_of is None else str(growth),
        stocks=[StockRow.of(stock, growth, years) for stock in stocks],
        left_out=[each.model for each in left_out],
        without_figures=tables.WITHOUT_FIGURES,
        models=[ModelRow.of(model, row, stocks) for model, row in zip(models, trained, strict=True)],
    )
    data = TableAnswer(
        parameters=scheme,
        table_1=rows_of(rows, fleets, given, drawn),
        footnote=tables.footnote(),
        today=today,
        chips=[fields_of(chip) | {"flop_per_day": chip.flop_per_day} for chip in tables.chips()],
        own=rows_of(own_rows, own_fleets, given, drawn),
        inputs=None if drawn is None else described({name: ranged(value) for name, value in given.items()}),
        draws=None if drawn is None else drawn.draws,
        seed=None if drawn is None else drawn.seed,
    )
    return finish(arguments, data, _text(data, stocks, sources=arguments.sources))


def _growth(arguments: argparse.Namespace, newest: str) -> tuple[float | Distribution, float]:
    """By how much stocks grow in a year, as it was given, and for how many years."""
    from analysis.report import tables

    if arguments.growth is not None and arguments.as_of is None:
        raise CallerError("--growth has no effect without --as-of")
    grows = tables.GROWTH if arguments.growth is None else arguments.growth
    if not fixed(grows) > 0:
        raise CallerError(f"--growth must be above 0, not {fixed(grows):g}")
    return grows, 0.0 if arguments.as_of is None else tables.years_since(newest, arguments.as_of)


def _text(data: TableAnswer, stocks: list[Stock], *, sources: bool) -> list[str]:
    scheme, foot, today = data.parameters, data.footnote, data.today
    bands = data.draws is not None
    lines = [
        "Chips to inspect a year (Eq. 1; - means that the lab owns fewer chips than the run needs)",
        f"T = {scheme['days']:g} days, T_m = {scheme['period']:g} days, f = {scheme['rate']:g} snapshots per chip and "
        f"day, p = {scheme['confidence']:g}, a = {scheme['flop_per_day']:g} FLOP per chip and day, "
        f"of which a run gets {scheme['utilisation']:g}",
        NO_ALARM,
        *(_band_note(data) if bands else ()),
        "",
        "Table 1 of Shavit 2023",
        *_grid(data.table_1, scheme),
        "",
        f"Footnote: 1e7 chips three times faster, 9.9e24 FLOP: {foot.samples:,} samples a year, "
        f"{foot.inspectors} inspectors (the IAEA had {foot.iaea_inspectors_2021} in 2021).",
    ]
    if data.own:
        lines += ["", "Your rows", *_grid(data.own, scheme)]
    lines += [
        "",
        f"Today: if one holder of {today.as_of or today.stocks_as_of} trained such a model within "
        f"{scheme['days']:g} days, on H100 equivalents (a = {today.parameters['flop_per_day']:.4g})",
        *_about_stocks(today),
        *_today_table(today, stocks, bands=bands),
    ]
    if sources:
        lines += _source_lines(data, stocks)
    else:
        lines += ["--sources says where each figure comes from."]
    return lines


def _source_lines(data: TableAnswer, stocks: Sequence[Stock]) -> list[str]:
    lines = ["", "Sources of the models", *(f"  {each.model}: {each.source}" for each in data.today.models)]
    lines += ["", "Sources of the stocks"]
    lines += [
        f"  {each.holder}, {each.as_of}, {each.kind}, confirmed: {'yes' if each.confirmed else 'no'}: {each.source}"
        for each in stocks
    ]
    lines += ["", "Chips"]
    lines += [
        f"  {each['chip']} ({each['released']}): {each['peak_dense_flops_bf16']:.4g} FLOP/s, confirmed: "
        f"{'yes' if each['confirmed'] else 'no'}: {each['source']}"
        for each in data.chips
    ]
    return lines


def _today_table(today: Today, stocks: Sequence[Stock], *, bands: bool) -> list[str]:
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
            model.model,
            model.published,
            model.kind,
            "yes" if model.confirmed else "no",
            *([_stated(model.training_flop_low, model.training_flop_high)] if bands else ()),
            f"{model.training_flop:.3g}",
            f"{model.chips_needed:,}",
            *(_cell(model.cells[place]) for place in shown),
        ]
        for model in today.models
    ]
    blank = ["", "", "", "", "", *([""] if bands else ())]
    held = [each.projected or each.chips_h100_equivalent for each in today.stocks]
    owned = [*blank, "projected" if today.as_of else "H100 eq.", *(f"{held[place]:,.0f}" for place in shown)]
    if bands:
        owned_range = [
            *blank,
            "5 % to 95 %",
            *(_stated(today.stocks[place].low, today.stocks[place].high) for place in shown),
        ]
    return aligned([head, owned, *([owned_range] if bands else ()), *body], left=4)


def _about_stocks(today: Today) -> list[str]:
    """Say how old the stocks are, how they are projected, and which models are not there."""
    stocks = f"Stocks are public estimates of the end of {today.stocks_as_of}; nothing newer is complete. "
    if today.as_of is None:
        stocks += f"The world's has grown since: --as-of YYYY-MM projects by {_growth_text()} times a year."
    else:
        stocks += f"PROJECTED to {today.as_of}: {today.growth} times a year for every holder alike, an assumption."
    models = [f"No source states a figure for {', '.join(today.without_figures)}."]
    if today.left_out:
        newest = ", ".join(today.left_out[-1:-4:-1])
        models.append(f"--since leaves out {len(today.left_out)} earlier models (the latest: {newest}).")
    return [stocks, " ".join(models)]


def _growth_text() -> str:
    from analysis.report.tables import GROWTH

    return f"{GROWTH.low:g} to {GROWTH.high:g}"


def _band_note(data: TableAnswer) -> list[str]:
    known = ", ".join(
        f"{name} {text}" for name, text in (data.inputs or {}).items() if text not in ("assumed", "chosen")
    )
    return [
        f"{data.draws:,} draws (seed {data.seed}): median (5 % to 95 %) where the chips are enough for the run; "
        f"uncertain: {known + ', ' if known else ''}models and stocks whose source states a range; the rest is assumed"
    ]


def _stated(low: float | None, high: float | None) -> str:
    return "assumed" if low is None or high is None else f"{low:.3g} to {high:.3g}"


def _grid(rows: Sequence[Row], scheme: Mapping[str, float]) -> list[str]:
    from analysis.report.tables import aligned

    head = ["model", "FLOP", f"chips for {scheme['days']:g} days", *(each.fleet for each in rows[0].cells)]
    body = [
        [
            row.model,
            f"{row.flop:.3g}",
            f"{row.chips_needed:,}",
            *(_cell(each) for each in row.cells),
        ]
        for row in rows
    ]
    return aligned([head, *body])


def _cell(cell: Cell | HolderCell) -> str:
    if cell.band is not None:
        return band_text(cell.band)
    return "-" if cell.per_year is None else f"{cell.per_year:,}"
