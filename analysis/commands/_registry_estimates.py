"""Estimates from a registry: what claimed losses say, and whether a census would have seen a leak."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from decimal import Decimal

from analysis.commands._common import finish, parse_now
from analysis.commands._detection_options import NO_FIND
from inspector import registry as reg

__all__ = ["leakage", "losses"]


def losses(arguments: argparse.Namespace) -> int:
    """Test whether owners claim more losses than a base rate explains."""
    start = int(parse_now(arguments.since).timestamp())
    end = int(parse_now(arguments.until).timestamp())
    with reg.Registry.open(arguments.database) as registry:
        records = reg.loss_records(registry, start=start, end=end)
    report = reg.assess_losses(
        records,
        rate_per_chip_year=arguments.rate,
        false_alarm=arguments.false_alarm,
        model=reg.LossModel(arguments.model),
        window_years=(end - start) / reg.SECONDS_PER_YEAR,
    )
    data = {
        "suspicious": report.suspicious,
        "model": report.model.value,
        "rate_per_chip_year": report.rate_per_chip_year,
        "false_alarm": report.false_alarm,
        "attained": report.attained,
        "owners": [asdict(owner) for owner in report.owners],
        "pooled": asdict(report.pooled),
    }
    lines = [f"{'owner':<24} {'lost':>7} {'expected':>10} {'p':>10} {'alarm at':>9}"]
    for row in (*report.owners, report.pooled):
        flag = "  SUSPICIOUS" if row.suspicious else ""
        lines.append(
            f"{row.owner:<24} {row.lost:>7} {row.expected:>10.3f} {row.p_value:>10.3g} {row.alarm_at:>9}{flag}"
        )
    lines.append(
        f"false-alarm probability over all tests: at most {report.attained:.3g} (asked {report.false_alarm:g})"
    )
    finish(arguments, data, lines)
    return 1 if report.suspicious else 0


@dataclass(frozen=True, slots=True)
class Unseen:
    """How likely diverted chips stay unseen for so many months, also as a natural logarithm."""

    diverted: int
    fleet: int
    census: int
    months: float
    unseen: float
    log_unseen: float | None


def leakage(arguments: argparse.Namespace) -> int:
    """Print how likely diverted chips stay unseen by censuses."""
    fleet = arguments.fleet
    if arguments.registry is not None:
        with reg.Registry.open(arguments.registry) as registry:
            fleet = sum(count for _, state, count in reg.summarise(registry).holdings if state.present)
    shared = {
        "fleet": fleet,
        "census": arguments.census,
        "per_month": arguments.per_month,
        "sensitivity": arguments.sensitivity,
    }
    rows: list[Unseen] = []
    for diverted in arguments.diverted:
        for months in arguments.months:
            logarithm = float(reg.log_unseen_probability(diverted=diverted, months=months, **shared))
            unseen = float(reg.unseen_probability(diverted=diverted, months=months, **shared))
            # JSON has no infinity: a certain discovery has no logarithm.
            log_unseen = logarithm if logarithm > float("-inf") else None
            rows.append(Unseen(diverted, fleet, arguments.census, months, unseen, log_unseen))
    data: dict[str, object] = {"rows": rows, "false_alarm": 0.0}
    lines = [f"{'diverted':>10} {'months':>8} {'unseen':>12}"]
    lines += [f"{row.diverted:>10} {row.months:>8g} {_tiny(row.unseen, row.log_unseen):>12}" for row in rows]
    if arguments.confidence is not None:
        seen: list[dict[str, object]] = []
        data["months_until_seen"] = seen
        for diverted in arguments.diverted:
            months = reg.months_until_seen(diverted=diverted, confidence=arguments.confidence, **shared)
            finite = months if months < float("inf") else None
            seen.append({"diverted": diverted, "months": finite})
            when = f"after {months:g} months" if finite is not None else "never"
            lines.append(f"{diverted} diverted chips are seen with probability {arguments.confidence:g} {when}")
    return finish(arguments, data, [*lines, NO_FIND])


def _tiny(probability: float, logarithm: float | None) -> str:
    """A probability; below the smallest float from its natural logarithm, None for impossible."""
    if probability > 0 or logarithm is None:
        return f"{probability:.4g}"
    return f"{Decimal(logarithm).exp():.4g}"
