"""What rounding logs decided in replayed steps: counts by class of operators, and where the device differs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from firmware_sim.errors import EvidenceError
from monitor.numerics.rounding.calibration import OPERATORS
from monitor.numerics.statistics import Statistics

__all__ = ["KINDS", "ClassCount", "Decisions", "Unlike"]

KINDS = (*OPERATORS, "function")
_MOST = (1 << 53) - 1
"""The largest count, which a float holds exactly."""


class ClassCount(NamedTuple):
    """Decisions in results of one class of operators; its words are those of ``monitor.numerics.statistics``."""

    kind: str
    terms: int
    logged: int
    free: int
    turned: int


class Unlike(NamedTuple):
    """One result in which a log decides unlike the device."""

    step: int
    call: int
    operator: str
    kind: str
    terms: int
    free: int
    turned: int
    coarse: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """What rounding logs decided in some steps that one device replayed."""

    classes: tuple[ClassCount, ...] = ()
    unlike: tuple[Unlike, ...] = ()

    @property
    def logged(self) -> int:
        """Decisions that were taken from the logs."""
        return sum(each.logged for each in self.classes)

    @property
    def free(self) -> int:
        """Those among them where the bounds of two devices leave both results."""
        return sum(each.free for each in self.classes)

    @property
    def turned(self) -> int:
        """Those that the device alone would have taken the other way."""
        return sum(each.turned for each in self.classes)

    @classmethod
    def of(cls, steps: Mapping[int, Statistics]) -> Decisions:
        """From the statistics of each replayed step."""
        every = [(step, each) for step, statistics in steps.items() for each in statistics.decided]
        counts = (ClassCount(each.kind, each.terms, each.logged, each.free, each.turned) for _, each in every)
        unlike = (
            Unlike(step, each.call, each.operator, each.kind, each.terms, each.free, each.turned, each.coarse)
            for step, each in every
            if each.turned
        )
        return cls.joined([cls(classes=tuple(counts), unlike=tuple(unlike))])

    @classmethod
    def joined(cls, parts: Iterable[Decisions]) -> Decisions:
        """Of all parts together, each class once."""
        parts = list(parts)
        sums: dict[tuple[str, int], list[int]] = {}
        for count in (each for part in parts for each in part.classes):
            before = sums.setdefault(count[:2], [0, 0, 0])
            sums[count[:2]] = [one + more for one, more in zip(before, count[2:], strict=True)]
        classes = (ClassCount(*key, *found) for key, found in sorted(sums.items()))
        return cls(classes=tuple(classes), unlike=tuple(each for part in parts for each in part.unlike))

    def to_json(self) -> dict[str, object]:
        """Return JSON-able values."""
        return {"classes": [list(each) for each in self.classes], "unlike": [list(each) for each in self.unlike]}

    @classmethod
    def from_json(cls, data: object) -> Decisions:
        """Parse; EvidenceError on another form, or where the two lists do not tell the same."""
        if not isinstance(data, Mapping) or set(data) != {"classes", "unlike"}:
            raise EvidenceError("the counts of what rounding logs decided have missing or extra keys")
        found = cls(
            classes=tuple(ClassCount(*row) for row in _rows(data["classes"], ClassCount)),
            unlike=tuple(Unlike(*row) for row in _rows(data["unlike"], Unlike)),
        )
        turned: dict[tuple[str, int], int] = {}
        for each in found.unlike:
            turned[each.kind, each.terms] = turned.get((each.kind, each.terms), 0) + each.turned
        if turned != {each[:2]: each.turned for each in found.classes if each.turned} or cls.joined([found]) != found:
            raise EvidenceError("the counts of what rounding logs decided contradict each other")
        return found


def _rows(rows: object, form: type[ClassCount] | type[Unlike]) -> Iterable[list[Any]]:
    """Rows of that form: counts that are not negative, and texts; EvidenceError on others."""
    texts = [form._fields.index(name) for name in ("kind", "operator") if name in form._fields]
    if not isinstance(rows, list):
        raise EvidenceError("the counts of what rounding logs decided are malformed")
    for row in rows:
        if not isinstance(row, list) or len(row) != len(form._fields):
            raise EvidenceError("the counts of what rounding logs decided are malformed")
        for place, value in enumerate(row):
            is_good = (
                isinstance(value, str) and len(value) <= 200
                if place in texts
                else type(value) is int and 0 <= value <= _MOST
            )
            if not is_good:
                raise EvidenceError("the counts of what rounding logs decided are malformed")
        if row[form._fields.index("kind")] not in KINDS:
            raise EvidenceError("the counts of what rounding logs decided are malformed")
        yield row
