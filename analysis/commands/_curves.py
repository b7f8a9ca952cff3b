"""``curve KIND --out FILE``: one figure as PNG, SVG or PDF, and its numbers as JSON."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.commands._common import add_json, finish
from analysis.commands._detection_options import add_run, add_scheme, command_line, named, numbers, scheme_of
from firmware_sim.errors import CallerError

if TYPE_CHECKING:
    from argparse import ArgumentParser, _SubParsersAction

    from matplotlib.axes import Axes

__all__ = ["register"]

_KEYS = """
JSON keys: kind, file, command, series (a list of name, x, y: the numbers drawn), and the kind's own figures:
stretch minimum (of p_d(k)/p over the grid) and limit; samples used, catch, detection (at --mark), needed (different
chips for the confidence).
"""

Summary = dict[str, Any]


def register(subparsers: _SubParsersAction[ArgumentParser]) -> None:
    """Add ``curve`` and its kinds."""
    curve = subparsers.add_parser("curve", help="draw a figure (PNG, SVG or PDF) and give its numbers", epilog=_KEYS)
    kinds = curve.add_subparsers(dest="kind", required=True, metavar="KIND")

    def kind(name: str, text: str, draw: Callable[[argparse.Namespace, Axes], Summary]) -> ArgumentParser:
        parser: ArgumentParser = kinds.add_parser(name, help=text, description=text, epilog=_KEYS)
        parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="ends in .png, .svg or .pdf")
        add_json(parser)
        parser.set_defaults(handler=lambda arguments: _curve(arguments, draw))
        return parser

    stretch = kind("stretch", "fewer chips for longer: p_d(k)/p (Shavit 2023, Figure 2)", _stretch)
    stretch.add_argument("--confidence", type=float, default=0.9, metavar="P", help="p (default 0.9)")
    stretch.add_argument(
        "--share", type=numbers, default=[0.01, 0.05, 0.1, 0.2], metavar="B,...", help="shares b of the fleet in use"
    )
    stretch.add_argument("--longest", type=int, default=100, metavar="K", help="largest stretch k (default 100)")

    chips = kind("chips", "samples a year against the size of the fleet", _chips)
    chips.add_argument(
        "--run", type=named("FLOP"), action="append", default=[], metavar="NAME=FLOP", help="a run (default: Table 1)"
    )
    chips.add_argument("--fleets", type=numbers, default=[1e3, 1e7], metavar="FROM,TO", help="default 1e3,1e7")
    add_scheme(chips)

    rate = kind("rate", "samples a year against the snapshot rate", _rate)
    add_run(rate, flop=2.56e24, chips=1e5)
    add_scheme(rate, period=False, rate=False)
    rate.add_argument("--periods", type=numbers, default=[7.0, 30.0, 90.0], metavar="TM,...", help="default 7,30,90")
    rate.add_argument("--rates", type=numbers, default=[1e-3, 10.0], metavar="FROM,TO", help="default 0.001,10")

    samples = kind("samples", "detection against the chips sampled in one inspection", _samples)
    add_run(samples, flop=2.56e24, chips=1e5)
    add_scheme(samples)
    samples.add_argument("--mark", type=int, default=None, metavar="N", help="mark an inspection of N chips")

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


def _curve(arguments: argparse.Namespace, draw: Callable[[argparse.Namespace, Axes], Summary]) -> int:
    from analysis.figures import Origin, canvas

    summary: Summary = {}
    command = command_line(arguments)
    with canvas(arguments.out, title=f"chipwitness curve {arguments.kind}", origin=Origin(command=command)) as axes:
        summary = draw(arguments, axes)
        series = [
            {"name": str(drawn.get_label()), "x": _floats(drawn.get_xdata()), "y": _floats(drawn.get_ydata())}
            for drawn in axes.lines
            if not str(drawn.get_label()).startswith("_")
        ]
    data = {"kind": arguments.kind, "file": str(arguments.out), "command": command, **summary, "series": series}
    lines = [f"{name}: {value:.6g}" for name, value in summary.items() if isinstance(value, float | int)]
    return finish(arguments, data, [f"wrote {arguments.out}", *lines])


def _floats(values: Any) -> list[float]:
    return [float(value) for value in values]


def _pair(name: str, values: list[float]) -> tuple[float, float]:
    if len(values) != 2 or not 0 < values[0] < values[1] < float("inf"):
        raise CallerError(f"--{name} needs two positive numbers FROM,TO with FROM below TO")
    return values[0], values[1]


def _stretch(arguments: argparse.Namespace, axes: Axes) -> Summary:
    import numpy as np

    from analysis import figures
    from inspector import detection as closed

    if not 2 <= arguments.longest <= 1_000_000:
        raise CallerError(f"--longest must be between 2 and 1,000,000, not {arguments.longest}")
    figures.stretch_figure(axes, confidence=arguments.confidence, shares=arguments.share, longest=arguments.longest)
    stretch, share = np.arange(1, arguments.longest + 1), np.linspace(0, max(arguments.share), 201)
    grid = [
        closed.stretch_detection(stretch=stretch, share=each, confidence=arguments.confidence).min() for each in share
    ]
    limit = closed.stretch_limit(share=max(arguments.share), confidence=arguments.confidence)
    return {
        "minimum": float(min(grid) / arguments.confidence),
        "limit": float(limit) / arguments.confidence,
    }


def _chips(arguments: argparse.Namespace, axes: Axes) -> Summary:
    from analysis import figures
    from analysis.tables import TABLE_1

    flops = dict(arguments.run) or {each.model: each.flop for each in TABLE_1}
    figures.chips_figure(axes, flops=flops, fleets=_pair("fleets", arguments.fleets), **scheme_of(arguments))
    return {}


def _rate(arguments: argparse.Namespace, axes: Axes) -> Summary:
    from analysis import figures

    figures.rate_figure(
        axes,
        flop=arguments.flop,
        chips=arguments.chips,
        periods=arguments.periods,
        rates=_pair("rates", arguments.rates),
        **scheme_of(arguments),
    )
    return {}


def _samples(arguments: argparse.Namespace, axes: Axes) -> Summary:
    import math

    from analysis import figures
    from inspector import detection as closed

    share = closed.used_share(
        flop=arguments.flop, chips=arguments.chips, days=arguments.days, flop_per_day=arguments.flop_per_day
    )
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
    )
    summary: Summary = {"used": used, "catch": catch}
    if arguments.mark is not None:
        miss = closed.log_miss_without_replacement(chips=chips, used=used, samples=arguments.mark, catch=catch)
        summary["detection"] = float(closed.detection(miss))
    summary["needed"] = closed.samples_needed_without_replacement(
        chips=chips, used=used, catch=catch, confidence=arguments.confidence
    )
    return summary


def _time(arguments: argparse.Namespace, axes: Axes) -> Summary:
    from analysis import figures
    from inspector import detection as closed
    from inspector.timing import time_to_detection

    run, scheme = {"flop": arguments.flop, "chips": arguments.chips}, scheme_of(arguments)
    share = closed.used_share(**run, days=arguments.days, flop_per_day=arguments.flop_per_day)
    schemes = {}
    for period in arguments.periods:
        samples = float(closed.samples_needed(**run, **scheme, period=period))
        schemes[f"every {period:g} days, s = {samples:.3g}"] = time_to_detection(
            share=float(share), samples=samples, days=arguments.days, period=period, rate=arguments.rate
        )
    figures.time_to_detection_figure(axes, schemes=schemes, run_days=arguments.days)
    return {}


def _cost(arguments: argparse.Namespace, axes: Axes) -> Summary:
    import numpy as np

    from analysis import figures
    from inspector import detection as closed

    scheme = scheme_of(arguments)
    highest = max(0.9999, scheme.pop("confidence"))
    confidence = 1.0 - np.geomspace(0.5, 1.0 - highest, 60)
    costs = {}
    for fleet in arguments.fleet:
        samples = closed.samples_needed(flop=arguments.flop, chips=fleet, confidence=confidence, **scheme)
        yearly = closed.DAYS_PER_YEAR / scheme["period"] * samples
        costs[f"{fleet:,.0f} chips"] = yearly / closed.CHIPS_PER_INSPECTOR
    unit = f"inspectors, at {closed.CHIPS_PER_INSPECTOR:,} chips each a year"
    figures.cost_figure(axes, costs=costs, confidence=confidence, unit=unit)
    return {}
