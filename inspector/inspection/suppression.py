"""Whether fewer snapshots were due on drawn chips than chance allows.

A schedule says which snapshots have to be there, and an audit that they are. It does not say that the draws were left
alone: who foresees them ends an epoch, or a boot, before each. So the numbers are compared with what a rate makes in so
much time, by the exact chance of as few. What was counted before a log was pruned is kept in the acceptance by which
it was pruned, and still counts: a prune starts no new count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import reduce
from operator import add
from typing import NamedTuple

from firmware_sim import Draws
from inspector.inspection.chip_report import ChipReport
from inspector.inspection.document import AllDraws
from inspector.inspection.guards import Guard
from inspector.inspection.verdict import Findings

__all__ = ["DOUBTED", "REJECTED", "judge_draws"]

REJECTED = 1e-9
"""A chance, divided among the drawn chips, below which a chip does not do what it was ordered to."""
DOUBTED = 1e-4
"""A chance below which nothing is concluded."""


class _Count(NamedTuple):
    """How many snapshots were due, how many chance gives on average, and how likely it gives as few."""

    demanded: int
    expected: float
    chance: float

    @classmethod
    def of(cls, draws: Draws, rate: Fraction) -> _Count:
        return cls(draws.due, draws.expected(rate), draws.chance(rate))

    @property
    def text(self) -> str:
        text = (
            f"{self.demanded} snapshots were due, while {self.expected:.1f} are expected on average, and so few come "
            "with "
        )
        return f"{text}probability {self.chance:.2g}"


def judge_draws(reports: Sequence[ChipReport], rate: Fraction, findings: Findings) -> AllDraws | None:
    """Compare the snapshots that were due on each drawn chip, and on all of them, with chance.

    Returns ``demanded``, ``expected`` and ``chance`` of all chips, the ``rate`` and, in words, what a ``tick`` is (of
    chips that differ, the shortest and the longest); each report gets its own, with its ``epochs`` (shutdowns and
    challenges end one too, from any sender) and ``cut`` (snapshots that a loss of power interrupted). None where
    no chip could be audited.
    """
    draws: list[Draws] = []
    chances: list[float] = []
    audited = [(report, report.audit) for report in reports if report.audit is not None]
    for report, audit in audited:
        draws.append(replace(audit.draws, earlier=report.earlier))
        stated = _Count.of(draws[-1], rate)
        chances.append(stated.chance)
        report.draws = {
            "demanded": stated.demanded,
            "expected": stated.expected,
            "chance": stated.chance,
            "epochs": audit.epochs,
            "cut": len(audit.cut_snapshots),
        }
        text = f"chip {report.chip}: {stated.text}, in {audit.epochs} epochs and {report.boots} boots"
        _judge(text, stated.chance, len(audited), findings, report.where)
    if not audited:
        return None
    every = _Count.of(reduce(add, draws), rate)
    ticks = sorted({(each.rates.flop, each.rates.moved) for each, _ in audited if each.rates is not None})
    tick = " or of ".join(f"{flop} FLOP or {moved} bytes" for flop, moved in ticks[:1] + ticks[1:][-1:])
    if min(chances) >= DOUBTED:  # else it is said already
        _judge(f"all drawn chips together: {every.text}", every.chance, len(audited), findings, {})
    return {
        "demanded": every.demanded,
        "expected": every.expected,
        "chance": every.chance,
        "rate": str(rate),
        "tick": tick,
    }


def _judge(text: str, chance: float, chips: int, findings: Findings, where: Mapping[str, str]) -> None:
    if chance < REJECTED / chips:
        text += ": they were suppressed, or the chip does not draw them at the ordered rate"
        findings.add(Guard.SCHEDULE, text, **where)
    elif chance < DOUBTED:
        findings.doubt(text, **where)
