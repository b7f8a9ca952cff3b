"""How many snapshots keys demand, beside what chance gives in as much time."""

from __future__ import annotations

import dataclasses
import itertools
import random
from fractions import Fraction
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firmware_sim import TICK, Draws, derive_epoch_key, parse_log, records_of, scheduled, threshold
from firmware_sim.audit import EpochSpan
from firmware_sim.evidence.chiplog import RecordKind
from inspector.inspection.suppression import DOUBTED
from tests.firmware_sim.conftest import RATE, RUN, work


def tail(chances, most):
    """P(no more than ``most`` of independent draws succeed), by all outcomes."""
    found = Fraction(0)
    for outcome in itertools.product((0, 1), repeat=len(chances)):
        if sum(outcome) <= most:
            one = Fraction(1)
            for hit, chance in zip(outcome, chances, strict=True):
                one *= chance if hit else 1 - chance
            found += one
    return found


@pytest.mark.parametrize("demanded", range(4))
def test_the_chance_is_that_of_all_outcomes(demanded):
    draws = Draws(whole=6, parts=(0.5, 0.25, 0.125), demanded=demanded)
    rate = Fraction(3, 4)
    each = [rate] * 6 + [rate * part for part in (Fraction(1, 2), Fraction(1, 4), Fraction(1, 8))]
    assert draws.expected(rate) == float(sum(each))
    assert draws.chance(rate) == pytest.approx(float(tail(each, demanded)), rel=1e-12)


def test_as_many_as_on_average_say_nothing():
    assert Draws(whole=10, parts=(), demanded=5).chance(Fraction(1, 2)) == 1.0
    assert Draws(whole=10_000, parts=(0.5,) * 10, demanded=0).chance(Fraction(1, 2)) < 1e-300


def test_what_was_counted_before_a_prune_is_counted_on():
    """By a bound that is never below the exact chance, and near it."""
    rate = Fraction(1, 2)
    first, second = Draws(whole=60, parts=(0.5,), demanded=17), Draws(whole=50, parts=(), demanded=12)
    both = Draws(whole=110, parts=(0.5,), demanded=29)
    carried = dataclasses.replace(second, earlier=first.summed())
    assert (carried.due, carried.expected(rate)) == (both.due, both.expected(rate))
    assert both.chance(rate) <= carried.chance(rate) < 1.2 * both.chance(rate)
    assert min(first.chance(rate), second.chance(rate)) > DOUBTED > carried.chance(rate)
    assert carried.summed() == both.summed()
    assert dataclasses.replace(second, demanded=40, earlier=first.summed()).chance(rate) == 1.0


@given(st.lists(st.sampled_from((0.25, 0.5, 0.75)), max_size=6), st.integers(0, 8), st.integers(0, 8), st.data())
def test_the_bound_is_never_below_the_exact_chance(parts, whole, earlier, data):
    rate = Fraction(2, 3)
    due = data.draw(st.integers(0, whole + earlier + len(parts)))
    first = Draws(whole=earlier, parts=tuple(parts), demanded=0).summed()
    carried = Draws(whole=whole, parts=(), demanded=due, earlier=first)
    exact = Draws(whole=whole + earlier, parts=tuple(parts), demanded=due)
    assert carried.chance(rate) >= exact.chance(rate) - 1e-12


def history(chance):
    """What honest chips are asked for: epochs and boots that end when they will, and their draws."""
    parts: list[Any]
    whole, parts, demanded, now = 0, [], 0, 0
    rate = chance.choice((Fraction(1, 2), Fraction(1, 5), Fraction(1, 20)))
    for epoch in range(chance.randint(1, 12)):
        end = now + chance.randrange(1, chance.choice((1, 8, 60)) * TICK)
        key = derive_epoch_key(chance.randbytes(32), epoch)
        demanded += len([*scheduled(key, 1, now, end, threshold(rate))])
        span = Span(now, end)
        draws = Draws.of([cast(EpochSpan, span)], 0)
        whole, parts, now = whole + draws.whole, [*parts, *draws.parts], end
    return Draws(whole=whole, parts=tuple(parts), demanded=demanded), rate


class Span:
    def __init__(self, start, end):
        self.start, self.end = start, end


def test_stretches_add_up_to_the_time():
    chance = random.Random(5)
    for _ in range(50):
        ends = sorted(chance.randrange(9 * TICK) for _ in range(6))
        draws = Draws.of([cast(EpochSpan, Span(*pair)) for pair in itertools.pairwise(ends)], 0)
        assert draws.whole + sum(draws.parts) == pytest.approx((ends[-1] - ends[0]) / TICK)


def test_honest_histories_are_as_rare_as_they_say():
    chance = random.Random(1)
    chances = [draws.chance(rate) for draws, rate in (history(chance) for _ in range(3000))]
    for most in (0.1, 0.01, 0.001):
        allowed = 3000 * most + 4 * (3000 * most) ** 0.5
        assert sum(found <= most for found in chances) <= allowed
    assert sum(found <= 0.1 for found in chances) >= 60, "or it would say nothing"
    assert min(chances) > 1e-9


def play(world, chip, ticks, avoid):
    """A host that lets a chip work, and closes the epoch before each snapshot that it foresees, if it does."""
    memory = world.attach(chip)
    for _ in range(ticks * 4):
        while avoid and chip._due <= chip._time + 2 * TICK:
            chip.close_epoch()
        work(memory, Fraction(1, 4))
    chip.commit(RUN, 1, bytes(32))


@pytest.mark.parametrize("avoid", [False, True])
def test_a44_who_closes_epochs_before_snapshots_has_too_few(world, avoid):
    chip = world.make()
    play(world, chip, 200, avoid)
    audit = world.check(world.collect(chip)).audit
    taken = records_of(parse_log(chip.log_bytes()), RecordKind.SNAPSHOT)
    assert audit.draws.demanded == len(taken)
    assert audit.draws.expected(RATE) == pytest.approx(40, abs=0.5)
    assert (audit.epochs > 10) is avoid
    assert (audit.draws.chance(RATE) < 1e-9) is avoid
