"""Census: an even draw nobody can steer, and an account of every chip drawn."""

from __future__ import annotations

import math
from collections import Counter
from itertools import permutations

import pytest

from firmware_sim.errors import CallerError
from inspector.registry import (
    ChipState,
    ClaimKind,
    ForgedStatement,
    ImportRejected,
    InvalidStatement,
    UnknownParty,
    audit,
    draw_census,
    draw_without_replacement,
    record_census,
    show_chip,
)

SEED = bytes(range(32))


def draw(world, count: int = 5, **changes: object):
    options = {"count": count, "seed": SEED, "inspector": "agency", "key": world.keys["agency"]} | changes
    return draw_census(world.registry, **options)


def record(world, census: int, answers: dict[str, str], *, inspector: str = "agency"):
    return record_census(world.registry, census, answers, inspector=inspector, key=world.keys[inspector])


def consistent(world) -> bool:
    return audit(world.registry, registrar=world.keys["registrar"].verifying).ok


def test_draw_is_a_sample_without_replacement() -> None:
    for population, count in ((1, 1), (10, 10), (1000, 37)):
        drawn = draw_without_replacement(SEED, population, count)
        assert len(set(drawn)) == count
        assert set(drawn) <= set(range(population))
    assert sorted(draw_without_replacement(SEED, 50, 50)) == list(range(50))
    assert draw_without_replacement(SEED, 1000, 37)[:10] == draw_without_replacement(SEED, 1000, 10)
    for count in (0, -1, 11):
        with pytest.raises(CallerError, match="cannot draw"):
            draw_without_replacement(SEED, 10, count)


def test_every_ordered_draw_is_equally_likely() -> None:
    """24,000 seeds, ordered pairs of 4: chi-square with 11 degrees of freedom.

    The bound 50 is passed by chance with probability 6e-7.
    """
    trials = 24_000
    seen = Counter(tuple(draw_without_replacement(number.to_bytes(32, "big"), 4, 2)) for number in range(trials))
    pairs = list(permutations(range(4), 2))
    assert set(seen) == set(pairs)
    expected = trials / len(pairs)
    assert math.fsum((seen[pair] - expected) ** 2 / expected for pair in pairs) < 50


def test_missing_chips_are_named_with_their_last_holder(world) -> None:
    world.pass_on(*world.chips[:10])
    census = draw(world, 20)
    assert (census.population, len(census.chips)) == (20, 20)
    assert dict(zip(census.chips, census.holders, strict=True)) == {
        chip: "lab-a" if chip in world.chips[:10] else "fab" for chip in world.chips
    }
    answers = {chip: chip for chip in census.chips}
    del answers["chip-0002"]
    answers["chip-0012"] = ""
    answers["chip-0005"] = "chip-9999"
    outcome = record(world, census.number, answers)
    assert outcome.present == 17
    assert {(gone.chip, gone.holder, gone.observed) for gone in outcome.missing} == {
        ("chip-0002", "lab-a", ""),
        ("chip-0012", "fab", ""),
        ("chip-0005", "lab-a", "chip-9999"),
    }
    view = show_chip(world.registry, "chip-0002")
    assert (view.holder, view.state, view.history[-1].kind) == ("lab-a", ChipState.LOST, "census-result")
    assert show_chip(world.registry, "chip-0003").state is ChipState.OWNED
    assert consistent(world)


def test_silence_is_not_an_answer(world) -> None:
    census = draw(world, 3)
    outcome = record(world, census.number, {})
    assert (outcome.present, {gone.chip for gone in outcome.missing}) == (0, set(census.chips))


def test_the_draw_is_a_function_of_log_and_seed(world) -> None:
    first = draw(world, 8)
    again = draw(world, 8)
    other = draw(world, 8, seed=bytes(32))
    assert first.chips == again.chips != other.chips
    assert (first.number, again.number, other.number) == (1, 2, 3)
    assert consistent(world)


def test_lost_and_destroyed_chips_are_not_asked_for(world) -> None:
    fab = {"holder": "fab", "key": world.keys["fab"]}
    world.registry.claim(ClaimKind.LOST, world.chips[:9], **fab)
    world.registry.claim(
        ClaimKind.DESTROYED, world.chips[9:18], witness="agency", witness_key=world.keys["agency"], **fab
    )
    census = draw(world, 2)
    assert (census.population, set(census.chips)) == (2, set(world.chips[18:]))
    with pytest.raises(CallerError, match="cannot draw 3 chips: 2 are held"):
        draw(world, 3)
    assert consistent(world)


def test_one_owners_chips_only(world) -> None:
    world.pass_on(*world.chips[4:9])
    census = draw(world, 5, owner="lab-a")
    assert (census.population, set(census.chips)) == (5, set(world.chips[4:9]))
    with pytest.raises(CallerError, match="5 are held by lab-a"):
        draw(world, 6, owner="lab-a")
    with pytest.raises(UnknownParty, match="agency"):
        draw(world, 1, owner="agency")
    assert consistent(world)


def test_moves_between_draw_and_result(world) -> None:
    """A chip sold since is answered for by its buyer, one claimed lost stays missing, a destroyed one is excused."""
    census = draw(world, 20)
    fab = {"holder": "fab", "key": world.keys["fab"]}
    world.pass_on("chip-0001")
    world.registry.claim(ClaimKind.LOST, ["chip-0002"], **fab)
    world.registry.claim(ClaimKind.DESTROYED, ["chip-0003"], witness="agency", witness_key=world.keys["agency"], **fab)
    gone = {"chip-0001", "chip-0002", "chip-0003"}
    outcome = record(world, census.number, {chip: chip for chip in census.chips if chip not in gone})
    assert (outcome.present, outcome.retired) == (17, ("chip-0003",))
    assert {(chip.chip, chip.holder, chip.sequence) for chip in outcome.missing} == {
        ("chip-0001", "lab-a", 2),
        ("chip-0002", "fab", 0),
    }
    assert show_chip(world.registry, "chip-0003").state is ChipState.DESTROYED
    assert show_chip(world.registry, "chip-0002").sequence == 1
    assert consistent(world)


def test_a_lost_chip_that_is_shown_resurfaces(world) -> None:
    census = draw(world, 20)
    world.registry.claim(ClaimKind.LOST, ["chip-0002"], holder="fab", key=world.keys["fab"])
    outcome = record(world, census.number, {chip: chip for chip in census.chips})
    assert (outcome.present, outcome.missing, outcome.resurfaced) == (20, (), ("chip-0002",))
    assert consistent(world)


def test_only_an_inspector_draws(world) -> None:
    with pytest.raises(UnknownParty, match="lab-a is enrolled as owner"):
        draw(world, inspector="lab-a", key=world.keys["lab-a"])
    with pytest.raises(UnknownParty, match="nobody is not enrolled"):
        draw(world, inspector="nobody")
    with pytest.raises(ForgedStatement, match="signed by lab-a, not by agency"):
        draw(world, key=world.keys["lab-a"])
    with pytest.raises(CallerError, match="seed of 32 bytes"):
        draw(world, seed=b"short")


def test_only_the_inspector_who_drew_records_and_once(world) -> None:
    census = draw(world)
    answers = {chip: chip for chip in census.chips}
    with pytest.raises(InvalidStatement, match="drawn by agency, not by other-agency"):
        record(world, census.number, answers, inspector="other-agency")
    with pytest.raises(ForgedStatement, match="signed by lab-a, not by agency"):
        record_census(world.registry, 1, answers, inspector="agency", key=world.keys["lab-a"])
    with pytest.raises(InvalidStatement, match="census 2 was not drawn"):
        record(world, 2, answers)
    record(world, census.number, answers)
    with pytest.raises(InvalidStatement, match="census 1 is recorded already"):
        record(world, census.number, answers)


def test_answers_that_were_not_asked_for(world) -> None:
    census = draw(world, 5)
    answers = {chip: chip for chip in census.chips}
    other = next(chip for chip in world.chips if chip not in census.chips)
    with pytest.raises(ImportRejected, match=f"chip {other} was not drawn"):
        record(world, census.number, answers | {other: other})
    with pytest.raises(ImportRejected, match=f"serial {census.chips[0]} was read for chip"):
        record(world, census.number, answers | {census.chips[1]: census.chips[0]})
