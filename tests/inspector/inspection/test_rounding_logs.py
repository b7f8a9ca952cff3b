"""What a log may decide unlike a device: in all, in a class of operators, in a call, and where nothing was measured."""

from __future__ import annotations

from typing import Any

import pytest

from firmware_sim.errors import EvidenceError
from inspector.inspection.rounding_logs import Counts, examine
from inspector.replay.decisions import Decisions

PAIR = {"mode": "rounded", "recorded_on": "native", "replayed_on": "sse41"}
HONEST = Counts.of(
    [
        {**PAIR, "decisions": {"classes": [["product", 64, 20_000, 10_000, 1], ["product", 4, 3, 2, 1]], "unlike": []}},
        {
            **PAIR,
            "recorded_on": "emulated-tiles",
            "decisions": {"classes": [["product", 50, 20_000, 10_000, 4], ["function", 0, 9000, 9000, 0]]},
        },
    ]
)


def decided(*results, kind="product", terms=64, coarse=0):
    """Decisions of calls, each given as (free, turned), in a step of its own."""
    unlike = [
        [step, 7, "aten.mm.default", kind, terms, free, turned, coarse]
        for step, (free, turned) in enumerate(results, start=1)
        if turned
    ]
    free, turned = (sum(column) for column in zip(*results, strict=True))
    return Decisions.from_json({"classes": [[kind, terms, 2 * free, free, turned]], "unlike": unlike})


def test_what_honest_logs_decide_is_allowed_and_more_is_in_doubt():
    assert examine(decided((10_000, 4)), "rounded", "sse41", HONEST).doubts == ()
    (text,) = examine(decided((10_000, 100)), "rounded", "sse41", HONEST).doubts
    assert text.startswith(
        "from step 1, call 7 (aten.mm.default) on, the rounding log decides 100 results differently from sse41"
    )
    most = examine(decided((10_000, 0)), "rounded", "sse41", HONEST).allowed
    assert 10 < most < 30
    assert text.endswith(f"of 10000 that it may choose honest logs decide at most {most} so")
    assert examine(decided((10_000, most)), "rounded", "sse41", HONEST).doubts == ()


def test_the_rate_is_the_highest_of_any_training_device_which_is_the_labs_word():
    rate, is_measured = HONEST.rate("rounded", "product", 64, "sse41")
    assert is_measured
    assert 5 / 10_000 < rate < 15 / 10_000


def test_a_few_decisions_in_one_call_are_not_hidden_among_many_calls():
    spread = decided(*[(1000, 1)] * 12, *[(1000, 0)] * 88)
    assert examine(spread, "rounded", "sse41", HONEST).doubts == ()
    (text,) = examine(decided((40, 12), *[(1000, 0)] * 100), "rounded", "sse41", HONEST).doubts
    assert "decides 12 results of this call differently from sse41" in text


def test_a_class_does_not_hide_among_others():
    many = decided((1_000_000, 100))
    few = decided(*[(50, 1)] * 20, kind="function", terms=0)
    doubts = examine(Decisions.joined([many, few]), "rounded", "sse41", HONEST).doubts
    assert ["of functions differently from sse41" in text for text in doubts] == [True]


def test_one_decision_is_in_doubt_where_the_bound_takes_half_of_the_bits():
    (text,) = examine(decided((1000, 1), coarse=1), "rounded", "sse41", HONEST).doubts
    assert text.endswith("can write up to 1 bits; their error bound takes half of their bits or more")


def test_what_was_not_measured_is_named_and_judged_by_the_highest_rate():
    short = decided((10_000, 4), terms=4)
    seen = examine(short, "rounded", "sse41", HONEST)
    assert (seen.uncalibrated, seen.doubts) == (("product sums of 4 terms",), ())
    assert examine(decided((10_000, 200), terms=4), "rounded", "sse41", HONEST).doubts
    elsewhere = examine(decided((10_000, 4)), "rounded", "cuda", HONEST)
    assert (elsewhere.uncalibrated, elsewhere.doubts) == (("product sums of 64 terms",), ())
    (text,) = examine(decided((10_000, 1)), "rounded-probabilistic", "sse41", HONEST).doubts
    assert text.endswith("honest logs decide at most 0 so; not calibrated: product sums of 64 terms")
    nothing = examine(decided((10_000, 0)), "rounded-probabilistic", "sse41", HONEST)
    assert (nothing.allowed, nothing.bits, nothing.doubts) == (0, 0.0, ())


def test_the_freedom_that_is_left_is_counted_in_bits():
    seen = examine(decided((10_000, 0)), "rounded", "sse41", HONEST)
    told: Any = seen.to_json()
    assert told["free_decisions"] == 10_000
    assert told["allowed_decisions"] < told["writable_bits"] < 14 * told["allowed_decisions"]


@pytest.mark.parametrize(
    "told",
    [
        {"classes": []},
        {"classes": [["product", 64, 2, 1, 1]], "unlike": []},
        {"classes": [], "unlike": [[1, 0, "a", "product", 64, 1, 1, 0]]},
        {"classes": [["product", 64, 2, 1, 0], ["product", 64, 2, 1, 0]], "unlike": []},
        {"classes": [["sum", 64, 2, 1, 0]], "unlike": []},
        {"classes": [["product", -64, 2, 1, 0]], "unlike": []},
        {"classes": [["product", 64, 2, True, 0]], "unlike": []},
        {"classes": [["product", 64, 2]], "unlike": []},
        {"classes": [], "unlike": "no"},
        {"classes": [], "unlike": [[1, 0, "a" * 201, "product", 64, 1, 0, 0]]},
    ],
)
def test_counts_of_another_form_are_refused(told):
    with pytest.raises(EvidenceError, match="what rounding logs decided"):
        Decisions.from_json(told)
