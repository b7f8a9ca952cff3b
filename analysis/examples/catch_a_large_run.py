"""How many inspections a year catch a run of 1e25 FLOP, as a closed form and as a figure.

Shows: Eq. 1 of Shavit 2023 with its assumptions as arguments, what different chips instead of independent draws change,
and how the probability grows with the number of sampled chips. No PyTorch is loaded, and nothing is simulated.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

from chipwitness import (
    Mark,
    detection_curve,
    samples_needed,
    samples_needed_without_replacement,
    samples_per_year,
    snapshot_probability,
    used_share,
)

FLOP, CHIPS, DAYS = 1e25, 100_000, 365.0
PERIOD, RATE, CONFIDENCE = 30.0, 0.1, 0.9
"""Chips are sampled every 30 days, each takes a snapshot every ten days on average."""


def main(folder: Path) -> dict[str, float]:
    """Write ``detection.png``; returns the numbers that were printed."""
    per_period = float(
        samples_needed(flop=FLOP, chips=CHIPS, days=DAYS, period=PERIOD, rate=RATE, confidence=CONFIDENCE)
    )
    per_year = float(samples_per_year(per_period=per_period, period=PERIOD))
    used = math.ceil(CHIPS * float(used_share(flop=FLOP, chips=CHIPS, days=DAYS)))
    catch = float(snapshot_probability(rate=RATE, days=PERIOD))
    different = samples_needed_without_replacement(chips=CHIPS, used=used, catch=catch, confidence=CONFIDENCE)
    print(f"the run keeps {used:,} of {CHIPS:,} chips busy for {DAYS:g} days")
    print(f"Eq. 1: {per_year:,.0f} chips a year, {per_period:.2f} in {PERIOD:g} days, catch it with {CONFIDENCE:.0%}")
    print(f"in one period alone: {different} different chips")
    detection_curve(
        folder / "detection.png",
        chips=CHIPS,
        used=used,
        catch=catch,
        confidence=CONFIDENCE,
        mark=Mark(samples=different, text="enough in one period"),
        title=f"A run of {FLOP:.0e} FLOP",
    )
    return {"per_period": per_period, "per_year": per_year, "used": used, "different": different}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
