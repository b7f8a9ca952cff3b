"""What the commands share that take uncertain inputs: options, draws, words, the figure of their sensitivity."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.commands._common import count, number
from firmware_sim.errors import CallerError

if TYPE_CHECKING:
    from inspector.probability.distributions import Distribution
    from inspector.probability.uncertainty import Band

__all__ = [
    "UNCERTAIN",
    "OneBand",
    "add_draws",
    "band_text",
    "banded",
    "described",
    "draw_sensitivity",
    "fixed",
    "influence_lines",
    "influences",
    "is_uncertain",
    "ranged",
    "within",
]

UNCERTAIN = (
    " A number marked ~ may be uncertain: LOW/MEDIAN/HIGH (5, 50 and 95 %), lognormal(LOW,HIGH) (5 and 95 %), "
    "triangular(LOW,MODE,HIGH), uniform(LOW,HIGH) or table(VALUE:WEIGHT,...). The answer is then a median with its 5 % "
    "and 95 % quantile; inputs are drawn independently."
)

_NAMES = {
    "flop": "FLOP of the run, H",
    "chips": "chips, C",
    "days": "days of the run, T",
    "period": "days between visits, $T_m$",
    "rate": "snapshots a day, f",
    "confidence": "confidence, p",
    "flop_per_day": "speed of a chip, a",
    "utilisation": "utilisation (MFU)",
    "refusals": "chips that cannot be shown",
}
"""Inputs as a figure calls them."""

_CHOSEN = ("period", "confidence")
"""Inputs that an inspectorate chooses, so that they are no assumptions."""


def within(kind: str) -> Callable[[str], Any]:
    """Return an argparse type: a number as a float, an uncertain one as a distribution."""

    def read(text: str) -> Any:
        try:
            return number(text)
        except ValueError:
            pass
        from inspector.probability.distributions import Domain, parse

        try:
            return parse(text, Domain(kind))
        except CallerError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def add_draws(parser: argparse.ArgumentParser, *, default: int, what: str) -> None:
    """Add ``--draws`` and ``--seed``."""
    parser.add_argument(
        "--draws",
        type=count,
        default=default,
        metavar="N",
        help=f"draws of uncertain inputs, {what} (default {default})",
    )
    parser.add_argument("--seed", type=count, default=0, metavar="S", help="seed of these draws (default 0)")


def is_uncertain(value: object) -> bool:
    """Return whether a number was given as a distribution."""
    return not isinstance(value, int | float)


def ranged(value: Any) -> Distribution:
    """Return a number as a distribution."""
    from inspector.probability.distributions import Fixed

    return value if is_uncertain(value) else Fixed(float(value))


def fixed(value: Any) -> float:
    """Return a number, or the median of an uncertain one."""
    return float(value.ppf(0.5)) if is_uncertain(value) else float(value)


def described(inputs: Mapping[str, Distribution]) -> dict[str, str]:
    """Return what is known of each input: its distribution, "chosen", or "assumed"."""
    from inspector.probability.distributions import Fixed

    return {
        name: str(each) if not isinstance(each, Fixed) else "chosen" if name in _CHOSEN else "assumed"
        for name, each in inputs.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class OneBand:
    """A number over the draws of uncertain inputs: 5 %, 50 % and 95 %; null where no draw has an answer.

    Attributes:
        possible: the share of draws with an answer.
    """

    low: float | None
    median: float | None
    high: float | None
    possible: float


def banded(found: Band) -> OneBand:
    """Return the band of one number."""
    there = float(found.possible) > 0
    low, median, high = (float(end) if there else None for end in (found.low, found.median, found.high))
    return OneBand(low=low, median=median, high=high, possible=float(found.possible))


def band_text(found: OneBand) -> str:
    """Return a band as text."""
    low, median, high = found.low, found.median, found.high
    if low is None or median is None or high is None:
        return "-"
    part = "" if found.possible == 1 else f" in {100 * found.possible:.3g} %"
    if low == high:
        return _count(median) + part
    return f"{_count(median, 3)} ({_count(low, 3)} to {_count(high, 3)}){part}"


def _count(value: float, digits: int = 0) -> str:
    """Return a number with separators; with so many significant digits where that is coarser than whole numbers."""
    if digits:
        value = float(f"{value:.{digits}g}")
    return f"{value:,.0f}" if value >= 100 or value == round(value) else f"{value:,.3g}"


def influences(
    answer: Callable[[Mapping[str, float]], float],
    answers: Callable[[Mapping[str, Any]], Any] | Sequence[float],
    inputs: Mapping[str, Distribution],
    *,
    seed: int,
) -> dict[str, object]:
    """Return tornado and Sobol indices of an answer for JSON.

    ``answers`` takes arrays; where that is too dear, it is the answers at the ``draws`` of the same seed.
    """
    import dataclasses
    import math

    from inspector.probability.uncertainty import levels, sobol, sobol_of_few, tornado

    swings = [dataclasses.asdict(each) for each in tornado(answer, inputs)]
    for swing in swings:
        swing.update({key: None for key in ("low", "high") if math.isnan(swing[key])})
    found: dict[str, object] = {"tornado": swings, "sobol": None, "sobol_reason": None}
    try:
        if not callable(answers):
            indices, explained = sobol_of_few(answers, levels(inputs, number=len(answers), seed=seed), seed=seed)
            return found | {"sobol": [dataclasses.asdict(each) for each in indices], "sobol_explained": explained}
        return found | {"sobol": [dataclasses.asdict(each) for each in sobol(answers, inputs, seed=seed)]}
    except CallerError as error:
        return found | {"sobol_reason": str(error)}


def influence_lines(found: Mapping[str, Any], unit: str) -> list[str]:
    """Return tornado and Sobol indices as a table."""
    from analysis.report.tables import aligned

    indices = {row["parameter"]: row for row in found["sobol"] or ()}
    rows = [["input", "at 5 %", "at 95 %", *(("alone", "with others") if indices else ())]]
    for swing in found["tornado"]:
        ends = ["-" if swing[key] is None else f"{swing[key]:,.4g}" for key in ("low", "high")]
        share = indices.get(swing["parameter"])
        rows.append(
            [
                swing["parameter"],
                *ends,
                *((f"{share['first']:.3f}", f"{share['total']:.3f}") if share is not None else ()),
            ]
        )
    also = ", and Sobol indices (share of the variance)" if indices else ""
    if "sobol_explained" in found:
        also = (
            f", and Sobol indices of its logarithm (a polynomial, which explains {found['sobol_explained']:.3f} of it)"
        )
    lines = [f"What the band comes from: {unit}{also}", *aligned(rows)]
    return lines if found["sobol_reason"] is None else [*lines, f"Sobol indices: {found['sobol_reason']}"]


def draw_sensitivity(
    path: Path, found: Mapping[str, Any], *, middle: float, x: str, title: str, note: str, command: str, seed: int
) -> None:
    """Draw the tornado, relative to the answer at the medians, for which the note states all inputs."""
    from analysis.report.figures import Origin, sensitivity_figure

    if not found["tornado"]:
        raise CallerError("no input is uncertain, so there is no sensitivity to draw")
    sensitivity_figure(
        path,
        rows=[
            (
                _NAMES.get(row["parameter"], row["parameter"]),
                *(float("nan") if row[key] is None else row[key] / middle for key in ("low", "high")),
            )
            for row in found["tornado"]
        ],
        x=x,
        ends=("at its 5 % quantile", "at its 95 % quantile"),
        title=title,
        note=note,
        origin=Origin(command=command, seed=seed),
    )
