"""What a plan is paid in and asks of a lab: inputs with bands, and figures that measurements give."""

from __future__ import annotations

import pytest

from analysis.inputs import measured_inputs
from firmware_sim.errors import CallerError
from firmware_sim.evidence.chiplog import RECORD_BYTES


def test_inspectors_are_whole_and_follow_their_load():
    inputs = measured_inputs()
    assert inputs.inspectors(0) == (0, 0, 0)
    assert inputs.inspectors(1_000) == (1, 1, 1)
    assert inputs.inspectors(1_001) == (2, 2, 2)
    assert inputs.given({"load": "500/1000/2000"}).inspectors(6_000) == (3, 6, 12)


def test_what_a_lab_is_asked_grows_with_the_rate_and_the_replay():
    inputs = measured_inputs().given({"other_records": "0.5", "replay": "2/3/4", "step_seconds": "1/2/4"})
    few = inputs.asks(rate=0.1, replayed_flop=0, flop_per_day=1e19)
    more = inputs.asks(rate=0.2, replayed_flop=1e21, flop_per_day=1e19)
    assert few["replayed_chip_hours"] == (0, 0, 0)
    assert more["replayed_chip_hours"] == pytest.approx((4_800, 7_200, 9_600))
    assert few["log_bytes"] == pytest.approx([RECORD_BYTES * 37.0] * 3)
    assert more["log_bytes"] == pytest.approx([RECORD_BYTES * 73.5] * 3)
    low, middle, high = few["transcript_bytes"]
    assert (low * 2, high / 2) == pytest.approx((middle, middle))
    assert 1 < few["slowdown"][0] < few["slowdown"][1] < few["slowdown"][2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"money": "dollars"}, "'dollars' is not a currency with the year of its prices: write it as 'USD 2026'"),
        ({"load": "0"}, "load must be above 0"),
        ({"load": "nan"}, "load must be above 0"),
        ({"load": "many"}, "input load: "),
        ({"slowdown": "3/2/1"}, "input slowdown: "),
        ({"salary": "3"}, "there is no input 'salary'; there are load, money"),
    ],
)
def test_mistakes_are_named(words, message):
    with pytest.raises(CallerError) as raised:
        measured_inputs().given(words)
    assert message in str(raised.value)
