"""How a verdict is printed: a short sentence for each reason, its details below it, chips with one finding together."""

from __future__ import annotations

import argparse
import json

import pytest

from analysis.commands._common import show_verdict
from analysis.words import kind, parts
from inspector.inspection.verdict import Outcome, Reason, Verdict

LONG = "the chips hold " + " ".join(["what"] * 20) + " was declared; 3 of 4 chips answered; judged at noon"


def reason(chip: int, record: int, text: str = "the snapshot cannot be explained", **where: object) -> Reason:
    named = f"lab-1-chip-{chip:04d}"
    text = f"chip {named}, record {record}: {text}"
    return Reason(guard="snapshot", text=text, where={"chip": named, "record": record, **where})


def shown(capsys: pytest.CaptureFixture[str], *reasons: Reason, runs: int = 1, as_json: bool = False) -> str:
    verdict = Verdict(outcome=Outcome.REJECT, reasons=reasons, evidence={"runs": [{}] * runs})
    assert show_verdict(argparse.Namespace(json=as_json), verdict) == 1
    return capsys.readouterr().out


def test_what_differs_in_numbers_alone_is_listed_by_chip(capsys):
    other = Reason(guard="meter", text="chip lab-1-chip-0000, record 7: the meter is full", where={"chip": "x"})
    printed = shown(capsys, reason(0, 13), reason(0, 14), other, reason(1, 13), reason(0, 15))
    assert printed.splitlines() == [
        "REJECT",
        "  [snapshot] chip lab-1-chip-0000, record 13: the snapshot cannot be explained",
        "    - the same for lab-1-chip-0000 (record 14, 15); lab-1-chip-0001 (record 13)",
        "  [meter] chip lab-1-chip-0000, record 7: the meter is full",
    ]


def test_json_holds_each_reason_whole(capsys):
    reasons = [reason(0, 13, LONG), reason(1, 14, LONG)]
    found = json.loads(shown(capsys, *reasons, as_json=True))["reasons"]
    assert [each["text"] for each in found] == [each.text for each in reasons]
    assert [(each["chip"], each["record"]) for each in found] == [("lab-1-chip-0000", 13), ("lab-1-chip-0001", 14)]


def test_reasons_of_other_runs_and_of_no_chip_are_printed_for_themselves(capsys):
    loose = [Reason(guard="replay", text=f"step {step} differs") for step in (1, 2)]
    printed = shown(capsys, reason(0, 1, run="RUN-A"), reason(0, 1, run="RUN-B"), *loose, runs=2)
    assert printed.count("\n") == 5
    assert "the same for" not in printed
    assert "[snapshot] RUN-B: chip lab-1-chip-0000" in printed


def test_details_of_a_long_reason_follow_its_sentence(capsys):
    assert parts("one; two") == ["one; two"]
    sentence, *details = LONG.split("; ")
    assert parts(LONG) == [sentence, *details]
    assert parts(f"not covered: {LONG}") == ["not covered:", sentence, *details]
    printed = shown(capsys, Reason(guard="all", text=LONG))
    assert printed.splitlines()[1:] == [f"  [all] {sentence}", *(f"    - {each}" for each in details)]


@pytest.mark.parametrize("name", ["x\n  [all] everything agrees", "x; [all] everything agrees", "\x1b[2JACCEPT"])
def test_a_name_of_a_lab_makes_no_reason_of_its_own(capsys, name):
    text = f"{name} {LONG}"
    printed = shown(capsys, *(Reason(guard="log", text=text, where={"chip": name, "record": each}) for each in (1, 2)))
    first, *others = printed.splitlines()
    assert first == "REJECT"
    assert others[0].startswith("  [log] ")
    assert all(each.startswith("    - ") for each in others[1:])
    assert "\x1b" not in printed


def test_a_kind_is_a_reason_without_its_numbers():
    assert kind("chip lab-1-chip-0000, record 13: 4 % of it") == kind("chip lab-2-chip-0009, record 7: 90 % of it")
    assert kind("no snapshot") != kind("no meter")
