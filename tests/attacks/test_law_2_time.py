"""Every busy tick of a chip is explained by one committed step, and every committed step by one busy tick."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial

import pytest

from firmware_sim import FirmwareChip
from inspector.inspection.guards import Settings
from inspector.inspection.judging import inspect
from inspector.inspection.verdict import Outcome
from tests.guards import off

SETTINGS = Settings(samples=3, seed="x", devices=("sse41",))

LIES = [
    # row, lie, busy ticks of each chip that no step explains
    ("a5", "extra-ticks", 6),
    ("a6", "early-ticks", 300),
    ("a7", "paused-ticks", 200),
]


@pytest.fixture
def judge(devices):
    return lambda recorded: partial(inspect, [recorded.run], recorded.trust, now=recorded.now, worker=devices.run)


@pytest.mark.parametrize(("row", "lie", "ticks"), LIES, ids=[row for row, _, _ in LIES])
def test_a5_a6_a7_work_without_a_step_is_rejected(row, lie, ticks, make_run, judge):
    recorded = make_run(lie=lie)
    verdict = judge(recorded)(settings=SETTINGS)
    assert verdict.outcome is Outcome.REJECT
    found = Counter()
    for reason in verdict.reasons:
        said = re.search(r"(\d+) busy ticks before it are explained by no committed step$", reason.text)
        found[reason.where["chip"]] += 0 if said is None else int(said[1])
    assert found == {f"lab-chip-000{i}": ticks for i in range(3)}
    with off("busy ticks"):
        assert judge(recorded)(settings=SETTINGS).outcome is Outcome.ACCEPT


def test_a5_a_step_without_a_busy_tick_is_rejected(make_run, judge, monkeypatch):
    tick = FirmwareChip.tick

    def no_time_for_step_3(chip, run_id, step):
        return None if step == 3 else tick(chip, run_id, step)

    monkeypatch.setattr(FirmwareChip, "tick", no_time_for_step_3)
    recorded = make_run()
    monkeypatch.undo()
    verdict = judge(recorded)(settings=SETTINGS)
    assert verdict.outcome is Outcome.REJECT
    assert any("no busy tick passed after step 3 was committed" in reason.text for reason in verdict.reasons)
    with off("busy ticks"):
        assert judge(recorded)(settings=SETTINGS).outcome is Outcome.ACCEPT


def test_honest_chips_may_idle_between_steps(make_run, judge, monkeypatch):
    tick = FirmwareChip.tick

    def idle_and_tick(chip, run_id, step):
        event = tick(chip, run_id, step)
        chip.idle(step % 3)
        return event

    monkeypatch.setattr(FirmwareChip, "tick", idle_and_tick)
    recorded = make_run()
    monkeypatch.undo()
    assert judge(recorded)(settings=SETTINGS).outcome is Outcome.ACCEPT
