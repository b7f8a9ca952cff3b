"""The odds of replayed segments: against enumeration, and against a lab that looks for the best place itself."""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from fractions import Fraction
from typing import Any, cast

import pytest
from scipy.stats import binom

from firmware_sim.errors import CallerError
from inspector.inspection.guards import Sampling, Settings
from inspector.inspection.sampling import choose, draw, odds_of
from inspector.probability.chances import chances
from inspector.probability.odds import Audit, Violation, chain, usual_violations
from inspector.replay.segment import Segment
from inspector.rounds import steps
from tests.guards import off

DRAWS = 2000
RATE = Fraction(1, 4)
FALSE_ALARM = 1e-3
LENGTHS = (4,) * 20 + (8, 8, 2)
KINDS = ("together:10", "scattered:3", "data:0.2", "swap")


def run_of(lengths) -> list[Segment]:
    """Segments of these lengths."""
    ends = [0, *itertools.accumulate(lengths)]
    return [Segment(index, start, stop) for index, (start, stop) in enumerate(itertools.pairwise(ends))]


def places(segments, violation):
    """All sets of segments that a lab could touch, to do what the violation says, as few as it can."""
    steps = segments[-1].stop
    if violation.kind == "together":
        count = int(violation.amount)
        for start in range(steps - count + 1):
            yield frozenset(each.index for each in segments if each.start < start + count and start < each.stop)
        return
    least = math.ceil(violation.amount * steps) if violation.kind == "data" else 0
    indices = range(len(segments))
    sizes = range(1, len(segments)) if least else (int(violation.amount),)
    for size in sizes:
        found = False
        for some in itertools.combinations(indices, size):
            if sum(segments[each].stop - segments[each].start for each in some) >= least:
                found = True
                yield frozenset(some)
        if found:
            return


@pytest.mark.parametrize("text", KINDS)
def test_the_stated_escape_is_the_best_of_all_places(text):
    lengths, drawn = (2, 3, 1, 4, 2, 3, 2), 2
    segments, violation = run_of(lengths), Violation.parse(text.replace("10", "5"))
    audit = Audit(lengths, frozenset({0}), drawn)
    samples = [frozenset((0, *some)) for some in itertools.combinations(range(1, len(lengths)), drawn)]
    best = max(sum(not place & some for some in samples) for place in places(segments, violation))
    assert audit.escape(violation) == pytest.approx(best / len(samples), rel=1e-12)


@pytest.mark.parametrize("text", KINDS)
def test_no_lab_that_knows_its_snapshots_does_better_than_the_odds(text):
    """2,000 inspections by the product's own draw; one-sided at 1e-3, seeded."""
    violation, segments = Violation.parse(text), run_of(LENGTHS)
    settings = Settings(samples=3, seed=None, devices=("sse41",), sampling=Sampling(confidence=0.5, against=violation))
    rng = random.Random(text)
    # Snapshots lie in 12 of the segments: in which, the lab knows; which of its chips are drawn, it does not.
    taken = [{segments[index].stop for index in rng.sample(range(1, len(segments)), 4)} for _ in range(6)]

    def inspected(label):
        seed = hashlib.sha256(f"{text} {label}".encode()).digest()
        steps = set().union(*random.Random(seed).sample(taken, 3))
        return choose(segments, steps, settings, seed, evaluations={})

    rehearsed = [{each.index for each in inspected(f"rehearsal {number}").segments} for number in range(400)]
    options = list(dict.fromkeys(places(segments, violation)))
    options = rng.sample(options, min(len(options), 400))
    place = max(options, key=lambda option: sum(not option & some for some in rehearsed))
    stated = next(
        row["escapes"]
        for row in cast(Any, odds_of(inspected("statement"), settings)["violations"])
        if row["violation"] == str(violation)
    )
    assert 0 < stated <= 0.5 + 1e-9

    def escapes():
        return sum(not place & {each.index for each in inspected(str(number)).segments} for number in range(DRAWS))

    most = binom.ppf(1 - FALSE_ALARM, DRAWS, stated)
    assert escapes() <= most
    with off("uniform segments"):
        assert escapes() > most


def test_no_lab_hides_an_undeclared_run_better_than_the_odds():
    """2,000 draws of 3 of 8 chips; the lab takes the chip that its own rehearsal drew least. One-sided at 1e-3."""
    pool = [f"lab-chip-{number:04d}" for number in range(8)]

    def drawn(label):
        return draw(pool, 3, hashlib.sha256(label.encode()).digest())

    rehearsed = [drawn(f"rehearsal {number}") for number in range(400)]
    chip = min(pool, key=lambda one: sum(one in some for some in rehearsed))
    rows: dict[Any, Any] = {row["lie"]: row["probability"] for row in chances(chips=8, drawn=3, rate=RATE, live=True)}
    stated = 1 - rows["an undeclared run, on one chip"]
    assert stated == pytest.approx(5 / 8)
    assert sum(chip not in drawn(str(number)) for number in range(DRAWS)) <= binom.ppf(1 - FALSE_ALARM, DRAWS, stated)
    with off("secret nobody can guess"):  # of the round's draw: the lab draws itself, before it takes a chip
        known = [drawn(f"{steps.fresh_secret()} {number}") for number in range(DRAWS)]
        taken = [min(set(pool) - set(drawn(f"{steps.fresh_secret()} {number}"))) for number in range(DRAWS)]
    escaped = sum(chip not in some for chip, some in zip(taken, known, strict=True))
    assert escaped > binom.ppf(1 - FALSE_ALARM, DRAWS, stated)
    untold = chances(chips=8, drawn=3, rate=RATE)
    assert {row["lie"]: row["probability"] for row in untold}["an undeclared run, on one chip"] == 0.0


def test_the_number_of_draws_is_the_least_that_is_enough():
    for text, lengths in itertools.product(KINDS, ((4,) * 30, LENGTHS, (1, 100, 1, 7))):
        audit, violation = Audit(lengths, frozenset({0})), Violation.parse(text)
        needed = audit.needed(violation, 0.9)
        assert audit.escape(violation, drawn=needed) <= 0.1 * (1 + 1e-9)
        assert needed == 0 or audit.escape(violation, drawn=needed - 1) > 0.1


def test_twenty_five_of_eighty_thousand_steps():
    audit = chain(80_957, first=False, drawn=25)
    assert audit.shown(0.9) == 7_123
    assert 0.0999 < (1 - 7_122 / 80_957) ** 25 < 0.1002
    assert audit.escape(Violation.parse("swap")) == pytest.approx(1 - 25 / 80_957, rel=1e-12)
    assert audit.needed(Violation.parse("swap"), 0.9) == math.ceil(0.9 * 80_957)


def test_ten_thousand_steps_at_a_tenth_of_the_price():
    audit = chain(10_000, 4, first=True)
    drawn = audit.needed(Violation.parse("scattered:100"), 0.9)
    assert audit.price(drawn) <= 1_000


def test_a_lie_that_must_touch_the_first_segment_never_escapes():
    audit = Audit((5, 2, 2), frozenset({0}))
    assert audit.touched(Violation.parse("together:5")) is None
    assert audit.escape(Violation.parse("scattered:3")) == 0.0
    assert audit.needed(Violation.parse("data:0.9"), 0.99) == 0


def test_odds_of_a_limit_that_is_too_low_name_the_price():
    settings = Settings(
        samples=1,
        seed=None,
        devices=("sse41",),
        segments=3,
        sampling=Sampling(confidence=0.9, against=Violation.parse("swap")),
    )
    chosen = choose(run_of((4,) * 11), set(), settings, b"seed", evaluations={})
    odds: dict[str, Any] = odds_of(chosen, settings)
    assert (odds["drawn"], odds["drawn_from"], odds["affordable"], odds["replayed_steps"]) == (2, 10, False, 12)
    swap = next(row for row in odds["violations"] if row["violation"] == "swap")
    assert swap["escapes"] == pytest.approx(0.8)
    assert (swap["needed_draws"], swap["needed_steps"]) == (9, 40)


@pytest.mark.parametrize("text", ["swap", "data:0.00001", "data:0.05", "together:10000000000000", "scattered:1"])
def test_a_violation_is_read_as_it_is_written(text):
    assert str(Violation.parse(text)) == text


def test_what_is_no_violation():
    for text in ("", "together", "data:0", "data:1.5", "swap:2", "scattered:1.5", "together:-1", "data:1e9", "gone:1"):
        with pytest.raises(CallerError):
            Violation.parse(text)
    assert [str(Violation.parse(text)) for text in KINDS] == list(KINDS)
    assert usual_violations(250)[0] == Violation("together", Fraction(3))


def test_a_chain_that_cannot_be():
    for wrong in (lambda: chain(0, first=True), lambda: chain(5, 0, first=True), lambda: Audit((1, 2), drawn=3)):
        with pytest.raises(CallerError):
            wrong()
