"""How likely one inspection is to catch a lie, in closed form: what a verdict prints and measurements are held against.

Chips are drawn without replacement; snapshots fall on each tick independently with one rate (Shavit 2023, App. B).
"""

from __future__ import annotations

from fractions import Fraction
from math import comb
from typing import Any

from inspector.probability.detection import detection, log_miss_without_replacement

__all__ = ["chances", "chip_drawn", "hidden_training_detection", "segment_replayed", "snapshots_within"]

_IDLE_TICKS = (1, 2, 5, 10, 20, 50)


def chip_drawn(*, chips: int, liars: int, drawn: int) -> float:
    """Chance that at least one of the lying chips is drawn."""
    return 1 - comb(chips - liars, drawn) / comb(chips, drawn)


def snapshots_within(ticks: int, rate: Fraction, least: int = 1) -> float:
    """Chance that at least so many snapshots fall into some ticks of a chip; ``rate`` in snapshots per tick."""
    r = float(rate)
    return 1 - sum(comb(ticks, k) * r**k * (1 - r) ** (ticks - k) for k in range(least))


def segment_replayed(ticks: int, *, drawn: int, rate: Fraction) -> float:
    """Chance that a segment other than the first is replayed: a drawn chip holds a snapshot of one of its ticks."""
    return snapshots_within(drawn * ticks, rate)


def hidden_training_detection(chips: int, drawn: int, rate: Fraction, ticks: int) -> float:
    """Chance to see that all chips hold another state than the declared one during some ticks.

    A chip holds an incriminating snapshot with probability 1 - (1 - rate)^ticks.

    Args:
        rate: snapshots per chip and tick.
    """
    catch = float(1 - (1 - rate) ** ticks)
    return float(detection(log_miss_without_replacement(chips=chips, used=chips, samples=drawn, catch=catch)))


def chances(*, chips: int, drawn: int, rate: Fraction, segment: int | None, live: bool = False) -> list[dict[str, Any]]:
    """Detection probabilities of a verdict: ``lie`` and the ``probability`` that this inspection catches it.

    Args:
        chips: registered chips of the labs under inspection.
        drawn: how many of them were drawn.
        rate: snapshots per chip and tick.
        segment: steps from one checkpoint to the next; None where not all segments with a snapshot are replayed, so
            that no chance is stated for the others.
        live: drawn chips are challenged after the draw, so that nothing that they have done can be older.
    """
    rows: list[tuple[str, float]] = [
        ("all chips work on something for which no step was committed", 1.0),
        ("operators run on all chips' memory that no committed step needs, told of or not", 1.0),
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
