"""How likely one inspection is to catch a lie, in closed form: what a verdict prints and measurements are held against.

Chips are drawn without replacement. Each tick of a chip's clock holds a snapshot independently, with one rate (Shavit
2023, App. B), and at a moment that is uniform within it: so a part of a tick holds one with that part of the rate.
"""

from __future__ import annotations

from fractions import Fraction
from math import comb, floor
from typing import Any

from inspector.probability.detection import detection, log_miss_without_replacement

__all__ = [
    "chances",
    "chip_drawn",
    "hidden_training_detection",
    "segment_replayed",
    "snapshots_within",
    "unseen",
]

_IDLE_TICKS = (1, 2, 5, 10, 20, 50)


def chip_drawn(*, chips: int, liars: int, drawn: int) -> float:
    """Chance that at least one of the lying chips is drawn."""
    return 1 - comb(chips - liars, drawn) / comb(chips, drawn)


def snapshots_within(ticks: int, rate: Fraction, least: int = 1) -> float:
    """Chance that at least so many snapshots fall into some ticks of a chip; ``rate`` in snapshots per tick."""
    r = float(rate)
    return 1 - sum(comb(ticks, k) * r**k * (1 - r) ** (ticks - k) for k in range(least))


def unseen(ticks: float, rate: Fraction) -> float:
    """The highest chance that no snapshot falls into so many ticks of a chip, wherever in a tick they begin."""
    r, whole = float(rate), floor(ticks)
    part = ticks - whole
    inner = (1 - r) ** whole * (1 - r * part / 2) ** 2
    return max(inner, (1 - r) ** (whole - 1) * (1 - r * (1 + part) / 2) ** 2) if whole else inner


def segment_replayed(ticks: float, *, drawn: int, rate: Fraction) -> float:
    """Chance that a segment other than the first is replayed, at least: a drawn chip holds a snapshot of its time."""
    return float(1 - unseen(ticks, rate) ** drawn)


def hidden_training_detection(chips: int, drawn: int, rate: Fraction, ticks: int) -> float:
    """Chance to see that all chips hold another state than the declared one during some ticks, at least.

    A chip holds an incriminating snapshot with probability 1 - ``unseen``.

    Args:
        rate: snapshots per chip and tick.
    """
    catch = 1 - unseen(ticks, rate)
    return float(detection(log_miss_without_replacement(chips=chips, used=chips, samples=drawn, catch=catch)))


def chances(
    *, chips: int, drawn: int, rate: Fraction, segment: float | None, live: bool = False, slack: bool = False
) -> list[dict[str, Any]]:
    """Detection probabilities of a verdict: ``lie`` and the ``probability`` that this inspection catches it.

    Args:
        chips: registered chips of the labs under inspection.
        drawn: how many of them were drawn.
        rate: snapshots per chip and tick.
        segment: ticks of the shortest segment by the drawn chips' clocks; None where that is not known, or where not
            all segments with a snapshot are replayed, so that no chance is stated for the others.
        live: drawn chips are challenged after the draw, so that nothing that they have done can be older.
        slack: their meters count work that could have been anything.
    """
    beyond = " beyond their slack" if slack else ""
    rows: list[tuple[str, float]] = [
        (f"all chips work{beyond} on something for which no step was committed", 1.0),
        (f"operators run on all chips' memory{beyond} that no committed step needs, told of or not", 1.0),
        *([("operators run on the chips' memory within their slack", 0.0)] if slack else []),
        *(
            (
                f"all chips hold another state for {ticks} ticks, put there past every operator",
                hidden_training_detection(chips, drawn, rate, ticks),
            )
            for ticks in _IDLE_TICKS
        ),
        ("the lab computes where no chip of the registry meters it", 0.0),
        ("a run that nobody declared, on one chip", chip_drawn(chips=chips, liars=1, drawn=drawn) if live else 0.0),
        ("one chip lies about itself", chip_drawn(chips=chips, liars=1, drawn=drawn)),
        ("one false step in the first segment", 1.0),
    ]
    if segment is not None:
        elsewhere = "one false step in another segment, by a lab that knows of no snapshot"
        rows.append((elsewhere, segment_replayed(segment, drawn=drawn, rate=rate)))
    return [{"lie": lie, "probability": probability} for lie, probability in rows]
