"""What was found of a run's samples and weights, in a fixed form without free text; and what rules make of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from firmware_sim.errors import EvidenceError
from inspector.rules.quantities import Finding
from inspector.rules.reading import Rule
from inspector.rules.truth import Truth

__all__ = ["Counted", "Examined", "examined_finding"]

_NO_SCORE = "no score: it is unfinished, or its program does not read the test set, or the loss is not finite"
_NO_SAMPLES = "nobody has counted its samples, or its batches do not show which rows are one sample"


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Places of all batches, how many hold a sample of a set, and the step and place of the first that does."""

    places: int
    matched: int
    first: tuple[int, int] | None

    def __post_init__(self) -> None:
        counts = (self.places, self.matched, *(self.first or ()))
        if not all(type(each) is int and each >= 0 for each in counts) or self.matched > self.places:
            raise EvidenceError("counts of samples are malformed")
        if (self.first is None) != (not self.matched):
            raise EvidenceError("counts of samples contradict each other")


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """What one device found of one run.

    Attributes:
        data: counts by the name of the set (``reading.digests_name``); None where they cannot be made.
        scores: mean loss by the SHA-256 of the test set; None where there is none.
    """

    data: Mapping[str, Counted | None]
    scores: Mapping[str, float | None]

    def to_json(self) -> dict[str, Any]:
        """JSON-able values."""
        counted = {
            name: each and {"places": each.places, "matched": each.matched, "first": each.first and list(each.first)}
            for name, each in self.data.items()
        }
        return {"data": counted, "scores": dict(self.scores)}

    @classmethod
    def from_json(cls, found: object) -> Examined:
        """Parse; EvidenceError on any other form."""
        if not isinstance(found, dict) or set(found) != {"data", "scores"}:
            raise EvidenceError("an examination has missing or extra keys")
        data, scores = found["data"], found["scores"]
        if not isinstance(data, dict) or not isinstance(scores, dict) or not all(map(_is_digest, [*data, *scores])):
            raise EvidenceError("an examination's sets or tests are malformed")
        if not all(each is None or (type(each) is float and math.isfinite(each)) for each in scores.values()):
            raise EvidenceError("an examination's scores are malformed")
        return cls(data={name: _counted(each) for name, each in data.items()}, scores=scores)


def _counted(entry: object) -> Counted | None:
    if entry is None:
        return None
    if not isinstance(entry, dict) or set(entry) != {"places", "matched", "first"}:
        raise EvidenceError("counts of samples have missing or extra keys")
    first = entry["first"]
    if first is not None and (not isinstance(first, list) or len(first) != 2):
        raise EvidenceError("the first counted sample is malformed")
    pair = None if first is None else (first[0], first[1])
    return Counted(places=entry["places"], matched=entry["matched"], first=pair)


def _is_digest(text: object) -> bool:
    return isinstance(text, str) and len(text) == 64 and set(text) <= set("0123456789abcdef")


def examined_finding(rule: Rule, run: Mapping[str, str], device: str, found: Examined | str) -> Finding:
    """What a rule of kind data or score says of a run, given what a device found of it, or why it found nothing.

    Args:
        run: what a finding about it is about (``RunFolder.where``).
    """
    where: dict[str, Any] = {**run, "device": device}

    def finding(truth: Truth, text: str, value: float | None, **more: Any) -> Finding:
        return Finding(
            labs=(run["lab"],), truth=truth, text=f"run {run['run']}: {text}", value=value, where=where | more
        )

    if isinstance(found, str):
        return finding(Truth.UNDECIDED, found, None)
    if rule.kind == "score":
        test = rule.about["test_sha256"]
        score = found.scores.get(test)
        if score is None:
            return finding(Truth.UNDECIDED, _NO_SCORE, None, test=test)
        text = f"its final weights have loss {score:.6g} on test set {test[:16]}…, on {device}"
        return finding(Truth.PASS if rule.holds(score) else Truth.FAIL, text, score, test=test)
    name = rule.about["set"]
    counted = found.data.get(name)
    if counted is None or not counted.places:
        return finding(Truth.UNDECIDED, _NO_SAMPLES, None)
    share = counted.matched / counted.places
    text = f"{counted.matched} of {counted.places} places hold a sample of set {name[:16]}…"
    more = {}
    if counted.first is not None:
        more = dict(zip(("step", "place"), counted.first, strict=True))
        text += f", the first in step {more['step']}, place {more['place']}"
    return finding(Truth.PASS if rule.holds(share) else Truth.FAIL, text, share, **more)
