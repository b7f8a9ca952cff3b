"""Are the losses that owners report more than bad luck? Large claims of lost chips are investigated (Shavit 2023, §6).

Null hypothesis: every chip for which an owner answers is lost independently with at most the declared rate λ per
chip-year. A chip answered for during τ years is then lost with probability 1−e^(−λτ), stochastically below a Poisson
count of mean λτ; so an owner's number of distinct lost chips is stochastically below Poisson(λ·Στ), and that exact
upper tail is a p-value that is never too small, whatever the holding times. When all n chips are held throughout, the
count is exactly Binomial(n, 1−e^(−λT)), the sharper test; it stays valid, if blunter, when some are held for less.

The false-alarm rate α is split in two: α/2 for the owners, by Holm's step-down over their p-values, and α/2 for the sum
over all owners, which colluding owners cannot keep low by sharing the losses out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from firmware_sim.errors import CallerError

__all__ = ["LossModel", "LossRecord", "LossReport", "OwnerLosses", "assess_losses"]


class LossModel(StrEnum):
    """The null distribution of the number of lost chips."""

    POISSON = "poisson"
    BINOMIAL = "binomial"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRecord:
    """One owner's losses in a window, from the log: ``lost`` distinct chips of ``chips``, held for ``chip_years``."""

    owner: str
    chips: int
    chip_years: float
    lost: int

    def __post_init__(self) -> None:
        if self.chips < 0 or self.lost < 0:
            raise CallerError(f"owner {self.owner}: chips and lost chips cannot be negative")
        if not (math.isfinite(self.chip_years) and self.chip_years >= 0):
            raise CallerError(f"owner {self.owner}: chip-years must be finite and not negative")
        if self.lost > self.chips:
            raise CallerError(f"owner {self.owner}: {self.lost} chips are lost, but only {self.chips} were held")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerLosses:
    """One owner's test: losses expected under the null, exact upper-tail p-value, the fewest losses that alarm."""

    owner: str
    lost: int
    expected: float
    p_value: float
    alarm_at: int
    suspicious: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LossReport:
    """The owners' tests and the pooled one.

    ``false_alarm`` bounds the probability that an innocent world sets off any alarm; ``attained`` is a tighter bound on
    the same probability, computed from the discrete tails at the alarm counts actually used.
    """

    model: LossModel
    rate_per_chip_year: float
    false_alarm: float
    attained: float
    owners: tuple[OwnerLosses, ...]
    pooled: OwnerLosses

    @property
    def suspicious(self) -> bool:
        """Whether any owner or the pooled count exceeds what the declared rate explains."""
        return self.pooled.suspicious or any(owner.suspicious for owner in self.owners)


def assess_losses(
    records: Sequence[LossRecord],
    *,
    rate_per_chip_year: float,
    false_alarm: float = 0.01,
    model: LossModel = LossModel.POISSON,
    window_years: float | None = None,
) -> LossReport:
    """Test each owner's losses and their sum against the declared base rate.

    Args:
        records: one per owner, at least one.
        rate_per_chip_year: λ, the greatest rate of honest loss; 0 makes every loss an alarm.
        false_alarm: α, bound on the probability of any alarm under the null (0 < α < 1).
        model: Poisson on chip-years, or binomial on chips over the whole window.
        window_years: T, required by the binomial model.

    Raises:
        CallerError: no records, an owner twice, or a parameter out of range.
    """
    _check(records, rate_per_chip_year, false_alarm)
    nulls = [_null(record, rate_per_chip_year, LossModel(model), window_years) for record in records]
    total = LossRecord(
        owner="all owners",
        chips=sum(record.chips for record in records),
        chip_years=math.fsum(record.chip_years for record in records),
        lost=sum(record.lost for record in records),
    )
    pooled_null = _null(total, rate_per_chip_year, LossModel(model), window_years)

    half = false_alarm / 2
    p_values = [null.tail(record.lost) for null, record in zip(nulls, records, strict=True)]
    rejected = _holm(p_values, half)
    alarm_counts = [null.critical(half / len(records)) for null in nulls]
    owners = tuple(_tested(*each) for each in zip(records, nulls, p_values, alarm_counts, rejected, strict=True))
    pooled_p = pooled_null.tail(total.lost)
    pooled_alarm = pooled_null.critical(half)
    pooled = _tested(total, pooled_null, pooled_p, pooled_alarm, pooled_p <= half)
    # Under the null Holm rejects something exactly when its first step does, at the Bonferroni level.
    quiet = math.fsum(math.log1p(-null.tail(count)) for null, count in zip(nulls, alarm_counts, strict=True))
    attained = -math.expm1(quiet) + pooled_null.tail(pooled_alarm)
    return LossReport(
        model=LossModel(model),
        rate_per_chip_year=rate_per_chip_year,
        false_alarm=false_alarm,
        attained=attained,
        owners=owners,
        pooled=pooled,
    )


def _check(records: Sequence[LossRecord], rate_per_chip_year: float, false_alarm: float) -> None:
    if not records:
        raise CallerError("there are no owners to test: no owner held a chip in this window")
    if len({record.owner for record in records}) != len(records):
        raise CallerError("an owner occurs twice among the loss records")
    if not (math.isfinite(rate_per_chip_year) and rate_per_chip_year >= 0):
        raise CallerError("the base rate of losses must be finite and not negative")
    if not 0 < false_alarm < 1:
        raise CallerError("the false-alarm rate must lie strictly between 0 and 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Null:
    """Binomial(chips, probability), or Poisson(mean) where ``probability`` is None."""

    chips: int
    mean: float
    probability: float | None

    def tail(self, count: int) -> float:
        """P(X ≥ count)."""
        from scipy import stats

        if count <= 0:
            return 1.0
        if self.probability is None:
            return float(stats.poisson.sf(count - 1, self.mean))
        return float(stats.binom.sf(count - 1, self.chips, self.probability))

    def critical(self, level: float) -> int:
        """Smallest count whose upper tail is at most ``level``."""
        low, high = 0, 1
        while self.tail(high) > level:
            low, high = high, high * 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.tail(middle) <= level else (middle, high)
        return high


def _tested(record: LossRecord, null: _Null, p_value: float, alarm_at: int, suspicious: bool) -> OwnerLosses:
    return OwnerLosses(
        owner=record.owner,
        lost=record.lost,
        expected=null.mean,
        p_value=p_value,
        alarm_at=alarm_at,
        suspicious=suspicious,
    )


def _null(record: LossRecord, rate: float, model: LossModel, window_years: float | None) -> _Null:
    if model is LossModel.POISSON:
        return _Null(chips=record.chips, mean=rate * record.chip_years, probability=None)
    if window_years is None or not (math.isfinite(window_years) and window_years > 0):
        raise CallerError("the binomial model needs the length of the window in years")
    probability = -math.expm1(-rate * window_years)
    return _Null(chips=record.chips, mean=record.chips * probability, probability=probability)


def _holm(p_values: Sequence[float], level: float) -> list[bool]:
    """Holm's step-down: reject in rising order of p while p ≤ level/(number not yet rejected)."""
    rejected = [False] * len(p_values)
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        if p_values[index] > level / (len(p_values) - rank):
            break
        rejected[index] = True
    return rejected
