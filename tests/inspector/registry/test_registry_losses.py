"""Loss claims: exact tails, the promised false-alarm rate, and exposure computed from the log."""

from __future__ import annotations

import math

import numpy as np
import pytest

from firmware_sim.errors import CallerError
from inspector.registry import (
    SECONDS_PER_YEAR,
    ClaimKind,
    LossModel,
    LossRecord,
    LossReport,
    assess_losses,
    loss_records,
)

RATE = 0.002


def record(owner: str, lost: int, *, chips: int = 10_000, years: float = 1.0) -> LossRecord:
    return LossRecord(owner=owner, chips=chips, chip_years=chips * years, lost=lost)


def poisson_tail(count: int, mean: float) -> float:
    return 1 - math.fsum(math.exp(-mean) * mean**k / math.factorial(k) for k in range(count))


def test_exact_poisson_tail() -> None:
    report = assess_losses([record("lab", 35)], rate_per_chip_year=RATE)
    [owner] = report.owners
    assert owner.expected == pytest.approx(20)
    assert owner.p_value == pytest.approx(poisson_tail(35, 20), rel=1e-9)
    assert owner.suspicious
    assert poisson_tail(owner.alarm_at, 20) <= 0.005 < poisson_tail(owner.alarm_at - 1, 20)


def test_exact_binomial_tail() -> None:
    q = -math.expm1(-0.5 * 2)
    report = assess_losses(
        [record("lab", 9, chips=10)], rate_per_chip_year=0.5, model=LossModel.BINOMIAL, window_years=2
    )
    wanted = math.fsum(math.comb(10, k) * q**k * (1 - q) ** (10 - k) for k in (9, 10))
    assert report.owners[0].p_value == pytest.approx(wanted, rel=1e-9)


def test_the_binomial_is_the_sharper_test() -> None:
    records = [record("lab", 8, chips=10)]
    poisson = assess_losses(records, rate_per_chip_year=0.3)
    binomial = assess_losses(records, rate_per_chip_year=0.3, model=LossModel.BINOMIAL, window_years=1)
    assert binomial.owners[0].p_value < poisson.owners[0].p_value


def test_one_cheat_among_many_is_named() -> None:
    records = [record(f"lab-{number}", 20) for number in range(19)] + [record("cheat", 60)]
    report = assess_losses(records, rate_per_chip_year=RATE, false_alarm=0.01)
    assert [owner.owner for owner in report.owners if owner.suspicious] == ["cheat"]


def test_the_correction_grows_with_the_number_of_owners() -> None:
    alone = assess_losses([record("lab", 34)], rate_per_chip_year=RATE)
    crowd = assess_losses([record(f"lab-{n}", 34 if n == 0 else 19) for n in range(200)], rate_per_chip_year=RATE)
    assert alone.owners[0].suspicious
    assert not crowd.owners[0].suspicious


def test_holm_frees_the_level_of_what_it_rejected() -> None:
    """Two owners: the second's p-value lies between α/4 and α/2, so only Holm's second step rejects it."""
    report = assess_losses([record("loud", 100), record("quiet", 33)], rate_per_chip_year=RATE, false_alarm=0.012)
    quiet = report.owners[1]
    assert 0.003 < quiet.p_value < 0.006
    assert quiet.suspicious


def test_losses_shared_out_among_colluding_owners_show_in_the_sum() -> None:
    report = assess_losses([record(f"lab-{n}", 26) for n in range(20)], rate_per_chip_year=RATE)
    assert not any(owner.suspicious for owner in report.owners)
    assert report.pooled.suspicious
    assert report.suspicious


def test_false_alarm_rate_is_kept() -> None:
    """20,000 innocent worlds of 12 unequal owners at the full base rate, seed 7.

    An alarm is a count at or above the one that the report names, which is checked against the whole test on the first
    40 worlds. The alarms are binomial with a probability of at most ``attained``; five standard deviations above it are
    passed with probability below 1e-6. At least a third of the bound is used, so the test can fail.
    """
    chips = np.array([50, 100, 200, 400, 800, 1_600, 3_200, 6_400, 9_000, 12_000, 15_000, 20_000])
    trials = 20_000
    losses = np.random.default_rng(7).binomial(chips, -math.expm1(-RATE), size=(trials, len(chips)))

    def assess(row: list[int]) -> LossReport:
        records = [record(f"lab-{n}", row[n], chips=int(count)) for n, count in enumerate(chips)]
        return assess_losses(records, rate_per_chip_year=RATE, false_alarm=0.3)

    first = assess([0] * len(chips))
    alarm_at = np.array([owner.alarm_at for owner in first.owners])
    alarmed = np.any(losses >= alarm_at, axis=1) | (losses.sum(axis=1) >= first.pooled.alarm_at)
    for row, alarm in zip(losses[:40].tolist(), alarmed[:40].tolist(), strict=True):
        assert assess(row).suspicious == alarm
    assert alarmed[:40].any()
    assert first.attained <= 0.3
    spread = 5 * math.sqrt(trials * first.attained)
    assert trials * first.attained / 3 < alarmed.sum() < trials * first.attained + spread


def test_nothing_lost_at_rate_zero_and_one_lost() -> None:
    assert not assess_losses([record("lab", 0)], rate_per_chip_year=0).suspicious
    report = assess_losses([record("lab", 1)], rate_per_chip_year=0)
    assert report.suspicious
    assert report.owners[0].p_value == 0
    assert report.attained == 0


@pytest.mark.parametrize(
    ("records", "options", "words"),
    [
        ([], {}, "no owners"),
        ([("lab", 1), ("lab", 2)], {}, "twice"),
        ([("lab", 1)], {"rate_per_chip_year": -1.0}, "base rate"),
        ([("lab", 1)], {"rate_per_chip_year": math.nan}, "base rate"),
        ([("lab", 1)], {"false_alarm": 0.0}, "false-alarm"),
        ([("lab", 1)], {"false_alarm": 1.0}, "false-alarm"),
        ([("lab", 1)], {"model": LossModel.BINOMIAL}, "window"),
        ([("lab", 1)], {"model": LossModel.BINOMIAL, "window_years": math.nan}, "window"),
        ([("lab", 10_001)], {}, "10001 chips are lost, but only 10000 were held"),
        ([("lab", -1)], {}, "negative"),
    ],
)
def test_nonsense(records: list[tuple[str, int]], options: dict[str, object], words: str) -> None:
    with pytest.raises(CallerError, match=words):
        assess_losses([record(*one) for one in records], **({"rate_per_chip_year": RATE} | options))  # type: ignore[arg-type]


def test_chip_years_are_a_number() -> None:
    for years in (math.nan, math.inf, -1.0):
        with pytest.raises(CallerError, match="chip-years"):
            record("lab", 0, years=years)


def test_exposure_from_the_log(world) -> None:
    """20 chips made at t0; 4 sold after half a year, 1 of them lost, 1 destroyed, 1 sold on before the window ends."""
    year, start = SECONDS_PER_YEAR, world.now
    world.now = start + year // 2
    world.pass_on(*world.chips[:4])
    world.now = start + 3 * year // 4
    lab = {"holder": "lab-a", "key": world.keys["lab-a"]}
    world.registry.claim(ClaimKind.LOST, [world.chips[0]], **lab)
    world.registry.claim(
        ClaimKind.DESTROYED, [world.chips[1]], witness="agency", witness_key=world.keys["agency"], **lab
    )
    world.pass_on(world.chips[2], sender="lab-a", receiver="lab-b")
    world.now = start + 2 * year
    world.pass_on(world.chips[5])

    records = {r.owner: r for r in loss_records(world.registry, start=start, end=start + year)}
    assert set(records) == {"fab", "lab-a", "lab-b"}
    assert (records["fab"].chips, records["fab"].lost) == (20, 0)
    assert records["fab"].chip_years == pytest.approx(16 + 4 / 2)
    # The lost chip counts to the end of the window, the destroyed and the sold one to their quarter.
    assert (records["lab-a"].chips, records["lab-a"].lost) == (4, 1)
    assert records["lab-a"].chip_years == pytest.approx(2 * 0.5 + 2 * 0.25)
    assert records["lab-b"].chip_years == pytest.approx(0.25)

    late = {r.owner: r for r in loss_records(world.registry, start=start + year, end=start + 2 * year)}
    assert {owner: record.chips for owner, record in late.items()} == {"fab": 16, "lab-a": 3, "lab-b": 1}
    assert {owner: record.chip_years for owner, record in late.items()} == pytest.approx(
        {"fab": 16, "lab-a": 2, "lab-b": 1}
    )
    assert late["lab-a"].lost == 0
    with pytest.raises(CallerError, match="empty"):
        loss_records(world.registry, start=start, end=start)


def test_a_chip_lost_twice_counts_once(world) -> None:
    lab = {"holder": "fab", "key": world.keys["fab"]}
    start = world.now - 1
    for _ in range(2):
        world.registry.claim(ClaimKind.LOST, ["chip-0001"], **lab)
        world.registry.claim(ClaimKind.FOUND, ["chip-0001"], witness="agency", witness_key=world.keys["agency"], **lab)
    [fab] = loss_records(world.registry, start=start, end=start + 10)
    assert fab.lost == 1
