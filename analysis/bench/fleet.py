"""``bench fleet``: how long a simulated year takes, and how that grows."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from analysis.montecarlo import estimate_rare_miss
from inspector.campaign import (
    Evidence,
    Fleet,
    Inspection,
    Kind,
    Lab,
    Plan,
    Pool,
    RateBook,
    Run,
    Site,
    Strategy,
    Threshold,
    make_plan,
    predict,
    simulate_agents,
    simulate_counts,
)

__all__ = ["run"]

YEAR = 365.0
SIZES = (10_000, 100_000, 1_000_000, 10_000_000)
DRAWS = (1_000, 10_000, 100_000, 1_000_000)
_SEED = 1
_MIB = 1 << 20


def run(
    *, chips: int = 10_000_000, trials: int = 1000, sizes: Sequence[int] = SIZES, draws: Sequence[int] = DRAWS
) -> list[dict[str, object]]:
    """Measure both engines on a year with monthly inspections; nothing is reused between rows.

    Rows: the aggregated engine on ``chips`` chips and ``trials`` trials; one trial of agents, which never stops early
    (its snapshots prove nothing, so no inspection ends the year), with the peak memory of the process; the aggregated
    engine with 20·``trials`` trials over fleets of ``sizes`` chips and over ``draws`` samples a period among
    ``chips``, and over numbers of trials; and the time of a miss probability of 1e-9 with its error against the closed
    form. ``ratio`` is the time relative to the first row of the same work.
    """
    rows = [_row(f"a year, {trials:,} trials", "counts", _counts(_year(chips), trials), chips=chips, trials=trials)]
    year = _year(chips, rate=0.0)
    seconds = _timed(lambda: simulate_agents(year, 1, _rng(), stop_when_caught=False))
    rows.append(
        _row("a year, 1 trial", "agents", seconds, chips=chips, trials=1, periods=year.periods, peak_mib=_peak_mib())
    )
    many = 20 * trials
    rows += _series("chips", [(size, _counts(_year(size, samples=100), many)) for size in sizes])
    # Samples of a draw cost nothing by themselves: a hypergeometric number takes the same time at every size.
    rows += _series("samples", [(n, _counts(_year(chips, samples=min(n, chips)), many)) for n in draws])
    rows += _series("trials", [(n, _counts(_year(chips), n)) for n in (many, 2 * many, 4 * many, 8 * many)])
    rows.append(_rare())
    return rows


def _year(chips: int, *, samples: int | None = None, rate: float = 1.0) -> Plan:
    kind = Kind(name="unit", flop_per_day=1.0)
    flop = chips // 100 * YEAR
    return make_plan(
        Fleet(labs=(Lab(name="A", sites=(Site(name="s", pools=(Pool(kind=kind, count=chips),)),)),)),
        [Run(name="run", lab="A", flop=flop, days=YEAR)],
        Threshold(threshold_flop=flop / 2, evidence=Evidence.WHOLE_RUN),
        Inspection(
            period_days=YEAR / 12, samples=max(1, chips // 10_000) if samples is None else samples, snapshot_rate=0.1
        ),
        Strategy(name="as planned"),
        RateBook(assumed={"undeclared-run": rate}),
        days=YEAR,
    )


def _rare() -> dict[str, object]:
    """58 samples in each of twelve months among 1,000 chips of which 30 train."""
    kind = Kind(name="unit", flop_per_day=1.0)
    plan = make_plan(
        Fleet(labs=(Lab(name="A", sites=(Site(name="s", pools=(Pool(kind=kind, count=1000),)),)),)),
        [Run(name="run", lab="A", flop=30 * YEAR, days=YEAR)],
        Threshold(threshold_flop=1.0, evidence=Evidence.WHOLE_RUN),
        Inspection(period_days=YEAR / 12, samples=58, snapshot_rate=0.1),
        Strategy(name="as planned"),
        RateBook(assumed={"undeclared-run": 1.0}),
        days=YEAR,
    )
    start = time.perf_counter()
    found = estimate_rare_miss(plan, _rng(), particles=4000, islands=24)
    seconds = time.perf_counter() - start
    truth = math.exp(predict(plan).log_miss or 0.0)
    return _row(
        "a miss probability of 1e-9",
        "splitting",
        seconds,
        estimate=found.value,
        low=found.low,
        high=found.high,
        closed_form=truth,
        relative_error=found.value / truth - 1,
    )


def _counts(plan: Plan, trials: int) -> float:
    """Return the best of three, since a run of some milliseconds is at the mercy of its neighbours."""
    return min(_timed(lambda: simulate_counts(plan, trials, _rng())) for _ in range(3))


def _series(work: str, measured: Sequence[tuple[int, float]]) -> list[dict[str, object]]:
    first = measured[0][1]
    return [
        {"work": work, "mode": "counts", "seconds": seconds, "ratio": seconds / first, work: size}
        for size, seconds in measured
    ]


def _row(work: str, mode: str, seconds: float, **more: Any) -> dict[str, object]:
    return {"work": work, "mode": mode, "seconds": seconds, "ratio": 1.0, **more}


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _rng() -> np.random.Generator:
    return np.random.Generator(np.random.Philox(_SEED))


def _peak_mib() -> float:
    """Return the largest resident memory of this process so far; Linux counts KiB, macOS bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / _MIB if sys.platform == "darwin" else peak * 1024 / _MIB
