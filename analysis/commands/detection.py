"""``samples``, ``table``, ``curve`` and ``plan``: how many inspections catch a run, and how likely."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.commands._answers import fields_of, json_fields, keys_text
from analysis.commands._common import add_json, finish, plural
from analysis.commands._detection_options import NO_ALARM, add_run, add_scheme, command_line, scheme_of, worked
from analysis.commands._influences import UncertainAnswer, draw_sensitivity, influence_lines, influences
from analysis.commands._uncertainty import (
    UNCERTAIN,
    add_draws,
    band_text,
    banded,
    fixed,
    is_uncertain,
    ranged,
)
from firmware_sim.errors import CallerError

if TYPE_CHECKING:
    from argparse import ArgumentParser, _SubParsersAction

    from inspector.probability.distributions import Distribution

__all__ = ["register"]


def register(subparsers: _SubParsersAction[ArgumentParser]) -> None:
    """Add the subcommands of this group."""
    from analysis.commands import _alarms, _curves, _plan, _table

    samples = subparsers.add_parser(
        "samples",
        description="How many chips to inspect in every period so that a run is caught (Shavit 2023, Eq. 1)."
        + UNCERTAIN,
        epilog=f"{keys_text(Sample)}\n{keys_text(UncertainAnswer, 'With uncertain inputs also')}",
    )
    add_run(samples, uncertain=True)
    add_scheme(samples, uncertain=True)
    add_draws(samples, default=10_000, what="a Latin hypercube")
    samples.add_argument(
        "--out", type=Path, metavar="FIGURE", help="draw the distributions of the uncertain inputs (.png, .svg, .pdf)"
    )
    add_json(samples)
    samples.set_defaults(handler=_samples)
    _table.register(subparsers)
    _curves.register(subparsers)
    _plan.register(subparsers)
    _alarms.register(subparsers)


def _samples(arguments: argparse.Namespace) -> int:
    given = {"flop": arguments.flop, "chips": arguments.chips, **scheme_of(arguments)}
    data = Sample.at({name: fixed(value) for name, value in given.items()})
    uncertain = any(is_uncertain(value) for value in given.values())
    if not uncertain and arguments.out is not None:
        raise CallerError("--out draws how uncertain inputs move the answer, but no input is uncertain")
    if not uncertain:
        return finish(arguments, data, _lines(data))
    more = _drawn(arguments, {name: ranged(value) for name, value in given.items()}, data)
    lines = ["At the medians of all inputs:", *_lines(data), "", *_band_lines(more)]
    return finish(arguments, fields_of(data) | json_fields(more), lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Everything that Eq. 1 says, for the medians of uncertain inputs.

    Attributes:
        per_period: s of Eq. 1, chips to inspect every period, not rounded.
        per_year: ceil(365·s/period).
        inspectors: at 1,000 chips each a year.
        chips_needed: chips that do the run in --days.
        megawatts: of the run's chips, at 1,400 W.
        share: chips needed, as a share of --chips.
        snapshot_probability: a chip takes a snapshot within a period.
        hit_probability: one sampled chip shows that it took part.
        guaranteed_flop: 2 × --flop. A run of at least this size is caught with the probability of --confidence, since
            snapshots from the first --flop of a run prove nothing.
        false_alarm: 0, by construction.
    """

    per_period: float
    per_year: int
    inspectors: int
    chips_needed: float
    chip_hours: float
    megawatts: float
    share: float
    snapshot_probability: float
    hit_probability: float
    guaranteed_flop: float
    false_alarm: float = 0.0
    flop: float
    chips: float
    days: float
    period: float
    rate: float
    confidence: float
    flop_per_day: float
    utilisation: float

    @classmethod
    def at(cls, values: Mapping[str, float]) -> Sample:
        """For these values of the run, its fleet and the parameters of Eq. 1."""
        from inspector.probability import detection as closed
        from inspector.probability.hidden_sites import WATTS_PER_CHIP

        per_period = float(closed.samples_needed(**worked(values)))
        per_year = int(closed.samples_per_year(per_period=per_period, period=values["period"]))
        fleet = {key: worked(values)[key] for key in ("days", "flop_per_day")}
        share = float(closed.used_share(flop=values["flop"], chips=values["chips"], **fleet))
        needed = float(closed.chips_needed(flop=values["flop"], **fleet))
        snapshot = float(closed.snapshot_probability(rate=values["rate"], days=values["period"]))
        return cls(
            per_period=per_period,
            per_year=per_year,
            inspectors=-(-per_year // closed.CHIPS_PER_INSPECTOR),
            chips_needed=needed,
            chip_hours=needed * values["days"] * 24.0,
            megawatts=needed * WATTS_PER_CHIP / 1e6,
            share=share,
            snapshot_probability=snapshot,
            hit_probability=share * snapshot,
            guaranteed_flop=2.0 * values["flop"],
            **values,
        )


def _lines(data: Sample) -> list[str]:
    from inspector.probability.detection import CHIPS_PER_INSPECTOR

    return [
        f"{data.per_year:,} chips a year, {data.per_period:,.2f} every {data.period:g} days "
        f"({plural(data.inspectors, 'inspector')} at {CHIPS_PER_INSPECTOR:,} chips each a year)",
        f"The run keeps {data.chips_needed:,.1f} of {data.chips:,.0f} chips busy for {data.days:g} days at a "
        f"utilisation of {data.utilisation:g} ({data.chip_hours:.3g} chip-hours, {data.megawatts:.3g} MW); "
        f"a sampled chip incriminates it with probability {data.hit_probability:.3g}.",
        f"Guarantee: a run of {data.guaranteed_flop:.3g} FLOP or more is caught with probability "
        f"{data.confidence:g} at least.",
        NO_ALARM,
    ]


def _drawn(arguments: argparse.Namespace, inputs: dict[str, Distribution], data: Sample) -> UncertainAnswer:
    """Return bands of the answers, and what they come from."""
    import numpy as np

    from inspector.probability import detection as closed
    from inspector.probability.hidden_sites import WATTS_PER_CHIP
    from inspector.probability.uncertainty import band, draws, samples_where_possible

    def yearly(at: Any) -> Any:
        return closed.DAYS_PER_YEAR * samples_where_possible(**worked(at)) / np.asarray(at["period"])

    at = draws(inputs, number=arguments.draws, seed=arguments.seed)
    a_year = yearly(at)
    needed = closed.chips_needed(**{key: worked(at)[key] for key in ("flop", "days", "flop_per_day")})
    found = {
        "per_period": banded(band(a_year * at["period"] / closed.DAYS_PER_YEAR)),
        "per_year": banded(band(np.ceil(a_year))),
        "inspectors": banded(band(np.ceil(np.ceil(a_year) / closed.CHIPS_PER_INSPECTOR))),
        "chips_needed": banded(band(needed)),
        "chip_hours": banded(band(needed * at["days"] * 24.0)),
        "megawatts": banded(band(needed * WATTS_PER_CHIP / 1e6)),
        "guaranteed_flop": banded(band(2.0 * at["flop"])),
    }
    answer = influences(
        found,
        lambda one: Sample.at(one).per_year,
        yearly,
        inputs,
        number=arguments.draws,
        seed=arguments.seed,
    )
    if arguments.out is not None:
        from analysis.report.style import setting

        draw_sensitivity(
            arguments.out,
            answer,
            middle=data.per_year,
            x="chips to sample a year, relative to the medians",
            title=f"What the {data.per_year:,} chips a year depend on",
            note=setting(**{name: getattr(data, name) for name in inputs}),
            command=command_line(arguments),
            seed=arguments.seed,
        )
    return answer


def _band_lines(answer: UncertainAnswer) -> list[str]:
    bands = answer.bands
    lines = [f"{answer.draws:,} draws of the uncertain inputs (seed {answer.seed}): median, 5 % to 95 %"]
    names = {"per_year": "chips a year", "inspectors": "inspectors", "chips_needed": "chips of the run"}
    for key, text in (names | {"chip_hours": "chip-hours of the run", "megawatts": "megawatts of the run"}).items():
        lines.append(f"  {text}: {band_text(bands[key])}")
    if bands["per_year"].possible < 1:
        share = 100 * bands["per_year"].possible
        lines.append(f"  over the {share:.3g} % of the draws in which the chips are enough for the run")
    known = [f"{name} {text}" for name, text in answer.inputs.items() if text not in ("assumed", "chosen")]
    rest = {word: [n for n, text in answer.inputs.items() if text == word] for word in ("assumed", "chosen")}
    lines.append(
        f"  uncertain: {', '.join(known)}; " + "; ".join(f"{word}: {', '.join(n)}" for word, n in rest.items() if n)
    )
    return [*lines, *influence_lines(answer, "chips a year at the input's 5 % and 95 %")]
