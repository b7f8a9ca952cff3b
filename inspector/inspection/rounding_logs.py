"""What a rounding log may decide: no more, unlike the device that replays it, than the logs of honest runs.

Where the error bounds of two devices leave two results, a log says which one was taken. The honest recorder lists every
such place, so listing is free. Deciding is not: an honest log decides unlike the replaying device only where the two
happened to compute differently, and how often they do was measured (``honest-logs`` of ``tests.measurements``). Which
device a lab trained on is its own word, so the highest rate that was measured with the replaying device's family
counts. A lab that prepares places by its data is held to the same rate, in each result, in each class of operators, and
in all that was replayed.

A decision is in doubt by itself where the bound takes half of the result's bits or more: it no more rounds than writes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from scipy.special import betainc, betaincinv, betaln

from firmware_sim.evidence import canonical
from inspector.devices import DEVICES
from inspector.replay.decisions import Decisions, Unlike

__all__ = ["COMMITTED", "Counts", "Examined", "committed", "examine"]

COMMITTED = Path(__file__).with_name("data") / "honest_logs.json"
"""Counts of honest pairs, with hardware, versions and commit."""
FALSE_ALARM = 1e-4
"""With what chance an honest log whose rate is the upper one fails each of the three tests."""
_CONFIDENCE = 0.95
_ENOUGH = 1000
"""Decisions from which on a class of operators counts as measured."""

_Class = tuple[str, str, int]
"""Numerics, kind of operator, and terms rounded up to a power of 4."""


def _class_of(numerics: str, kind: str, terms: int) -> _Class:
    return numerics, kind, 1 << 2 * ((max(terms, 1) - 1).bit_length() + 1 >> 1)


def _family(name: str) -> str:
    return DEVICES[name].kind if name in DEVICES else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Decisions of honest logs: free and turned ones, by class and the two devices of a pair."""

    pairs: Mapping[tuple[_Class, str, str], tuple[int, int]]
    _rates: dict[str, dict[_Class, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]]) -> Counts:
        """From rows with mode, recorded_on, replayed_on and decisions."""
        pairs: dict[tuple[_Class, str, str], tuple[int, int]] = {}
        for row in rows:
            for kind, terms, _, free, turned in row["decisions"]["classes"]:
                key = _class_of(row["mode"], kind, terms), row["recorded_on"], row["replayed_on"]
                before = pairs.get(key, (0, 0))
                pairs[key] = before[0] + free, before[1] + turned
        return cls(pairs=pairs)

    def rates(self, family: str) -> dict[_Class, float]:
        """The highest upper rate of each measured class among pairs with a device of that family, or of any device."""
        if family not in self._rates:
            rates: dict[_Class, float] = {}
            for (name, one, other), (free, turned) in self.pairs.items():
                if free >= _ENOUGH and (not family or family in (_family(one), _family(other))):
                    upper = float(betaincinv(turned + 1, max(free - turned, 1), _CONFIDENCE))
                    rates[name] = max(rates.get(name, 0.0), upper)
            self._rates[family] = rates
        return self._rates[family]

    def rate(self, numerics: str, kind: str, terms: int, device: str) -> tuple[float, bool]:
        """The rate by which a class is judged on a device, and whether it was measured for the two.

        Where it was not it is the highest of any class under these numerics, with that family or else any, and 0 where
        none was measured.
        """
        wanted = _class_of(numerics, kind, terms)
        known = self.rates(_family(device)) if _family(device) else {}
        if wanted in known:
            return known[wanted], True
        others = [rate for name, rate in known.items() if name[0] == numerics]
        others = others or [rate for name, rate in self.rates("").items() if name[0] == numerics]
        return max(others, default=0.0), False


@functools.cache
def committed() -> Counts:
    """Those in ``data/honest_logs.json``."""
    text = resources.files(__package__).joinpath(f"data/{COMMITTED.name}").read_text(encoding="utf-8")
    return Counts.of(canonical.loads(text)["rows"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """What logs decided on one device.

    Attributes:
        decisions: the counts.
        allowed: most decisions unlike the device that would have passed in all.
        bits: what a lab that knows the device can write with these.
        uncalibrated: classes of operators that were not measured with this family of devices.
        doubts: why an honest log would hardly have decided so.
    """

    decisions: Decisions
    allowed: int
    uncalibrated: tuple[str, ...]
    doubts: tuple[str, ...]

    @property
    def bits(self) -> float:
        """What a lab that knows the device can write with so many of these places, at most.

        That is the logarithm of how many choices of at most ``allowed`` of them there are. Below the middle the counts
        of fewer fall at least as a geometric series does.
        """
        free, most = self.decisions.free, self.allowed
        if 2 * most >= free:
            return float(free)
        choices = -math.log(free + 1) - float(betaln(most + 1, free - most + 1))
        return round((choices - math.log1p(-most / (free - most + 1))) / math.log(2), 6)

    def to_json(self) -> dict[str, object]:
        """Return JSON-able values: what a verdict's evidence holds of a replay."""
        return {
            "logged_decisions": self.decisions.logged,
            "free_decisions": self.decisions.free,
            "turned_decisions": self.decisions.turned,
            "allowed_decisions": self.allowed,
            "writable_bits": round(self.bits, 1),
            "not_calibrated": list(self.uncalibrated),
            "first_turned_step": min((each.step for each in self.decisions.unlike), default=None),
        }


def _allowed(free: int, rate: float, groups: int = 1) -> int:
    """The least number that honest decisions exceed with a chance of at most FALSE_ALARM in any of so many groups."""
    least, most = 0, free
    while least < most:
        middle = (least + most) // 2
        if float(betainc(middle + 1, free - middle, rate)) > FALSE_ALARM / groups:
            least = middle + 1
        else:
            most = middle
    return most


def _named(kind: str, terms: int) -> str:
    return "functions" if kind == "function" else f"{kind} sums of {terms} terms"


def _said(where: Unlike, turned: int, what: str, device: str, why: str) -> str:
    place = f"step {where.step}, call {where.call} ({where.operator})"
    text = (
        f"from {place} on, the rounding log decides {turned} results{what} differently from {device}, so that it can "
        "write up to "
    )
    return f"{text}{turned} bits; {why}"


def _doubts(decisions: Decisions, device: str, rates: Mapping[tuple[str, int], float], allowed: int) -> tuple[str, ...]:
    """Why honest logs would hardly have decided so."""
    doubts = []
    if coarse := [each for each in decisions.unlike if each.coarse]:
        why = "their error bound takes half of their bits or more"
        doubts.append(_said(coarse[0], sum(each.coarse for each in coarse), "", device, why))
    if (text := _excessive(decisions, device, rates, allowed)) is not None:
        doubts.append(text)
    return tuple(doubts)


def _excessive(decisions: Decisions, device: str, rates: Mapping[tuple[str, int], float], allowed: int) -> str | None:
    """Where more was decided unlike the device than honest logs do: in all, in a class, or in one result."""

    def judged() -> Iterator[tuple[Unlike, int, int, int, str]]:
        for where in decisions.unlike[:1]:
            yield where, decisions.turned, decisions.free, allowed, ""
        for each in decisions.classes:
            if each.turned:
                where = next(one for one in decisions.unlike if (one.kind, one.terms) == each[:2])
                most = _allowed(each.free, rates[each[:2]], len(decisions.classes))
                yield where, each.turned, each.free, most, f" of {_named(*each[:2])}"
        for one in decisions.unlike:
            most = _allowed(one.free, rates[one.kind, one.terms], decisions.free)
            yield one, one.turned, one.free, most, " of this call"

    for where, turned, free, most, what in judged():
        if turned > most:
            return _said(
                where, turned, what, device, f"of {free} that it may choose honest logs decide at most {most} so"
            )
    return None


def examine(decisions: Decisions, numerics: str, device: str, counts: Counts | None = None) -> Examined:
    """Judge what logs decided in all that a device replayed of a run."""
    counts = committed() if counts is None else counts
    found = {each[:2]: counts.rate(numerics, *each[:2], device) for each in decisions.classes}
    rates = {name: rate for name, (rate, _) in found.items()}
    expected = sum(rates[each[:2]] * each.free for each in decisions.classes)
    allowed = _allowed(decisions.free, expected / max(decisions.free, 1))
    unknown = tuple(sorted(_named(*name) for name, (_, is_measured) in found.items() if not is_measured))
    doubts = _doubts(decisions, device, rates, allowed)
    if unknown:
        doubts = tuple(f"{text}; not calibrated: {', '.join(unknown)}" for text in doubts)
    return Examined(decisions=decisions, allowed=allowed, uncalibrated=unknown, doubts=doubts)
