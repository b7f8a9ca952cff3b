"""Declarations that hide something, and honest ones: a small part of what was measured."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.measurements import declarations
from tests.measurements.__main__ import main as measure


@pytest.fixture
def rows(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the command prints of one case of some families."""

    def run(hiding: Any, honest: Any) -> Any:
        for name, families in (("HIDING", hiding), ("HONEST", honest)):
            every = getattr(declarations, name)
            monkeypatch.setattr(declarations, name, {family: every[family] for family in families})
        assert measure(["declarations", "--cases", str(len(hiding)), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


def test_nothing_hidden_is_accepted_and_nothing_honest_is_rejected(rows: Any) -> None:
    found = rows(["buffers", "training in evaluations", "samples"], ["saliency", "averages", "interrupted"])
    assert [row["outcome"] for row in found] == [*["INCONCLUSIVE"] * 2, "REJECT", "INCONCLUSIVE", *["ACCEPT"] * 2]
    assert [row["agreed"] for row in found[3:]] == ["ACCEPT", "", ""]


def test_what_is_not_judged_as_it_must_be_is_told() -> None:
    row = {"work": "buffers", "mode": "hiding", "outcome": "ACCEPT", "agreed": "", "seed": 3, "reasons": ["why"]}
    assert declarations.verdict([row]) == "1 of 1 are not judged as they must be: buffers (seed 3): ACCEPT: why"
    for outcome, agreed in (("REJECT", ""), ("INCONCLUSIVE", "INCONCLUSIVE"), ("refused", "")):
        assert declarations.verdict([{**row, "mode": "honest", "outcome": outcome, "agreed": agreed}]) is not None
    assert declarations.verdict([{**row, "mode": "honest", "outcome": "INCONCLUSIVE", "agreed": "ACCEPT"}]) is None
