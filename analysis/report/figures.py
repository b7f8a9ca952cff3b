"""The figures of Chipwitness: detection, samples, timing, evasion, cost and supply-chain leakage.

Each function draws on given axes or writes the file that a path names (PNG, SVG or PDF by its extension) and returns
nothing. Closed forms come from ``inspector``; simulated results are passed in as arrays with their intervals.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analysis.report.results import (
    EvasionBar,
    RegimeColumn,
    bar_size,
    cost_figure,
    evasion_figure,
    found_figure,
    leakage_figure,
    regimes_figure,
    roc_figure,
    sensitivity_figure,
)
from analysis.report.style import (
    FAINT,
    LINES,
    NOTE,
    Axes,
    Origin,
    Target,
    canvas,
    count_axis,
    crown,
    drawn,
    label,
    line,
    percent_axis,
    setting,
    sheet,
    short_count,
)
from firmware_sim.errors import CallerError
from inspector.probability import detection as closed
from inspector.probability.timing import TimeToDetection
from inspector.probability.uncertainty import Band

__all__ = [
    "EvasionBar",
    "Mark",
    "Origin",
    "RegimeColumn",
    "Spread",
    "bar_size",
    "canvas",
    "chips_figure",
    "cost_figure",
    "detection_curve",
    "drawn",
    "evasion_figure",
    "found_figure",
    "leakage_figure",
    "rate_figure",
    "regimes_figure",
    "roc_figure",
    "sensitivity_figure",
    "sheet",
    "stretch_figure",
    "time_to_detection_figure",
    "timeline_figure",
]

_EVERY_INTEGER_UP_TO = 400
_SATURATED = 0.9999
_BANDS = "\nlines: medians of all inputs; bands: 5 % to 95 %"

Spread = Callable[[str, NDArray[np.float64]], Band]
"""From the name of a line and its places on the x axis to the band around it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A concrete inspection to show on a detection curve.

    Attributes:
        samples: different chips that it sampled.
        text: what to call it.
    """

    samples: int
    text: str = "this inspection"


def detection_curve(
    target: Target,
    *,
    chips: int,
    used: int,
    catch: float = 1.0,
    confidence: float | None = None,
    mark: int | Mark | Sequence[Mark] = (),
    title: str = "",
    note: str = "",
    origin: Origin | None = None,
) -> None:
    """Draw detection probability against the number of sampled chips, and mark concrete inspections on it.

    Args:
        target: axes, or the path of the file to write.
        chips: C, chips of the fleet.
        used: chips that the run used.
        catch: chance that a sampled used chip incriminates (snapshot present, read, replay catches it).
        confidence: wanted probability, drawn as a level with the number of samples that reaches it.
        mark: samples of a concrete inspection, or marks with a text.
        title: of the figure; by default none.
        note: what it holds for, such as the run and the scheme.
        origin: command and seed for the metadata.
    """
    marks = [Mark(samples=mark)] if isinstance(mark, int) else [mark] if isinstance(mark, Mark) else list(mark)
    x = _sample_grid(chips, used, catch, [each.samples for each in marks])
    exact = closed.detection(closed.log_miss_without_replacement(chips=chips, used=used, samples=x, catch=catch))
    hit = closed.hit_probability(share=used / chips, snapshot=catch)
    with canvas(target, title=title or "Detection against sampled chips", origin=origin) as axes:
        dots = "o" if x.size <= 40 else "None"
        replaced = closed.detection(closed.log_miss(hit=hit, samples=x))
        same = np.allclose(exact, replaced, rtol=1e-9)
        axes.plot(x, exact, **line(0, dots), label="Eq. 1" if same else "different chips (hypergeometric)")
        if not same:
            axes.plot(x, replaced, **line(1, "None"), label="with replacement (Eq. 1)")
        axes.set_ylim(0, 1.06)
        percent_axis(axes.yaxis)
        axes.set_xlim(0, float(x[-1]) * 1.03)
        count_axis(axes.xaxis)
        if confidence is not None:
            _wanted(axes, chips, used, catch, confidence, float(x[-1]))
        for number, each in enumerate(marks):
            _place(axes, each, chips, used, catch, number)
        label(axes, x=f"chips sampled, out of {chips:,}", y="probability that the run is caught")
        about = f"run on {used:,} of {chips:,} chips; each incriminates with probability {catch:.3g}"
        crown(axes, title=title, note=f"{note}\n{about}" if note else about)


def stretch_figure(
    target: Target,
    *,
    confidence: float = 0.9,
    shares: Sequence[float] = (0.01, 0.05, 0.1, 0.2),
    longest: int = 100,
    origin: Origin | None = None,
) -> None:
    """Draw p_d(k)/p against the stretch k for several shares b (Shavit 2023, Figure 2, as lines)."""
    k = np.arange(1, longest + 1)
    with canvas(target, title="Fewer chips for longer", origin=origin) as axes:
        for number, share in enumerate(shares):
            ratio = closed.stretch_detection(stretch=k, share=share, confidence=confidence) / confidence
            limit = float(closed.stretch_limit(share=share, confidence=confidence)) / confidence
            name = f"b = {share:g} (k→∞: {limit:.4f})"
            axes.plot(k, ratio, **line(number), markevery=_decades(k), label=name)
        axes.set_xscale("log")
        axes.set_xlim(1, longest)
        axes.set_xticks(_decades(k) + 1, [str(each + 1) for each in _decades(k)])
        axes.minorticks_off()
        label(axes, x="stretch k: 1/k of the chips for k times as long", y="detection, as a share of p")
        note = f"samples set for p = {confidence:g}; b: share of the fleet in use; every used chip holds a snapshot"
        crown(axes, title="What stretching a run does to its detection", note=note)


def chips_figure(
    target: Target,
    *,
    flops: Mapping[str, float],
    fleets: tuple[float, float] = (1e3, 1e7),
    days: float = 365.0,
    period: float = 30.0,
    rate: float = 0.1,
    confidence: float = 0.9,
    flop_per_day: float = closed.FLOP_PER_CHIP_DAY,
    per_inspector: float = 1000.0,
    spread: Spread | None = None,
    origin: Origin | None = None,
) -> None:
    """Draw the samples a year that Eq. 1 asks for against the size of the fleet, one line for each run.

    Args:
        target: axes or path.
        flops: name of the run → H in FLOP.
        fleets: smallest and largest fleet.
        days, period, rate, confidence, flop_per_day: T, T_m, f, p, a.
        per_inspector: chips that one inspector examines in a year (right-hand axis).
        spread: from a run's name and fleets to the band of its samples a year, where inputs are uncertain.
        origin: command and seed for the metadata.
    """
    wants = {name: closed.chips_needed(flop=flop, days=days, flop_per_day=flop_per_day) for name, flop in flops.items()}
    drawn_runs = {name: flop for name, flop in flops.items() if wants[name] <= fleets[1]}
    if not drawn_runs:
        least = min(wants, key=lambda name: float(wants[name]))
        raise closed.ChipsTooFewError(
            f"there is no run to draw: {least!r} needs {float(wants[least]):.4g} chips, but the largest fleet holds "
            f"{fleets[1]:.4g}"
        )
    with canvas(target, title="Samples a year against fleet size", origin=origin) as axes:
        for number, (name, flop) in enumerate(drawn_runs.items()):
            needed = float(wants[name])
            fleet = np.geomspace(max(fleets[0], np.ceil(needed)), fleets[1], 200)
            samples = closed.samples_needed(
                flop=flop,
                chips=fleet,
                days=days,
                period=period,
                rate=rate,
                confidence=confidence,
                flop_per_day=flop_per_day,
            )
            yearly = closed.samples_per_year(per_period=samples, period=period)
            axes.plot(
                fleet,
                yearly,
                **line(number),
                markevery=40,
                label=name if name.endswith(" FLOP") else f"{name} ({flop:.3g} FLOP)",
            )
            if spread is not None:
                _shade(axes, fleet, spread(name, fleet), number)
        for name in (each for each in flops if each not in drawn_runs):
            axes.plot([], [], linestyle="None", label=f"{name} needs {float(wants[name]):.3g} chips: left out")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(*fleets)
        count_axis(axes.xaxis)
        count_axis(axes.yaxis)

        def to_inspectors(samples: Any) -> Any:
            return samples / per_inspector

        def to_samples(inspectors: Any) -> Any:
            return inspectors * per_inspector

        right = axes.secondary_yaxis("right", functions=(to_inspectors, to_samples))
        right.set_ylabel(f"inspectors, at {short_count(per_inspector)} chips each a year")
        count_axis(right.yaxis)
        right.tick_params(labelsize=8.5)
        label(axes, x="chips C that the lab owns", y="chips to sample a year")
        note = setting(days=days, period=period, rate=rate, confidence=confidence, flop_per_day=flop_per_day)
        crown(axes, title="Samples a year by size of the fleet", note=note + (_BANDS if spread else ""))


def rate_figure(
    target: Target,
    *,
    flop: float,
    chips: float,
    periods: Sequence[float] = (7.0, 30.0, 90.0),
    rates: tuple[float, float] = (1e-3, 10.0),
    days: float = 365.0,
    confidence: float = 0.9,
    flop_per_day: float = closed.FLOP_PER_CHIP_DAY,
    spread: Spread | None = None,
    origin: Origin | None = None,
) -> None:
    """Draw the samples a year against the snapshot rate f, one line for each monitoring period, and the floor f → ∞.

    ``spread`` goes from a period's text and rates to the band of the samples a year, where inputs are uncertain.
    """
    grid = np.geomspace(*rates, 200)
    floor = 0.0
    with canvas(target, title="Samples a year against the snapshot rate", origin=origin) as axes:
        for number, period in enumerate(periods):
            samples = closed.samples_needed(
                flop=flop,
                chips=chips,
                days=days,
                period=period,
                rate=grid,
                confidence=confidence,
                flop_per_day=flop_per_day,
            )
            axes.plot(grid, 365.0 / period * samples, **line(number), markevery=40, label=f"Tₘ = {period:g} days")
            if spread is not None:
                _shade(axes, grid, spread(f"{period:g}", grid), number)
        share = closed.used_share(flop=flop, chips=chips, days=days, flop_per_day=flop_per_day)
        floor = float(365.0 / days * closed.samples_for(hit=share, confidence=confidence))
        axes.axhline(floor, color=FAINT, linewidth=1)
        _name_floor(axes, floor)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_ylim(bottom=floor / 2)
        axes.set_xlim(*rates)
        count_axis(axes.xaxis)
        count_axis(axes.yaxis)
        label(axes, x="snapshots per chip and day, f", y="chips to sample a year")
        note = setting(flop=flop, chips=chips, days=days, confidence=confidence, flop_per_day=flop_per_day)
        crown(axes, title="Samples a year by rate of snapshots", note=note + (_BANDS if spread else ""))


def _name_floor(axes: Axes, floor: float) -> None:
    axes.annotate(
        f"every used chip holds a snapshot: {short_count(np.ceil(floor))} a year",
        (0.99, floor),
        xycoords=axes.get_yaxis_transform(),
        xytext=(0, -4),
        textcoords="offset points",
        ha="right",
        va="top",
        fontsize=NOTE,
        color=FAINT,
    )


def time_to_detection_figure(
    target: Target,
    *,
    schemes: Mapping[str, TimeToDetection],
    run_days: float | None = None,
    title: str = "",
    note: str = "",
    origin: Origin | None = None,
) -> None:
    """Draw the probability to be caught by each day, one staircase for each scheme; ``note`` says for which run."""
    if not schemes:
        raise CallerError("there is no scheme to draw")
    last = max(float(each.days[-1]) for each in schemes.values()) * 1.05
    with canvas(target, title=title or "Time to detection", origin=origin) as axes:
        for number, (name, scheme) in enumerate(schemes.items()):
            days = np.concatenate(([0.0], scheme.days, [last]))
            caught = np.concatenate(([0.0], scheme.detected, scheme.detected[-1:]))
            axes.plot(
                days, caught, **line(number), drawstyle="steps-post", markevery=max(1, days.size // 8), label=name
            )
            median = scheme.quantile(0.5)
            if np.isfinite(median):
                axes.plot(
                    median,
                    float(scheme.detected[scheme.days >= median][0]),
                    marker="*",
                    markersize=11,
                    color=LINES[number % len(LINES)]["color"],
                    markeredgecolor="white",
                    linestyle="None",
                    zorder=5,
                    clip_on=False,
                )
        if run_days is not None:
            axes.axvline(run_days, color=FAINT, linewidth=1)
            axes.annotate(
                "run ends",
                (run_days, 0.02),
                xytext=(-4, 0),
                textcoords="offset points",
                ha="right",
                fontsize=NOTE,
                color=FAINT,
            )
        axes.set_xlim(0, last)
        axes.set_ylim(0, 1.03)
        percent_axis(axes.yaxis)
        label(axes, x="days since the run began", y="probability of having been caught")
        star = "★ first day with at least 50%"
        crown(axes, title=title or "When the run is caught", note=f"{note}; {star}" if note else star)


def timeline_figure(
    target: Target,
    *,
    chips: Mapping[str, Sequence[tuple[float, str]]],
    kinds: Mapping[str, str],
    wrong: Mapping[str, Sequence[float]],
    title: str = "",
    origin: Origin | None = None,
) -> None:
    """Draw what chips recorded, a row for each chip.

    Args:
        target: axes or path.
        chips: name of a chip → tick and kind of each of its records.
        kinds: kinds to draw → what to call them.
        wrong: name of a chip → ticks of its snapshots that nothing explains.
        title: of the figure.
        origin: command and seed for the metadata.
    """
    rows = {name: place for place, name in enumerate(chips)}
    with canvas(target, title=title or "Records of chips", origin=origin) as axes:
        for number, (kind, text) in enumerate(kinds.items()):
            spots = [(tick, rows[name]) for name, records in chips.items() for tick, each in records if each == kind]
            axes.plot(
                *zip(*spots, strict=True) if spots else ([], []), **line(number) | {"linestyle": "None"}, label=text
            )
        ring: dict[str, Any] = {
            "marker": "o",
            "markersize": 12,
            "markerfacecolor": "None",
            "markeredgecolor": "#a3271c",
        }
        odd = [(tick, rows[name]) for name, ticks in wrong.items() for tick in ticks]
        if odd:
            axes.plot(*zip(*odd, strict=True), linestyle="None", **ring, label="snapshot that nothing explains")
        axes.set_yticks(range(len(rows)), list(rows))
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.locator_params(axis="x", integer=True)
        label(axes, x="tick, over all boots", y="")
        crown(axes, title=title)


def _shade(axes: Axes, x: NDArray[np.float64], band: Band, number: int) -> None:
    """Shade between the 5 % and the 95 % quantile, without a place in the legend."""
    colour = LINES[number % len(LINES)]["color"]
    axes.fill_between(x, band.low, band.high, color=colour, alpha=0.15, linewidth=0, label=f"_band {number}")


def _decades(k: NDArray[np.int_]) -> NDArray[np.int_]:
    return np.array([each - 1 for each in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if each <= k[-1]])


def _sample_grid(chips: int, used: int, catch: float, marked: Sequence[int]) -> NDArray[np.float64]:
    if chips <= _EVERY_INTEGER_UP_TO:
        return np.arange(chips + 1, dtype=np.float64)
    hit = closed.hit_probability(share=used / chips, snapshot=catch)
    enough = float(closed.samples_for(hit=hit, confidence=_SATURATED)) if hit > 0 else float(chips)
    last = min(chips, max(20, int(np.ceil(enough)), *(2 * each for each in marked)))
    return np.unique(np.round(np.linspace(0, last, 300)))


def _wanted(axes: Axes, chips: int, used: int, catch: float, confidence: float, last: float) -> None:
    axes.axhline(confidence, color=FAINT, linewidth=1, linestyle=(0, (1, 2)))
    try:
        needed = closed.samples_needed_without_replacement(chips=chips, used=used, catch=catch, confidence=confidence)
        text = f"{100 * confidence:g}% takes {needed:,} chips"
    except closed.OutOfReachError:
        text = f"{100 * confidence:g}%: out of reach even with all chips"
    end = closed.detection(closed.log_miss_without_replacement(chips=chips, used=used, samples=last, catch=catch))
    place, side = (last, "right") if end > (1 + confidence) / 2 else (0.01 * last, "left")
    axes.annotate(
        text, (place, confidence), xytext=(0, -3), textcoords="offset points", ha=side, va="top", fontsize=NOTE
    )


def _place(axes: Axes, mark: Mark, chips: int, used: int, catch: float, number: int) -> None:
    value = closed.detection(
        closed.log_miss_without_replacement(chips=chips, used=used, samples=mark.samples, catch=catch)
    )
    axes.vlines(mark.samples, 0, value, color="black", linewidth=1)
    axes.plot(mark.samples, value, marker="*", markersize=14, color="black", linestyle="None", zorder=6, clip_on=False)
    left = mark.samples < 0.5 * axes.get_xlim()[1]
    axes.annotate(
        f"{mark.text}: {mark.samples:,} chips, {100 * float(value):.3g}%",
        (mark.samples, float(value)),
        xytext=(12 if left else -12, (-16 if value > 0.2 else 12) - 18 * number * (1 if value > 0.2 else -1)),
        ha="left" if left else "right",
        textcoords="offset points",
        fontsize=NOTE + 1,
        bbox={"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": "black", "linewidth": 0.6},
        zorder=7,
    )
