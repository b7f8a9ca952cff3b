"""``--json`` prints the keys that ``--help-all`` lists, and no others."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from analysis.cli import main
from analysis.commands._chip_answers import LoggedChip, QuotedChip, ShownChip
from tests.inspector.inspection.test_document import departures

NUMBERS = (
    ("odds", "--steps", "40", "--audited", "1,5,9-12", "--draw", "a secret", "--step-seconds", "2"),
    ("odds", "--steps", "4000", "--intervals", "--state-cost", "1", "--step-cost", "1"),
    ("samples", "--flop", "1e24", "--chips", "1e5"),
    ("samples", "--flop", "1e24/2e24/4e24", "--chips", "1e5", "--draws", "256"),
    ("plan", "--flop", "1e24/2e24/4e24", "--site", "a=50000", "--draws", "20"),
    ("table", "--row", "mine=1e25", "--fleet", "ours=1e5"),
    ("plan", "--flop", "1e24", "--site", "a=50000", "--gain", "1", "--penalty", "2", "--inspector-cost", "1e5"),
    ("alarms", "--flop", "1e24", "--chips", "1e5", "--refusals", "0.01", "--prior", "0.1"),
    ("campaign", "--list"),
    ("campaign", "--show", "regimes"),
    ("campaign", "--keys"),
)

RUNS = (
    ("run", "stats"),
    ("fsck",),
    ("declare", "show"),
    ("program", "show"),
    ("chip", "show"),
    ("chip", "log"),
    ("chip", "quote"),
)
"""Commands of a run folder."""

SOMETIMES = {"clock", "reason", "would_hold", "other", "widest_gap", "drawn_next", "sobol_explained"}
"""Keys whose help says when they are there."""


def documented(capsys: pytest.CaptureFixture[str], command: Sequence[str]) -> dict[str, set[str]]:
    """Keys by the heading under which the help lists them."""
    with pytest.raises(SystemExit):
        main([*command, "--help-all"])
    found: dict[str, set[str]] = {}
    heading = ""
    for line in capsys.readouterr().out.splitlines():
        if not line.startswith(" "):
            heading = line.rstrip(":")
        elif line.startswith("  ") and line[2:3].strip():
            found.setdefault(heading, set()).update(line.strip().partition(": ")[0].split(", "))
    return found


@pytest.mark.parametrize("words", NUMBERS, ids=" ".join)
def test_a_command_prints_the_keys_that_its_help_lists(words, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "4000")
    listed = documented(capsys, words[:1])
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    rows: list[Mapping[str, Any]] = answer if isinstance(answer, list) else [answer]
    given = [each for each in words if each.startswith("--")]
    own = [name for name in listed if re.match("JSON", name)]
    given += ["uncertain"] * any("/" in each for each in words)
    added = [name for name in listed if any(f"With {each}" in name for each in given)]
    alone = [name for name in added if name in {"With --list", "With --show", "With --keys", "With --intervals"}]
    known = set().union(*(listed[name] for name in alone or [*own, *added]))
    for row in rows:
        assert set(row) <= known <= set(row) | SOMETIMES


@pytest.mark.parametrize("words", RUNS, ids=" ".join)
def test_a_command_about_a_run_prints_the_keys_that_its_help_lists(words, honest, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "4000")
    listed = documented(capsys, words)
    assert main([*words, str(honest.run), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    rows: list[Mapping[str, Any]] = answer if isinstance(answer, list) else [answer]
    known = set().union(*(keys for heading, keys in listed.items() if heading.startswith("JSON")))
    assert rows
    for row in rows:
        assert set(row) <= known <= set(row) | SOMETIMES


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (("show", "--clock", "H100 SXM"), ShownChip),
        (("log",), LoggedChip),
        (("quote",), QuotedChip),
    ],
)
def test_what_chips_show_has_the_types_that_help_documents(words, kind, honest, capsys):
    assert main(["chip", *words, str(honest.run), "--json"]) == 0
    pages = json.loads(capsys.readouterr().out)
    assert len(pages) == len(honest.trust.chips)
    assert [each for page in pages for each in departures(page, kind)] == []
