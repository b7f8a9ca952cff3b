"""``bundle``: what it counts, and that it says so where a change goes unnoticed."""

from __future__ import annotations

import random
from typing import Any, cast

import pytest

from inspector.inspection.verdict import Outcome, Verdict
from tests.measurements import bundle


def verdict_of(verifies: Any) -> Any:
    return Verdict(outcome=Outcome.ACCEPT, reasons=(), evidence={"verifies": verifies})


def test_a_change_that_goes_unnoticed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    blind = 3

    def check(data: Any, trust: Any) -> Any:
        return verdict_of(all(byte == 0 for place, byte in enumerate(data) if place != blind))

    monkeypatch.setattr(bundle, "check_bundle", check)
    row = bundle.change_bytes(bytes(8), cast(Any, None), range(8), random.Random(1))
    assert (row["changed"], row["noticed"], row["missed"], row["unchanged"]) == (8, 7, [blind], "ACCEPT")
    assert bundle.verdict([{**row, "work": "minimal"}]) == "1 of 8 changes of the bundle minimal go unnoticed"
    assert bundle.verdict([{**row, "work": "minimal", "noticed": 8}]) is None
    assert "does not verify" in str(bundle.verdict([{**row, "work": "minimal", "unchanged": "REJECT"}]))
