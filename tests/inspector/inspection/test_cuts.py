"""Power that goes in the middle of snapshots: by accident, and to erase them."""

from __future__ import annotations

from fractions import Fraction

import pytest

from inspector.inspection.explanation import judge_cuts
from inspector.inspection.verdict import Findings


def judged(erased, gaps, rate):
    findings = Findings()
    judge_cuts("c", erased, gaps, rate, findings)
    assert not findings.found, "a crash convicts nobody"
    return [doubt.text for doubt in findings.doubts]


@pytest.mark.parametrize("gaps", [1, 2, 40])
def test_every_erased_snapshot_leaves_the_verdict_open_and_its_boot_is_named(gaps):
    assert judged([], gaps, Fraction(1, 4)) == []
    for count in range(1, gaps + 1):
        [text] = judged(list(range(3, 3 + count)), gaps, Fraction(1, 4))
        assert f"power was cut {gaps} times, {count} of them in the middle of a snapshot (boot 3" in text


def test_who_cuts_the_power_at_each_snapshot_is_told_how_likely_that_is():
    assert "probability of 0.0001 at most" in judged([1, 2], 2, Fraction(1, 100))[0]
    assert "probability of 0.25 at most" in judged([7], 1, Fraction(1, 4))[0]
