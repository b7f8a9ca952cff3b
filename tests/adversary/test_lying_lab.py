"""A lab that lies as hypothesis likes: nothing false is accepted where all chips are drawn and all steps replayed."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tests.adversary.actions import ACTIONS, PHASES, perform
from tests.adversary.play import judge, lying_scene, scratch, shorten
from tests.adversary.world import World

PICKS = st.integers(0, 999)


class LyingLab(RuleBasedStateMachine):
    """Plays the actions of the table, each at its time."""

    world: World
    steps: list[tuple[str, int]]

    @initialize(seed=st.integers(0, 9999), sampled=st.booleans(), preset=st.integers(0, 24))
    def settle(self, seed, sampled, preset):
        kind = "preset" if preset == 24 else "loop"
        scene = lying_scene(random.Random(seed), kind, sampled=sampled and kind == "loop")
        self.world = World(scene, scratch())
        self.steps = []

    def act(self, name, pick):
        self.steps.append((name, pick))
        perform(self.world, name, pick)

    def teardown(self):
        if not hasattr(self, "world"):
            return
        try:
            played = judge(self.world, self.steps)
        finally:
            self.world.close()
        assert played.problem is None, shorten(played).to_json()


def _rule(name):
    entry = ACTIONS[name]

    def act(self, pick):
        self.act(name, pick)

    def fits(self):
        world = getattr(self, "world", None)
        if world is None or world.scene.kind not in entry.kinds:
            return False
        return PHASES.index(entry.phase) >= PHASES.index(world.phase)

    act.__name__ = name
    return precondition(fits)(rule(pick=PICKS)(act))


for _name in sorted(
    name for name, entry in ACTIONS.items() if entry.rows or not entry.honest or entry.phase != "finished"
):
    setattr(LyingLab, _name, _rule(_name))


@pytest.mark.timeout(900)
def test_no_lie_is_accepted():
    run_state_machine_as_test(
        LyingLab,
        settings=settings(
            max_examples=20,  # of the lives that ``python -m tests.measurements adversary`` plays by the thousand
            stateful_step_count=8,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],  # a sequence is shortened by leaving out actions
            suppress_health_check=list(HealthCheck),
        ),
    )
