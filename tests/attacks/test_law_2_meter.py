"""Every operator that runs on a chip's memory is explained by one committed step, and every step by its operators."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import partial

import pytest

from firmware_sim import NO_WORK, DeviceMemory, Meter
from inspector.inspection.guards import Settings
from inspector.inspection.inspection import inspect
from inspector.inspection.verdict import Outcome
from monitor.lab.conduct import Conduct, undeclared
from tests.guards import off

SETTINGS = Settings(samples=1, seed="x", devices=("sse41",))


@pytest.fixture
def judge(devices):
    return lambda recorded: partial(inspect, [recorded.run], recorded.trust, now=recorded.now, worker=devices.run)


def test_a8_hidden_steps_that_no_chip_is_told_of(make_run, judge):
    """One drawn chip is enough: all of them count what runs on the state.

    Where one was due for a snapshot, its moment may have come between the hidden steps' operators.
    """
    look = judge(make_run(lie="untold-steps"))
    verdict = look(settings=SETTINGS)
    assert verdict.outcome is Outcome.REJECT
    assert {"meter"} <= {reason.guard for reason in verdict.reasons} <= {"meter", "snapshot"}
    with off("metered work", "snapshots inside steps"):
        assert look(settings=replace(SETTINGS, samples=3)).outcome is Outcome.ACCEPT


def test_a8_a_step_that_no_chip_computed(make_run, judge, monkeypatch):
    """Its result was put into the chips' memory from elsewhere."""
    charge, counted = Meter.charge, []

    def half_of_it(meter, work):
        counted.append(work)
        charge(meter, work if len(counted) % 7 else NO_WORK)

    monkeypatch.setattr(Meter, "charge", half_of_it)
    look = judge(make_run(steps=2, checkpoint_every=2, rate=Fraction(1)))
    monkeypatch.undo()
    verdict = look(settings=SETTINGS)
    assert verdict.outcome is Outcome.REJECT
    assert "; the meter lacks " in verdict.reasons[0].text
    with off("metered work", "snapshots inside steps"):
        assert look(settings=SETTINGS).outcome is Outcome.ACCEPT


def test_a_chip_that_is_told_of_a_larger_state_than_there_is(make_run, judge, monkeypatch):
    """It counts nearly nothing of hidden steps, and no time passes for it: memory is attached so, and then rightly."""

    def hidden(self, step, host):
        if step != 3:
            return
        held = {name: tensor.clone() for name, tensor in host.memory.export().items()}
        host.lab.restart()
        for chip, shard in zip(host.lab.chips, host.memory.shards, strict=True):
            part, whole = shard.share
            chip.attach(DeviceMemory(shard.regions, meter=shard.meter, share=(part, whole << 30)), host._run_id, step)
        for _ in range(6):
            host.moment.train(host.memory, undeclared(host.moment.batch))
        host.memory.load(held)
        host.lab.restart()
        host.attach_memory(step)
        host.announce(step)

    monkeypatch.setattr(Conduct, "after_step", hidden)
    look = judge(make_run())
    monkeypatch.undo()
    verdict = look(settings=SETTINGS)
    assert verdict.outcome is Outcome.REJECT
    assert {reason.guard for reason in verdict.reasons} == {"commitment"}
    assert "bytes as the size of the whole state" in verdict.reasons[0].text
    with off("share of the state"):
        assert look(settings=SETTINGS).outcome is Outcome.ACCEPT
