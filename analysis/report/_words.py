"""What a verdict's guards found, in words for somebody who has never seen the program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["plainly"]

_PLAIN = {
    "all": "Everything that was checked agrees with what the lab declared.",
    "meter": "Its chips counted more work than the declared training needs.",
    "snapshot": "Its chips held weights that the declared training never had.",
    "replay": "Training the declared steps again gave another result.",
    "initialisation": "Its starting weights are not those that it declared.",
    "log-chain": "A chip's log is not the one that the chip signed for.",
    "log": "A chip's log does not hold together.",
    "schedule": "A chip did not take the snapshots that were due.",
    "identity": "A chip is not what the registry lists.",
    "dispute": "A referee repeated the one operation about which two labs differ.",
}


def plainly(reasons: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a sentence for each guard that found something, in their order; what was not covered is left out."""
    guards = dict.fromkeys(str(each["guard"]) for each in reasons)
    return [_PLAIN.get(guard, f"The check “{guard}” failed.") for guard in guards if guard != "scope"]
