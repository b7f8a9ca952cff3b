"""A chip's time is what its meter has counted, and all of that is explained by committed steps."""

from __future__ import annotations

from functools import partial

import pytest

from firmware_sim import Roofline
from inspector.inspection.guards import Settings
from inspector.inspection.inspection import inspect
from inspector.inspection.verdict import Outcome
from monitor.lab.host import Host
from tests.guards import off

SETTINGS = Settings(samples=3, seed="x", devices=("sse41",))

LIES = [
    # row, lie, what is said of each chip, guards without which it passes
    ("a5", "extra-ticks", "; the meter counts another ", ("metered work", "snapshots inside steps")),
    ("a6", "early-ticks", "this record belongs to a run that was not declared", ("undeclared runs", "snapshot moment")),
    (
        "a7",
        "paused-ticks",
        "this record belongs to a run that was not declared",
        ("undeclared runs", "snapshot moment"),
    ),
]


@pytest.fixture
def judge(devices):
    return lambda recorded: partial(inspect, [recorded.run], recorded.trust, now=recorded.now, worker=devices.run)


@pytest.mark.parametrize(("row", "lie", "text", "without"), LIES, ids=[row for row, *_ in LIES])
def test_a5_a6_a7_work_without_a_step_is_rejected(row, lie, text, without, make_run, judge):
    """No chip can be told that time passed in which it worked; it works, and counts that."""
    recorded = make_run(lie=lie)
    verdict = judge(recorded)(settings=SETTINGS)
    assert verdict.outcome is Outcome.REJECT
    for said in ("; the meter counts another ", text):
        found = {reason.where["chip"] for reason in verdict.reasons if said in reason.text}
        assert found == {f"lab-chip-000{i}" for i in range(3)}
    with off(*without):
        assert judge(recorded)(settings=SETTINGS).outcome is Outcome.ACCEPT


def test_a_clock_that_runs_slower_than_its_device_is_rejected(make_run, judge, monkeypatch):
    """Firmware that nobody should allow: twice the work in a tick, so that half as many snapshots are due."""
    time = Roofline.time
    monkeypatch.setattr(Roofline, "time", lambda roofline, work: time(roofline, work) // 2)
    recorded = make_run()
    monkeypatch.undo()
    verdict = judge(recorded)(settings=SETTINGS)
    assert verdict.outcome is Outcome.REJECT
    assert any(
        "busy is 0, but the work that the meter counted takes 1 ticks" in reason.text for reason in verdict.reasons
    )
    with off("own clock"):
        assert judge(recorded)(settings=SETTINGS).outcome is Outcome.ACCEPT


def test_honest_chips_may_idle_between_steps(make_run, judge, monkeypatch):
    announce = Host.announce

    def and_idle(host, step):
        announce(host, step)
        for chip in host.lab.chips:
            chip.idle(step % 3)

    monkeypatch.setattr(Host, "announce", and_idle)
    recorded = make_run()
    monkeypatch.undo()
    assert judge(recorded)(settings=SETTINGS).outcome is Outcome.ACCEPT
