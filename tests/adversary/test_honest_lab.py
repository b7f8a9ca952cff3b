"""An honest lab that does whatever is documented: never rejected, and open only for a reason that is named."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tests.adversary.actions import perform
from tests.adversary.play import honest_scene, judge, scratch, shorten
from tests.adversary.world import World

PICKS = st.integers(0, 999)


class HonestLab(RuleBasedStateMachine):
    """Trains, idles, crashes and resumes, while others talk about its chips."""

    world: World
    steps: list[tuple[str, int]]

    @initialize(seed=st.integers(0, 9999), preset=st.integers(0, 24))
    def settle(self, seed, preset):
        self.world = World(honest_scene(random.Random(seed), "preset" if preset == 24 else "loop"), scratch())
        self.steps = []

    def act(self, name, pick):
        self.steps.append((name, pick))
        perform(self.world, name, pick)

    @rule(pick=PICKS)
    def step(self, pick):
        self.act("step", pick)

    @rule(pick=PICKS)
    def idle(self, pick):
        self.act("idle", pick)

    @rule(pick=PICKS)
    def crash(self, pick):
        self.act("crash", pick)

    @rule(pick=PICKS)
    def next_run(self, pick):
        self.act("next_run", pick)

    @rule(pick=PICKS)
    def rival(self, pick):
        self.act("rival", pick)

    def teardown(self):
        if not hasattr(self, "world"):
            return
        try:
            played = judge(self.world, self.steps)
        finally:
            self.world.close()
        assert played.problem is None, shorten(played).to_json()


@pytest.mark.timeout(600)
def test_no_honest_lab_is_rejected():
    run_state_machine_as_test(
        HonestLab,
        settings=settings(
            max_examples=9,  # of the lives that ``python -m tests.measurements adversary`` plays by the thousand
            stateful_step_count=6,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],  # a sequence is shortened by leaving out actions
            suppress_health_check=list(HealthCheck),
        ),
    )
