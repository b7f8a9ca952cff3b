"""What uncertain inputs do to an answer: bands, and which input they come from."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.commands._uncertainty import OneBand, described
from firmware_sim.errors import CallerError
from inspector.probability.uncertainty import Index, Swing, levels, sobol, sobol_of_few, tornado

if TYPE_CHECKING:
    from inspector.probability.distributions import Distribution

__all__ = ["UncertainAnswer", "draw_sensitivity", "influence_lines", "influences"]

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


@dataclass(frozen=True, slots=True, kw_only=True)
class UncertainAnswer:
    """What uncertain inputs do to an answer.

    Attributes:
        bands: by result, over the draws.
        inputs: by input, its distribution; of a single number, "chosen" where the inspectorate sets it, else "assumed".
        tornado: for each parameter: low and high, the answer with the parameter at its 5 % and at its 95 % quantile;
            None if there is no answer.
        sobol: for each parameter: first, total and their 95 % intervals; None where there are none.
        sobol_reason: why there are none, or None.
        sobol_explained: share of the variance that a polynomial fitted to the answers explains among those that were
            not used to fit it; sobol is then of the answer's logarithm, from the polynomial. None without a polynomial.
    """

    bands: Mapping[str, OneBand]
    inputs: Mapping[str, str]
    draws: int
    seed: int
    tornado: Sequence[Swing]
    sobol: Sequence[Index] | None = None
    sobol_reason: str | None = None
    sobol_explained: float | None = None


def influences(
    bands: Mapping[str, OneBand],
    answer: Callable[[Mapping[str, float]], float],
    answers: Callable[[Mapping[str, Any]], Any] | Sequence[float],
    inputs: Mapping[str, Distribution],
    *,
    number: int,
    seed: int,
) -> UncertainAnswer:
    """Return the bands with tornado and Sobol indices of an answer.

    ``answers`` takes arrays; where that is too dear, it is the answers at the ``draws`` of the same seed.
    """
    indices, explained, reason = None, None, None
    try:
        if callable(answers):
            indices = sobol(answers, inputs, seed=seed)
        else:
            indices, explained = sobol_of_few(answers, levels(inputs, number=len(answers), seed=seed), seed=seed)
    except CallerError as error:
        reason = str(error)
    return UncertainAnswer(
        bands=bands,
        inputs=described(inputs),
        draws=number,
        seed=seed,
        tornado=tornado(answer, inputs),
        sobol=indices,
        sobol_reason=reason,
        sobol_explained=explained,
    )


def influence_lines(found: UncertainAnswer, unit: str) -> list[str]:
    """Return tornado and Sobol indices as a table."""
    from analysis.report.tables import aligned

    indices = {row.parameter: row for row in found.sobol or ()}
    rows = [["input", "at 5 %", "at 95 %", *(("alone", "with others") if indices else ())]]
    for swing in found.tornado:
        ends = ["-" if math.isnan(value) else f"{value:,.4g}" for value in (swing.low, swing.high)]
        share = indices.get(swing.parameter)
        rows.append([swing.parameter, *ends, *((f"{share.first:.3f}", f"{share.total:.3f}") if share else ())])
    also = ", and Sobol indices (share of the variance)" if indices else ""
    if found.sobol_explained is not None:
        also = f", and Sobol indices of its logarithm (a polynomial, which explains {found.sobol_explained:.3f} of it)"
    lines = [f"What the band comes from: {unit}{also}", *aligned(rows)]
    return lines if found.sobol_reason is None else [*lines, f"Sobol indices: {found.sobol_reason}"]


def draw_sensitivity(
    path: Path, found: UncertainAnswer, *, middle: float, x: str, title: str, note: str, command: str, seed: int
) -> None:
    """Draw the tornado, relative to the answer at the medians, for which the note states all inputs."""
    from analysis.report.figures import Origin, sensitivity_figure

    if not found.tornado:
        raise CallerError("no input is uncertain, so there is no sensitivity to draw")
    sensitivity_figure(
        path,
        rows=[(_NAMES.get(row.parameter, row.parameter), row.low / middle, row.high / middle) for row in found.tornado],
        x=x,
        ends=("at its 5 % quantile", "at its 95 % quantile"),
        title=title,
        note=note,
        origin=Origin(command=command, seed=seed),
    )
