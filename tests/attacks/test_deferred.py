"""What is accepted and must not be, and needs a part that is not there yet: each reason names the part."""

from __future__ import annotations

from fractions import Fraction

import pytest

from inspector.dispute.dispute import Disputant, settle
from inspector.inspection.guards import Settings
from inspector.inspection.inspection import inspect
from inspector.inspection.memory import remember
from inspector.inspection.sources import Past
from inspector.inspection.transcripts import open_run
from inspector.inspection.verdict import Outcome
from monitor.lab.prover import LabProver

SETTINGS = Settings(samples=3, seed="x", devices=("sse41",))


def deferred(missing: str):
    """Expected to fail until the named part is there; passing is a failure too, so that this list stays true."""
    return pytest.mark.xfail(strict=True, raises=AssertionError, reason=missing)


@pytest.fixture
def judge(devices):
    def run(recorded, *, runs=None, trust=None, settings=SETTINGS, memory=None):
        return inspect(
            runs or [recorded.run],
            trust or recorded.trust,
            settings,
            now=recorded.now,
            worker=devices.run,
            past=Past(memory=memory),
        )

    return run


def test_a8_the_verdict_claims_no_chance_for_work_where_no_chip_meters_it(make_run, judge):
    verdict = judge(make_run(lie="elsewhere-steps", rate=Fraction(1)))
    assert verdict.outcome is Outcome.ACCEPT
    told = {row["lie"]: row["probability"] for row in verdict.evidence["chances"]}
    assert told["the lab computes where no chip of the registry meters it"] == 0.0
    assert "unmetered work" in verdict.reasons[1].text


def test_a16_a_quote_that_was_seen_before_is_said_to_be_old(make_run, judge):
    recorded = make_run()
    memory = remember({}, judge(recorded, memory={}))
    text = judge(recorded, memory=memory).reasons[0].text
    assert "0 of 3 drawn chips continue from where an earlier inspection left them" in text
    assert "and 3 showed nothing newer than what was seen then" in text


def test_b9_a_dispute_about_runs_with_another_learning_rate(make_run):
    claims = []
    for name, rate in (("one", 0.01), ("two", 0.02)):
        recorded = make_run(name, numerics="exact", learning_rate=rate)
        claims.append(Disputant(run=open_run(recorded.run, recorded.trust), prover=LabProver(recorded.run)))
    first, second = claims
    verdict = settle(first, second, recorded.trust)  # which the inspectorate countersigned for the second run alone
    assert verdict.outcome is Outcome.REJECT
    assert verdict.evidence["guilty"] == "one"
    assert (
        verdict.reasons[0].text
        == "step 0: the declaration of one is not the countersigned one; they differ in groups, recipe"
    )
    verdict = settle(first, second)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert (
        "neither was countersigned: give a trust file in which only the one that was ordered is"
        in verdict.reasons[0].text
    )
