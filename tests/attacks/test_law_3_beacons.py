"""An answer is newer than its question: beacons, where they are agreed, tie chips' work to the verifier's time."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial

import pytest

from firmware_sim import RecordKind, parse_log
from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import Roofline
from inspector.inspection.guards import Settings
from inspector.inspection.inspection import inspect
from inspector.inspection.verdict import Outcome
from monitor.lab.host import Host
from monitor.lab.simulated_lab import lab_path
from monitor.transcript import RunFolder
from monitor.transcript.layout import chip_path
from tests.guards import off

SETTINGS = Settings(samples=3, seed="x", devices=("sse41",))


@pytest.fixture
def judge(devices):
    return lambda recorded: partial(inspect, [recorded.run], now=recorded.now, worker=devices.run)


def test_steps_between_beacons_are_accepted_and_longer_ones_are_not(make_run, judge):
    recorded = make_run(beacon_every=2)
    assert recorded.trust.beacon_seconds == 120
    look = judge(recorded)
    assert look(recorded.trust, SETTINGS).outcome is Outcome.ACCEPT
    verdict = look(replace(recorded.trust, beacon_seconds=119), SETTINGS)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "it worked during 120 seconds without a beacon; at most 119 seconds are agreed" in verdict.reasons[0].text
    with off("beacons"):
        assert look(replace(recorded.trust, beacon_seconds=119), SETTINGS).outcome is Outcome.ACCEPT


def test_more_work_than_there_was_time_for_is_rejected(make_run, judge):
    """The chips of one run, if their device were slower than what they count from beacon to beacon takes."""
    recorded = make_run(beacon_every=2)
    look = judge(recorded)
    run = RunFolder(recorded.run, recorded.trust.labs["lab"])
    records = parse_log(run.read(chip_path(run.metadata.chips[0], "log.bin")))
    work = next(each.work for each in reversed(records) if each.kind is RecordKind.BEACON)
    enough = Roofline(flop=work.flop, moved=work.moved)
    trust = replace(recorded.trust, rates=dict.fromkeys(recorded.trust.chips, enough))
    assert look(trust, SETTINGS).outcome is Outcome.ACCEPT
    slow = replace(trust, rates=dict.fromkeys(trust.chips, Roofline(flop=enough.flop, moved=work.moved // 500)))
    verdict = look(slow, SETTINGS)
    assert verdict.outcome is Outcome.REJECT
    assert {reason.guard for reason in verdict.reasons} == {"time"}
    assert "seconds between two beacons, but its device needs" in verdict.reasons[0].text
    with off("pace"):
        assert look(slow, SETTINGS).outcome is Outcome.ACCEPT


@pytest.mark.parametrize("which", ["first", "last", "all"])
def test_beacons_that_never_came_leave_the_verdict_open(make_run, judge, monkeypatch, which):
    show, shown = Host.show_time, []

    def some(host, step):
        shown.append(step)
        if which != "all" and (step == 0) != (which == "first"):
            show(host, step)

    monkeypatch.setattr(Host, "show_time", some)
    recorded = make_run(beacon_every=100)
    verdict = judge(recorded)(recorded.trust, SETTINGS)
    assert shown == [0, 6]
    assert verdict.outcome is Outcome.INCONCLUSIVE
    said = "after its last beacon" if which == "last" else "took part in a run before its first beacon"
    assert said in verdict.reasons[0].text


def test_a17_chips_put_back_to_a_copy_get_no_more_beacons(make_run):
    first = make_run("first", beacon_every=1)
    chips = lab_path(first.run) / "chips"
    shutil.copytree(chips, chips.with_name("copy"))
    make_run("hidden", after=first.run)
    shutil.rmtree(chips)
    chips.with_name("copy").rename(chips)
    with pytest.raises(EvidenceError, match="put back to an earlier state, or two copies of it exist"):
        make_run("third", after=first.run)
