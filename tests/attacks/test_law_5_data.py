"""A preset's run trains on the preset's data in the order that its seed gives, or on data that were agreed."""

from __future__ import annotations

import json

import pytest

from analysis.cli import main
from inspector.inspection.guards import Settings
from inspector.inspection.inspection import inspect
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome
from tests.agreements import agreement, resigned
from tests.guards import off

SETTINGS = Settings(samples=3, seed="x", devices=("sse41",))


@pytest.fixture
def other_data(make_run):
    return make_run(lie="other-data")


def test_a14_noise_in_place_of_the_presets_data_is_rejected(other_data, devices):
    verdict = inspect([other_data.run], other_data.trust, SETTINGS, now=other_data.now, worker=devices.run)
    assert verdict.outcome is Outcome.REJECT
    text = "the samples or their order are not those that preset digits-cnn and seed 5 give"
    assert [reason.text for reason in verdict.reasons] == [text]


def test_a14_guard_off_it_is_accepted(other_data, devices):
    with off("agreed data"):
        verdict = inspect([other_data.run], other_data.trust, SETTINGS, now=other_data.now, worker=devices.run)
    assert verdict.outcome is Outcome.ACCEPT


def test_a14_data_of_the_labs_own_need_an_agreement(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("inspector.devices.enter", lambda name: None)  # train in this process
    text = tmp_path / "text.txt"
    text.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 100)
    words = [
        "train",
        "--preset",
        "tiny-gpt",
        "--steps",
        "1",
        "--batch-size",
        "2",
        "--chips",
        "2",
        "--numerics",
        "exact",
    ]
    assert main([*words, "--data", str(text), "--out", str(tmp_path / "run"), "--seed", "1"]) == 0
    trust = tmp_path / "run.trust.json"
    judge = ["verify", str(tmp_path / "run"), "--trust", str(trust), "--json"]
    capsys.readouterr()
    assert main(judge) == 0
    agreed = Trust.load([trust])
    assert len(agreement(agreed).data) == 1
    trust.write_text(json.dumps(resigned(tmp_path / "run", agreed, data=frozenset()).to_json()))
    capsys.readouterr()
    assert main(judge) == 3
    assert "were not countersigned" in json.loads(capsys.readouterr().out)["reasons"][0]["text"]
