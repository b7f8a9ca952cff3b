"""The main job, whole: its verdicts, its summary and its report."""

from __future__ import annotations

import json

import pytest

from analysis.cli import main
from analysis.demo import LABS, as_expected


@pytest.mark.slow
def test_demo_ends_with_the_right_verdicts_and_a_report(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("inspector.devices.enter", lambda name: None)
    out = tmp_path / "demo"
    assert main(["demo", "--out", str(out)]) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert as_expected(summary)
    assert [(row["lab"], row["lie"]) for row in summary["labs"]] == [(lab.name, lab.lie) for lab in LABS]
    assert all({"outcome", "reasons", "evidence"} <= set(row) for row in summary["labs"])
    assert len(summary["equal_on"]) == 2
    prints = {device["fingerprint"] for device in summary["replay_devices"]}
    assert len(prints) == 2
    assert summary["training_device"]["fingerprint"] not in prints
    control = summary["control"]
    assert control["native_drift_max"] > 0
    assert control["turned_decisions"] > 0
    assert control["diverges_from_step_without_log"] >= 1
    assert summary["dispute"]["evidence"]["operators_executed"] == 1
    kinds = ["announcement", "heads", "draw", "answers", "order", "results"]
    assert [row["kind"] for row in summary["rounds"]["timeline"]] == kinds
    assert {entry.name for entry in (out / "parties").iterdir()} == {"inspectorate", "registry"}
    assert summary["labs"][0]["evidence"]["odds"][0]["coverage"] == 1.0
    assert 0.9 < summary["detection"]["predicted_probability"] <= 1
    report = (out / "report.html").read_text()
    assert report.count("<svg") == 3
    assert all(lab.name in report for lab in LABS)
    assert "src=" not in report
    assert "REJECT: " in capsys.readouterr().out
    assert main(["demo", "--out", str(out)]) == 2


def test_a_wrong_verdict_is_noticed():
    rows = [{"lie": None, "outcome": "ACCEPT"}, {"lie": "x", "outcome": "REJECT"}]
    good = {"labs": rows, "equal_on": ["a", "b"], "dispute": {"evidence": {"guilty": "wrong-operator"}}}
    good["rounds"] = {"outcome": "ACCEPT", "shown": "ACCEPT"}
    assert as_expected(good)
    assert not as_expected({**good, "labs": [rows[0], {"lie": "x", "outcome": "ACCEPT"}]})
    assert not as_expected({**good, "labs": [{"lie": None, "outcome": "INCONCLUSIVE"}, rows[1]]})
    assert not as_expected({**good, "equal_on": ["a"]})
    assert not as_expected({**good, "rounds": {"outcome": "ACCEPT", "shown": "REJECT"}})
    assert not as_expected({**good, "dispute": {"evidence": {"guilty": "right-operator"}}})
