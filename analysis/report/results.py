"""Figures of results that are computed elsewhere: costs, simulated strategies, leakage, sensitivity."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from analysis.report.style import (
    FAINT,
    HATCHES,
    NOTE,
    Axes,
    FuncFormatter,
    Origin,
    Rectangle,
    Target,
    canvas,
    count_axis,
    crown,
    label,
    line,
    percent_axis,
    short_count,
)
from firmware_sim.errors import CallerError

__all__ = [
    "EvasionBar",
    "RegimeColumn",
    "bar_size",
    "cost_figure",
    "evasion_figure",
    "leakage_figure",
    "regimes_figure",
    "roc_figure",
    "sensitivity_figure",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvasionBar:
    """A simulated detection probability of one strategy, with its interval and, where there is one, the closed form."""

    name: str
    value: float
    low: float
    high: float
    closed_form: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.value <= self.high <= 1:
            raise CallerError(f"estimate {self.name!r}: needs 0 <= low <= value <= high <= 1")
        if self.closed_form is not None and not 0 <= self.closed_form <= 1:
            raise CallerError(f"estimate {self.name!r}: the closed form must be a probability")


def bar_size(bars: int) -> tuple[float, float]:
    """Return width and height in inches of a figure with horizontal bars."""
    return 6.4, 1.6 + 0.36 * bars


def cost_figure(
    target: Target,
    *,
    costs: Mapping[str, NDArray[np.float64]],
    confidence: ArrayLike,
    unit: str = "inspector-years a year",
    title: str = "",
    note: str = "",
    origin: Origin | None = None,
) -> None:
    """Draw cost against wanted confidence; the axis is linear in log(1-p), in which Eq. 1's cost is a straight line."""
    wanted = np.asarray(confidence, dtype=np.float64)
    if not ((wanted >= 0) & (wanted < 1)).all():
        raise CallerError("confidence must be at least 0 and below 1")
    nines = -np.log10(1.0 - wanted)
    with canvas(target, title=title or "Cost against confidence", origin=origin) as axes:
        for number, (name, values) in enumerate(costs.items()):
            if len(values) != wanted.size:
                raise CallerError(f"costs of {name!r}: {len(values)} values for {wanted.size} confidences")
            axes.plot(nines, values, **line(number), markevery=max(1, wanted.size // 8), label=name)
        ticks = [p for p in (0.5, 0.9, 0.99, 0.999, 0.9999, 0.99999) if wanted.min() <= p <= wanted.max()]
        axes.set_xticks([-np.log10(1.0 - p) for p in ticks], [f"{100 * p:g}%" for p in ticks])
        axes.set_xlim(nines.min(), nines.max())
        axes.set_ylim(bottom=0)
        count_axis(axes.yaxis)
        label(axes, x="wanted detection probability p", y=unit)
        crown(axes, title=title or "What confidence costs", note=note)


def found_figure(
    target: Target,
    *,
    chips: NDArray[np.float64],
    found: Mapping[str, NDArray[np.float64]],
    title: str = "",
    note: str = "",
    origin: Origin | None = None,
) -> None:
    """Draw the chance that undeclared chips are found against their number, a line for each source."""
    with canvas(target, title=title or "Hidden sites", origin=origin) as axes:
        for number, (name, chance) in enumerate(found.items()):
            axes.plot(
                chips, chance, **line(number), markevery=max(1, chips.size // 8), label=name, clip_on=False, zorder=3
            )
        axes.set_xscale("log")
        axes.set_xlim(chips.min(), chips.max())
        axes.set_ylim(0, 1.03)
        count_axis(axes.xaxis)
        percent_axis(axes.yaxis)
        label(axes, x="chips at undeclared sites", y="probability that they are found")
        crown(axes, title=title or "What finds an undeclared site", note=note)


def evasion_figure(
    target: Target,
    *,
    estimates: Sequence[EvasionBar],
    confidence: float | None = None,
    interval: str | None = "interval",
    title: str = "",
    note: str = "",
    origin: Origin | None = None,
) -> None:
    """Draw evasion strategies side by side: detection with its interval, and the closed form where there is one.

    Args:
        target: axes or path.
        estimates: one bar each, first on top.
        confidence: wanted probability, drawn as a line.
        interval: what the whiskers are, such as "95% interval"; None if the bars themselves are closed forms.
        title: of the figure.
        note: what it holds for, such as fleet, run and scheme.
        origin: command and seed for the metadata.
    """
    if not estimates:
        raise CallerError("no strategy to draw")
    rows = np.arange(len(estimates))[::-1]
    with canvas(target, title=title or "Evasion strategies", origin=origin, size=bar_size(len(estimates))) as axes:
        value = np.array([each.value for each in estimates])
        name = "closed form" if interval is None else "simulated"
        axes.barh(
            rows, value, height=0.62, color="#c9d8ea", edgecolor="#08306b", hatch="///", linewidth=0.8, label=name
        )
        if interval is not None:
            spread = [value - [each.low for each in estimates], [each.high for each in estimates] - value]
            axes.errorbar(
                value, rows, xerr=spread, fmt="none", ecolor="black", capsize=3, linewidth=1.2, label=interval
            )
        _mark_theory(axes, rows, estimates)
        _name_bars(axes, rows, estimates)
        if confidence is not None:
            axes.axvline(confidence, color=FAINT, linestyle="--", linewidth=1, label=f"wanted, {100 * confidence:g}%")
        axes.set_yticks(rows, [each.name for each in estimates])
        axes.set_ylim(-0.6, len(estimates) - 0.4)
        axes.grid(False, axis="y")
        axes.set_xlim(0, 1.12)
        axes.set_xticks(np.linspace(0, 1, 6))
        percent_axis(axes.xaxis)
        label(axes, x="probability of being caught", y="")
        crown(axes, title=title, note=note)


def _mark_theory(axes: Axes, rows: Iterable[int], estimates: Sequence[EvasionBar]) -> None:
    """Mark the closed forms, where there are some."""
    theory = [
        (each.closed_form, row) for row, each in zip(rows, estimates, strict=True) if each.closed_form is not None
    ]
    if theory:
        axes.plot(
            *zip(*theory, strict=True),
            marker="D",
            markersize=6,
            markerfacecolor="white",
            color="black",
            linestyle="None",
            clip_on=False,
            label="closed form",
        )


def _name_bars(axes: Axes, rows: Iterable[int], estimates: Sequence[EvasionBar]) -> None:
    for row, each in zip(rows, estimates, strict=True):
        axes.annotate(
            f"{100 * each.value:.3g}%",
            (max(each.high, each.closed_form or 0.0), row),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            fontsize=NOTE,
            bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RegimeColumn:
    """One regime: detection and median day of detection (None: never) of each strategy, and what it costs a year.

    ``worst`` is the place of the strategy that is caught least.
    """

    name: str
    detections: tuple[float, ...]
    delays: tuple[float | None, ...]
    worst: int
    false_alarm: float
    inspectors: float
    cost: float


def regimes_figure(
    target: Target,
    *,
    strategies: Sequence[str],
    columns: Sequence[RegimeColumn],
    title: str = "",
    note: str = "",
    origin: Origin | None = None,
) -> None:
    """Draw regimes side by side: a cell for each strategy, darker where it is caught more often, the worst case below.

    Args:
        target: axes or path.
        strategies: names of the rows, first on top.
        columns: one for each regime.
        title: of the figure.
        note: what it holds for, such as fleet, run and scheme.
        origin: command and seed for the metadata.
    """
    if not strategies or not columns:
        raise CallerError("no strategy or no regime to draw")
    for column in columns:
        if not len(column.detections) == len(column.delays) == len(strategies):
            raise CallerError(f"regime {column.name!r} needs one detection and one delay for each strategy")
    size = (max(6.4, 2.2 + 1.15 * len(columns)), 2.6 + 0.42 * (len(strategies) + 1))
    with canvas(target, title=title or "Regimes side by side", origin=origin, size=size) as axes:
        last = len(strategies)
        for x, column in enumerate(columns):
            for y, row in [*enumerate(range(last)), (last, column.worst)]:
                caught, day = column.detections[row], column.delays[row]
                shade = 1.0 - 0.72 * caught
                colour = (shade, shade, 0.55 * shade + 0.45)
                axes.add_patch(Rectangle((x, y), 1, 1, facecolor=colour, edgecolor="white"))
                text = f"{100 * caught:.3g}%\n" + ("never" if day is None else f"day {day:g}")
                ink = "white" if caught > 0.6 else "black"
                axes.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=NOTE, color=ink)
        axes.axhline(last, color="black", linewidth=2)
        axes.set_xlim(0, len(columns))
        axes.set_ylim(last + 1, 0)
        axes.set_yticks(np.arange(last + 1) + 0.5, [*strategies, "worst case"])
        feet = _feet(columns)
        axes.set_xticks(np.arange(len(columns)) + 0.5, ["\n".join(foot) for foot in feet], fontsize=NOTE)
        axes.tick_params(length=0)
        axes.grid(False)
        axes.spines[["left", "bottom"]].set_visible(False)
        label(axes, x="", y="")
        what = "cells: chance to be caught and median day; below: honest labs accused, inspectors and money a year"
        crown(axes, title=title, note=f"{note}\n{what}")


def _feet(columns: Sequence[RegimeColumn]) -> list[list[str]]:
    """What is written below each column."""
    names = [wrap(column.name, 14) or [""] for column in columns]
    height = max(map(len, names))
    money = any(column.cost for column in columns)
    return [
        [
            *name,
            *[""] * (height + 1 - len(name)),
            f"{100 * column.false_alarm:.2g}% accused",
            f"{column.inspectors:.3g} inspectors",
            *([f"costs {short_count(column.cost)}"] if money else []),
        ]
        for name, column in zip(names, columns, strict=True)
    ]


def roc_figure(
    target: Target,
    *,
    false_alarm: Sequence[float],
    detection: Sequence[float],
    tolerated: Sequence[int],
    best: int,
    title: str = "",
    note: str = "",
    origin: Origin | None = None,
) -> None:
    """Draw detection against false alarm, one point for each number of tolerated chips.

    Args:
        target: axes or path.
        false_alarm: chance that an honest lab is accused, in the order of ``tolerated``.
        detection: chance that a violation is.
        tolerated: refusals of a visit.
        best: the number with the least expected cost, marked.
        title: of the figure.
        note: what it holds for, such as fleet, run and scheme.
        origin: command and seed for the metadata.
    """
    if not tolerated or best not in tolerated or not len(tolerated) == len(false_alarm) == len(detection):
        raise CallerError("an ROC needs one false-alarm rate and one detection rate for each number of tolerated chips")
    with canvas(target, title=title or "ROC", origin=origin) as axes:
        floor = max(1e-7, min((each for each in false_alarm if each > 0), default=1e-7) / 3)
        x = np.maximum(np.asarray(false_alarm, np.float64), floor)
        axes.plot(x, detection, **line(0), label="chips that could not be shown, tolerated at a visit")
        grid = np.geomspace(floor, 1, 200)
        axes.plot(grid, grid, **line(4, "None"), label="a verdict by lot")
        place = list(tolerated).index(best)
        axes.plot(
            x[place], detection[place], marker="*", markersize=14, color="black", linestyle="None", clip_on=False,
            label=f"least expected cost: {best}",
        )  # fmt: skip
        last = math.inf
        for number, height in enumerate(detection):
            if abs(height - last) > 0.05:  # where the points lie closer, so would their numbers
                spot = (x[number], height)
                axes.annotate(
                    str(tolerated[number]), spot, (-6, 4), textcoords="offset points", ha="right", fontsize=NOTE
                )
                last = height
        axes.set_xscale("log")
        axes.set_xlim(floor, 1.3)
        axes.set_ylim(0, 1.06)
        percent_axis(axes.yaxis)
        label(axes, x="chance that an honest lab is accused", y="chance that a violation is caught")
        crown(axes, title=title or "What tolerance buys and costs", note=note)


def leakage_figure(
    target: Target,
    *,
    months: ArrayLike,
    unseen: Mapping[str, ArrayLike],
    title: str = "",
    note: str = "",
    origin: Origin | None = None,
) -> None:
    """Draw the probability that diverted chips stay unseen against the months since, on a logarithmic axis.

    Args:
        target: axes or path.
        months: shape (n,).
        unseen: name of the line, such as "10 chips" → probabilities, shape (n,).
        title: of the figure.
        note: what it holds for, such as fleet, run and scheme.
        origin: command and seed for the metadata.
    """
    time = np.asarray(months, dtype=np.float64)
    with canvas(target, title=title or "Supply-chain leakage", origin=origin) as axes:
        for number, (name, values) in enumerate(unseen.items()):
            curve = np.asarray(values, dtype=np.float64)
            if curve.shape != time.shape:
                raise CallerError(f"line {name!r}: {curve.size} probabilities for {time.size} months")
            axes.plot(time, curve, **line(number), markevery=max(1, time.size // 8), label=name)
        axes.set_yscale("log")
        axes.set_ylim(bottom=max(1e-12, axes.get_ylim()[0]), top=1.2)
        axes.set_xlim(float(time.min()), float(time.max()))
        label(axes, x="months since the diversion", y="probability that no chip was missed yet")
        crown(axes, title=title or "How long diverted chips stay unseen", note=note or "lines: chips diverted")


def sensitivity_figure(
    target: Target,
    *,
    rows: Sequence[tuple[str, float, float]],
    x: str = "answer, relative to the one as it is",
    ends: tuple[str, str] = ("parameter lower", "parameter higher"),
    title: str = "",
    note: str = "",
    origin: Origin | None = None,
) -> None:
    """Draw a tornado: by which factor the answer changes when each parameter is made lower and higher.

    Args:
        target: axes or path.
        rows: (parameter, factor when it is lower, factor when it is higher; NaN if impossible), strongest first.
        x: label of the axis.
        ends: what lower and higher mean.
        title: of the figure.
        note: what it holds for, such as fleet, run and scheme.
        origin: command and seed for the metadata.
    """
    if not rows:
        raise CallerError("there is no parameter to draw")
    places = np.arange(len(rows))[::-1]
    with canvas(target, title=title or "Sensitivity", origin=origin, size=bar_size(len(rows))) as axes:
        axes.set_xscale("log", base=2)
        for side, colour in enumerate(("#c9d8ea", "#f0b48a")):
            factors = np.array([row[1 + side] for row in rows], dtype=np.float64)
            known = np.where(np.isfinite(factors), factors, 1.0)
            look: dict[str, Any] = {
                "height": 0.62,
                "color": colour,
                "edgecolor": "black",
                "hatch": HATCHES[side],
                "linewidth": 0.8,
            }
            axes.barh(places, known - 1.0, left=1.0, **look, label=ends[side])
        axes.axvline(1.0, color="black", linewidth=1)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
        axes.set_yticks(places, [row[0] for row in rows])
        axes.grid(False, axis="y")
        label(axes, x=x, y="")
        crown(axes, title=title, note=note)
