"""Evasion strategies side by side, in closed form or as a campaign measured them, for ``curve evasion``."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.commands._curve_answers import (
    Strategy,
    VisitedStrategy,
)
from analysis.commands._detection_options import (
    campaign_note,
    scheme_of,
    worked,
)
from firmware_sim import limits
from firmware_sim.errors import CallerError, EvidenceError, file_error
from firmware_sim.evidence import canonical

if TYPE_CHECKING:
    from analysis.report.figures import EvasionBar

__all__ = ["closed_bars", "measured_bars", "setting_of"]


Evasions = tuple[list["EvasionBar"], Sequence[Strategy | VisitedStrategy], Mapping[str, Any]]
"""Bars to draw, what they say, and how the figure looks."""


def setting_of(arguments: argparse.Namespace) -> str:
    """Return what a figure holds for, of what its options name."""
    from analysis.report.style import setting

    names = ("flop", "chips", "days", "period", "rate", "confidence")
    return setting(**{name: getattr(arguments, name, None) for name in names})


def closed_bars(arguments: argparse.Namespace) -> Evasions:
    """Return how often the samples that Eq. 1 asks for at one site catch each evasion, visit by visit."""
    from analysis.commands._evasions import parse_evasion, spoken
    from analysis.report.figures import EvasionBar
    from inspector.probability import detection as closed
    from inspector.probability.planning import Problem, VisitedSite, Visits, best_response
    from inspector.probability.timing import time_to_detection

    scheme = worked(scheme_of(arguments))
    period = scheme.pop("period")
    samples = closed.samples_needed(flop=arguments.flop, chips=arguments.chips, period=period, **scheme)
    site = VisitedSite(name="all chips", chips=arguments.chips)
    names = arguments.evasion or ["declared", "stretch=10", "rush=10", "hide=0.5", "tamper=0.5"]
    evasions = tuple(parse_evasion(each) for each in names)
    problem = Problem(flop=arguments.flop, sites=(site,), periods=(period,), evasions=evasions, **scheme)
    visits = [Visits(site=site.name, period=period, samples=math.ceil(samples))]
    bars, strategies = [], []
    for each in evasions:
        even = best_response(problem, visits, each)
        course = time_to_detection(
            share=min(1.0, even.placement[0] / arguments.chips),
            samples=visits[0].samples,
            days=arguments.days * each.stretch,
            period=period,
            rate=arguments.rate,
            readout=each.readout,
        )
        caught = float(course.detected[-1])
        bars.append(EvasionBar(name=spoken(each.name), value=caught, low=caught, high=caught))
        strategies.append(
            VisitedStrategy(
                name=each.name,
                detection=caught,
                low=caught,
                high=caught,
                closed_form=None,
                false_alarm=even.false_alarm,
                visits=course.days.size,
                eq_1=even.detection,
                excess=caught - even.false_alarm,
            )
        )
    title = f"What the lab makes of {visits[0].samples:,} samples every {period:g} days"
    look = {"confidence": arguments.confidence, "interval": None, "title": title, "note": setting_of(arguments)}
    return bars, strategies, look


def measured_bars(path: Path) -> Evasions:

    from analysis.report.figures import EvasionBar

    try:
        data = canonical.parse(limits.read_file(path, limits.WORKER_BYTES), most=limits.WORKER_BYTES)
        bars = [
            EvasionBar(
                name=row["strategy"],
                value=row["detection"]["value"],
                low=row["detection"]["low"],
                high=row["detection"]["high"],
                closed_form=row["predicted"],
            )
            for row in data["rows"]
        ]
        look = {
            "confidence": float(data["scenario"]["wanted"]),
            "interval": f"{100 * data['confidence']:g}% interval",
            "title": str(data["scenario"]["title"]),
            "note": campaign_note(data["scenario"]),
        }
        alarms = [float(row["false_alarm"]) for row in data["rows"]]
        strategies = [
            Strategy(
                name=bar.name,
                detection=bar.value,
                low=bar.low,
                high=bar.high,
                closed_form=bar.closed_form,
                false_alarm=alarm,
                excess=bar.value - alarm,
            )
            for bar, alarm in zip(bars, alarms, strict=True)
        ]
        return bars, strategies, look
    except OSError as error:
        raise file_error(f"{path} cannot be read", error) from None
    except (EvidenceError, ValueError, KeyError, TypeError) as error:
        why = f": {error}" if isinstance(error, EvidenceError) else ""
        raise CallerError(f"{path} is not what campaign --json prints{why}") from None
