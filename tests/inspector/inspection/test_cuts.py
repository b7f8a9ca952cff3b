"""Power that goes in the middle of snapshots: by accident, and to erase them."""

from __future__ import annotations

from fractions import Fraction

import pytest

from inspector.inspection.findings import Findings
from inspector.inspection.guards import Settings
from inspector.inspection.provenance import CUTS_BY_CHANCE, judge_cuts
from inspector.probability.chances import snapshots_within


def judged(cut, gaps, rate):
    findings = Findings(Settings(samples=1, seed="x", devices=()))
    judge_cuts("c", cut, gaps, rate, findings)
    return bool(findings.found), bool(findings.doubts)


@pytest.mark.parametrize("rate", [Fraction(1, 1000), Fraction(1, 8), Fraction(1, 4), Fraction(9, 10), Fraction(1)])
@pytest.mark.parametrize("gaps", [1, 2, 5, 40])
def test_an_honest_lab_is_accused_no_more_than_once_in_a_thousand_times(gaps, rate):
    accused = [cut for cut in range(gaps + 1) if judged(cut, gaps, rate)[0]]
    assert not accused or snapshots_within(gaps, rate, min(accused)) < CUTS_BY_CHANCE
    assert accused == list(range(min(accused, default=gaps + 1), gaps + 1))
    assert judged(0, gaps, rate) == (False, False)


def test_every_erased_snapshot_leaves_the_verdict_open_at_least():
    rate = Fraction(1, 4)
    assert [judged(cuts, cuts, rate) for cuts in range(1, 6)] == [*[(False, True)] * 4, (True, False)]
    assert judged(2, 2, Fraction(1, 100)) == (True, False), "nobody loses two rare snapshots by accident"
