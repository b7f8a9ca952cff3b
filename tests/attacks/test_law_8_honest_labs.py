"""Nobody can make another party look guilty, and no honest lab is rejected."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from firmware_sim import DeviceMemory, Region, Work
from inspector.inspection.guards import Settings
from inspector.inspection.inspection import inspect
from inspector.inspection.sources import Sources
from inspector.inspection.verdict import Outcome
from monitor.lab.simulated_lab import SimulatedLab, lab_path
from monitor.recording.recipes import write_answers
from tests.guards import off
from tests.handing import hand_over

SETTINGS = Settings(samples=4, seed="x", devices=("sse41",))


@pytest.fixture
def with_idle_chip(make_run):
    return make_run(chips=3, idle_chips=1)


def judge(recorded, devices, *, answers=(), settings=SETTINGS):
    sources = Sources(answers=answers)
    return inspect([recorded.run], recorded.trust, settings, now=recorded.now, worker=devices.run, sources=sources)


def test_c3_an_idle_chip_answers_outside_of_any_run(with_idle_chip, devices):
    answers = [with_idle_chip.run.with_name("run.answers")]
    verdict = judge(with_idle_chip, devices, answers=answers)
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons
    assert "lab-chip-0003" in verdict.evidence["drawn_chips"]
    with off("answers outside runs"):
        assert judge(with_idle_chip, devices, answers=answers).outcome is Outcome.REJECT


def test_c3_an_idle_chip_that_does_not_answer_is_a_refusal(with_idle_chip, devices):
    verdict = judge(with_idle_chip, devices)
    assert verdict.outcome is Outcome.REJECT
    assert [reason.where["chip"] for reason in verdict.reasons] == ["lab-chip-0003"]


def test_c3_an_idle_chip_that_worked_is_rejected(with_idle_chip, devices):
    lab = SimulatedLab.reopen(lab_path(with_idle_chip.run))
    held = np.ones(1 << 16, dtype=np.float32)
    memory = DeviceMemory([Region.of("w", held)])
    lab.idle[0].attach(memory, bytes([1] * 32), 0)
    memory.meter.charge(Work(1, 0, held.nbytes))
    write_answers(lab, with_idle_chip.run)
    lab.cut_power()
    verdict = judge(with_idle_chip, devices, answers=[with_idle_chip.run.with_name("run.answers")])
    assert verdict.outcome is Outcome.REJECT
    assert "this record belongs to a run that was not declared" in verdict.reasons[0].text
    assert {reason.guard for reason in verdict.reasons} == {"snapshot", "meter"}


@pytest.fixture
def rivals(make_run, monkeypatch):
    """An honest lab, and a rival whose signed run lists a chip of its own making under that lab's chip's name."""
    honest = make_run("honest", lab="lab", chips=2)
    monkeypatch.setattr("monitor.lab.simulated_lab.chip_ids", lambda config: ["lab-chip-0000", "rival-chip-0001"])
    rival = make_run("rival", lab="rival", chips=2, seed=6)
    monkeypatch.undo()
    trust = replace(
        honest.trust,
        labs={**honest.trust.labs, **rival.trust.labs},
        chips={**honest.trust.chips, "rival-chip-0001": "rival"},
        inspectorates=honest.trust.inspectorates | rival.trust.inspectorates,
        countersigned=honest.trust.countersigned | rival.trust.countersigned,
    )
    return honest, rival, trust


def test_c4_a_rivals_junk_about_a_chip_counts_for_nothing(rivals, devices):
    honest, rival, trust = rivals

    def outcomes():
        settings = replace(SETTINGS, samples=len(trust.chips))
        verdict = inspect([honest.run, rival.run], trust, settings, now=honest.now, worker=devices.run)
        assert verdict.outcome is Outcome.REJECT
        return verdict.evidence["labs"]

    assert outcomes() == {"lab": "ACCEPT", "rival": "REJECT"}
    with off("evidence of the chip's own lab"):
        assert outcomes() == {"lab": "REJECT", "rival": "REJECT"}


def test_c4_a_rival_whose_run_cannot_be_read_leaves_the_honest_lab_unjudged(rivals, devices):
    honest, rival, trust = rivals
    (rival.run / "metadata.json").write_bytes(b"{}")
    hand_over(rival.run)
    settings = replace(SETTINGS, samples=2)
    verdict = inspect([honest.run, rival.run], trust, settings, now=honest.now, worker=devices.run)
    assert verdict.outcome is Outcome.REJECT
    assert verdict.evidence["labs"] == {"lab": "INCONCLUSIVE", "rival": "REJECT"}
    assert {reason.where.get("run") for reason in verdict.reasons} == {"rival"}
