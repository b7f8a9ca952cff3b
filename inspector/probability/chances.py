"""How likely one inspection is to catch a lie, in closed form: what a verdict prints and measurements are held against.

Chips are drawn without replacement. Each tick of a chip's clock holds a snapshot independently, with one rate (Shavit
2023, App. B), and at a moment that is uniform within it: so a part of a tick holds one with that part of the rate. A
lab sees each snapshot as its chip takes it, and knows that what is left of that tick holds none. It may end an epoch at
any moment, and what is left of the tick is drawn anew.
"""

from __future__ import annotations

from fractions import Fraction
from math import comb, exp

from inspector.probability.detection import detection, log_miss_without_replacement

__all__ = [
    "chances",
    "chip_drawn",
    "hidden_training_detection",
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
    """The highest chance that no snapshot falls into so many ticks of a chip at a stretch, by a lab that sees each.

    It begins just after a snapshot that came early in its tick, so that all but one tick of the stretch is exposed. Who
    then ends its epoch again and again meets r(1 - x) in what is left of a tick, whatever has passed of it: with ever
    shorter parts it escapes a tick with e^-r, which is more than the 1 - r of one draw.
    """
    return exp(-float(rate) * max(float(ticks) - 1, 0.0))


def hidden_training_detection(chips: int, drawn: int, rate: Fraction, ticks: int) -> float:
    """Chance to see that all chips hold another state than the declared one during some ticks, at least.

    A chip holds an incriminating snapshot with probability 1 - ``unseen``.

    Args:
        rate: snapshots per chip and tick.
    """
    catch = 1 - unseen(ticks, rate)
    return float(detection(log_miss_without_replacement(chips=chips, used=chips, samples=drawn, catch=catch)))


def chances(
    *, chips: int, drawn: int, rate: Fraction, uniform: bool = False, live: bool = False, slack: bool = False
) -> list[dict[str, object]]:
    """Detection probabilities of a verdict: ``lie`` and the ``probability`` that this inspection catches it, at least.

    Args:
        chips: registered chips of the labs under inspection.
        drawn: how many of them were drawn.
        rate: snapshots per chip and tick.
        uniform: segments are drawn uniformly too, so that the odds speak of false steps (``odds``); where they are
            not, a lab that has seen a segment go by without a snapshot ends it with a false step.
        live: drawn chips are challenged after the draw, so that nothing that they have done can be older.
        slack: their meters count work that could have been anything.
    """
    beyond = " beyond their slack" if slack else ""
    rows: list[tuple[str, float]] = [
        (f"all chips work{beyond} on something for which no step was committed", 1.0),
        (f"PyTorch operators run on all chips' memory{beyond} that no committed step needs, reported or not", 1.0),
        *([("operators run on the chips' memory within their slack", 0.0)] if slack else []),
        *(
            (
                f"all chips hold another state for {ticks} ticks at a stretch, put there past every operator",
                hidden_training_detection(chips, drawn, rate, ticks),
            )
            for ticks in _IDLE_TICKS
        ),
        ("all chips hold another state in pieces, from each snapshot to the end of its tick", 0.0),
        ("the lab computes where no chip of the registry meters it", 0.0),
        ("an undeclared run, on one chip", chip_drawn(chips=chips, liars=1, drawn=drawn) if live else 0.0),
        ("one chip lies in its log, its keys or its firmware", chip_drawn(chips=chips, liars=1, drawn=drawn)),
        ("one chip lies in a snapshot, once one is due", chip_drawn(chips=chips, liars=1, drawn=drawn)),
        ("one false step in the first segment", 1.0),
    ]
    if not uniform:
        rows.append(("one false step at the end of a segment in which the lab has seen no snapshot", 0.0))
    return [{"lie": lie, "probability": probability} for lie, probability in rows]
