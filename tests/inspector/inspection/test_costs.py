"""What an inspectorate countersigned about a program's cost, counted again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inspector.inspection.inspection import verify
from inspector.inspection.verdict import Outcome
from tests.agreements import agreement, resigned
from tests.guards import off


@pytest.mark.parametrize("name", ["flop", "most_flop", "bytes"])
def test_other_costs_than_were_countersigned_leave_the_verdict_open(honest, name):
    signed = agreement(honest.trust).programs
    assert verify(honest.run, honest.trust, now=honest.now).outcome is Outcome.ACCEPT
    wrong = {digest: replace(cost, **{name: getattr(cost, name) // 2}) for digest, cost in signed.items()}
    trust = resigned(honest.run, honest.trust, programs=wrong)
    verdict = verify(honest.run, trust, now=honest.now)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    (cost,) = signed.values()
    assert f"but it takes {cost.flop} FLOP, at most {cost.most_flop}, and {cost.bytes} bytes" in verdict.reasons[0].text
    with off("countersigned costs"):
        assert verify(honest.run, trust, now=honest.now).outcome is Outcome.ACCEPT
