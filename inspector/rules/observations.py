"""What was found of a run's samples and weights, in a fixed form without free text; and what rules make of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from firmware_sim.errors import EvidenceError
from firmware_sim.evidence.canonical import JsonObject
from inspector.rules.quantities import Finding
from inspector.rules.rule_files import Rule, test_name
from inspector.rules.truth import Truth

__all__ = ["Counted", "Examined", "examined_finding"]

_NO_SCORE = (
    "no score: it is unfinished, or a loss is not finite, or not every countersigned program that trains reads the "
    "test set; a rule may name one of those that were countersigned (`program`)"
)
_NO_SAMPLES = "its samples were not counted, or its batches do not show which rows are one sample"
_NUMBERS = ("places", "matched", "unclear", "hidden", "batches", "constants", "tensors", "unopened")


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Where samples of a set were looked for, and how often they were found.

    Attributes:
        places: of samples in all batches; matched: how many hold one of the set; first: step and place of the first.
        unclear: batches that do not show which rows are one sample.
        hidden: samples of the set among the rows of these, of constants and of the first state; at: where the first is,
            ("batch", step), (a program's digest, number of its constant) or ("state", number of the declared tensor).
        batches, constants, tensors: how many were searched, the tensors those of the first state.
        unopened: programs without countersignature, whose constants were not.
    """

    places: int
    matched: int
    unclear: int
    hidden: int
    batches: int
    constants: int
    tensors: int
    unopened: int
    first: tuple[int, int] | None
    at: tuple[str, int] | None

    def __post_init__(self) -> None:
        pairs = [pair for pair in (self.first, self.at) if pair is not None]
        if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
            raise EvidenceError("counts of samples are malformed")
        counts = [getattr(self, name) for name in _NUMBERS] + [pair[1] for pair in pairs] + [*(self.first or ())[:1]]
        if not all(type(each) is int and each >= 0 for each in counts) or self.matched > self.places:
            raise EvidenceError("counts of samples are malformed")
        if self.at is not None and not (self.at[0] in ("batch", "state") or _is_digest(self.at[0])):
            raise EvidenceError("counts of samples are malformed")
        if (self.first is None) != (not self.matched) or (self.at is None) != (not self.hidden):
            raise EvidenceError("two counts of the same samples contradict each other")

    @property
    def searched(self) -> str:
        """Where was searched, in words."""
        rest = f"; rows of {self.unclear} more batches" if self.unclear else ""
        rest += f"; not in {self.unopened} programs, not countersigned" if self.unopened else ""
        batches = f"{self.places} places of {self.batches - self.unclear} batches"
        return f"{batches}, {self.constants} constants, {self.tensors} tensors of the first state{rest}"

    def to_json(self) -> dict[str, object]:
        """JSON-able values."""
        return {name: list(each) if isinstance(each, tuple) else each for name, each in asdict(self).items()}

    @classmethod
    def from_json(cls, entry: object) -> Counted:
        """Parse; EvidenceError on any other form."""
        if not isinstance(entry, dict) or set(entry) != set(cls.__slots__):
            raise EvidenceError("counts of samples have missing or extra keys")
        values: JsonObject = {name: tuple(each) if isinstance(each, list) else each for name, each in entry.items()}
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """What one device found of one run.

    Attributes:
        data: counts by the name of the set (``reading.digests_name``).
        scores: by the name of the test (``reading.test_name``), the mean loss by each of its programs; None where there
            is none.
    """

    data: Mapping[str, Counted]
    scores: Mapping[str, Mapping[str, float] | None]

    def to_json(self) -> dict[str, object]:
        """JSON-able values."""
        scores = {name: each and dict(each) for name, each in self.scores.items()}
        return {"data": {name: each.to_json() for name, each in self.data.items()}, "scores": scores}

    @classmethod
    def from_json(cls, found: object) -> Examined:
        """Parse; EvidenceError on any other form."""
        if not isinstance(found, dict) or set(found) != {"data", "scores"}:
            raise EvidenceError("an examination has missing or extra keys")
        data, scores = found["data"], found["scores"]
        if not isinstance(data, dict) or not isinstance(scores, dict):
            raise EvidenceError("an examination's sets or tests are malformed")
        names = [*data, *(part for name in scores for part in str(name).split("/"))]
        if not all(map(_is_digest, names)) or not all(map(_is_score, scores.values())):
            raise EvidenceError("an examination's sets, tests or scores are malformed")
        return cls(data={name: Counted.from_json(each) for name, each in data.items()}, scores=scores)


def _is_score(entry: object) -> bool:
    if not isinstance(entry, dict) or not entry:
        return entry is None
    return all(_is_digest(name) and type(loss) is float and math.isfinite(loss) for name, loss in entry.items())


def _is_digest(text: object) -> bool:
    return isinstance(text, str) and len(text) == 64 and set(text) <= set("0123456789abcdef")


_Found = tuple[Truth, str, float | None, dict[str, object]]
"""Whether a rule holds, why in words, the value that decides, and where."""


def examined_finding(rule: Rule, run: Mapping[str, str], device: str, found: Examined | str) -> Finding:
    """What a rule of kind data or score says of a run, given what a device found of it, or why it found nothing.

    Args:
        run: what a finding about it is about (``RunFolder.where``).
    """
    truth, text, value, more = _found_under(rule, device, found)
    where = {**run, "device": device, **more}
    return Finding(labs=(run["lab"],), truth=truth, text=f"run {run['run']}: {text}", value=value, where=where)


def _found_under(rule: Rule, device: str, found: Examined | str) -> _Found:
    if isinstance(found, str):
        return Truth.UNDECIDED, found, None, {}
    if rule.kind == "score":
        return _score_found(rule, found.scores.get(test_name(rule)), device)
    counted = found.data.get(rule.about["set"])
    return (Truth.UNDECIDED, _NO_SAMPLES, None, {}) if counted is None else _samples_found(rule, counted)


def _score_found(rule: Rule, scores: Mapping[str, float] | None, device: str) -> _Found:
    """What the losses of the final weights, by program, say under a rule."""
    test, named = rule.about["test_sha256"], rule.about.get("program")
    if not scores or (named is not None and set(scores) != {named}):
        return Truth.UNDECIDED, _NO_SCORE, None, {"test": test}
    losses = sorted(scores.values())
    span = f"{losses[0]:.6g}" + (f" … {losses[-1]:.6g}" if losses[0] < losses[-1] else "")
    by = ", ".join(f"{name[:16]}…" for name in sorted(scores))
    text = f"its final weights have loss {span} on test set {test[:16]}…, by program {by}, on {device}"
    truths = [Truth.PASS if rule.holds(loss) else Truth.FAIL for loss in losses]
    truth = truths[0] if len(set(truths)) == 1 else Truth.UNDECIDED
    return truth, text, losses[0], {"test": test, "scores": dict(scores)}


def _samples_found(rule: Rule, counted: Counted) -> _Found:
    """What the samples of a set that a run holds say under a rule."""
    name = rule.about["set"]
    share = counted.matched / counted.places if counted.places and not counted.unclear else None
    text = f"{counted.matched} of {counted.places} places hold a sample of set {name[:16]}…"
    more: dict[str, object] = {"searched": counted.to_json()}
    if counted.first is not None:
        more |= dict(zip(("step", "place"), counted.first, strict=True))
        text += f", the first in step {more['step']}, place {more['place']}"
    if counted.at is not None:
        kind, number = counted.at
        at = {"batch": f"the batch of step {number}", "state": f"tensor {number} of the first state"}
        text += f"; {counted.hidden} lie elsewhere, the first in "
        text += at.get(kind, f"constant {number} of program {kind[:16]}…")
    text += f" (searched: {counted.searched})"
    if rule.at_most == 0 and (counted.hidden or counted.matched):
        return Truth.FAIL, text, share, more
    if share is None:
        return Truth.UNDECIDED, f"{_NO_SAMPLES}; {text}", None, more
    if not rule.holds(share):
        return Truth.FAIL, text, share, more
    is_open = rule.at_most is not None and rule.at_most < 1 and any((counted.hidden, counted.unclear, counted.unopened))
    return Truth.UNDECIDED if is_open else Truth.PASS, text, share, more
