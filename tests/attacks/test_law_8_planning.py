"""Law 8: no honest behaviour is accused. C6: a confidence is never reached through false alarms.

``plan`` and ``campaign`` are asked for 90 % where chips of honest labs cannot always be shown. What they propose is
judged by sums done here, never by the figures that they print.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from analysis.cli import main
from tests.guards import off

CAP = 0.01
REFUSED = 0.02  # chance that an honest lab cannot show a drawn chip
SCENARIO = """\
title = "a lab that cannot always show its chips"
days = 120
[rule]
threshold_flop = 1e23
evidence = "whole-run"
[inspection]
period_days = 30
confidence = 0.9
snapshot_rate = 0.1
honest_refusal_rate = 0.02
refusals_allowed = {refusals}
[detection]
assumed = {{ undeclared-run = {seen} }}
[[kind]]
name = "unit"
flop_per_second = 1.1574074074074073e15
[[lab]]
name = "A"
site = [{{ name = "s", chips = [{{ kind = "unit", count = 5000 }}] }}]
[[run]]
name = "run"
lab = "A"
flop = 6e23
days = 120
[[strategy]]
name = "hidden run"
"""
PLAN = ["plan", "--flop", "2.56e24", "--site", "a=1e5", "--refusals", str(REFUSED)]


def accused(samples: int, allowed: int, times: float) -> float:
    """P(an honest lab fails to show more than ``allowed`` of ``samples`` chips at one of ``times`` visits)."""
    quiet = sum(
        math.comb(samples, missing) * REFUSED**missing * (1 - REFUSED) ** (samples - missing)
        for missing in range(min(allowed, samples) + 1)
    )
    return 1 - quiet**times


def ask(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, dict[str, Any], str]:
    code = main([*map(str, words), "--json"])
    shown = capsys.readouterr()
    return code, json.loads(shown.out), shown.err


def scenario(folder: Path, *, refusals: str, seen: float) -> Path:
    path = folder / "scenario.toml"
    path.write_text(SCENARIO.format(refusals=refusals, seen=seen), encoding="utf-8")
    return path


def honest_in_plan(data: dict[str, Any], days: float) -> float:
    """The honest lab's figure of a plan of one site, from its visits alone."""
    (visit,) = data["visits"]
    return accused(visit["samples"], visit["refusals_allowed"], max(1.0, days / visit["period"]))


def test_c6_plan_reaches_its_confidence_by_evidence(capsys: pytest.CaptureFixture[str]) -> None:
    code, data, _ = ask(capsys, *PLAN, "--evasion", "declared", "--evasion", "stretch=4")
    assert code == 0
    assert data["detection"] >= 0.9
    assert honest_in_plan(data, 4 * 365) <= CAP
    for row, days in zip(sorted(data["responses"], key=lambda each: each["evasion"]), (365, 4 * 365), strict=True):
        assert row["false_alarm"] == pytest.approx(honest_in_plan(data, days), rel=1e-6)
        assert row["excess"] == pytest.approx(row["detection"] - row["false_alarm"])
        assert row["excess"] >= 0.9 - CAP


def test_c6_guard_off_plan_accuses_the_honest(capsys: pytest.CaptureFixture[str]) -> None:
    with off("false-alarm cap"):
        code, data, _ = ask(capsys, *PLAN, "--evasion", "declared", "--evasion", "stretch=4")
    assert code == 0
    assert data["detection"] >= 0.9
    assert honest_in_plan(data, 365) > 0.8


def test_c6_plan_says_when_only_false_alarms_would_do(capsys: pytest.CaptureFixture[str]) -> None:
    """A lab whose logs never incriminate, and one that refuses what would."""
    for evasion in ("tamper=1", "refuse"):
        code, data, err = ask(capsys, *PLAN, "--evasion", evasion)
        assert (code, data["visits"]) == (2, None)
        assert "no schedule" in data["reason"]
        assert err == f"chipwitness plan: {data['reason']}\n"


def test_c6_guard_off_plan_catches_the_invisible(capsys: pytest.CaptureFixture[str]) -> None:
    with off("false-alarm cap"):
        code, data, _ = ask(capsys, *PLAN, "--evasion", "tamper=1")
    assert code == 0
    assert data["detection"] >= 0.9
    assert honest_in_plan(data, 365) == pytest.approx(data["detection"])


def test_c6_campaign_is_sized_within_the_cap(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = scenario(tmp_path, refusals='"fewest"', seen=1.0)
    code, data, _ = ask(capsys, "campaign", path, "--trials", 400, "--seed", 6)
    assert code == 0
    about = data["scenario"]
    honest = accused(about["samples_per_period"], about["refusals_allowed"], about["periods"])
    assert honest <= CAP
    assert about["false_alarm"] == pytest.approx(honest, rel=1e-6)
    world, lab = data["rows"]
    # 400 trials at 95 %: the seed is fixed.
    assert world["strategy"] == "honest"
    assert world["detection"]["low"] <= honest <= world["detection"]["high"]
    assert lab["predicted"] >= 0.9
    assert lab["predicted_excess"] == pytest.approx(lab["predicted"] - honest)
    for row in data["rows"]:
        assert row["false_alarm"] == pytest.approx(honest, rel=1e-6)
        assert row["excess"]["value"] == pytest.approx(row["detection"]["value"] - honest)


def test_c6_guard_off_campaign_accuses_the_honest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = scenario(tmp_path, refusals='"fewest"', seen=1.0)
    with off("false-alarm cap"):
        code, data, _ = ask(capsys, "campaign", path, "--trials", 400, "--seed", 6)
    assert code == 0
    about = data["scenario"]
    assert accused(about["samples_per_period"], about["refusals_allowed"], about["periods"]) > 0.5
    assert data["rows"][0]["detection"]["value"] > 0.5


@pytest.mark.parametrize(("refusals", "seen"), [("0", 1.0), ("1", 1.0), ("0", 0.0), ('"fewest"', 0.0)])
def test_c6_campaign_says_when_only_false_alarms_would_do(
    refusals: str, seen: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A threshold that honest refusals pass, or a lie that no inspection sees."""
    code, data, err = ask(capsys, "campaign", scenario(tmp_path, refusals=refusals, seen=seen), "--trials", 10)
    assert (code, data["rows"]) == (2, None)
    assert "no number of samples reaches 0.9 against 'hidden run' with false alarms of 0.01 at most" in data["reason"]
    assert err == f"chipwitness campaign: {data['reason']}\n"


@pytest.mark.parametrize(("refusals", "seen"), [("0", 1.0), ("1", 1.0), ("0", 0.0), ('"fewest"', 0.0)])
def test_c6_guard_off_campaign_catches_the_invisible(
    refusals: str, seen: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = scenario(tmp_path, refusals=refusals, seen=seen)
    with off("false-alarm cap"):
        code, data, _ = ask(capsys, "campaign", path, "--trials", 400, "--seed", 6)
    assert code == 0
    about = data["scenario"]
    assert accused(about["samples_per_period"], about["refusals_allowed"], about["periods"]) > CAP
    assert data["rows"][1]["predicted"] >= 0.9


def test_c6_no_cap_lets_false_alarms_reach_the_confidence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = scenario(tmp_path, refusals="0", seen=1.0)
    for words in ([*PLAN, "--false-alarms", "0.9"], ["campaign", path, "--false-alarms", "0.9"]):
        assert main([str(word) for word in words]) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert "already reaches the wanted confidence of 0.9" in shown.err
        assert shown.err.count("\n") == 1
