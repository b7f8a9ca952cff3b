"""Law 9: a lab that foresees its chips' draws, and closes each epoch in time, has fewer snapshots than chance gives.

Row A44. No call tells a host what comes next; this one reads it in its chips' private memory.
"""

from __future__ import annotations

from fractions import Fraction
from functools import partial

import pytest

from firmware_sim import TICK
from inspector.inspection.guards import Settings
from inspector.inspection.inspection import inspect
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome
from monitor.lab.conduct import Conduct
from tests.guards import off

RATE = Fraction(1, 2)
TICKS = 100


class Idles(Conduct):
    """Lets its chips idle for long, and may close epochs before snapshots."""

    def __init__(self, foresees: bool) -> None:
        self.foresees = foresees

    def after_step(self, step, host):
        for _ in range(TICKS if step == 2 else 0):
            for chip in host.lab.chips:
                while self.foresees and chip._due <= chip._time + TICK:
                    chip.close_epoch()
            host.idle_chips()


@pytest.fixture
def judged(make_run, devices, monkeypatch):
    def judge(foresees):
        monkeypatch.setattr("monitor.recording.recorder.conduct", lambda *_: Idles(foresees))
        recorded = make_run(steps=12, chips=2, rate=RATE, checkpoint_every=4)
        settings = Settings(samples=2, seed="x", devices=("sse41",))
        return inspect([recorded.run], recorded.trust, settings, now=recorded.now, worker=devices.run)

    return judge


def test_a44_missing_snapshots_are_seen(judged):
    verdict = judged(True)
    assert verdict.outcome is Outcome.REJECT
    assert {reason.guard for reason in verdict.reasons} == {"schedule"}
    assert "snapshots were due, while" in verdict.reasons[0].text
    assert "epochs and 1 boots" in verdict.reasons[0].text
    assert verdict.evidence["draws"]["chance"] < 1e-9
    assert all(chip["draws"]["epochs"] > 20 for chip in verdict.evidence["chips"])


def test_a44_guard_off_they_are_not_missed(judged):
    with off("missing snapshots"):
        assert judged(True).outcome is Outcome.ACCEPT


def test_chips_that_idle_as_long_have_as_many_as_chance_gives(judged):
    verdict = judged(False)
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons
    assert verdict.evidence["draws"]["chance"] > 1e-4


# A50: a chip whose tick is another than its maker says takes fewer snapshots for the same work.


def longer(trust, factor):
    """What a maker says whose chips do so much more in a tick than these."""
    data = trust.to_json()
    clocks = {chip: {name: rate // factor for name, rate in each.items()} for chip, each in data["clocks"].items()}
    return Trust.from_json({**data, "clocks": clocks}, "the maker's")


def said(verdict):
    return " ".join(reason.text for reason in verdict.reasons)


def test_a50_a_tick_is_as_long_as_the_maker_says(make_run, devices):
    recorded = make_run(steps=4, chips=2, rate=RATE, checkpoint_every=2)
    settings = Settings(samples=2, seed="x", devices=("sse41",))
    judge = partial(inspect, [recorded.run], settings=settings, now=recorded.now, worker=devices.run)
    honest = judge(trust=recorded.trust)
    assert honest.outcome is Outcome.ACCEPT
    tick = honest.evidence["draws"]["tick"]
    assert f"at 1/2 in a tick of {tick}" in honest.reasons[0].text
    assert "how long a tick of its chips is" not in said(honest)
    verdict = judge(trust=longer(recorded.trust, 20))
    assert verdict.outcome is Outcome.REJECT
    assert "its tick is" in verdict.reasons[0].text
    assert "but its maker gives" in verdict.reasons[0].text
    silent = recorded.trust.to_json()
    del silent["clocks"]
    unknown = judge(trust=Trust.from_json(silent, "a silent one"))
    assert unknown.outcome is Outcome.ACCEPT
    assert "how long a tick of its chips is, which no trust file says" in said(unknown)
