"""Rules for the learning rate of each step, as data: lab, inspector and referee compute the same number."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from firmware_sim import limits
from firmware_sim.errors import CallerError, EvidenceError

__all__ = ["KINDS", "Schedule"]

KINDS = ("constant", "warmup", "linear", "cosine", "step", "table")
_WHOLE = {"constant": (), "warmup": ("steps",), "linear": ("steps",), "cosine": ("steps",), "step": ("every",)}
_FACTORS = {"linear": ("last",), "cosine": ("last",), "step": ("factor",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Factor between the learning rate of each step and its declared value, in IEEE double.

    Attributes:
        kind: one of ``KINDS``.
            ``constant``: 1. ``warmup``: t/steps until step ``steps``, then 1. ``linear``: from 1 at step 1 in a line to
            ``last`` at step ``steps`` and after. ``cosine``: the same on half a cosine. ``step``: ``factor`` to the
            power of the whole number of ``every`` steps gone by. ``table``: an entry for each step, the last from
            there on.
        numbers: the rule's numbers by name, a table as a tuple.
    """

    kind: str
    numbers: tuple[tuple[str, float | int | tuple[float, ...]], ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise CallerError(f"unknown schedule {self.kind!r:.40}; known: {', '.join(KINDS)}")
        given = dict(self.numbers)
        whole, factors = _WHOLE.get(self.kind, ()), _FACTORS.get(self.kind, ())
        wanted = {"factors"} if self.kind == "table" else {*whole, *factors}
        if set(given) != wanted or len(given) != len(self.numbers):
            raise CallerError(f"a {self.kind} schedule has the numbers {', '.join(sorted(wanted)) or 'none'}")
        for name in whole:
            if type(given[name]) is not int or not 1 <= given[name] <= limits.STEPS.most:  # type: ignore[operator]
                raise CallerError(f"{name} of a {self.kind} schedule is a number of steps from 1 on")
        table = given.get("factors", ())
        if not isinstance(table, tuple) or (self.kind == "table" and not 1 <= len(table) <= limits.SCHEDULE.most):
            raise CallerError(f"a table of factors has 1 … {limits.SCHEDULE.most} entries")
        for value in (*table, *(given[name] for name in factors)):
            if type(value) is not float or not 0 <= value < math.inf:
                raise CallerError(f"the factors of a {self.kind} schedule are fractional numbers of at least 0")

    @classmethod
    def of(cls, kind: str, **numbers: Any) -> Schedule:
        """Make a schedule from keywords: ``Schedule.of("cosine", steps=100, last=0.1)``."""
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in numbers.items()}
        return cls(kind=kind, numbers=tuple(sorted(values.items())))

    def factor(self, step: int) -> float:
        """The factor of step 1, 2, …"""
        given: dict[str, Any] = dict(self.numbers)
        if self.kind == "warmup":
            return step / given["steps"] if step < given["steps"] else 1.0
        if self.kind in ("linear", "cosine"):
            done = min((step - 1) / max(given["steps"] - 1, 1), 1.0)
            left = 1.0 - done if self.kind == "linear" else (1.0 + math.cos(math.pi * done)) / 2.0
            return float(given["last"] + (1.0 - given["last"]) * left)
        if self.kind == "step":
            try:
                return float(given["factor"] ** ((step - 1) // given["every"]))
            except OverflowError:
                return math.inf
        if self.kind == "table":
            return float(given["factors"][min(step, len(given["factors"])) - 1])
        return 1.0

    def rate(self, declared: float, step: int) -> float:
        """The learning rate of step 1, 2, … of a parameter group that declares this one."""
        factor = self.factor(step)
        return declared if factor == 1.0 else declared * factor

    def agrees(self, declared: object, used: object, step: int) -> bool:
        """Whether a step uses the rate that the rule gives, to 2^-46 of itself: cosines differ in the last bits.

        A rule that gives no finite rate agrees with none.
        """
        if not isinstance(declared, float | int) or not isinstance(used, float | int):
            return declared == used
        expected = self.rate(float(declared), step)
        return math.isfinite(expected) and abs(used - expected) <= 2.0**-46 * abs(expected)

    def to_json(self) -> dict[str, Any]:
        """Return JSON-able values."""
        numbers = {name: list(value) if isinstance(value, tuple) else value for name, value in self.numbers}
        return {"kind": self.kind, **numbers}

    @classmethod
    def from_json(cls, data: object) -> Schedule:
        """Parse; EvidenceError on any other form."""
        if not isinstance(data, dict) or not isinstance(data.get("kind"), str):
            raise EvidenceError("a schedule in the metadata is malformed")
        try:
            return cls.of(data["kind"], **{str(name): value for name, value in data.items() if name != "kind"})
        except (CallerError, TypeError) as error:
            raise EvidenceError(f"a schedule in the metadata is invalid: {error}") from None
