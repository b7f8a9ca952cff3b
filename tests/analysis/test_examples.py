"""The examples run as they stand, and show what their docstrings say."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import analysis.examples
from analysis.examples import (
    catch_a_large_run,
    finetune_with_lora,
    record_a_loop,
    reinforce_a_policy,
    resume_after_a_crash,
    settle_a_dispute,
)
from inspector import Outcome

FOLDER = Path(analysis.examples.__file__).parent
PAGE = FOLDER.parent / "docs" / "recording.md"


def test_a_loop_is_recorded_and_inspected(tmp_path, kept_devices):
    verdicts = record_a_loop.main(tmp_path)
    assert verdicts["honest"].outcome is Outcome.ACCEPT
    assert verdicts["lying"].outcome is Outcome.REJECT
    assert {reason.guard for reason in verdicts["lying"].reasons} == {"replay"}


def test_tokens_of_an_update_come_from_a_rollout_of_the_same_transcript(tmp_path, kept_devices):
    verdicts = reinforce_a_policy.main(tmp_path)
    assert verdicts["honest"].outcome is Outcome.ACCEPT
    assert "of step 1 in that of step 2 ('ids')" in verdicts["honest"].reasons[0].text
    assert verdicts["lying"].outcome is Outcome.REJECT
    assert {reason.guard for reason in verdicts["lying"].reasons} == {"replay"}


def test_adapters_are_tuned_under_autocast(tmp_path, kept_devices):
    verdicts = finetune_with_lora.main(tmp_path)
    assert verdicts["honest"].outcome is Outcome.ACCEPT
    assert verdicts["lying"].outcome is Outcome.REJECT
    assert {reason.guard for reason in verdicts["lying"].reasons} == {"replay"}
    model = finetune_with_lora.adapted_gpt()
    assert {name.split(".")[-2] for name, each in model.named_parameters() if each.requires_grad} == {"down", "up"}


def test_a_crash_changes_no_bit(tmp_path, monkeypatch):
    whole, resumed = resume_after_a_crash.main(tmp_path / "run")
    assert whole == resumed
    monkeypatch.setattr(resume_after_a_crash.Loader, "load_state_dict", lambda self, state: None)
    assert resume_after_a_crash.main(tmp_path / "twin")[1] != whole


def test_a_large_run_is_counted_and_drawn(tmp_path, capsys):
    found = catch_a_large_run.main(tmp_path)
    assert (tmp_path / "detection.png").read_bytes().startswith(b"\x89PNG")
    used, chips, catch = found["used"], catch_a_large_run.CHIPS, 1 - 2.718281828459045**-3
    assert used == 318  # 1e25 FLOP on chips of 1e15 FLOP/s in a year
    assert (1 - catch * used / chips) ** found["different"] == pytest.approx(0.1, rel=0.02)
    assert "days, catch it with 90%" in capsys.readouterr().out


def test_a_dispute_names_the_liar(tmp_path):
    verdict = settle_a_dispute.main(tmp_path)
    assert verdict.outcome is Outcome.REJECT
    assert verdict.evidence["guilty"] == "wrong"
    assert verdict.evidence["step"] == settle_a_dispute.WRONG
    assert verdict.evidence["operators_executed"] == 1


def test_every_example_says_what_it_shows_and_is_linked():
    paths = sorted(FOLDER.glob("[!_]*.py"))
    assert len(paths) >= 4
    for path in paths:
        assert "\nShows: " in (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""), path
        assert f"analysis/examples/{path.name}" in PAGE.read_text("utf-8"), path
