"""Law 9: a probability in a verdict covers the best lie that fits under it."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest

from analysis.cli import main
from inspector.inspection.guards import Sampling, Settings
from inspector.inspection.judging import inspect
from inspector.inspection.verdict import Outcome
from inspector.probability.odds import Violation
from tests.guards import off

SWAP = Violation.parse("swap")


def swap_escapes(verdict) -> float:
    """The stated chance of a swap of all weights."""
    (odds,) = verdict.evidence["odds"]
    return next(row["escapes"] for row in odds["violations"] if row["violation"] == "swap")


@pytest.fixture
def swapped(make_run):
    """Another model's weights, swapped in at the last step of a segment in which no chip took a snapshot."""
    return make_run(lie="fake-layers", lie_step=6, steps=6, checkpoint_every=2, rate=Fraction(1, 1000))


@pytest.fixture
def judge(devices):
    def run(recorded, sampling, seed="x"):
        settings = Settings(samples=3, seed=seed, devices=("sse41",), sampling=sampling)
        return inspect([recorded.run], recorded.trust, settings, now=recorded.now, worker=devices.run)

    return run


def test_a18_weights_swapped_in_a_segment_without_a_snapshot(swapped, judge):
    """The odds state what a lab gets away with; with the confidence that is paid for, it gets away with less."""
    unpaid = judge(swapped, None)
    assert unpaid.outcome is not Outcome.REJECT
    assert swap_escapes(unpaid) == 1.0
    verdict = judge(swapped, Sampling(confidence=0.9, against=SWAP))
    assert verdict.outcome is Outcome.REJECT
    assert swap_escapes(verdict) == 0.0
    with off("uniform segments"):
        assert judge(swapped, Sampling(confidence=0.9, against=SWAP)).outcome is not Outcome.REJECT


def test_a18_half_of_the_draws_at_half_the_confidence(swapped, judge):
    half = Sampling(confidence=0.5, against=SWAP)
    verdicts = [judge(swapped, half, seed=str(number)) for number in range(8)]
    assert {swap_escapes(verdict) for verdict in verdicts} == {0.5}
    caught = sum(verdict.outcome is Outcome.REJECT for verdict in verdicts)
    assert 1 <= caught <= 7  # 8 fair draws are all alike with a chance of 1/128, and these are seeded


def test_a18_through_the_command_line(swapped, tmp_path, capsys):
    (tmp_path / "trust.json").write_text(json.dumps(swapped.trust.to_json()))
    words = ["--trust", str(tmp_path / "trust.json"), "--json"]
    inspection = ["--samples", "3", "--seed", "x", "--device", "sse41", "--now", "2026-01-01T00:30:00Z"]
    assert main(["inspect", str(swapped.run), *words, *inspection]) == 1
    (stated,) = json.loads(capsys.readouterr().out)["evidence"]["odds"]
    assert main(["odds", str(swapped.run), *words]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["violations"] == stated["violations"]
    assert (stated["coverage"], stated["drawn"], stated["drawn_from"]) == (1.0, 2, 2)
