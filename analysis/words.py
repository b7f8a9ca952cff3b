"""What a verdict's guards found, in words for somebody who has never seen the program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["alike", "kind", "odds_rows", "parts", "plainly", "said"]

_WORDS = 24
"""Of a reason, before its details follow it as a list."""

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


def kind(text: str) -> str:
    """Return a reason without its numbers, its digests and its names with numbers."""
    return " ".join("#" if any(map(str.isdigit, word)) else word for word in text.split())


def parts(text: str) -> list[str]:
    """Return a long reason's first sentence and its details, and a short reason whole."""
    if len(text.split()) <= _WORDS:
        return [text]
    return text.replace("not covered: ", "not covered:; ", 1).split("; ")


def alike(reasons: Iterable[Mapping[str, Any]]) -> list[list[str]]:
    """Return groups of reasons that differ only in numbers, digests and names with numbers: guard, then the texts."""
    groups: dict[tuple[str, str], list[str]] = {}
    for each in reasons:
        guard, text = str(each.get("guard", "")), str(each.get("text", ""))
        groups.setdefault((guard, kind(text)), [guard]).append(text)
    return list(groups.values())


def said(value: object) -> str:
    """Return a JSON value in words: yes and no, a dash for nothing, lists and tables with commas."""
    if value is None or isinstance(value, bool):
        return {None: "–", True: "yes", False: "no"}[value]
    if isinstance(value, Mapping):
        return "; ".join(f"{str(key).replace('_', ' ')} {said(each)}" for key, each in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(said, value)) or "none"
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}" if isinstance(value, float) else str(value)


def odds_rows(labs: Iterable[Mapping[str, Any]]) -> list[list[str]]:
    """Return a row for each violation and its odds, with the labs for which these hold."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for lab in labs:
        for odds in lab["evidence"]["odds"]:
            steps = f"{odds['replayed_steps']} of {odds['steps']}"
            for each in odds["violations"]:
                row = (each["text"], steps, f"{each['escapes']:.2g}", str(each["needed_steps"]))
                rows.setdefault(row, []).append(lab["lab"])
    return [[*row, ", ".join(dict.fromkeys(names))] for row, names in rows.items()]
