"""Sequences that broke a law while the machines were built, each as short as it could be made.

The guards that catch them were off, or not there yet; with a guard off again each of its sequences is accepted.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.adversary.lies import BESIDE, GUARD_ROWS
from tests.adversary.mass import DOUBT, tail
from tests.adversary.play import play
from tests.adversary.world import Scene
from tests.guards import GUARDS, off

FULL: dict[str, Any] = {"chips": 2, "samples": 2, "checkpoint_every": 1}

LIES = {
    "A1": ("snapshot moment", {"kind": "preset", "batch": 4}, [("step", 0), ("show_old", 0), ("step", 0)]),
    "A2": ("snapshot moment", {}, [("step", 0), ("show_old", 0), ("step", 0)]),
    "A3": ("verified manifest", {"model": "dropout"}, [("other_seed", 0), ("swap_folder", 0)]),
    "A5": ("metered work", {}, [("step", 0), ("extra_work", 8324)]),
    "A6": ("undeclared runs", {}, [("work_before", 5377)]),
    "A7": ("undeclared runs", {}, [("step", 0), ("work_between_boots", 57827), ("step", 0)]),
    "A8": ("metered work", {}, [("step", 0), ("hidden_steps", 123), ("step", 0)]),
    "A9": ("plain memory", {}, [("hostile_memory", 28926)]),
    "A10": ("numbers bound", {}, [("declare_product", 0), ("step", 0), ("step", 0)]),
    "A11": ("changes declared", {"optimizer": "adamw"}, [("huge_decay", 958), ("step", 0), ("step", 0)]),
    "A12": ("numbers equal", {}, [("declare_rate", 0)]),
    "A13": ("products counted", {}, [("hide_products", 0), ("step", 0)]),
    "A14": ("agreed data", {"kind": "preset", "batch": 4}, [("other_data", 0)]),
    "A15": ("open epoch", {}, [("open_epoch", 0)]),
    "A21": ("direct paths", {}, [("carry_weights", 1), ("step", 0)]),
}
"""Row: the guard that catches it, the scene, what the lab does."""

REFUSED = [("nonsense", pick) for pick in range(15)]
"""Commands that ended in an error of Python's own, not in a numbered refusal; each is told to a chip in mid-run."""

BROKEN: dict[str, tuple[int, dict[str, Any], list[tuple[str, int]]]] = {
    "a dishonest chip that is given no memory": (
        2517426453,
        {"model": "dropout", "chips": 3, "samples": 3, "steps": 2, "batch": 3},
        [("crooked_chip", 4671), ("nonsense", 21028)],
    ),
    "a first checkpoint without optimizer state": (
        234226122,
        {"optimizer": "adamw", "chips": 3, "samples": 3, "steps": 1, "checkpoint_every": 3},
        [("flip_bit_and_sign", 14865)],
    ),
    "a batch in place of the first checkpoint": (
        1736167243,
        {"chips": 4, "samples": 3, "steps": 1, "batch": 3, "checkpoint_every": 8, "rate": (3, 4)},
        [("copy_file", 10116)],
    ),
    "a replayed snapshot after a boot": (
        4283261869,
        {"chips": 1, "samples": 1, "steps": 1, "batch": 1},
        [("crooked_chip", 40403), ("restore_chip", 65334)],
    ),
    "data exchanged twice, so that in the end it is the declared": (
        2027125286,
        {"kind": "preset", "model": "dropout", "optimizer": "sgd", "chips": 2, "samples": 2, "steps": 2, "batch": 3},
        [("preset_lie", 16122), ("other_data", 60798)],
    ),
    "a decoy that no tick has seen": (
        744165756,
        {"optimizer": "sgd", "numerics": "rounded", "chips": 1, "samples": 1, "steps": 3, "batch": 3},
        [("attach_decoy", 41569), ("reboot", 33287)],
    ),
}
"""What 20,000 sequences found: the first three ended in a traceback; in the others a lab forgot to lie."""

HONEST = {
    "an idle chip whose lab crashes": ({"idle": 1, "samples": 3}, [("step", 0), ("crash", 0), ("step", 0)]),
    "a rival that stores junk": ({}, [("step", 0), ("rival", 18000)]),
    "a rival whose run cannot be read": ({}, [("step", 0), ("rival", 42101)]),
    "a second run on the same chips": ({"kind": "preset", "batch": 4}, [("step", 0), ("next_run", 0), ("step", 0)]),
}


def scene(changes, **more):
    return Scene(seed=7, **{**FULL, **changes, **more})


@pytest.mark.parametrize("row", LIES)
def test_a_kept_lie_is_not_accepted(row):
    guard, changes, steps = LIES[row]
    played = play(scene(changes), steps)
    assert played.problem is None, played.to_json()
    if row != "A9":  # the chip refuses such memory, so that nothing is told
        assert row in played.rows
    assert guard in GUARD_ROWS


@pytest.mark.parametrize("row", LIES)
def test_a_kept_lie_is_accepted_with_its_guard_off(row):
    guard, changes, steps = LIES[row]
    with off(guard, *BESIDE.get(guard, ())):
        played = play(scene(changes), steps)
    assert played.problem is not None, played.to_json()
    assert played.problem.startswith("accepted")
    assert row in played.rows


def test_nonsense_is_refused_and_changes_nothing():
    played = play(scene({}), [("step", 0), *REFUSED, ("step", 0)])
    assert played.problem is None, played.to_json()
    assert played.outcome == "ACCEPT"


@pytest.mark.sampled("name")
@pytest.mark.parametrize("kind", ["loop", "preset"])
@pytest.mark.parametrize("name", ["idle", "reboot", "quote_early", "close_early", "show_true"])
def test_what_a_host_may_do_between_steps_is_accepted(name, kind):
    """Lies of the table differ from these by what they do besides."""
    played = play(scene({"kind": kind, "batch": 4}), [("step", 0), (name, 0), ("step", 0)])
    assert (played.problem, played.rows, played.outcome) == (None, [], "ACCEPT"), played.to_json()


@pytest.mark.parametrize("pick", range(4))
def test_a_step_within_a_command_is_a_power_cut(pick):
    """The chip cannot take a snapshot then; the step is taken again."""
    played = play(scene({}), [("step", 0), ("within_command", pick), ("step", 0)])
    assert played.problem is None
    assert played.outcome in ("ACCEPT", "INCONCLUSIVE"), played.to_json()
    assert any("power cut" in reason or "power was cut" in reason for reason in played.reasons)


@pytest.mark.parametrize("name", BROKEN)
def test_a_kept_sequence_breaks_nothing(name):
    seed, changes, steps = BROKEN[name]
    played = play(Scene(seed=seed, **{**FULL, **changes}), steps)
    assert played.problem is None, played.to_json()


@pytest.mark.parametrize("name", HONEST)
def test_a_kept_honest_lab_is_not_rejected(name):
    changes, steps = HONEST[name]
    played = play(scene(changes, is_honest=True), steps)
    assert played.problem is None, played.to_json()


def test_a_seed_that_decides_nothing_is_no_lie():
    """Both were counted as accepted lies: the crash comes before the first step, and the body draws no mask."""
    for steps in ([("other_seed", 0), ("crash", 0)], [("other_seed", 0), ("no_products", 0)]):
        assert play(scene({"model": "dropout"}), steps).problem is None


def test_a_lie_that_was_not_told_is_none():
    """All were counted as accepted lies: no step is left to lie about, another body takes the place of the decay."""
    for name in ("step_elsewhere", "idle_instead"):
        played = play(scene({}), [("step", 0), (name, 0), ("crash", 0)])
        assert (played.problem, played.rows, played.outcome) == (None, [], "ACCEPT")
    assert play(scene({}), [("huge_decay", 0), ("no_products", 0), ("step", 0), ("step", 0)]).problem is None
    three = {"chips": 3, "samples": 3, "optimizer": "sgd", "rate": (1, 1)}
    assert play(scene(three), [("no_products", 0), ("crooked_chip", 3)]).problem is None  # its part never changes
    assert play(scene(three), [("crooked_chip", 3)]).rows == ["a dishonest chip"]


def test_a_declaration_that_another_replaced_is_no_lie():
    """It was counted as an accepted one: momentum, which the last one lies about, governs nothing in the first step."""
    assert play(scene({"steps": 1}), [("declare_product", 7529), ("declare_numbers", 14979)]).problem is None


def test_products_of_one_sample_count():
    """They were accepted under a cap of 0: with one sample each weight is used once, as in a gate."""
    hidden = scene({"batch": 1}), [("hide_products", 0), ("step", 0)]
    assert play(*hidden).problem is None
    with off("past counted"):
        assert play(*hidden).outcome == "REJECT"
    with off("past counted", "products counted"):
        assert play(*hidden).outcome == "ACCEPT"


def grind(number):
    changes: dict[str, Any] = {"chips": 4, "samples": 2, "checkpoint_every": 8}
    played = play(Scene(seed=number, **changes), [("step", 0), ("one_works", 0), ("grind", 0)])
    return played.escape, played.outcome == "ACCEPT"


def test_a_draw_that_can_be_foreseen_is_ground():
    """One of four chips works, two are drawn, and the lab quotes again until the draw misses it."""
    with off("fresh draw"):
        worlds = [grind(number) for number in range(14)]
    assert all(chance == pytest.approx(1 / 2) for chance, _ in worlds)
    assert tail(worlds) < DOUBT


def test_every_guard_of_the_table_can_be_switched_off():
    assert set(GUARD_ROWS) <= set(GUARDS)
    assert {row for rows in GUARD_ROWS.values() for row in rows} == {*LIES, "A4"}


def test_the_tail_is_that_of_a_sum_of_unlike_chances():
    assert tail([(0.5, True), (0.5, True)]) == pytest.approx(0.25)
    assert tail([(0.5, False), (0.25, True)]) == pytest.approx(1 - 0.5 * 0.75)
    assert tail([(0.0, False), (1.0, True)]) == 1.0
