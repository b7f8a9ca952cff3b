from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from firmware_sim import TICK, CallerError, EvidenceError
from firmware_sim.schedule import (
    EpochKey,
    commit_epoch,
    decode_epoch_keys,
    derive_epoch_key,
    encode_epoch_keys,
    is_scheduled,
    moment_of,
    rate_per_tick,
    scheduled,
    threshold,
)

KEY = bytes(range(32))
RATES = st.fractions(0, 1, max_denominator=10**12)
TIMES = st.integers(0, 40 * TICK)


def scheduled_ticks(key, boot, start, end, rate):
    """The ticks from `start` up to `end` that hold a snapshot."""
    return [moment // TICK for moment in scheduled(key, boot, start * TICK, end * TICK, threshold(rate))]


@given(RATES)
def test_threshold_is_the_rate_to_2_to_the_minus_256(rate):
    assert 0 <= rate - Fraction(threshold(rate), 2**256) < Fraction(1, 2**256)


@pytest.mark.parametrize("rate", [Fraction(-1, 10**9), Fraction(10**9 + 1, 10**9)])
def test_rates_outside_are_refused(rate):
    with pytest.raises(CallerError, match="not between 0 and 1"):
        threshold(rate)


def test_extreme_rates_are_never_and_always():
    assert list(scheduled_ticks(KEY, 1, 0, 500, Fraction(0))) == []
    assert list(scheduled_ticks(KEY, 1, 7, 500, Fraction(1))) == list(range(7, 500))


@given(RATES, RATES, st.integers(0, 2**32 - 1), st.integers(0, 2**63))
def test_higher_rate_keeps_every_snapshot_of_a_lower_one(one, other, boot, tick):
    low, high = sorted((one, other))
    if is_scheduled(KEY, boot, tick, threshold(low)):
        assert is_scheduled(KEY, boot, tick, threshold(high))


def test_known_schedule():
    """Golden: a change here makes every recorded schedule unauditable."""
    assert list(scheduled(KEY, 1, 0, 60 * TICK, threshold(Fraction(1, 10)))) == GOLDEN


GOLDEN = [45025246097, 49412873181, 119851359913, 133228767029, 169283120265]


@given(st.binary(min_size=32, max_size=32), st.integers(0, 2**32 - 1), st.integers(0, 2**63))
def test_moment_lies_in_its_tick(key, boot, tick):
    assert tick * TICK <= moment_of(key, boot, tick) < (tick + 1) * TICK


def test_every_moment_is_as_likely():
    """n = 8,000 ticks, 8 equal parts of a tick; a chi-square test rejects uniform moments with probability 1e-3 (the
    key is fixed, so the outcome is too)."""
    parts = [(moment_of(KEY, 1, tick) % TICK) * 8 // TICK for tick in range(8000)]
    assert stats.chisquare([parts.count(part) for part in range(8)]).pvalue > 1e-3


def test_moments_tell_nothing_of_which_ticks_are_due():
    """The ticks of a schedule of 1/4 have moments as uniform as all others; false alarm 1e-3, with a fixed key."""
    due = list(scheduled(KEY, 1, 0, 8000 * TICK, threshold(Fraction(1, 4))))
    parts = [(moment % TICK) * 4 // TICK for moment in due]
    assert stats.chisquare([parts.count(part) for part in range(4)]).pvalue > 1e-3


@given(TIMES, TIMES, TIMES, RATES)
def test_spans_that_meet_hold_together_what_the_whole_holds(one, two, three, rate):
    """Wherever an epoch ends, in the middle of a tick too, no moment is lost or demanded twice."""
    start, middle, end = sorted((one, two, three))
    limit = threshold(rate)
    whole = list(scheduled(KEY, 1, start, end, limit))
    assert whole == [*scheduled(KEY, 1, start, middle, limit), *scheduled(KEY, 1, middle, end, limit)]
    assert whole == sorted(whole)
    assert all(start < moment <= end and moment == moment_of(KEY, 1, moment // TICK) for moment in whole)


def test_gaps_are_geometric():
    """n = 20,000 ticks at rate 1/20, five keys; each chi-square test rejects a true schedule with probability 1e-4,
    so at most 5e-4 for all (keys are fixed, so the outcome is too)."""
    rate = 1 / 20
    for number in range(5):
        key = derive_epoch_key(KEY, number)
        ticks = list(scheduled_ticks(key, 1, 0, 20_000, Fraction(1, 20)))
        gaps = [b - a for a, b in zip([0, *ticks], ticks, strict=False)]
        edges = [1, 5, 10, 20, 40]
        observed = [
            sum(low <= gap < high for gap in gaps) for low, high in zip(edges, [*edges[1:], 10**9], strict=True)
        ]
        tails = [(1 - rate) ** (low - 1) for low in edges] + [0.0]
        expected = [len(gaps) * (tails[i] - tails[i + 1]) for i in range(len(edges))]
        assert stats.chisquare(observed, expected).pvalue > 1e-4


def test_epochs_and_boots_have_unrelated_schedules():
    """Two independent schedules of 2,000 ticks at 1/2 agree on 1,000 ± 5σ (σ = 22.4): false alarm below 1e-6."""
    schedules = [
        set(scheduled_ticks(derive_epoch_key(KEY, epoch), boot, 0, 2000, Fraction(1, 2)))
        for epoch, boot in [(0, 1), (1, 1), (0, 2)]
    ]
    for one, other in [(0, 1), (0, 2), (1, 2)]:
        agreed = 2000 - len(schedules[one] ^ schedules[other])
        assert abs(agreed - 1000) < 5 * 22.4


def test_bernoulli_ticks_are_never_worse_than_poisson():
    """Shavit's f = 0.1 a day at one draw a minute: no snapshot in 30 days is at most as likely as e^(-3)."""
    rate = rate_per_tick(Fraction(1, 10), 1440)
    none = float((1 - rate) ** 1) ** (1440 * 30)
    assert none <= 2.718281828459045**-3
    assert none == pytest.approx(2.718281828459045**-3, rel=1e-3)
    for arguments in [(Fraction(1), 0), (Fraction(3), 2), (Fraction(-1), 2)]:
        with pytest.raises(CallerError):
            rate_per_tick(*arguments)


def test_commitment_binds_chip_epoch_and_key():
    assert (
        len(
            {
                commit_epoch(*arguments)
                for arguments in [("a", 0, KEY), ("b", 0, KEY), ("a", 1, KEY), ("a", 0, KEY[::-1])]
            }
        )
        == 4
    )


@given(st.dictionaries(st.integers(0, 2**64 - 1), st.binary(min_size=32, max_size=32), max_size=5))
def test_epoch_keys_round_trip(keys):
    revealed = [EpochKey(epoch=epoch, key=key) for epoch, key in keys.items()]
    assert decode_epoch_keys(encode_epoch_keys(revealed)) == tuple(sorted(revealed, key=lambda key: key.epoch))


LINE = '{"epoch":1,"key":"' + "0" * 64 + '"}'


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[1]",
        '[{"epoch":1}]',
        f"[{LINE} ]",
        f"[{LINE},{LINE}]",
        f"[{LINE.replace('1', '2', 1)},{LINE}]",
        f"[{LINE.replace('1', '-1', 1)}]",
        f"[{LINE.replace('1', 'true', 1)}]",
        f"[{LINE.replace('1', str(2**64), 1)}]",
        f"[{LINE.replace('0', 'A', 1)}]",
        f"[{LINE.replace('0', 'g', 1)}]",
        f"[{LINE.replace('00', ' 0', 1)}]",
    ],
)
def test_malformed_epoch_keys_are_refused(text):
    with pytest.raises(EvidenceError):
        decode_epoch_keys(text.encode())


def test_epoch_keys_cannot_be_built_invalid():
    for epoch, key in [(-1, KEY), (0, b"")]:
        with pytest.raises(CallerError):
            EpochKey(epoch=epoch, key=key)
