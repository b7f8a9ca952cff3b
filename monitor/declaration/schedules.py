"""Rules for the learning rate of each step, as data: lab, inspector and referee compute the same number."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate, repeat
from types import SimpleNamespace
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from firmware_sim import limits
from firmware_sim.errors import CallerError, EvidenceError

__all__ = ["KINDS", "Schedule", "declared_groups"]

KINDS = ("constant", "warmup", "linear", "cosine", "step", "table")
_WHOLE = {"constant": (), "warmup": ("steps",), "linear": ("steps",), "cosine": ("steps",), "step": ("every",)}
_FACTORS = {"linear": ("last",), "cosine": ("last",), "step": ("factor",)}
_CLOSE = 2.0**-34
_SPAN = 1000
"""Steps that a scheduler is compared with a rule for, if the rule has no number that says it."""
_LISTED = "declare no schedule, and the rates are listed step by step"


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
        rates: of a scheduler's, the rate of each parameter group that the factors apply to, and that a run declares.
    """

    kind: str
    numbers: tuple[tuple[str, float | int | tuple[float, ...]], ...] = ()
    rates: tuple[float, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise CallerError(f"unknown schedule {self.kind!r:.40}; known: {', '.join(KINDS)}")
        given = dict(self.numbers)
        whole, factors = _WHOLE.get(self.kind, ()), _FACTORS.get(self.kind, ())
        wanted = {"factors"} if self.kind == "table" else {*whole, *factors}
        if set(given) != wanted or len(given) != len(self.numbers):
            raise CallerError(
                f"a {self.kind} schedule takes exactly these numbers: {', '.join(sorted(wanted)) or 'none'}"
            )
        for name in whole:
            if type(given[name]) is not int or not 1 <= given[name] <= limits.STEPS.most:  # type: ignore[operator]
                raise CallerError(f"{name} of a {self.kind} schedule must be a number of steps from 1 on")
        table = given.get("factors", ())
        if not isinstance(table, tuple) or (self.kind == "table" and not 1 <= len(table) <= limits.SCHEDULE.most):
            raise CallerError(f"a table of factors must have 1 … {limits.SCHEDULE.most} entries")
        for value in (*table, *(given[name] for name in factors)):
            if type(value) is not float or not 0 <= value < math.inf:
                raise CallerError(f"the factors of a {self.kind} schedule must be floating-point numbers of at least 0")

    @classmethod
    def of(cls, kind: str, **numbers: Any) -> Schedule:
        """Make a schedule from keywords: ``Schedule.of("cosine", steps=100, last=0.1)``."""
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in numbers.items()}
        return cls(kind=kind, numbers=tuple(sorted(values.items())))

    def factor(self, step: int) -> float:
        """The factor of a step, counted from 1."""
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

    def agrees(self, declared: object, used: object, step: int, largest: float) -> bool:
        """Whether a step uses the rate that the rule gives, to 2^-34 of the largest that its group has used so far.

        Mathematical libraries differ in the last bits of a cosine, and PyTorch computes many schedules from one step to
        the next: over 10,000 steps to 2^-38 of the largest rate, which is all that is left of a rate that falls to 0. A
        lab gains as little: the rate that it used, whatever the rule gives, is what its arithmetic is bound to, what is
        listed, and what rules bound. A rule that gives no finite rate agrees with none.

        Args:
            largest: of the rates that steps up to this one have used; what no step has used buys no tolerance.
        """
        if not isinstance(declared, float | int) or not isinstance(used, float | int):
            return declared == used
        try:
            expected = self.rate(float(declared), step)
            return math.isfinite(expected) and abs(used - expected) <= _CLOSE * largest < math.inf
        except OverflowError:
            return False

    @classmethod
    def of_scheduler(cls, scheduler: object, *, steps: int, every: int = 1) -> Schedule:
        """The schedule that a scheduler of PyTorch's will follow: a kind that gives its rates, or else a table.

        A copy goes through all steps; the scheduler and its optimizer stay as they are. Each factor is that between a
        step's rate and the group's highest, which the run declares (``rates``).

        Args:
            scheduler: made for the optimizer that is recorded, before the first step.
            steps: that update, to foresee; the last rate is that of all after them.
            every: of them between two calls of ``scheduler.step()``.

        Raises:
            CallerError: its rates depend on more than the number of steps, or its groups' on different factors.
        """
        if not 1 <= steps <= limits.SCHEDULE.most or every < 1:
            raise CallerError(
                f"a schedule must be computed for 1 … {limits.SCHEDULE.most} steps, and `every` must be at least 1"
            )
        by_group = _foreseen(scheduler, steps, every)
        peaks = tuple(map(max, by_group))
        scaled = [[rate / peak for rate in rates] for rates, peak in zip(by_group, peaks, strict=True) if peak > 0]
        for rule in cls._of_factors(scaled[0] if scaled else [1.0]):
            if all(rule._off(peak, rates) is None for peak, rates in zip(peaks, by_group, strict=True)):
                return cls(kind=rule.kind, numbers=rule.numbers, rates=peaks)
        raise CallerError(f"{_class(scheduler)} gives its groups different factors; {_LISTED}")

    @classmethod
    def _of_factors(cls, factors: Sequence[float]) -> list[Schedule]:
        """Rules that may give these factors, a table last, which does."""
        first, last = factors[0], factors[-1]
        end = next(place for place, factor in enumerate(factors) if abs(factor - last) <= _CLOSE / 2) + 1
        change = next((place for place, factor in enumerate(factors) if factor != first), None)
        found = [cls.of("constant"), cls.of("warmup", steps=end)]
        found += [cls.of(kind, steps=end, last=last) for kind in ("linear", "cosine")]
        found += [cls.of("step", every=change, factor=factors[change] / first)] if change and first else []
        tail = next((len(factors) - place for place, factor in enumerate(reversed(factors)) if factor != last), 0)
        return [*found, cls.of("table", factors=list(factors[: tail + 1]))]

    def _off(self, declared: object, rates: Sequence[float]) -> int | None:
        """The first of steps 1, 2, … that does not use the rule's rate, to half of what is allowed."""
        every = enumerate(zip(rates, accumulate(rates, max), strict=True), 1)
        return next((step for step, (rate, top) in every if not self.agrees(declared, rate, step, top / 2)), None)

    def to_json(self) -> dict[str, object]:
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


def declared_groups(
    schedule: Schedule | None, groups: Sequence[Mapping[str, Any]], stateful: Mapping[str, object]
) -> tuple[Mapping[str, Any], ...]:
    """The parameter groups that a run declares, with the rates that its schedule's factors apply to.

    Warns of each scheduler in ``stateful`` that gives other rates than a schedule by hand, if it goes on once a step.

    Raises:
        CallerError: the schedule is none, or that of a scheduler whose optimizer has other rates.
    """
    if schedule is None:
        return tuple(groups)
    if not isinstance(schedule, Schedule):
        raise CallerError(f"{_class(schedule)} is not a schedule; take Schedule.of_scheduler(scheduler, steps=…)")
    now, peaks = [group.get("lr") for group in groups], schedule.rates
    firsts = [schedule.rate(peak, 1) for peak in peaks]
    if not peaks:
        for name, scheduler in stateful.items():
            _warn(schedule, groups, name, scheduler)
        return tuple(groups)
    if len(now) != len(peaks) or not all(map(schedule.agrees, peaks, now, repeat(1), firsts)):
        raise CallerError(
            f"the scheduler begins with the rates {firsts!a:.100}, but the optimizer has {now!a:.100}; take the "
            f"schedule from the scheduler of the recorded optimizer before its first step, or {_LISTED}"
        )
    return tuple({**group, "lr": peak} for group, peak in zip(groups, peaks, strict=True))


def _warn(schedule: Schedule, groups: Sequence[Mapping[str, Any]], name: str, scheduler: object) -> None:
    """Warn of a scheduler of these groups that gives other rates than the schedule has numbers for."""
    most = max((len(value) if isinstance(value, tuple) else int(value) for _, value in schedule.numbers), default=0)
    steps = min({"constant": _SPAN, "step": most + 1}.get(schedule.kind, most), limits.SCHEDULE.most)
    with suppress(CallerError):  # or it is no scheduler, and cannot be foreseen
        by_group = _foreseen(scheduler, steps, 1)
        for group, rates in zip(groups, by_group, strict=True) if len(groups) == len(by_group) else ():
            if step := schedule._off(group.get("lr"), rates):
                warnings.warn(
                    f"{name!a:.60} gives rate {rates[step - 1]!r} in step {step} if it goes on once a step, and the "
                    f"schedule {group.get('lr')!r} times {schedule.factor(step)!r}; declare "
                    "Schedule.of_scheduler(scheduler, steps=…), with every=… if it goes on less often",
                    stacklevel=4,
                )
                break


def _class(scheduler: object) -> str:
    return f"{type(scheduler).__name__!a:.60}"


def _foreseen(scheduler: object, steps: int, every: int) -> list[tuple[float, ...]]:
    """By parameter group the rates of steps 1, 2, …; CallerError where a copy of the scheduler fails."""
    if not isinstance(scheduler, LRScheduler):
        raise CallerError(f"{_class(scheduler)} is not a scheduler of torch.optim.lr_scheduler; {_LISTED}")
    optimizer: Any = scheduler.optimizer
    groups = [{name: copy.copy(group[name]) for name in group if name != "params"} for group in optimizer.param_groups]
    twin = SimpleNamespace(param_groups=groups, step=optimizer.step, _opt_called=True)
    found: list[list[float]] = []
    try:
        with warnings.catch_warnings(action="ignore"):
            follower: Any = copy.deepcopy(scheduler, {id(optimizer): twin})
            for step in range(steps):
                if step and not step % every:
                    follower.step()
                found.append([float(group["lr"]) for group in groups])
    except Exception as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        where = f"step {len(found) + 1} of {_class(scheduler)}"
        raise CallerError(f"{where} cannot be foreseen: {text!a:.200}; {_LISTED}") from None
    if any(not 0 <= rate < math.inf for rates in found for rate in rates):
        raise CallerError(f"{_class(scheduler)} gives a rate that is not a number of at least 0; {_LISTED}")
    return list(zip(*found, strict=True))
