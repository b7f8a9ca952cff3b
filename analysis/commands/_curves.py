"""``curve KIND --out FILE``: one figure as PNG, SVG or PDF, and its numbers as JSON."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.commands._answers import fields_of
from analysis.commands._common import add_json, count, finish, plural
from analysis.commands._curve_answers import (
    AnySummary,
    ChipsSummary,
    EvasionSummary,
    MarkedSummary,
    SamplesSummary,
    Series,
    StretchSummary,
    Summary,
    VisitedStrategy,
)
from analysis.commands._curve_evasions import closed_bars, measured_bars, setting_of
from analysis.commands._detection_options import (
    NO_ALARM,
    NO_FIND,
    add_run,
    add_scheme,
    command_line,
    named,
    numbers,
    scheme_of,
    worked,
)
from analysis.commands._uncertainty import add_draws, fixed, is_uncertain, ranged
from firmware_sim.errors import CallerError

if TYPE_CHECKING:
    from argparse import ArgumentParser, _SubParsersAction

    from analysis.report.figures import Spread
    from analysis.report.style import Axes
    from inspector.probability.uncertainty import Band

__all__ = ["register"]

_KEYS = """
JSON keys: kind, file, command, series (a list with name, x, y: the numbers drawn, null where there is none),
false_alarm (0, by construction; evasion has it in strategies). For stretch also: minimum (of p_d(k)/p over the grid),
limit. For chips also: left_out (runs that the largest fleet cannot do). For samples also: used, catch, detection (at
--mark), needed (chips for the confidence, null if out of reach). For evasion also: strategies (name, detection, low,
high, closed_form, false_alarm: chance that this regime accuses an honest lab, excess: detection less false_alarm). For
a closed form also: visits (whole visits during the run, as a campaign counts them), eq_1 (detection for T/T_m visits,
not rounded, as in Eq. 1 and plan).
"""


Draw = Callable[[argparse.Namespace, "Axes"], AnySummary]
Kind = Callable[[str, str, Draw], "ArgumentParser"]
"""Adds a kind of curve, by its name, what it shows, and what draws it."""

_REGIMES = "regimes"
"""The ready scenario that a sheet draws."""


def register(subparsers: _SubParsersAction[ArgumentParser]) -> None:
    """Add ``curve`` and its kinds."""
    curve = subparsers.add_parser("curve", epilog=_KEYS)
    kinds = curve.add_subparsers(dest="kind", required=True, metavar="KIND")

    parsers: dict[str, tuple[ArgumentParser, Draw]] = {}

    def kind(name: str, text: str, draw: Draw) -> ArgumentParser:
        parser: ArgumentParser = kinds.add_parser(name, help=text, epilog=_KEYS)
        parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="ends in .png, .svg or .pdf")
        add_json(parser)
        parsers[name] = parser, draw
        parser.set_defaults(handler=lambda arguments: _curve(arguments, draw))
        return parser

    _add_fleet_curves(kind)
    _add_inspection_curves(kind)
    _add_sheet(kinds, parsers)


def _add_fleet_curves(kind: Kind) -> None:
    """Add the curves about a run and its fleet."""
    stretch = kind("stretch", "fewer chips for longer: p_d(k)/p (Shavit 2023, Figure 2)", _stretch)
    stretch.add_argument("--confidence", type=float, default=0.9, metavar="P", help="p (default 0.9)")
    stretch.add_argument(
        "--share", type=numbers, default=[0.01, 0.05, 0.1, 0.2], metavar="B,...", help="shares b of the fleet in use"
    )
    stretch.add_argument("--longest", type=count, default=100, metavar="K", help="largest stretch k (default 100)")

    chips = kind("chips", "samples a year against the size of the fleet", _chips)
    chips.add_argument(
        "--run",
        type=named("FLOP", uncertain=True),
        action="append",
        default=[],
        metavar="NAME=~FLOP",
        help="a run (default: Table 1)",
    )
    chips.add_argument("--fleets", type=numbers, default=[1e3, 1e7], metavar="FROM,TO", help="default 1e3,1e7")
    add_scheme(chips, uncertain=True)
    add_draws(chips, default=1_000, what="for the bands")

    rate = kind("rate", "samples a year against the snapshot rate", _rate)
    add_run(rate, flop=2.56e24, chips=1e5, uncertain=True)
    add_scheme(rate, period=False, rate=False, uncertain=True)
    add_draws(rate, default=1_000, what="for the bands")
    rate.add_argument("--periods", type=numbers, default=[7.0, 30.0, 90.0], metavar="TM,...", help="default 7,30,90")
    rate.add_argument("--rates", type=numbers, default=[1e-3, 10.0], metavar="FROM,TO", help="default 0.001,10")


def _add_sheet(kinds: _SubParsersAction[ArgumentParser], parsers: Mapping[str, tuple[ArgumentParser, Draw]]) -> None:
    """Add ``curve sheet``."""
    text = "all figures of `curve` with their defaults, and the built-in inspection regimes, on one sheet"
    sheet = kinds.add_parser("sheet", help=text, epilog="JSON keys: kind, file, command, figures.")
    sheet.add_argument("--out", type=Path, required=True, metavar="FILE", help="ends in .png, .svg or .pdf")
    sheet.add_argument("--trials", type=count, default=500, metavar="N", help="trials in each cell (default 500)")
    sheet.add_argument("--seed", type=count, default=0, metavar="S", help="of these trials (default 0)")
    add_json(sheet)
    sheet.set_defaults(handler=lambda arguments: _sheet(arguments, parsers))


def _add_inspection_curves(kind: Kind) -> None:
    """Add the curves about inspections, and about what a lab does against them."""
    samples = kind("samples", "detection against the chips sampled in one inspection", _samples)
    add_run(samples, flop=2.56e24, chips=1e5)
    add_scheme(samples)
    samples.add_argument("--mark", type=count, default=None, metavar="N", help="mark an inspection of N chips")

    time = kind("time", "time to detection", _time)
    add_run(time, flop=2.56e24, chips=1e5)
    add_scheme(time, period=False)
    time.add_argument("--periods", type=numbers, default=[7.0, 30.0, 90.0], metavar="TM,...", help="default 7,30,90")

    cost = kind("cost", "inspectors against confidence", _cost)
    add_run(cost, flop=2.56e24, chips=1e5)
    add_scheme(cost)
    cost.add_argument(
        "--fleet", type=numbers, default=[1e5, 3e5, 1e6], metavar="C,...", help="fleets (default 1e5,3e5,1e6)"
    )

    evasion = kind(
        "evasion", "evasion strategies side by side, as a campaign measured them or in closed form", _evasion
    )
    add_run(evasion, flop=2.56e24, chips=1e5)
    add_scheme(evasion)
    evasion.add_argument(
        "--evasion",
        action="append",
        metavar="NAME[=X]",
        help="evasion to draw in closed form, as `plan --help` lists them (repeat)",
    )
    evasion.add_argument(
        "--results", type=Path, metavar="FILE", help="file from `campaign --json`, to draw in place of the closed form"
    )

    leakage = kind("leakage", "diverted chips that no census has found missing yet", _leakage)
    leakage.add_argument("--fleet", type=count, default=1_000_000, metavar="N", help="chips on record (default 1e6)")
    leakage.add_argument("--census", type=count, default=1_000, metavar="M", help="chips of each census (default 1000)")
    leakage.add_argument(
        "--diverted",
        type=numbers,
        default=[10.0, 100.0, 1000.0],
        metavar="N,...",
        help="numbers of diverted chips (default 10,100,1000)",
    )
    leakage.add_argument("--months", type=count, default=24, metavar="T", help="default 24")
    leakage.add_argument("--per-month", type=float, default=1.0, metavar="X", help="censuses a month (default 1)")


def _sheet(arguments: argparse.Namespace, parsers: Mapping[str, tuple[ArgumentParser, Draw]]) -> int:
    """Draw every kind with its defaults, and the ready regimes, on one sheet."""
    from analysis.commands._regimes import columns_of
    from analysis.montecarlo import TrialEngine
    from analysis.regimes import compare
    from analysis.report import figures
    from analysis.scenarios import open_regimes

    results = compare(open_regimes(_REGIMES), arguments.trials, arguments.seed, engine=TrialEngine.COUNTS)

    def kind(name: str) -> Callable[[Axes], None]:
        parser, draw = parsers[name]
        options = parser.parse_args(["--out", str(arguments.out)])

        def on(axes: Axes) -> None:
            draw(options, axes)

        return on

    def regimes(axes: Axes) -> None:
        figures.regimes_figure(axes, title=results[0].scenario.title, **columns_of(results))

    command = f"chipwitness curve sheet --trials {arguments.trials} --seed {arguments.seed}"
    drawings = {name: kind(name) for name in parsers}
    figures.sheet(
        arguments.out,
        drawings=drawings,
        wide={"regimes": regimes},
        title="chipwitness curve sheet",
        origin=figures.Origin(command=command, seed=arguments.seed),
    )
    names = [*drawings, "regimes"]
    data = {"kind": "sheet", "file": str(arguments.out), "command": command, "figures": names}
    return finish(arguments, data, [f"wrote {arguments.out}: {', '.join(names)}"])


def _curve(arguments: argparse.Namespace, draw: Draw) -> int:
    from analysis.report.figures import Origin, canvas

    command = command_line(arguments)
    with canvas(arguments.out, title=f"chipwitness curve {arguments.kind}", origin=Origin(command=command)) as axes:
        summary = draw(arguments, axes)
        series = [
            Series(str(drawn.get_label()), _floats(drawn.get_xdata()), _floats(drawn.get_ydata()))
            for drawn in axes.lines
            if not str(drawn.get_label()).startswith("_") and len(drawn.get_xdata())  # type: ignore[arg-type]
        ]
    data = {
        "kind": arguments.kind,
        "file": str(arguments.out),
        "command": command,
        **fields_of(summary),
        "series": series,
    }
    bars = summary.strategies if isinstance(summary, EvasionSummary) else [summary]
    alarms = [each.false_alarm for each in bars]
    closing = [] if any(alarms) else [NO_FIND if arguments.kind == "leakage" else NO_ALARM]
    return finish(arguments, data, [f"wrote {arguments.out}", *_text(summary), *closing])


def _text(summary: AnySummary) -> list[str]:
    if isinstance(summary, ChipsSummary):
        return [f"left out: {name} needs more chips than the largest fleet" for name in summary.left_out]
    if not isinstance(summary, EvasionSummary):
        shown = {name: value for name, value in fields_of(summary).items() if name != "false_alarm"}
        return [f"{name}: {value:.6g}" for name, value in shown.items() if value is not None]
    lines, even = [], []
    for row in summary.strategies:
        visits = f" in {plural(row.visits, 'visit')}" if isinstance(row, VisitedStrategy) else ""
        honest = f"; honest labs accused with {row.false_alarm:.4f}" if row.false_alarm else ""
        lines.append(f"{row.name}: caught with probability {row.detection:.4f}{visits}{honest}")
        even += [f"{row.name} {row.eq_1:.4f}"] if isinstance(row, VisitedStrategy) else []
    if even:
        lines.append(
            "Visits are whole, and the run begins right after one, as in a campaign. Spread evenly, as in Eq. 1: "
            + ", ".join(even)
        )
    return lines


def _floats(values: Any) -> list[float | None]:
    return [float(value) if math.isfinite(value) else None for value in values]


def _pair(name: str, values: list[float]) -> tuple[float, float]:
    if len(values) != 2 or not 0 < values[0] < values[1] < float("inf"):
        raise CallerError(f"--{name} needs two positive numbers FROM,TO with FROM below TO")
    return values[0], values[1]


def _stretch(arguments: argparse.Namespace, axes: Axes) -> AnySummary:
    import numpy as np

    from analysis.report import figures
    from inspector.probability import detection as closed

    if not 2 <= arguments.longest <= 1_000_000:
        raise CallerError(f"--longest must be between 2 and 1,000,000, not {arguments.longest}")
    figures.stretch_figure(axes, confidence=arguments.confidence, shares=arguments.share, longest=arguments.longest)
    stretch, share = np.arange(1, arguments.longest + 1), np.linspace(0, max(arguments.share), 201)
    grid = [
        closed.stretch_detection(stretch=stretch, share=each, confidence=arguments.confidence).min() for each in share
    ]
    limit = closed.stretch_limit(share=max(arguments.share), confidence=arguments.confidence)
    return StretchSummary(minimum=float(min(grid) / arguments.confidence), limit=float(limit) / arguments.confidence)


def _chips(arguments: argparse.Namespace, axes: Axes) -> AnySummary:
    from analysis.report import figures
    from analysis.report.tables import TABLE_1
    from inspector.probability.detection import chips_needed

    runs = dict(arguments.run) or {each.model: each.flop for each in TABLE_1}
    flops = {name: fixed(flop) for name, flop in runs.items()}
    fleets, scheme = _pair("fleets", arguments.fleets), scheme_of(arguments)
    middle = worked({name: fixed(value) for name, value in scheme.items()})

    def of(name: str, fleet: Any) -> Mapping[str, Any]:
        return {"flop": runs[name], "chips": fleet, **scheme}

    spread = _spread(arguments, of, [*runs.values(), *scheme.values()])
    figures.chips_figure(axes, flops=flops, fleets=fleets, **middle, spread=spread)
    speed = {key: middle[key] for key in ("days", "flop_per_day")}
    return ChipsSummary(left_out=[name for name, flop in flops.items() if chips_needed(flop=flop, **speed) > fleets[1]])


def _rate(arguments: argparse.Namespace, axes: Axes) -> AnySummary:
    from analysis.report import figures

    given = {"flop": arguments.flop, "chips": arguments.chips, **scheme_of(arguments)}

    def of(period: str, rates: Any) -> Mapping[str, Any]:
        return {**given, "period": float(period), "rate": rates}

    middle = worked({name: fixed(value) for name, value in given.items()})
    rates, spread = _pair("rates", arguments.rates), _spread(arguments, of, given.values())
    figures.rate_figure(axes, periods=arguments.periods, rates=rates, **middle, spread=spread)
    return Summary()


def _spread(
    arguments: argparse.Namespace,
    of: Callable[[str, Any], Mapping[str, Any]],
    values: Iterable[Any],
) -> Spread | None:
    """Return the band around a line of samples a year, by name and places; None where no input is uncertain."""
    if not any(map(is_uncertain, values)):
        return None

    def band_of(name: str, places: Any) -> Band:
        from inspector.probability.detection import DAYS_PER_YEAR
        from inspector.probability.uncertainty import band, draws, samples_where_possible

        given = of(name, places)
        known = {key: ranged(value) for key, value in given.items() if value is not places}
        at: dict[str, Any] = draws(known, number=arguments.draws, seed=arguments.seed)
        at |= {key: value[:, None] for key, value in given.items() if value is places}
        return band(DAYS_PER_YEAR * samples_where_possible(**worked(at)) / at["period"])

    return band_of


def _samples(arguments: argparse.Namespace, axes: Axes) -> AnySummary:
    from analysis.report import figures
    from inspector.probability import detection as closed

    speed = worked(scheme_of(arguments))["flop_per_day"]
    share = closed.used_share(flop=arguments.flop, chips=arguments.chips, days=arguments.days, flop_per_day=speed)
    chips, used = int(arguments.chips), math.ceil(float(share) * arguments.chips)
    catch = float(closed.snapshot_probability(rate=arguments.rate, days=arguments.period))
    if arguments.mark is not None and not 0 <= arguments.mark <= chips:
        raise CallerError(f"--mark must be between 0 and the {chips} chips, not {arguments.mark}")
    figures.detection_curve(
        axes,
        chips=chips,
        used=used,
        catch=catch,
        confidence=arguments.confidence,
        mark=() if arguments.mark is None else arguments.mark,
        title="What one inspection catches",
        note=setting_of(arguments),
    )
    needed = None
    with suppress(closed.OutOfReachError):
        needed = closed.samples_needed_without_replacement(
            chips=chips, used=used, catch=catch, confidence=arguments.confidence
        )
    if arguments.mark is None:
        return SamplesSummary(used=used, catch=catch, needed=needed)
    miss = closed.log_miss_without_replacement(chips=chips, used=used, samples=arguments.mark, catch=catch)
    return MarkedSummary(used=used, catch=catch, detection=float(closed.detection(miss)), needed=needed)


def _time(arguments: argparse.Namespace, axes: Axes) -> AnySummary:
    from analysis.report import figures
    from inspector.probability import detection as closed
    from inspector.probability.timing import time_to_detection

    run, scheme = {"flop": arguments.flop, "chips": arguments.chips}, worked(scheme_of(arguments))
    share = closed.used_share(**run, days=arguments.days, flop_per_day=scheme["flop_per_day"])
    schemes = {}
    for period in arguments.periods:
        samples = float(closed.samples_needed(**run, **scheme, period=period))
        schemes[f"every {period:g} days, s = {samples:.3g}"] = time_to_detection(
            share=float(share), samples=samples, days=arguments.days, period=period, rate=arguments.rate
        )
    figures.time_to_detection_figure(axes, schemes=schemes, run_days=arguments.days, note=setting_of(arguments))
    return Summary()


def _cost(arguments: argparse.Namespace, axes: Axes) -> AnySummary:
    import numpy as np

    from analysis.report import figures
    from analysis.report.style import setting
    from inspector.probability import detection as closed

    scheme = worked(scheme_of(arguments))
    highest = max(0.9999, scheme.pop("confidence"))
    confidence = 1.0 - np.geomspace(0.5, 1.0 - highest, 60)
    costs = {}
    for fleet in arguments.fleet:
        samples = closed.samples_needed(flop=arguments.flop, chips=fleet, confidence=confidence, **scheme)
        yearly = closed.DAYS_PER_YEAR / scheme["period"] * samples
        costs[f"{fleet:,.0f} chips"] = yearly / closed.CHIPS_PER_INSPECTOR
    unit = f"inspectors, at {closed.CHIPS_PER_INSPECTOR:,} chips each a year"
    given = {name: getattr(arguments, name) for name in ("flop", "days", "period", "rate")}
    figures.cost_figure(axes, costs=costs, confidence=confidence, unit=unit, note=setting(**given))
    return Summary()


def _evasion(arguments: argparse.Namespace, axes: Axes) -> AnySummary:
    from analysis.report import figures
    from analysis.report.style import Figure

    bars, strategies, look = measured_bars(arguments.results) if arguments.results else closed_bars(arguments)
    figure = axes.get_figure()
    if isinstance(figure, Figure):  # a sheet's parts keep their size
        figure.set_size_inches(*figures.bar_size(len(bars)))
    figures.evasion_figure(axes, estimates=bars, **look)
    return EvasionSummary(strategies=strategies)


def _leakage(arguments: argparse.Namespace, axes: Axes) -> AnySummary:
    import numpy as np

    from analysis.report import figures
    from inspector.registry.leakage import unseen_probability

    if not 1 <= arguments.months <= 1200:
        raise CallerError(f"--months must be between 1 and 1200, not {arguments.months}")
    months = np.arange(arguments.months + 1)
    unseen = {
        f"{diverted:,.0f} chips": unseen_probability(
            diverted=diverted,
            fleet=arguments.fleet,
            census=arguments.census,
            months=months,
            per_month=arguments.per_month,
        )
        for diverted in arguments.diverted
    }
    often = plural(arguments.per_month, "census")
    note = f"{arguments.census:,} of {arguments.fleet:,} chips drawn by each census, {often}"
    figures.leakage_figure(axes, months=months, unseen=unseen, note=f"{note} a month; lines: chips diverted")
    return Summary()
